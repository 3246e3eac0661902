"""Gossip between hosts, as one rank sees it: the ranks of a host are averaged first, and go on with the same weights.

Each rank of a host owns a part of the weights, and a part has a push-sum weight of its own: its owner may have taken in
what the owner of another part has not, or have left out an edge to a host that is done. A step has three stages, each a
message: every rank sends the owners their parts; an owner adds them up and gossips the host's sum of its part with the
owners of that part on other hosts; it sends what comes of it, divided by their number, back to the ranks. So one host
sends the weights once to each of its neighbours, over the connections of all its ranks. Engines do the second and third
stage, whatever their training thread does; what is sent is mass, weights and push-sum weights alike, so the sums over
the ranks never change here either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.message_exchange import MessageFormat, OutgoingMessage
from hvd_async.algorithms.gossip.messages import RankFinished
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.algorithms.gossip.push_sum import MIN_WEIGHT
from hvd_async.algorithms.gossip.worker import PushSumWorker
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.messages import Drained, OptimizerCommand

STAGES = 3
REDUCE_SCATTER, GOSSIP, ALL_GATHER = range(STAGES)


class _Shard(NamedTuple):
    """A part of the weights, times how much it counts, and that."""

    x: Vector
    weight: float


@dataclass
class _Step:
    """A step of the host, as the owner of a part sees it."""

    given: dict[int, _Shard] = field(default_factory=dict)
    """By the ranks of the host that have given theirs."""
    before: Vector = None
    """The owner's part before its update, of D-PSGD."""
    mass: _Shard | None = None
    """The host's, once all have given and other hosts were sent their share."""


