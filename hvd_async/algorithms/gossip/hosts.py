"""Hosts whose ranks take steps together: each rank owns a part of the host's weights.

The owner of a part adds up the contributions of the host's ranks to it, and sends them the result. Engines do so
independently of their training threads, also for a rank that has finished or whose optimizer was deleted.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hvd_async.algorithms.gossip import push_sum
from hvd_async.algorithms.gossip.adpsgd import Pairing
from hvd_async.algorithms.gossip.averages import GlobalAverages
from hvd_async.algorithms.gossip.config import STAGES, PairRequested, RankFinished, StartExchange
from hvd_async.algorithms.gossip.error_feedback import ErrorFeedback, SavedState
from hvd_async.algorithms.gossip.message_format import MessageFormat, OutgoingMessage
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.push_sum import Message, Sent, State
from hvd_async.algorithms.gossip.rank import MEAN, GossipWorker, Links, ReceivedMessage, check_weight
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.interfaces import Program, RankRuntime, Vector, Wait
from hvd_async.runtime.protocol import Drained, OptimizerCommand, RunCollective

# -- steps of a host ---------------------------------------------------------------------------------------------------


REDUCE_SCATTER, GOSSIP, ALL_GATHER = range(STAGES)
"""Stages of a step."""


class HostWorker(GossipWorker):
    """A gossiping rank that takes its steps together with the other ranks of its host."""

    def __init__(
        self, engine: RankRuntime, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]
    ) -> None:
        super().__init__(engine, plan, post, finish)
        size = plan.config.local_size
        self._host, self._own = divmod(self._place, size)
        self._locals = range(self._host * size, (self._host + 1) * size)
        self._parts: dict[int, dict[int, State]] = {}
        """Results received, by step and owner."""

    def _reduced(self, step: int, parts: list[State]) -> Program[list[State]]:
        """Contribute parts to a step of the host; return its result, by part (training thread)."""
        number = self._registered_number()
        messages = [
            OutgoingMessage(to, self._post.as_bytes(parts[part].x), parts[part].w)
            for part, to in enumerate(self._locals)
            if to != self._place
        ]

        def submit() -> None:
            self._exchanges.offer(number, self._key(step, REDUCE_SCATTER), messages, 0.0)
            self._contribute(step, self._place, State(parts[self._own].x + 0, parts[self._own].w))

        self.engine.call_soon(submit)
        yield Wait(lambda: self._has_all(step))
        return self._take_parts(step)

    @staticmethod
    def _key(step: int, stage: int) -> int:
        return step * STAGES + stage

    def _has_all(self, step: int) -> bool:
        return len(self._parts.get(step, ())) == len(self._locals)

    def _take_parts(self, step: int) -> list[State]:
        return [part for _, part in sorted(self._parts.pop(step).items())]

    # -- engine thread ----------------------------------------------------------------------------------------

    def _links(self, key: int) -> Links:
        step, stage = divmod(key, STAGES)
        if stage != GOSSIP:
            others = [place for place in self._locals if place != self._place]
            return Links(others, others, self._post.plain_rows)
        size, phase = len(self._locals), self._base_of_exchanges + step
        receivers = [host * size + self._own for host, _ in self.plan.out_edges(self._host, phase)]
        return Links(receivers, [host * size + self._own for host, _ in self.plan.in_edges(self._host, phase)])

    @abc.abstractmethod
    def _contribute(self, step: int, sender: int, part: State) -> None:
        """Record a contribution of a rank of the host to this rank's part."""

    def _deliver(self, sender: int, key: int, weight: float, data: Vector) -> None:
        """Receive a message from a rank of the host."""
        step, stage = divmod(key, STAGES)
        self._taken += 1
        part = State(self._post.from_bytes(data), weight)
        if stage == REDUCE_SCATTER:
            self._contribute(step, sender, part)
        else:
            self._add_result(step, sender - self._locals[0], part)

    def _active(self, place: int, step: int) -> bool:
        """Return whether a rank takes a step; True unless it is known to have finished before."""
        return step <= self._receive_buffer.finished.get(place, step)

    def _has_active(self, host: int, step: int) -> bool:
        """Return whether any rank of a host takes a step; True unless all are known to have finished before."""
        return any(self._active(place, step) for place in self._ranks_of(host))

    def _ranks_of(self, host: int) -> range:
        """Return the places of a host's ranks."""
        size = len(self._locals)
        return range(host * size, (host + 1) * size)

    def _share(self, step: int, places: Iterable[int], part: State) -> None:
        """Send the result of this rank's part to these ranks of the host; takes ownership of it."""
        data = self._post.as_bytes(part.x)
        messages = [OutgoingMessage(place, data) for place in sorted(places) if place != self._place]
        self._exchanges.offer(self._registered_number(), self._key(step, ALL_GATHER), messages, part.w)
        if self._place in places:
            self._add_result(step, self._own, part)

    def _add_result(self, step: int, owner: int, part: State) -> None:
        with self.engine.changed:
            self._parts.setdefault(step, {})[owner] = part
            self.engine.changed.notify_all()


