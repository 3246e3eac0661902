"""Hosts whose ranks take steps together: in each step a host's ranks are averaged, and the host is one participant.

A step has up to three stages. Every rank owns a part of its host's vector. Each rank sends each owner its contribution
to that part. The owner adds the contributions up, exchanges the result with other hosts if the algorithm sends messages
between neighbours, and sends it back to the ranks that contributed. So all ranks of a host end a step with the same
weights. Owners work in their engines, independently of their training threads, also for a rank that has finished or
whose optimizer was deleted.

What happens between hosts is the algorithm's. ``HostPushSumWorker`` gossips parts; ``HostADPSGDWorker`` averages parts
of neighbouring hosts in pairs (``adpsgd``); ``HostOuterWorker`` takes the outer steps of ranks that have been averaged
(``outer_worker``).
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from typing import Any

from hvd_async.algorithms.gossip import push_sum
from hvd_async.algorithms.gossip.config import STAGES, RankFinished
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.message_format import OutgoingMessage
from hvd_async.algorithms.gossip.push_sum import Message, Sent, State
from hvd_async.algorithms.gossip.rank import GossipWorker, Links, PushSumWorker, ReceivedMessage
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.interfaces import Program, Vector, Wait
from hvd_async.runtime.protocol import Drained, OptimizerCommand

# -- steps of a host ---------------------------------------------------------------------------------------------------


REDUCE_SCATTER, GOSSIP, ALL_GATHER = range(STAGES)
"""Stages of a step."""


class HostWorker(GossipWorker):
    """A gossiping rank that takes its steps together with the other ranks of its host."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        size = self.plan.config.local_size
        self._locals = self._ranks_of(self._host)
        self._pieces = self.plan.parts // size
        """Number of the format's parts that make up the part of an owner."""
        piece = self._post.split(self._post.zeros())[0]
        self._piece, self._piece_bytes = len(piece), len(self._post.as_bytes(piece))
        self._results: dict[int, dict[int, State]] = {}
        """Results received, by step and owner."""
        # Engine thread:
        self._contributed: dict[int, dict[int, State]] = {}
        """Contributions to this rank's part, by step and the contributor's place."""
        self._host_step = 0
        """The last step whose result was sent back, since the last end that is complete here."""
        self._host_base = 0
        """``_base`` after that end. (A rank that was deleted in a drain no longer counts its own.)"""
        self._ended: Drained[Any] | None = None
        """A drain or cut that is not complete here yet."""
        self._is_alone = False
        """Whether this rank's optimizer was deleted, so that ends are complete without it."""

    def _with_host(self, step: int, x: Vector, weights: Iterable[float]) -> Program[list[State]]:
        """Contribute x, with the weight of each part, to a step of the host; return its result, by owner (training
        thread)."""
        parts = list(map(State, self._split(x), weights))
        number, own = self.number, parts[self._own]
        messages = [self._message(to, part) for to, part in zip(self._locals, parts, strict=True) if to != self._place]

        def submit() -> None:
            self._exchanges.offer(number, self._key(step, REDUCE_SCATTER), messages, 0.0)
            self._contribute(step, self._place, State(own.x + 0, own.w))

        self.engine.call_soon(submit)
        yield Wait(lambda: len(self._results.get(step, ())) == len(self._locals))
        return self._take_results(step)

    def _take_results(self, step: int) -> list[State]:
        return [part for _, part in sorted(self._results.pop(step).items())]

    # -- parts ------------------------------------------------------------------------------------------------

    def _split(self, x: Vector) -> list[Vector]:
        """Return each owner's part of a vector."""
        pieces, each = self._post.split(x), self._pieces
        if each == 1:
            return pieces
        return [self._post.concatenate(pieces[first : first + each]) for first in range(0, len(pieces), each)]

    def _join(self, parts: list[Vector]) -> Vector:
        """Return the vector of all owners' parts: the inverse of ``_split``."""
        if self._pieces > 1:
            parts = [piece for part in parts for piece in self._cut(part, self._piece)]
        return self._post.join(parts)

    def _message(self, to: int, part: State) -> OutgoingMessage:
        return OutgoingMessage(to, self._post.as_bytes(part.x), part.w)

    def _received(self, data: Vector) -> Vector:
        """Return the part in a message of a rank of the host."""
        if self._pieces == 1:
            return self._post.from_bytes(data)
        pieces = self._cut(data[: self._pieces * self._piece_bytes], self._piece_bytes)
        return self._post.concatenate([self._post.from_bytes(piece) for piece in pieces])

    @staticmethod
    def _cut(vector: Vector, length: int) -> list[Vector]:
        return [vector[start : start + length] for start in range(0, len(vector), length)]

    # -- engine thread ----------------------------------------------------------------------------------------

    @staticmethod
    def _key(step: int, stage: int) -> int:
        return step * STAGES + stage

    def _links(self, key: int) -> Links:
        step, stage = divmod(key, STAGES)
        if stage != GOSSIP:
            others = [place for place in self._locals if place != self._place]
            rows = -(-self._pieces * self._piece_bytes // max(1, self._post.nbytes))
            return Links(others, others, max(1, rows))
        size, phase = len(self._locals), self._base_of_exchanges + step
        receivers = [host * size + self._own for host, _ in self.plan.out_edges(self._host, phase)]
        return Links(receivers, [host * size + self._own for host, _ in self.plan.in_edges(self._host, phase)])

    def _deliver(self, sender: int, key: int, weight: float, data: Vector) -> None:
        """Receive a message of this host or, by the algorithm, of another one."""
        if sender not in self._locals:
            super()._deliver(sender, key, weight, data)
            return
        step, stage = divmod(key, STAGES)
        self._taken += 1
        part = State(self._received(data), weight)
        if stage == REDUCE_SCATTER:
            self._contribute(step, sender, part)
        else:
            self._add_result(step, sender - self._locals[0], part)

    def _contribute(self, step: int, place: int, part: State) -> None:
        """Record a contribution of a rank of the host to this rank's part."""
        self._contributed.setdefault(step, {})[place] = part
        self._progress()

    def _progress(self) -> None:
        """Process the next steps of the host, as far as its ranks' contributions and other hosts' messages are here."""
        while contributed := self._contributed.get(step := self._host_step + 1):
            if any(self._active(place, step) and place not in contributed for place in self._locals):
                return
            result = self._result(step, [contributed[place] for place in sorted(contributed)])
            if result is None:
                return
            self._share(step, contributed, result)
            del self._contributed[step]
            self._host_step = step

    @abc.abstractmethod
    def _result(self, step: int, contributed: list[State]) -> State | None:
        """Return what each rank of the host gets of this part in a step; None if messages of other hosts are missing.

        Args:
            step: the step, counted from the last end.
            contributed: the contributions of all ranks that take it.
        """

    def _sum(self, contributed: list[State]) -> State:
        """Return the sum of contributions as a new state."""
        first, *others = contributed
        return push_sum.receive(State(first.x + 0, first.w), ((Message(*part), 1.0) for part in others), self._post.add)

    def _active(self, place: int, step: int) -> bool:
        """Return whether a rank takes a step; True unless it is known to have finished before."""
        return step <= self._receive_buffer.finished.get(place, step)

    def _share(self, step: int, places: Iterable[int], part: State) -> None:
        """Send the result of this rank's part to these ranks of the host; takes ownership of it."""
        messages = [self._message(place, part) for place in sorted(places) if place != self._place]
        self._exchanges.offer(self.number, self._key(step, ALL_GATHER), messages, 0.0)
        if self._place in places:
            self._add_result(step, self._own, part)

    def _add_result(self, step: int, owner: int, part: State) -> None:
        with self.engine.changed:
            self._results.setdefault(step, {})[owner] = part
            self.engine.changed.notify_all()

    # -- ends (engine thread) ---------------------------------------------------------------------------------

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command."""
        if isinstance(command, Drained):
            self._exchanges.carrier.pause(command.rounds)
            self._ended = command
        super().on_command(command)
        match command:
            case Drained():
                self._complete_end()
            case RankFinished():
                self._progress()

    def _on_exchange_done(self) -> None:
        self._complete_end()

    def _complete_end(self) -> None:
        """Restart the count of the host's steps once all that belongs to an end is here."""
        ended = self._ended
        if ended is None or self._exchanges.carrier.completed < ended.rounds or not self._on_end(ended):
            return
        self._contributed.clear()
        self._host_step = 0
        self._host_base = 0 if ended.flushed else self._host_base + self._longest
        with self.engine.changed:
            self._ended = None
            self.engine.changed.notify_all()
        if self._is_alone:
            self._continue_alone(ended)

    def _on_end(self, ended: Drained[Any]) -> bool:
        """Complete an end whose exchanges are done; return False if it has to wait for something else."""
        return True

    def _continue_alone(self, ended: Drained[Any]) -> None:
        """Continue after an end without the optimizer, which would otherwise do this."""
        self._results.clear()
        self._exchanges.carrier.resume()

    def discard_results(self) -> None:
        """Continue with this rank's part for the other ranks of its host, although its optimizer is deleted."""
        self.keep, self._is_alone = None, True
        if self._ended is not None:
            self._complete_end()
        elif (ended := self._drained) is not None:
            self._continue_alone(ended)
        else:
            self._exchanges.carrier.resume()


# -- push-sum between hosts --------------------------------------------------------------------------------------------
# The owner of a shard of the weights adds the shards of its host's ranks up, gossips the sum with the owners of that
# shard on other hosts, and divides the result by the number of ranks. So a host sends the weights once to each
# neighbour, over the connections of all its ranks. With x_r rank r's biased weights after its update, n the number of
# ranks of a host h, and p the hosts' mixing matrix, for each shard:
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


class HostPushSumWorker(HostWorker, PushSumWorker):
    """Push-sum between hosts, on one rank: SGP, OSGP, D-PSGD."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._weights = [1.0] * self.plan.config.local_size
        """Push-sum weights of the shards; ``weight`` is their mean."""
        self._excess: Vector | None = None
        """The difference between x and z x ``weight``; None if all shards have that weight."""
        self._split_up = False
        """Whether at the last cut messages of other hosts were pending, or shards had different weights."""
        # Engine thread:
        self._neighbour_stopped = False
        """Whether an empty message was received since the last end: its sender keeps its weights."""
        self._old_shards: dict[int, Vector] = {}
        """This rank's shard before its update, by step (D-PSGD)."""
        self._rests: dict[int, State] = {}
        """The host's sum without the share sent to other hosts, by step, until their messages are here."""
        self._had: set[tuple[int, int]] = set()
        """Messages that were added before the step that needs them: (host, its step)."""
        self._leftover: list[tuple[Message, float]] = []
        """Messages, with their edges' weights, that no step before the last end has added; the next step adds them."""

    def begin(self, weights: Vector) -> None:
        if self._post.differences and not self._known.begun:  # weights of an earlier run's cut are each rank's own
            shards = self._split(self._post.zeros() if self._restored else weights)
            self._known.begin(shards[self._own] * float(len(shards)))

    def mix_program(self, before: Vector, after: Vector) -> Program[Vector]:
        self.check_step()
        self._count_step()
        step = self._step
        if self.wants_before:
            shard = self._split(self._with_excess(before))[self._own]
            self.engine.call_soon(lambda: self._old_shards.update({step: shard}))
        shards = yield from self._with_host(step, self._with_excess(after), self._weights)
        if self.plan.averages(self._base + step):
            x = self._join([shard.x for shard in shards])
            x, weights = yield from self._average(x, [shard.w for shard in shards])
            shards = list(map(State, self._split(x), weights))
        return self._gathered(shards)

    def _with_excess(self, x: Vector) -> Vector:
        return x if self._excess is None else self._post.add(x, self._excess, 1.0)

    def _gathered(self, shards: list[State]) -> Vector:
        """Set this rank's x and push-sum weights from these shards; return z."""
        weights = self._weights = [shard.w for shard in shards]
        mean = self._weight = weights[0] if len(set(weights)) == 1 else sum(weights) / len(weights)
        z = [push_sum.model(shard) for shard in shards]
        even = all(weight == mean for weight in weights)
        self._excess = None if even else self._join([x * (w - mean) for x, w in zip(z, weights, strict=True)])
        return self._join(z)

    # -- ends -------------------------------------------------------------------------------------------------

    def _is_complete(self) -> bool:
        return super()._is_complete() and self._ended is None  # (else the engine may still add to ``_leftover``)

    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        """Average all ranks with ``flush``; after a cut, the next step takes the pending messages of other hosts."""
        self._together = flush
        if not flush:
            self._split_up = bool(self._leftover) or self._excess is not None
            return weights
        x = self._with_leftover(weights * self._weight, keep=False)
        self._excess = None
        z = yield from super().consensus_program(x)
        self._weight, self._weights = 1.0, [1.0] * len(self._locals)
        return z

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
        parts = self._split(x)
        parts[self._own], weight = push_sum.receive(State(parts[self._own], 0.0), leftover, self._post.add)
        self._weight += weight / len(parts)
        return self._join(parts)

    def _on_end(self, ended: Drained[Any]) -> bool:
        """Put pending messages aside: they belong to no later step (engine thread)."""
        self._leftover += self._decoded(self._receive_buffer.take(None))
        self._neighbour_stopped = False
        for record in (self._old_shards, self._rests, self._had):
            record.clear()
        return True

    def _continue_alone(self, ended: Drained[Any]) -> None:
        if ended.flushed:
            self._leftover.clear()
        super()._continue_alone(ended)

    # -- checkpoints ------------------------------------------------------------------------------------------

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

    def restore(self, kept: SavedState) -> None:
        super().restore(kept)
        self._weights, self._host_base = [self._weight] * len(self._locals), self._base

    # -- engine thread ----------------------------------------------------------------------------------------

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
                yield Message(x, weight), dict(self.plan.in_edges(self._host, self._host_base + step))[host]

    def _result(self, step: int, contributed: list[State]) -> State | None:
        if step not in self._rests:
            if self.config.max_staleness and self._lacks(step):
                return None
            self._rests[step] = self._gossip(step, contributed)
        if self._lacks(step):
            return None
        total = self._with_others(self._rests.pop(step), step, step)
        return push_sum.divided(total, len(contributed))

    def _gossip(self, step: int, contributed: list[State]) -> State:
        """Send a share of the host's sum to other hosts; return the rest. OSGP: messages of earlier steps are added
        first."""
        total, ranks = self._sum(contributed), len(contributed)
        if self.config.max_staleness:
            total = self._with_others(total, step, step - 1)
        out = self.plan.out_edges(self._host, self._host_base + step)
        receivers = [(host, p) for host, p in out if self._has_active(host, step)]
        before, alike = self._old_shards.pop(step, None), len({shard.w for shard in contributed}) == 1
        x = total.x + 0 if self._post.lossless else total.x
        if before is not None and alike:  # (otherwise the owner has finished, or the step is the first after a cut)
            x = before * float(ranks)
        senders = self.plan.senders(self._host)
        gets_less = self._neighbour_stopped or not all(self._has_active(host, step) for host in senders)
        weight, sent = total.w, list[Sent]()
        if push_sum.may_send(weight, gets_less, ranks):
            messages, sent = self._shares(x, weight, receivers)
        else:
            weight, data = 0.0, self._post.encode(x * 0.0)
            messages = [OutgoingMessage(self._ranks_of(host)[self._own], data) for host, _ in receivers]
        self._exchanges.offer(self.number, self._key(step, GOSSIP), messages, weight)
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
            messages += [OutgoingMessage(self._ranks_of(host)[self._own], data) for host, _ in hosts]
            sent.append(Sent(Message(decoded, weight), sum(p for _, p in hosts)))
        return messages, sent

    def _has_active(self, host: int, step: int) -> bool:
        """Return whether any rank of a host takes a step; True unless all are known to have finished before."""
        return any(self._active(place, step) for place in self._ranks_of(host))

    def _lacks(self, number: int) -> bool:
        """Return whether a step still has to wait for a message of another host."""
        last = number - self.config.max_staleness  # earlier ones were waited for in earlier steps
        return any(
            self._has_active(host, last)
            and (host, last) not in self._receive_buffer.received
            and (host, last) not in self._had
            for host, _ in (self.plan.in_edges(self._host, self._host_base + last) if last > 0 else ())
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
