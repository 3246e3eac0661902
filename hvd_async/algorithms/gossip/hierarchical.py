"""Hierarchical gossip: the ranks of a host are averaged first, hosts gossip, and a host's ranks share the same weights.

A step is a reduce-scatter within the host, gossip of each shard between hosts, and an all-gather within the host. Each
rank owns a shard of the weights. Every rank sends the owners their shards; an owner adds them up and gossips the host's
sum of its shard with the owners of that shard on other hosts; it sends the result, divided by their number, back to the
ranks. So one host sends the weights once to each of its neighbours, over the connections of all its ranks. Engines do
the second and third stage, whatever their training thread does. With x_r rank r's biased weights after its update, n
the ranks of a host h, and p the hosts' mixing matrix, for each shard:

    X_h <- sum_r x_r,  W_h <- sum_r w_r                  reduce-scatter
    X_h <- X_h - sum_g p_gh M_gh + sum_g p_hg M_hg       gossip, M_gh what host g decodes of X_h (D-PSGD: n times the
    W_h <- W_h - sum_g p_gh W_h + sum_g p_hg W_g         x_r from before the update); w likewise
    x_r <- X_h / n,  w_r <- W_h / n                      all-gather
    x_r <- mean of x, w_r <- mean of w over all ranks    each ``average_every`` steps (Gossip-PGA)

Inside a host shards travel as they are. Between hosts they are compressed, and what compression leaves out stays with
the sender. With 8 bits M is CHOCO-SGD's estimate (``error_feedback``), one for each shard and edge at either end. Both
have seen the same messages in one order, so estimates outlive drains and cuts, also where a rank's optimizer is
deleted and its engine, which knows no drained weights, goes on with its shard.

A shard has a push-sum weight of its own: its owner may have received a message that the owner of another shard has
not, or have left out an edge to a host that has finished. All messages carry x and w alike (``push_sum``), so their
sums over ranks never change here either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hvd_async.algorithms.gossip import push_sum
from hvd_async.algorithms.gossip.error_feedback import ErrorFeedback, SavedState
from hvd_async.algorithms.gossip.global_average import GlobalAverages
from hvd_async.algorithms.gossip.host_steps import GOSSIP, HostWorker
from hvd_async.algorithms.gossip.message_exchange import MessageFormat, OutgoingMessage
from hvd_async.algorithms.gossip.messages import STAGES, RankFinished
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.push_sum import Message, Sent, State
from hvd_async.algorithms.gossip.receive_buffer import ReceivedMessage
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.messages import Drained, OptimizerCommand


@dataclass
class _Step:
    """A step of the host, at the owner of a shard."""

    contributed: dict[int, State] = field(default_factory=dict)
    """The shard of each rank of the host that has sent it, by place."""
    before: Vector = None
    """The owner's shard before its update (D-PSGD)."""
    total: State | None = None
    """The host's sum, once all ranks have contributed and other hosts were sent their share."""