# -- hierarchical gossip -----------------------------------------------------------------------------------------------
# The ranks of a host are averaged first, then hosts gossip, and all ranks of a host get the same weights.
#
# A step is a reduce-scatter within the host, gossip of each shard between hosts, and an all-gather within the host.
# Each rank owns a shard of the weights. Every rank sends each owner its shard. An owner adds the shards up, gossips the
# sum with the owners of the same shard on other hosts, divides the result by the number of ranks, and sends it back to
# them. So a host sends the weights once to each neighbour, over the connections of all its ranks. Engines run the
# second and third stage independently of their training threads. With x_r rank r's biased weights after its update, n
# the number of ranks of a host h, and p the hosts' mixing matrix, for each shard:
#
#     X_h <- sum_r x_r,  W_h <- sum_r w_r                  reduce-scatter
#     X_h <- X_h - sum_g p_gh M_gh + sum_g p_hg M_hg       gossip, M_gh what host g decodes of X_h (D-PSGD: n times the
#     W_h <- W_h - sum_g p_gh W_h + sum_g p_hg W_g         x_r from before the update); w likewise
#     x_r <- X_h / n,  w_r <- W_h / n                      all-gather
#     x_r <- mean of x, w_r <- mean of w over all ranks    every ``average_every`` steps (Gossip-PGA)
#
# Within a host shards are not compressed. Between hosts they are, and the sender keeps the compression error. With 8
# bits M is CHOCO-SGD's estimate (``error_feedback``), one for each shard and edge at either end. Both ends have seen
# the same messages in the same order, so estimates outlive drains and cuts, even if a rank's optimizer is deleted and
# its engine, which does not have the drained weights, continues with its shard.
#
# Each shard has its own push-sum weight: its owner may have received a message that the owner of another shard has not,
# or may have omitted an edge to a host that has finished. All messages carry shares of both x and w (``push_sum``), so
# their sums over ranks never change.


@dataclass
class _Step:
    """A step of the host, at the owner of a shard."""

    contributed: dict[int, State] = field(default_factory=dict)
    """Contributions to the shard so far, by the contributor's place."""
    before: Vector = None
    """The owner's shard before its update (D-PSGD)."""
    total: State | None = None
    """The host's sum without the share sent to other hosts, once all ranks have contributed."""


