"""AD-PSGD on one rank: the engine averages a shadow copy of the weights with neighbours while the rank computes.

Lian et al., ICML 2018, Algorithm 1: whenever a rank is ready, its weights and a neighbour's become their mean, and
gradients computed at older weights are applied to the current weights. Here the coordinator pairs ranks, on any
symmetric graph. The training thread adds its optimizer's changes to the shadow and loads the shadow as its weights, so
any optimizer can be used. The engine reads snapshots of the shadow only, so no rank waits for a rank that computes.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hvd_async.algorithms.gossip.config import PairRequested, RankFinished, StartExchange
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.hosts import ALL_GATHER, HostWorker
from hvd_async.algorithms.gossip.message_format import OutgoingMessage
from hvd_async.algorithms.gossip.push_sum import Add, Times
from hvd_async.algorithms.gossip.push_sum import State as Part
from hvd_async.algorithms.gossip.rank import MEAN, GossipWorker, check_weight
from hvd_async.algorithms.own_weights import Kept
from hvd_async.runtime.interfaces import FiniteFlag, Program, Vector, Wait
from hvd_async.runtime.protocol import Drained, OptimizerCommand, RunCollective

# -- requests for averagings -------------------------------------------------------------------------------------------


class Pairing:
    """Decides when a rank, or a host, requests an averaging with a neighbour, and when it waits for one.

    Args:
        most: steps that may be taken between two averagings.
        neighbours: places of the neighbours.
        may_ask: returns whether this rank may request averagings now.
        request: sends a request.

    Attributes:
        left: neighbours that have not finished.
    """

    def __init__(
        self, most: int, neighbours: Iterable[int], may_ask: Callable[[], bool], request: Callable[[], None]
    ) -> None:
        self._most, self._neighbours = most, frozenset(neighbours)
        self._may_ask, self._request = may_ask, request
        self.left = self._neighbours
        self._lock = threading.Lock()
        self._local = 0
        """Steps since the last averaging."""
        self._due = 0
        """Steps without an averaging of their own; -1: one averaging in advance (engine thread)."""
        self._asked = False
        """Whether a request is pending, in no exchange yet (engine thread)."""

    # -- training thread --------------------------------------------------------------------------------------

    def may_step(self) -> bool:
        """Return whether a step needs no averaging before it."""
        return self._local < self._most or not self.left

    def stepped(self) -> None:
        """Count a step; the engine's ``ask`` must follow."""
        with self._lock:
            self._local += 1

    def ended(self) -> None:
        """Restart the count of steps after a drain or cut."""
        with self._lock:
            self._local = 0

    # -- engine thread ----------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Request an averaging for a step, unless one was done in advance."""
        self._due = min(self._due + 1, self._most)
        self.request_if_due()

    def request_if_due(self) -> None:
        """Request an averaging if one is due and no request is pending."""
        if self._due > 0 and not self._asked and self.left and self._may_ask():
            self._asked = True
            self._request()

    def granted(self) -> None:
        """Record that an exchange contains the requested averaging."""
        self._asked = False

    def averaged(self) -> None:
        """Count an averaging that has completed here."""
        with self._lock:
            self._local = 0
        # a rank limited to one step must request a pair in it: otherwise two that wait for each other are never paired
        self._due = max(self._due - 1, -1 if self._most > 1 else 0)
        self.request_if_due()

    def finished(self, neighbour: int) -> None:
        """Remove a neighbour that has finished."""
        self.left = self.left - {neighbour}

    def reset(self, gone: Iterable[int]) -> None:
        """Start after a drain or cut, with all neighbours except these."""
        self.left = self._neighbours - frozenset(gone)
        self._due, self._asked = 0, False