class HierarchicalWorker(HostWorker):
    """One optimizer of one rank whose host gossips."""

    def __init__(self, engine: Engine, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]) -> None:
        super().__init__(engine, plan, post, finish)
        size = plan.config.local_size
        self._averages: GlobalAverages = GlobalAverages(engine, post)
        self._known = ErrorFeedback(post, plan.config.graph, size)
        """Estimates of this rank's shard."""
        self._weights = [1.0] * size
        """Push-sum weights of the shards; ``weight`` is their mean."""
        self._excess: Vector | None = None
        """The difference of x to z x ``weight``; None if all shards have that weight."""
        self._split_up = False
        """Whether at the last cut messages of other hosts were waiting, or shards had different weights."""
        self._neighbour_stopped = False
        """Whether an empty message was received since the last drain or cut: its sender keeps what it has."""
        # Engine thread's:
        self._steps: dict[int, _Step] = {}
        self._mixed = 0
        """The last step whose result was sent back."""
        self._had: set[tuple[int, int]] = set()
        """Messages added before the step that waits for them: (host, its step)."""
        self._leftover: list[tuple[Message, float]] = []
        """Messages, with their edges' weights, that no step before the last end has added: the first one does."""
        self._ended: Drained[Any] | None = None
        """An end that this rank, whose optimizer is deleted, has to complete by itself."""

    def begin(self, weights: Vector) -> None:
        if self._post.differences and not self._known.begun:  # weights of an earlier run's cut are each rank's own
            shards = self._post.split(self._post.zeros() if self._restored else weights)
            self._known.begin(shards[self._own] * float(len(shards)))

    def mix(self, before: Vector, after: Vector) -> Vector:
        self.check_step()
        self._count_step()
        step, weights = self._step, self._weights
        parts = self._post.split(self._with_excess(after))
        if self.wants_before:
            own_before = self._post.split(self._with_excess(before))[self._own]
            self.engine.call_soon(lambda: setattr(self._at(step), "before", own_before))
        shards = self._reduced(step, list(map(State, parts, weights)))
        if self.plan.averages(self._base + step):
            shards = self._average(shards)
        return self._gathered(shards)

    def _average(self, shards: list[State]) -> list[State]:
        """Return the mean of x and w over the ranks that have not finished."""
        x = self._post.join([shard.x for shard in shards])
        index = self._averages.contribute(self._registered_number(), x, [shard.w for shard in shards])
        self._await(lambda: self._averages.is_complete(index))
        self._averagings += 1
        x, weights = self._averages.result(index)
        return list(map(State, self._post.split(x), weights))

    def _with_excess(self, x: Vector) -> Vector:
        return x if self._excess is None else self._post.add(x, self._excess, 1.0)

    def _gathered(self, shards: list[State]) -> Vector:
        """Make these shards this rank's x and push-sum weights; return z."""
        weights = self._weights = [shard.w for shard in shards]
        mean = self._weight = weights[0] if len(set(weights)) == 1 else sum(weights) / len(weights)
        z = [push_sum.model(shard) for shard in shards]
        even = all(weight == mean for weight in weights)
        self._excess = None if even else self._post.join([x * (w - mean) for x, w in zip(z, weights, strict=True)])
        return self._post.join(z)

    # -- ends -------------------------------------------------------------------------------------------------

    def gather(self, weights: Vector, flush: bool) -> Vector:
        """Average all ranks with ``flush``; after a cut, messages of other hosts that no step took wait for one."""
        self._count_anew()
        self._together = flush
        if not flush:
            self._split_up = bool(self._leftover) or self._excess is not None
            return weights
        x = self._with_leftover(weights * self._weight, keep=False)
        self._excess = None
        z = super().consensus(x)
        self._weight, self._weights = 1.0, [1.0] * len(self._locals)
        return z

    def _count_anew(self) -> None:
        with self.engine.changed:  # messages that wait belong to no later step
            self._leftover += self._decoded(self._receive_buffer.take(None))
            self._steps.clear()
            self._had.clear()
            self._mixed = 0

    def discard_results(self) -> None:
        """Go on with this rank's shard for the ranks of its host, though its optimizer is deleted."""
        self.keep, self._ended = None, self._inbox.drained
        if self._ended is None:
            self._exchanges.resume()
        else:
            self._end_without_optimizer()

    def _end_without_optimizer(self) -> None:
        """Count steps anew once all exchanges of an end are done, as ``complete_drain`` does for an optimizer:
        its host counts on it."""
        ended = self._ended
        if ended is None or self._exchanges.completed < ended.rounds:
            return
        self._ended = None
        self._count_anew()
        self._base = 0 if ended.flushed else self._base + self._longest
        if ended.flushed:
            self._leftover.clear()
        self._neighbour_stopped = False
        self._exchanges.resume()

    def _restart(self) -> None:
        self._averages.restart()
        self._neighbour_stopped = False
        super()._restart()

    def consensus(self, x: Vector) -> Vector:
        weight = self._weight
        x = self._with_leftover(x, keep=True)
        mean = super().consensus(x)
        self._weight = weight
        return mean

    def _with_leftover(self, x: Vector, keep: bool) -> Vector:
        """Return x with messages of other hosts that no step took added to this rank's shard."""
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
        """Return the state that a checkpoint needs beside the weights after a cut; None after a drain.

        Raises:
            ReplicaStateError: after a cut, when messages of other hosts wait, or only the owners of some shards have
                added theirs.
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
        """Yield each message of another host that carries something, decoded, with its edge's weight."""
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
        """Go on with the next steps of the host, as far as messages are here."""
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
        """Add up the shards of the host's ranks, and send other hosts their share; return the rest. OSGP: messages of
        earlier steps are added before."""
        first, *others = (step.contributed[place] for place in sorted(step.contributed))
        total = push_sum.receive(
            State(first.x + 0, first.w), ((Message(*shard), 1.0) for shard in others), self._post.add
        )
        if self.config.max_staleness:
            total = self._with_others(total, number, number - 1)
        size = len(self._locals)
        receivers = [
            (host, p) for host, p in self.plan.out_edges(self._host, self._base + number) if self._goes_on(host, number)
        ]
        ranks = 1 + len(others)
        if step.before is None or any(shard.w != first.w for shard in others):  # the owner has finished; or after a cut
            x = total.x + 0 if self._post.lossless else total.x
        else:
            x = step.before * float(ranks)
        senders = self.plan.senders(self._host)
        gets_less = self._neighbour_stopped or not all(self._goes_on(host, number) for host in senders)
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
        """Return messages of x to hosts' ranks, and what they carry; each host's own, if it knows its own estimate."""
        alike = [[each] for each in receivers] if self._post.differences else [receivers] if receivers else []
        messages, sent = list[OutgoingMessage](), list[Sent]()
        for hosts in alike:
            data, decoded = self._known.encode(f"to {hosts[0][0]}", x)
            messages += [OutgoingMessage(host * len(self._locals) + self._own, data) for host, _ in hosts]
            sent.append(Sent(Message(decoded, weight), sum(p for _, p in hosts)))
        return messages, sent

    def _lacks(self, number: int) -> bool:
        """Return whether a message is missing that a step has to wait for."""
        last = number - self.config.max_staleness  # earlier ones were waited for in earlier steps
        return any(
            self._goes_on(host, last)
            and (host, last) not in self._receive_buffer.received
            and (host, last) not in self._had
            for host, _ in (self._into(self._host, last) if last > 0 else ())
        )

    def _with_others(self, total: State, number: int, until: int) -> State:
        """Return a shard with messages of other hosts added, of their steps up to ``until``."""
        leftover, self._leftover = self._leftover, []
        received = self._receive_buffer.take(until)
        self._staleness.update([number] * len(leftover) + [max(0, number - message.step) for message in received])
        had = self._had.union((message.sender, message.step) for message in received)
        self._had = {(host, past) for host, past in had if past >= number - self.config.max_staleness}
        total = push_sum.receive(total, leftover, self._post.add)
        return push_sum.receive(total, self._decoded(received), self._post.add)