class HierarchicalWorker(HostWorker):
    """Hierarchical gossip on one rank: push-sum between hosts."""

    def __init__(
        self, engine: RankRuntime, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]
    ) -> None:
        super().__init__(engine, plan, post, finish)
        size = plan.config.local_size
        self._averages: GlobalAverages = GlobalAverages(engine, post)
        self._known = ErrorFeedback(post, plan.config.graph, size)
        """Estimates of this rank's shard."""
        self._weights = [1.0] * size
        """Push-sum weights of the shards; ``weight`` is their mean."""
        self._excess: Vector | None = None
        """The difference between x and z x ``weight``; None if all shards have that weight."""
        self._split_up = False
        """Whether at the last cut messages of other hosts were pending, or shards had different weights."""
        self._neighbour_stopped = False
        """Whether an empty message was received since the last drain or cut: its sender keeps its weights."""
        # Engine thread:
        self._steps: dict[int, _Step] = {}
        self._mixed = 0
        """The last step whose result was sent back."""
        self._had: set[tuple[int, int]] = set()
        """Messages that were added before the step that needs them: (host, its step)."""
        self._leftover: list[tuple[Message, float]] = []
        """Messages, with their edges' weights, that no step before the last end has added; the next step adds them."""
        self._ended: Drained[Any] | None = None
        """A drain or cut that this rank has to complete without its optimizer, which was deleted."""

    def begin(self, weights: Vector) -> None:
        if self._post.differences and not self._known.begun:  # weights of an earlier run's cut are each rank's own
            shards = self._post.split(self._post.zeros() if self._restored else weights)
            self._known.begin(shards[self._own] * float(len(shards)))

    def mix_program(self, before: Vector, after: Vector) -> Program[Vector]:
        self.check_step()
        self._count_step()
        step, weights = self._step, self._weights
        parts = self._post.split(self._with_excess(after))
        if self.wants_before:
            own_before = self._post.split(self._with_excess(before))[self._own]
            self.engine.call_soon(lambda: setattr(self._at(step), "before", own_before))
        shards = yield from self._reduced(step, list(map(State, parts, weights)))
        if self.plan.averages(self._base + step):
            shards = yield from self._average(shards)
        return self._gathered(shards)

    def _average(self, shards: list[State]) -> Program[list[State]]:
        """Return the mean of x and w over the ranks that have not finished."""
        x = self._post.join([shard.x for shard in shards])
        index = self._averages.contribute(self._registered_number(), x, [shard.w for shard in shards])
        yield Wait(lambda: self._averages.is_complete(index))
        self._averagings += 1
        x, weights = self._averages.result(index)
        return list(map(State, self._post.split(x), weights))

    def _with_excess(self, x: Vector) -> Vector:
        return x if self._excess is None else self._post.add(x, self._excess, 1.0)

    def _gathered(self, shards: list[State]) -> Vector:
        """Set this rank's x and push-sum weights from these shards; return z."""
        weights = self._weights = [shard.w for shard in shards]
        mean = self._weight = weights[0] if len(set(weights)) == 1 else sum(weights) / len(weights)
        z = [push_sum.model(shard) for shard in shards]
        even = all(weight == mean for weight in weights)
        self._excess = None if even else self._post.join([x * (w - mean) for x, w in zip(z, weights, strict=True)])
        return self._post.join(z)

    # -- ends -------------------------------------------------------------------------------------------------

    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        """Average all ranks with ``flush``; after a cut, the next step takes the pending messages of other hosts."""
        self._restart_steps()
        self._together = flush
        if not flush:
            self._split_up = bool(self._leftover) or self._excess is not None
            return weights
        x = self._with_leftover(weights * self._weight, keep=False)
        self._excess = None
        z = yield from super().consensus_program(x)
        self._weight, self._weights = 1.0, [1.0] * len(self._locals)
        return z

    def _restart_steps(self) -> None:
        with self.engine.changed:  # pending messages belong to no later step
            self._leftover += self._decoded(self._receive_buffer.take(None))
            self._steps.clear()
            self._had.clear()
            self._mixed = 0

    def discard_results(self) -> None:
        """Continue with this rank's shard for the other ranks of its host, although its optimizer is deleted."""
        self.keep, self._ended = None, self._inbox.drained
        if self._ended is None:
            self._exchanges.resume()
        else:
            self._end_without_optimizer()

    def _end_without_optimizer(self) -> None:
        """Restart the count of steps once all exchanges of a drain or cut are done, as ``complete_drain`` does for a
        rank with an optimizer: its host needs it."""
        ended = self._ended
        if ended is None or self._exchanges.completed < ended.rounds:
            return
        self._ended = None
        self._restart_steps()
        self._base = 0 if ended.flushed else self._base + self._longest
        if ended.flushed:
            self._leftover.clear()
        self._neighbour_stopped = False
        self._exchanges.resume()

    def _restart(self) -> None:
        self._averages.restart()
        self._neighbour_stopped = False
        super()._restart()

    def consensus_program(self, x: Vector) -> Program[Vector]:
        weight = self._weight
        x = self._with_leftover(x, keep=True)
        mean = yield from super().consensus_program(x)
        self._weight = weight
        return mean

    def _with_leftover(self, x: Vector, keep: bool) -> Vector:
        """Return x after adding the messages of other hosts that no step took to this rank's shard."""
        leftover, x = self._leftover, self._with_excess(x)
        if not keep:
            self._leftover = []
        if not leftover:
            return x
        parts = self._post.split(x)
        parts[self._own], weight = push_sum.receive(State(parts[self._own], 0.0), leftover, self._post.add)
        self._weight += weight / len(parts)
        return self._post.join(parts)

    def saved_state(self) -> SavedState | None:
        """Return the state, other than the weights, that a checkpoint needs after a cut; None after a drain.

        Raises:
            ReplicaStateError: after a cut, if messages of other hosts are pending, or only some owners have added
                theirs.
        """
        if self._split_up and not self._together:
            raise ReplicaStateError(
                "messages of other hosts are on their way, which a checkpoint after cut() cannot hold yet: call "
                "drain() and save rank 0's state"
            )
        return super().saved_state()

    def _estimates(self) -> dict[str, Vector]:
        return self._known.saved_state()

    def restore(self, kept: SavedState) -> None:
        self._known.restore(kept.copies)
        super().restore(kept)
        self._weights = [self._weight] * len(self._locals)

    # -- engine thread ----------------------------------------------------------------------------------------

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command."""
        super().on_command(command)
        match command:
            case RankFinished():
                self._progress()
            case Drained() if self.deleted:
                self._exchanges.pause(command.rounds)
                self._ended = command
                self._end_without_optimizer()

    def _on_exchange_done(self) -> None:
        self._end_without_optimizer()

    def _deliver(self, sender: int, key: int, weight: float, data: Vector) -> None:
        if sender in self._locals:
            super()._deliver(sender, key, weight, data)
            return
        self._neighbour_stopped |= weight == 0.0
        self._receive_buffer.deliver(sender // len(self._locals), key // STAGES, weight, data)
        self._progress()

    def _decoded(self, messages: list[ReceivedMessage]) -> Iterator[tuple[Message, float]]:
        """Yield each non-empty message of another host, decoded, with its edge's weight."""
        for host, step, weight, data in messages:
            self._taken += 1
            if weight:
                x = self._known.decode(f"from {host}", data)
                yield Message(x, weight), dict(self._into(self._host, step))[host]

    def _at(self, step: int) -> _Step:
        return self._steps.setdefault(step, _Step())

    def _contribute(self, step: int, sender: int, part: State) -> None:
        self._at(step).contributed[sender] = part
        self._progress()

    def _progress(self) -> None:
        """Process the next steps of the host, as far as their messages have arrived."""
        late = self.config.max_staleness > 0
        while (step := self._steps.get(self._mixed + 1)) is not None:
            number = self._mixed + 1
            if step.total is None:
                if any(self._active(place, number) and place not in step.contributed for place in self._locals):
                    return
                if not step.contributed or (late and self._lacks(number)):
                    return
                step.total = self._gossip(number, step)
            if self._lacks(number):
                return
            total = self._with_others(step.total, number, number)
            self._share(number, step.contributed, push_sum.divided(total, len(step.contributed)))
            del self._steps[number]
            self._mixed = number

    def _gossip(self, number: int, step: _Step) -> State:
        """Add up the shards of the host's ranks, and send a share to other hosts; return the rest. OSGP: messages of
        earlier steps are added first."""
        first, *others = (step.contributed[place] for place in sorted(step.contributed))
        total = push_sum.receive(
            State(first.x + 0, first.w), ((Message(*shard), 1.0) for shard in others), self._post.add
        )
        if self.config.max_staleness:
            total = self._with_others(total, number, number - 1)
        size = len(self._locals)
        out = self.plan.out_edges(self._host, self._base + number)
        receivers = [(host, p) for host, p in out if self._has_active(host, number)]
        ranks = 1 + len(others)
        if step.before is None or any(shard.w != first.w for shard in others):  # the owner has finished, or after a cut
            x = total.x + 0 if self._post.lossless else total.x
        else:
            x = step.before * float(ranks)
        senders = self.plan.senders(self._host)
        gets_less = self._neighbour_stopped or not all(self._has_active(host, number) for host in senders)
        weight, sent = total.w, list[Sent]()
        if push_sum.may_send(weight, gets_less, ranks):
            messages, sent = self._shares(x, weight, receivers)
        else:
            weight, data = 0.0, self._post.encode(x * 0.0)
            messages = [OutgoingMessage(host * size + self._own, data) for host, _ in receivers]
        self._exchanges.offer(self._registered_number(), self._key(number, GOSSIP), messages, weight)
        for share in sent:
            total = push_sum.without(total, share, self._post.add)
        return total

    def _shares(
        self, x: Vector, weight: float, receivers: list[tuple[int, float]]
    ) -> tuple[list[OutgoingMessage], list[Sent]]:
        """Return messages of x to other hosts' owners, and the shares that they carry.

        Messages are encoded once, or with differences once per receiving host.
        """
        groups = [[each] for each in receivers] if self._post.differences else [receivers] if receivers else []
        messages, sent = list[OutgoingMessage](), list[Sent]()
        for hosts in groups:
            data, decoded = self._known.encode(f"to {hosts[0][0]}", x)
            messages += [OutgoingMessage(host * len(self._locals) + self._own, data) for host, _ in hosts]
            sent.append(Sent(Message(decoded, weight), sum(p for _, p in hosts)))
        return messages, sent

    def _lacks(self, number: int) -> bool:
        """Return whether a step still has to wait for a message of another host."""
        last = number - self.config.max_staleness  # earlier ones were waited for in earlier steps
        return any(
            self._has_active(host, last)
            and (host, last) not in self._receive_buffer.received
            and (host, last) not in self._had
            for host, _ in (self._into(self._host, last) if last > 0 else ())
        )

    def _with_others(self, total: State, number: int, until: int) -> State:
        """Return a shard after adding messages of other hosts, of their steps up to ``until``."""
        leftover, self._leftover = self._leftover, []
        received = self._receive_buffer.take(until)
        self._staleness.update([number] * len(leftover) + [max(0, number - message.step) for message in received])
        had = self._had.union((message.sender, message.step) for message in received)
        self._had = {(host, past) for host, past in had if past >= number - self.config.max_staleness}
        total = push_sum.receive(total, leftover, self._post.add)
        return push_sum.receive(total, self._decoded(received), self._post.add)