class HierarchicalWorker(PushSumWorker):
    """One optimizer of one rank whose host gossips."""

    def __init__(self, engine: Engine, plan: GossipPlan, post: MessageFormat, finish: Callable[[bool], object]) -> None:
        super().__init__(engine, plan, post, finish)
        size = plan.config.local_size
        self._host, self._own = divmod(self._place, size)
        self._locals = range(self._host * size, (self._host + 1) * size)
        self._weights = [1.0] * size
        """Push-sum weights of the parts; ``weight`` is their mean."""
        self._excess: Vector | None = None
        """What x has beyond z x ``weight``; None if all parts have that weight."""
        self._split_up = False
        """Whether at the last cut messages of other hosts were waiting, or parts had different weights."""
        # Engine thread's:
        self._steps: dict[int, _Step] = {}
        self._mixed = 0
        """The last step that was sent back."""
        self._had: set[tuple[int, int]] = set()
        """Messages that were taken in before they had to be: (host, its step)."""
        self._parts: dict[int, dict[int, _Shard]] = {}
        """What came back, by step and owner."""
        self._ended: Drained[Any] | None = None
        """An end that this rank, whose optimizer is gone, has to come to by itself."""

    def mix(self, before: Vector, after: Vector) -> Vector:
        """End a step, as ``PushSumWorker.mix``; z is that of the whole host."""
        number = self._opened_number()
        self._check_drained()
        self._step += 1
        step, weights = self._step, self._weights
        parts = self._post.split(self._with_excess(after))
        own_before = self._post.split(self._with_excess(before))[self._own] if self.wants_before else None
        letters = [
            OutgoingMessage(to, self._post.encode(parts[part]), weights[part])
            for part, to in enumerate(self._locals)
            if to != self._place
        ]

        def give() -> None:
            self._mail.offer(number, step * STAGES + REDUCE_SCATTER, letters, 0.0)
            self._at(step).before = own_before
            self._take_part(step, self._place, _Shard(parts[self._own] + 0, weights[self._own]))

        self.engine.call_soon(give)
        self._await(lambda: len(self._parts.get(step, ())) == len(self._locals))
        back = self._parts.pop(step)
        return self._settle([back[part] for part in range(len(self._locals))])

    def _with_excess(self, x: Vector) -> Vector:
        return x if self._excess is None else self._post.add(x, self._excess, 1.0)

    def _settle(self, parts: list[_Shard]) -> Vector:
        """Take these parts for x and their weights; returns z."""
        weights = self._weights = [weight for _, weight in parts]
        mean = self._weight = weights[0] if len(set(weights)) == 1 else sum(weights) / len(weights)
        z = [x if weight == 1.0 else x * (1.0 / weight) for x, weight in parts]
        even = all(weight == mean for weight in weights)
        self._excess = None if even else self._post.join([x * (w - mean) for x, w in zip(z, weights, strict=True)])
        return self._post.join(z)

    # -- ends -------------------------------------------------------------------------------------------------

    def gather(self, weights: Vector, flush: bool) -> Vector:
        """As ``PushSumWorker.gather``; after a cut, what other hosts have sent and no step took waits for the next."""
        self._count_anew()
        if not flush:
            self._together = False
            self._split_up = bool(self._letters.come) or self._excess is not None
            return weights
        z = super().gather(weights, flush)
        self._weights = [1.0] * len(self._locals)
        return z

    def _count_anew(self) -> None:
        with self.engine.changed:  # what waits is of no step of the time after, and will be taken by its first
            self._letters.come = {
                (host, -i): self._letters.come[host, step] for i, (host, step) in enumerate(sorted(self._letters.come))
            }
            self._steps.clear()
            self._had.clear()
            self._mixed = 0

    def discard_results(self) -> None:
        """This rank's optimizer is gone; its engine goes on with its part of the weights for the ranks of its host."""
        self.keep, self._ended = None, self._inbox.drained
        if self._ended is None:
            self._mail.resume()
        else:
            self._end_without_optimizer()

    def _end_without_optimizer(self) -> None:
        """Count steps anew once all exchanges of an end are done, as ``complete_drain`` does for an optimizer:
        its host counts on it."""
        ended = self._ended
        if ended is None or self._mail.landed < ended.rounds:
            return
        self._ended = None
        self._count_anew()
        self._base = 0 if ended.flushed else self._base + self._longest
        if ended.flushed:
            with self.engine.changed:
                self._letters.come.clear()
        self._giving.short = False
        self._mail.resume()

    def _take_in(self, x: Vector, until: int | None = None) -> Vector:
        """Add what other hosts have sent, in a drain: to this rank's part of this rank's x."""
        x = self._with_leftover(x, keep=False)
        self._excess = None
        return x

    def consensus(self, x: Vector) -> Vector:
        """As ``PushSumWorker.consensus``."""
        weight = self._weight
        x = self._with_leftover(x, keep=True)
        mean = super().consensus(x)
        self._weight = weight
        return mean

    def _with_leftover(self, x: Vector, keep: bool) -> Vector:
        with self.engine.changed:
            come = [self._letters.come[key] for key in sorted(self._letters.come)]
            if not keep:
                self._letters.come.clear()
        x = self._with_excess(x)
        if not come:
            return x
        parts = self._post.split(x)
        for weight, part in come:
            parts[self._own] = self._post.add(parts[self._own], part, 1.0)
            self._weight += weight / len(parts)
        self._taken += 0 if keep else len(come)
        return self._post.join(parts)

    def kept(self) -> SavedState | None:
        """As ``PushSumWorker.kept``.

        Raises:
            ReplicaStateError: after a cut, while messages of other hosts wait to be taken in, or have been by the
                owners of some parts only.
        """
        if self._split_up and not self._together:
            raise ReplicaStateError(
                "messages of other hosts are on their way, which a checkpoint after cut() cannot hold yet: call "
                "drain() and save rank 0's state"
            )
        return super().kept()

    def restore(self, kept: SavedState) -> None:
        """As ``PushSumWorker.restore``."""
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
                self._mail.pause(command.rounds)
                self._ended = command
                self._end_without_optimizer()

    def _tell_starved(self) -> None:
        """An exchange has landed."""
        super()._tell_starved()
        self._end_without_optimizer()

    def _deliver(self, sender: int, key: int, weight: float, data: Vector) -> None:
        step, stage = divmod(key, STAGES)
        x = self._post.decode(data)
        self._taken += stage != GOSSIP
        if stage == REDUCE_SCATTER:
            self._take_part(step, sender, _Shard(x, weight))
        elif stage == ALL_GATHER:
            self._returned(step, sender - self._locals[0], _Shard(x, weight))
        else:
            host = sender // len(self._locals)
            self._giving.short |= weight == 0.0
            p = dict(self._into(self._host, step))[host]
            with self.engine.changed:
                self._letters.come[host, step] = (p * weight, x * p)
            self._progress()

    def _at(self, step: int) -> _Step:
        return self._steps.setdefault(step, _Step())

    def _take_part(self, step: int, giver: int, mass: _Shard) -> None:
        self._at(step).given[giver] = mass
        self._progress()

    def _returned(self, step: int, place: int, mass: _Shard) -> None:
        with self.engine.changed:
            self._parts.setdefault(step, {})[place] = mass
            self.engine.changed.notify_all()

    def _active(self, place: int, step: int) -> bool:
        """Whether a rank takes a step, as far as is known."""
        return step <= self._letters.retired.get(place, step)

    def _goes_on(self, host: int, step: int) -> bool:
        """Whether some rank of a host takes a step, as far as is known."""
        size = len(self._locals)
        return any(self._active(place, step) for place in range(host * size, (host + 1) * size))

    def _progress(self) -> None:
        """Do what can be done of the next step of the host."""
        late = self.config.max_staleness > 0
        while (step := self._steps.get(self._mixed + 1)) is not None:
            number = self._mixed + 1
            if step.mass is None:
                if any(self._active(place, number) and place not in step.given for place in self._locals):
                    return
                if not step.given or (late and self._lacks(number)):
                    return
                step.mass = self._share(number, step)
            if self._lacks(number):
                return
            self._give_back(number, step, self._with_others(step.mass, number, number))
            del self._steps[number]
            self._mixed = number

    def _share(self, number: int, step: _Step) -> _Shard:
        """Add up what the ranks of the host have given, and send other hosts their share; OSGP: also of what they have
        sent at earlier steps."""
        masses = [step.given[place] for place in sorted(step.given)]
        x, weight = masses[0].x + 0, masses[0].weight
        for mass in masses[1:]:
            x, weight = self._post.add(x, mass.x, 1.0), weight + mass.weight
        if self.config.max_staleness:
            x, weight = self._with_others(_Shard(x, weight), number, number - 1)
        size = len(self._locals)
        receivers = [
            (host, p) for host, p in self.plan.out_edges(self._host, self._base + number) if self._goes_on(host, number)
        ]
        if step.before is None or len({mass.weight for mass in masses}) > 1:  # (the owner is done; or after a cut)
            message = x + 0
        else:
            message = step.before * float(len(masses))
        sent, given = weight, sum(p for _, p in receivers)
        short = self._giving.short or not all(self._goes_on(host, number) for host in self.plan.senders(self._host))
        if short and weight < MIN_WEIGHT * len(masses):
            message, sent, given = message * 0.0, 0.0, 0.0
        data = self._post.encode(message)
        letters = [OutgoingMessage(host * size + self._own, data) for host, _ in receivers]
        self._mail.offer(self._opened_number(), number * STAGES + GOSSIP, letters, sent)
        if given:
            x = self._post.add(x, message, -given)
        return _Shard(x, weight * (1.0 - given))

    def _lacks(self, number: int) -> bool:
        """Whether a message is missing that a step has to wait for."""
        last = number - self.config.max_staleness  # (earlier ones were waited for in earlier steps)
        return any(
            self._goes_on(host, last) and (host, last) not in self._letters.come and (host, last) not in self._had
            for host, _ in (self._into(self._host, last) if last > 0 else ())
        )

    def _with_others(self, mass: _Shard, number: int, until: int) -> _Shard:
        """With what other hosts have sent, of their steps up to ``until``."""
        with self.engine.changed:
            here = sorted(key for key in self._letters.come if key[1] <= until)
            come = [self._letters.come.pop(key) for key in here]
        x, weight = mass
        for (_, past), (own_weight, part) in zip(here, come, strict=True):
            x, weight = self._post.add(x, part, 1.0), weight + own_weight
            self._staleness[max(0, number - past)] += 1
        self._had = {(host, past) for host, past in self._had.union(here) if past >= number - self.config.max_staleness}
        self._taken += len(come)
        return _Shard(x, weight)

    def _give_back(self, number: int, step: _Step, mass: _Shard) -> None:
        share = 1.0 / len(step.given)
        x, weight = mass.x * share, mass.weight * share
        data = self._post.encode(x)
        letters = [OutgoingMessage(place, data) for place in sorted(step.given) if place != self._place]
        self._mail.offer(self._opened_number(), number * STAGES + ALL_GATHER, letters, weight)
        if self._place in step.given:
            self._returned(number, self._own, _Shard(x, weight))
