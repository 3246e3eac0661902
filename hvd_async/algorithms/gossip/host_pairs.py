"""AD-PSGD of hosts: the ranks of a host step together, while engines average its weights with a neighbouring host's.

A host has one shadow of its weights y, of which each of its ranks owns a part (``host_steps``). A step adds to it the
mean of what its ranks' optimizers have changed, and gives all of them the sum, so that they hold the same weights. When
the first rank of a host that goes on is owed an averaging, it requests one for the host; then each rank's engine
averages its part with that of the rank at its place on the other host. With n ranks of a host that have the optimizer,
m of the other, y_h and y_g the snapshots that were exchanged, and u_r what rank r's optimizer has changed:

    y_h <- y_h + sum_r u_r / n               of the ranks r that take the step; all weights become y_h
    y_h <- y_h + m / (n + m) (y_g - y_h)

So sum_h n_h y_h, the sum of all ranks' weights, moves by local changes alone. (A rank that is gone takes its share with
it; before, n = m.) A rank that has finished changes nothing further, but goes on to own its part, and its host's
weights go on to stand for it.

A part may have been averaged since its host's last step, and a rank may have finished before that. So at an end the
coordinator has owners send their parts to the ranks of their host, in the last exchange (``StartExchange.gathers``):
a drain averages, and a checkpoint after a cut holds, the host's weights as they are then. Where a rank's optimizer is
deleted, its engine goes on with its part: at a drain it listens to the average of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_async.algorithms.gossip.adpsgd import check_weight
from hvd_async.algorithms.gossip.base import MEAN
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.host_steps import ALL_GATHER, HostWorker
from hvd_async.algorithms.gossip.message_exchange import MessageFormat, OutgoingMessage
from hvd_async.algorithms.gossip.messages import PairRequested, RankFinished, StartExchange
from hvd_async.algorithms.gossip.pairing import Pairing
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.push_sum import State
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.messages import Drained, OptimizerCommand, RunCollective

END = 0
"""The step under which parts are gathered at an end."""


class HostPairWorker(HostWorker):
    """One optimizer of one rank whose host is averaged with others in pairs.

    Attributes:
        log: events in the order in which they changed this rank's part: ("step", number of the host's), ("sent",
            exchange, partner's place), ("landed", exchange, partner's place).
    """

    def __init__(self, engine: Engine, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]) -> None:
        super().__init__(engine, plan, post, finish)
        self._given: Vector = None
        """The weights that the model was given last; beyond them it has its own change, whoever made it."""
        # Engine thread's, once it is registered:
        self._shadow: Vector = None
        """This rank's part of the host's weights."""
        self._contributed: dict[int, dict[int, Vector]] = {}
        """Changes of this part, by step and the place of the rank that made them."""
        self._host_step = 0
        """The host's last step since the last end."""
        self._mine: dict[int, Vector] = {}
        """Snapshots sent, encoded, by exchange."""
        self._shares: dict[int, float] = {}
        """The other host's share of an average, by exchange."""
        self._gone: set[int] = set()
        """Ranks that have the optimizer no more, by place."""
        self._ended: Drained[Any] | None = None
        """An end that is not complete here yet."""
        self._average: Vector | None = None
        """This part of all ranks' average at that end, if it is a drain."""
        self._drained_total = 0
        """Steps of all ranks until the last drain."""
        self._apart = False
        """Whether hosts began with weights of their own, and there was no drain since."""
        self._pairing = Pairing(
            plan.config.max_local_steps,
            plan.topology.neighbours(self._host),
            self._speaks,
            lambda: engine.send(PairRequested(self._registered_number())),
        )
        self._calls.on_result = self._on_result

    def begin(self, weights: Vector) -> None:
        if self._number is None:  # weights replaced later are a change like any other: the next step has it
            self._given = weights
            self._shadow = self._post.split(weights)[self._own] + 0

    def mix(self, before: Vector, after: Vector) -> Vector:
        """End a step of the host; its first rank waits after ``max_local_steps`` without an averaging."""
        self.check_step()
        if self._speaks() and not self._pairing.may_step():
            self._await(self._pairing.may_step, lambda: "an averaging with a neighbouring host")
        self._count_step()
        self._pairing.stepped()
        change = self._post.add(after, self._given, -1.0)
        parts = self._reduced(self._step, [State(part, 1.0) for part in self._post.split(change)])
        self._given = self._post.join([part.x for part in parts])
        self.engine.call_soon(self._pairing.ask)
        return self._given

    def _speaks(self) -> bool:
        """Return whether this rank requests averagings for its host: the first that has not finished."""
        finished = self._receive_buffer.finished
        return not self._announced and all(place in finished for place in self._locals[: self._own])

    # -- ends -------------------------------------------------------------------------------------------------

    def gather(self, weights: Vector, flush: bool) -> Vector:
        self._together = flush
        if END in self._parts:  # else no rank has taken a step
            held = self._post.join([part.x for part in self._take_parts(END)])
            change = self._post.add(weights, self._given, -1.0)
            self._given, weights = held, self._post.add(change, held, 1.0)
        if flush:
            weights = self.consensus(weights)
            self._given = weights + 0
            if self.log is not None:
                self.log.append(("drained",))
        self._pairing.ended()
        return weights

    def discard_results(self) -> None:
        """Go on with this rank's part for the ranks of its host, though its optimizer is deleted."""
        self.keep = None
        if self._ended is None:
            self._exchanges.resume()
        else:
            self._complete_end()

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _estimates(self) -> dict[str, Vector]:
        """Return a mark: the ranks of a host have the same weights."""
        return {self._mark: self._post.scalar(1.0)}

    @property
    def _mark(self) -> str:
        return f"pairs of hosts with {len(self._locals)} ranks"

    def restore(self, kept: SavedState) -> None:
        """Begin with the state that an earlier run's cut saved.

        Raises:
            ValueError: it has a push-sum weight other than 1, or the ranks of a host had weights of their own.
        """
        check_weight(kept, self.config.algorithm)
        if self._mark not in kept.copies:
            raise ValueError(
                f"this state was saved after cut() by ranks with weights of their own, and ranks of a host begin with "
                f"the same: go on with the algorithm that it was saved with, and with hierarchical="
                f"{len(self._locals)} only if it was saved so; or save after drain()"
            )
        super().restore(kept)
        self._apart = True

    # -- engine thread ----------------------------------------------------------------------------------------

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command."""
        match command:
            case StartExchange(_, _, _, pairs):
                for hosts in map(self._hosts, pairs):
                    if self._host in hosts:  # (all engines are told of exchanges and of ranks in one order)
                        self._pairing.granted()
                        own, other = self._present(self._host), self._present(sum(hosts) - self._host)
                        self._shares[command.round] = other / (own + other)
                super().on_command(command)
            case RankFinished(_, rank, _, gone):
                super().on_command(command)
                place = self._ranks.index(rank)
                if gone:
                    self._gone.add(place)
                host = place // len(self._locals)
                if all(place in self._receive_buffer.finished for place in self._ranks_of(host)):
                    with self.engine.changed:
                        self._pairing.finished(host)
                        self.engine.changed.notify_all()
                self._progress()
                self._pairing.want()
            case Drained():
                self._gone.update(map(self._ranks.index, command.gone))
                all_hosts = range(len(self._ranks) // len(self._locals))
                self._pairing.begin_anew(host for host in all_hosts if not self._present(host))
                self._ended = command
                self._exchanges.pause(command.rounds)
                super().on_command(command)
                self._complete_end()
            case _:
                super().on_command(command)

    def _on_exchange_done(self) -> None:
        self._complete_end()

    def _complete_end(self) -> None:
        """Count anew once all exchanges of an end are done, and after a drain the average of all ranks is here; a rank
        that has its optimizer goes on with exchanges once it has, too."""
        ended = self._ended
        if ended is None or self._exchanges.completed < ended.rounds:
            return
        total = sum(ended.produced)
        if ended.flushed and (self._apart or total != self._drained_total):
            if self._average is None:
                return
            self._shadow, self._average = self._average, None
        if ended.flushed:
            self._drained_total, self._apart = total, False
        self._contributed.clear()
        self._ended, self._host_step = None, 0
        if self.deleted:
            self._parts.clear()
            self._exchanges.resume()

    def _on_result(self, command: RunCollective, result: Vector) -> None:
        """Take the average of all ranks at a drain for this part."""
        if self._ended is not None and self._ended.flushed and command.what == MEAN:
            self._average = self._post.split(result * (1.0 / len(command.ranks)))[self._own] + 0
            self._complete_end()

    def _contribute(self, step: int, sender: int, part: State) -> None:
        self._contributed.setdefault(step, {})[sender] = part.x
        self._progress()

    def _progress(self) -> None:
        """Take the next steps of the host, as far as its ranks' changes are here."""
        while changes := self._contributed.get(step := self._host_step + 1):
            if any(self._active(place, step) and place not in changes for place in self._locals):
                return
            part = 1.0 / max(1, self._present(self._host))
            for place in sorted(changes):
                self._shadow = self._post.add(self._shadow, changes[place], part)
            if self.log is not None:
                self.log.append(("step", step))
            self._share(step, changes, State(self._shadow + 0, 1.0))
            del self._contributed[step]
            self._host_step = step

    def _present(self, host: int) -> int:
        """Return how many ranks of a host have the optimizer."""
        return sum(place not in self._gone for place in self._ranks_of(host))

    def _hosts(self, pair: tuple[int, int]) -> list[int]:
        return [self._ranks.index(rank) // len(self._locals) for rank in pair]

    def _snapshots(self, command: StartExchange) -> list[tuple[int, OutgoingMessage]]:
        outgoing = list[tuple[int, OutgoingMessage]]()
        for hosts in map(self._hosts, command.pairs):
            if self._host in hosts:
                partner = self._ranks_of(sum(hosts) - self._host)[self._own]
                self._mine[command.round] = self._post.encode(self._shadow + 0)
                outgoing.append((command.round, OutgoingMessage(partner, self._mine[command.round])))
                if self.log is not None:
                    self.log.append(("sent", command.round, partner))
        if command.gathers:
            part = State(self._shadow + 0, 1.0)
            data, key = self._post.as_bytes(part.x), self._key(END, ALL_GATHER)
            outgoing += [(key, OutgoingMessage(place, data)) for place in self._locals if place != self._place]
            self._add_result(END, self._own, part)
        return outgoing

    def _deliver(self, sender: int, key: int, weight: float, data: Vector) -> None:
        if sender in self._locals:
            super()._deliver(sender, key, weight, data)
            return
        mine, theirs = self._post.decode(self._mine.pop(key)), self._post.decode(data)
        share = self._shares.pop(key)
        self._shadow = self._post.add(self._post.add(self._shadow, theirs, share), mine, -share)
        if self.log is not None:
            self.log.append(("landed", key, sender))
        self._averagings += 1
        self._taken += 1
        self._pairing.averaged()