# -- the rank ----------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """State of a rank.

    Attributes:
        shadow: the current weights, shape (n,).
        model: the weights last loaded into the model, shape (n,); the model may have changed them since.
    """

    shadow: Vector
    model: Vector


def on_step(state: State, weights: Vector, add: Add, times: Times = operator.mul) -> State:
    """Return the state with the model's change added to the shadow; takes ownership of ``weights``, the model's."""
    change = add(weights, state.model, -1.0)
    shadow = add(state.shadow, change, 1.0)
    return State(shadow, times(shadow, 1.0))


def on_average(state: State, own: Vector, other: Vector, add: Add, share: float = 0.5) -> State:
    """Return the state averaged with a neighbour, which has this share: x <- x + share (x_j - x_i), with both ranks'
    snapshots x_i and x_j."""
    return state._replace(shadow=add(add(state.shadow, other, share), own, -share))


class ADPSGDWorker(GossipWorker):
    """AD-PSGD on one rank.

    Attributes:
        log: events in the order in which they changed the shadow: ("step", number), ("sent", exchange, partner's
            place), ("landed", exchange, partner's place).
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._lock = threading.Lock()
        """Held while the shadow changes, and while the log does."""
        self._state = State(None, None)
        self._mine: dict[int, Vector] = {}
        """Snapshots sent, encoded, by exchange (engine thread)."""
        self._shares: dict[int, float] = {}
        """The neighbour's share of an average, by exchange (engine thread)."""
        self._gone: set[int] = set()
        """Places of ranks whose optimizer was deleted (engine thread)."""
        self.can_be_late = self.plan.config.local_size == 1 and not self.engine.elastic
        self._shown: FiniteFlag | None = None
        """Whether the shadow is finite; None: it is."""
        self._good: Vector | None = None
        """The last finite snapshot, while snapshots are chosen by such flags (engine thread)."""
        self._pairing = Pairing(
            self.plan.config.max_local_steps,
            self.plan.topology.neighbours(self._host),
            self._may_ask,
            lambda: self.engine.send(PairRequested(self.number)),
        )

    def _may_ask(self) -> bool:
        """Return whether this rank requests averagings now."""
        return not self._announced

    def restore(self, kept: SavedState) -> None:
        check_weight(kept, self.config.algorithm)
        super().restore(kept)

    def begin(self, weights: Vector) -> None:
        self._state = State(weights, weights + 0)
        self._good = weights + 0 if self.flags_late else None

    def mix_program(self, before: Vector, after: Vector) -> Program[Vector]:
        """End a step; wait only after ``max_local_steps`` without an averaging."""
        self.check_step()
        if not self._pairing.may_step():
            yield Wait(self._pairing.may_step, lambda: "an averaging with a neighbour")
        self._count_step()
        self._pairing.stepped()
        with self._lock:
            self._state, self._shown = on_step(self._state, after, self._post.add, self._post.times), self.flag
            z = self._state.model
            self._post.mark(self._state.shadow)
            self._note("step", self._before + self._step)
        self.engine.call_soon(self._pairing.ask)
        return z

    # -- ends -------------------------------------------------------------------------------------------------

    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        with self._lock:
            self._state, self._together = on_step(self._state, weights, self._post.add, self._post.times), flush
            z = self._state.model
        if flush:
            z = yield from self.consensus_program(z + 0)  # (if this is interrupted, the rank continues from z)
            with self._lock:
                self._state = State(z + 0, z)
                self._note("drained")
        self._pairing.ended()
        return z

    def leave(self, weights: Vector) -> Kept:
        return Kept(on_step(self._state, weights, self._post.add, self._post.times).model)

    # -- engine thread ----------------------------------------------------------------------------------------

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command."""
        match command:
            case StartExchange():  # (all engines receive these commands in the same order)
                for neighbour in self._neighbours_in(command):
                    self._pairing.granted()
                    own, other = self._present(self._host), self._present(neighbour)
                    self._shares[command.round] = other / (own + other)
                super().on_command(command)
            case RankFinished(_, rank, _, gone):
                place = self._ranks.index(rank)
                if gone:
                    self._gone.add(place)
                super().on_command(command)
                host, finished = place // self.config.local_size, self._receive_buffer.finished
                if all(place in finished for place in self._ranks_of(host)):
                    with self.engine.changed:
                        self._pairing.finished(host)
                        self.engine.changed.notify_all()
            case Drained():
                self._gone.update(map(self._ranks.index, command.gone))
                self._pairing.reset(host for host in range(self.plan.topology.size) if not self._present(host))
                super().on_command(command)
            case _:
                super().on_command(command)

    def _present(self, host: int) -> int:
        """Return the number of a host's ranks that have the optimizer."""
        return sum(place not in self._gone for place in self._ranks_of(host))

    def _neighbours_in(self, command: StartExchange) -> list[int]:
        """Return the host with which an exchange averages this rank's, if there is one."""
        first, size = self._ranks[self._place - self._own], self.config.local_size
        pairs = [pair for pair in command.pairs if first in pair]
        return [self._ranks.index(rank) // size for pair in pairs for rank in pair if rank != first]

    def _snapshots(self, command: StartExchange) -> list[tuple[int, OutgoingMessage]]:
        partners = [self._ranks_of(neighbour)[self._own] for neighbour in self._neighbours_in(command)]
        return [
            (command.round, OutgoingMessage(partner, self._snapshot(partner, command.round))) for partner in partners
        ]

    def _snapshot(self, partner: int, round_: int) -> Vector:
        with self._lock:
            shadow = self._state.shadow
            if self._shown is not None and self._good is not None:
                with self._post.apart(shadow, self._good):
                    self._good = self._shown.choose(shadow, self._good)
                    data = self._post.encode(self._good)
                    self._post.mark(data)
            else:
                data = self._post.encode(self._post.times(shadow, 1.0) if self._post.lossless else shadow)
            self._note("sent", round_, partner)
        self._mine[round_] = data
        return data

    def _deliver(self, sender: int, key: int, weight: float, data: Vector) -> None:
        own = self._mine.pop(key)
        with self._lock, self._post.apart(self._state.shadow, own, data):
            mine, theirs = self._post.decode(own), self._post.decode(data)
            self._state = on_average(self._state, mine, theirs, self._post.add, self._shares.pop(key))
            self._post.mark(self._state.shadow)
            self._note("landed", key, sender)
        self._averagings += 1
        self._taken += 1
        self._pairing.averaged()


# -- hosts -------------------------------------------------------------------------------------------------------------
# A host has one shadow copy y of its weights; each rank owns a part of it. A step adds the mean of the changes that the
# ranks' optimizers have made, while engines average the shadow with a neighbouring host's. The first active rank of a
# host requests averagings for the host. Each rank's engine then averages its part with the rank at its place on the
# other host. With n ranks of a host that have the optimizer, m of the other, y_h and y_g the exchanged snapshots, and
# u_r the change by rank r's optimizer:
#
#     y_h <- y_h + sum_r u_r / n               of the ranks r that take the step; all weights become y_h
#     y_h <- y_h + m / (n + m) (y_g - y_h)
#
# So sum_h n_h y_h, the sum of all ranks' weights, changes by local updates only. (The share of a rank whose optimizer
# is deleted is lost; before that, n = m.) A rank that has finished makes no more changes, but its engine still owns its
# part, and its weights are still those of its host.
#
# A part may have been averaged since its host's last step, and a rank may have finished before that. So at an end the
# coordinator makes owners send their parts to the ranks of their host, in the last exchange
# (``StartExchange.gathers``). A drain averages these weights, and a checkpoint after a cut holds them. If a rank's
# optimizer is deleted, its engine continues with its part, and takes the average of all ranks at a drain.


END = 0
"""The step number of the parts that are gathered at an end."""


class HostADPSGDWorker(HostWorker, ADPSGDWorker):
    """AD-PSGD of hosts on one rank. Its shadow is its part of the host's, which only the engine changes.

    Attributes:
        log: as in ``ADPSGDWorker``; steps are those of the host since the last end.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._mark = f"pairs of hosts with {len(self._locals)} ranks"
        self._given: Vector = None
        """The weights last loaded into the model, which may have changed them since (training thread)."""
        # Engine thread:
        self._average: Vector | None = None
        """This part of the average of all ranks at a drain that is not complete here yet."""
        self._drained_total = 0
        """Steps of all ranks until the last drain."""
        self._apart = False
        """Whether hosts started with different weights, without a drain since."""
        self._calls.on_result = self._on_result

    def begin(self, weights: Vector) -> None:
        if self._number is None:  # weights replaced later are a change, which the next step contributes
            self._given = weights
            self._state = State(self._split(weights)[self._own] + 0, None)

    def mix_program(self, before: Vector, after: Vector) -> Program[Vector]:
        """End a step of the host; its first rank waits after ``max_local_steps`` without an averaging."""
        self.check_step()
        if self._may_ask() and not self._pairing.may_step():
            yield Wait(self._pairing.may_step, lambda: "an averaging with a neighbouring host")
        self._count_step()
        self._pairing.stepped()
        change = self._post.add(after, self._given, -1.0)
        parts = yield from self._with_host(self._step, change, [1.0] * len(self._locals))
        self._given = self._join([part.x for part in parts])
        self.engine.call_soon(self._pairing.ask)
        return self._given

    def _may_ask(self) -> bool:
        """Return whether this rank requests averagings for its host: it is the first that has not finished."""
        finished = self._receive_buffer.finished
        return super()._may_ask() and all(place in finished for place in self._locals[: self._own])

    # -- ends -------------------------------------------------------------------------------------------------

    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        self._together = flush
        if END in self._results:  # otherwise no rank has taken a step
            held = self._join([part.x for part in self._take_results(END)])
            change = self._post.add(weights, self._given, -1.0)
            self._given, weights = held, self._post.add(change, held, 1.0)
        if flush:
            weights = yield from self.consensus_program(weights)
            self._given = weights + 0
            self._note("drained")
        self._pairing.ended()
        return weights

    def leave(self, weights: Vector) -> Kept:
        return Kept(weights)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _estimates(self) -> dict[str, Vector]:
        """Return a marker: the ranks of a host have the same weights."""
        return {self._mark: self._post.scalar(1.0)}

    def restore(self, kept: SavedState) -> None:
        """Start from the state that an earlier run saved after a cut.

        Raises:
            ValueError: it has a push-sum weight other than 1, or the ranks of a host had different weights.
        """
        super().restore(kept)
        if self._mark not in kept.copies:
            raise ValueError(
                f"this state was saved after cut() by ranks with weights of their own, and the ranks of a host must "
                f"start with equal weights: continue with the algorithm that it was saved with, and with hierarchical="
                f"{len(self._locals)} only if it was saved so; or save after drain()"
            )
        self._apart = True

    # -- engine thread ----------------------------------------------------------------------------------------

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command."""
        super().on_command(command)
        if isinstance(command, RankFinished):  # from now on this rank may be the first of its host
            self._pairing.request_if_due()

    def _result(self, step: int, contributed: list[Part]) -> Part | None:
        shadow = self._state.shadow
        for change in contributed:
            shadow = self._post.add(shadow, change.x, 1.0 / max(1, self._present(self._host)))
        self._state = State(shadow, None)
        self._note("step", step)
        return Part(shadow + 0, 1.0)

    def _snapshots(self, command: StartExchange) -> list[tuple[int, OutgoingMessage]]:
        outgoing = super()._snapshots(command)
        if command.gathers:
            part, key = Part(self._state.shadow + 0, 1.0), self._key(END, ALL_GATHER)
            outgoing += [(key, self._message(place, part)) for place in self._locals if place != self._place]
            self._add_result(END, self._own, part)
        return outgoing

    def _on_end(self, ended: Drained[Any]) -> bool:
        """Take the average of all ranks at a drain; return False if it is not here yet."""
        total = sum(ended.produced)
        if ended.flushed and (self._apart or total != self._drained_total):
            if self._average is None:
                return False
            self._state, self._average = State(self._average, None), None
        if ended.flushed:
            self._drained_total, self._apart = total, False
        return True

    def _on_result(self, command: RunCollective, result: Vector) -> None:
        """Take this part of the average of all ranks at a drain."""
        if self._ended is not None and self._ended.flushed and command.what == MEAN:
            self._average = self._split(result * (1.0 / len(command.ranks)))[self._own] + 0
            self._complete_end()