# -- AD-PSGD of hosts --------------------------------------------------------------------------------------------------
# The ranks of a host step together, while engines average its weights with a neighbouring host.
#
# A host has one shadow copy y of its weights; each rank owns a part of it. A step adds the mean of the changes that the
# ranks' optimizers have made, and sends the sum to all ranks, so that they hold the same weights. The first active rank
# of a host requests averagings for the host. Each rank's engine then averages its part with the rank at its place on
# the other host. With n ranks of a host that have the optimizer, m of the other, y_h and y_g the exchanged snapshots,
# and u_r the change by rank r's optimizer:
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


class HostPairWorker(HostWorker):
    """AD-PSGD of hosts on one rank: its host is averaged with neighbouring hosts in pairs.

    Attributes:
        log: events in the order in which they changed this rank's part: ("step", number of the host's step), ("sent",
            exchange, partner's place), ("landed", exchange, partner's place).
    """

    def __init__(
        self, engine: RankRuntime, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]
    ) -> None:
        super().__init__(engine, plan, post, finish)
        self._given: Vector = None
        """The weights last loaded into the model, which may have changed them since."""
        # Engine thread, once this rank is registered:
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
        """Places of ranks whose optimizer was deleted."""
        self._ended: Drained[Any] | None = None
        """A drain or cut that is not complete here yet."""
        self._average: Vector | None = None
        """This part of the average of all ranks at that end, if it is a drain."""
        self._drained_total = 0
        """Steps of all ranks until the last drain."""
        self._apart = False
        """Whether hosts started with different weights, without a drain since."""
        self._pairing = Pairing(
            plan.config.max_local_steps,
            plan.topology.neighbours(self._host),
            self._speaks,
            lambda: engine.send(PairRequested(self._registered_number())),
        )
        self._calls.on_result = self._on_result

    def begin(self, weights: Vector) -> None:
        if self._number is None:  # weights replaced later are a change, which the next step contributes
            self._given = weights
            self._shadow = self._post.split(weights)[self._own] + 0

    def mix_program(self, before: Vector, after: Vector) -> Program[Vector]:
        """End a step of the host; its first rank waits after ``max_local_steps`` without an averaging."""
        self.check_step()
        if self._speaks() and not self._pairing.may_step():
            yield Wait(self._pairing.may_step, lambda: "an averaging with a neighbouring host")
        self._count_step()
        self._pairing.stepped()
        change = self._post.add(after, self._given, -1.0)
        parts = yield from self._reduced(self._step, [State(part, 1.0) for part in self._post.split(change)])
        self._given = self._post.join([part.x for part in parts])
        self.engine.call_soon(self._pairing.ask)
        return self._given

    def _speaks(self) -> bool:
        """Return whether this rank requests averagings for its host: it is the first that has not finished."""
        finished = self._receive_buffer.finished
        return not self._announced and all(place in finished for place in self._locals[: self._own])

    # -- ends -------------------------------------------------------------------------------------------------

    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        self._together = flush
        if END in self._parts:  # otherwise no rank has taken a step
            held = self._post.join([part.x for part in self._take_parts(END)])
            change = self._post.add(weights, self._given, -1.0)
            self._given, weights = held, self._post.add(change, held, 1.0)
        if flush:
            weights = yield from self.consensus_program(weights)
            self._given = weights + 0
            if self.log is not None:
                self.log.append(("drained",))
        self._pairing.ended()
        return weights

    def discard_results(self) -> None:
        """Continue with this rank's part for the other ranks of its host, although its optimizer is deleted."""
        self.keep = None
        if self._ended is None:
            self._exchanges.resume()
        else:
            self._complete_end()

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _estimates(self) -> dict[str, Vector]:
        """Return a marker: the ranks of a host have the same weights."""
        return {self._mark: self._post.scalar(1.0)}

    @property
    def _mark(self) -> str:
        return f"pairs of hosts with {len(self._locals)} ranks"

    def restore(self, kept: SavedState) -> None:
        """Start from the state that an earlier run saved after a cut.

        Raises:
            ValueError: it has a push-sum weight other than 1, or the ranks of a host had different weights.
        """
        check_weight(kept, self.config.algorithm)
        if self._mark not in kept.copies:
            raise ValueError(
                f"this state was saved after cut() by ranks with weights of their own, and the ranks of a host must "
                f"start with equal weights: continue with the algorithm that it was saved with, and with hierarchical="
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
                    if self._host in hosts:  # (all engines receive these commands in the same order)
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
                self._pairing.request_if_due()
            case Drained():
                self._gone.update(map(self._ranks.index, command.gone))
                all_hosts = range(len(self._ranks) // len(self._locals))
                self._pairing.reset(host for host in all_hosts if not self._present(host))
                self._ended = command
                self._exchanges.pause(command.rounds)
                super().on_command(command)
                self._complete_end()
            case _:
                super().on_command(command)

    def _on_exchange_done(self) -> None:
        self._complete_end()

    def _complete_end(self) -> None:
        """Reset the counts once all exchanges of an end are done and, for a drain, the average of all ranks is here.

        Exchanges resume here if the optimizer is deleted; otherwise once it has completed the end.
        """
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
        """Take this part of the average of all ranks at a drain."""
        if self._ended is not None and self._ended.flushed and command.what == MEAN:
            self._average = self._post.split(result * (1.0 / len(command.ranks)))[self._own] + 0
            self._complete_end()

    def _contribute(self, step: int, sender: int, part: State) -> None:
        self._contributed.setdefault(step, {})[sender] = part.x
        self._progress()

    def _progress(self) -> None:
        """Process the next steps of the host, as far as its ranks' changes have arrived."""
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
        """Return the number of a host's ranks that have the optimizer."""
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
