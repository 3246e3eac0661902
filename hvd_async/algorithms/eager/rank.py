"""Rank of eager-SGD, in any framework: it hands gradients over, receives rounds, and applies each exactly once.

The training thread calls ``connect``, ``hand_over``, ``step`` and ``drain``; the engine thread carries out the
coordinator's commands. Source: Li et al., PPoPP 2020, with the guarantees that the paper leaves open.

Two objects hold a rank's gradients, one for each thread. ``RoundsInFlight`` belongs to the engine thread: it takes
gradients from the training thread by a queue, and submits them in rounds. ``EagerWorker`` belongs to the training
thread: it is given complete rounds, and applies them. ``Remains`` holds the gradients that outlive a membership change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from hvd_async.algorithms.eager.config import (
    EagerConfig,
    EndStep,
    ExplainRound,
    GradientReady,
    ReportReceived,
    RoundsReceived,
    RoundTrigger,
    SetHyperparameters,
    StartRound,
    StepEntered,
    VersionTaken,
)
from hvd_async.algorithms.eager.gradient_format import GradientFormat, PendingGradient, ReducedRound, Tail
from hvd_async.algorithms.eager.timeline import recorder
from hvd_async.errors import GradientLossError, ReplicaStateError
from hvd_async.runtime.carrier import Carrier, Collective
from hvd_async.runtime.interfaces import Handle, Program, RankRuntime, Take, Vector, Wait
from hvd_async.runtime.log import warn
from hvd_async.runtime.protocol import Drained, Failed, Hyper, OptimizerCommand
from hvd_async.runtime.worker import Uninterrupted, Worker
from hvd_async.stats import Stats

# -- gradients from their hand-over until their round is complete ------------------------------------------------------
# A gradient is queued until the engine wakes up, pending until a round takes it, and in flight until that is complete.
#
# A round takes all gradients that are pending when it is submitted; a later gradient stays for the next round, so
# nothing is lost and nothing counts twice. If ranks step host by host, a gradient becomes pending only when the host's
# other ranks have theirs, as the round's command says; so all of them go into the same round.


STEADY = 10
"""Number of steps in a row whose hyperparameters were the same at the hand-over of the first bucket and in ``step()``,
before a step is announced."""
UNSETTLED = 2
"""Maximum number of incomplete rounds that are applied, before another one is."""
NAMES_IN_RING = 4
"""Maximum number of a bucket's collectives in flight. Their names are reused, as Horovod's cache requires."""
NAME = "hvd_async.eager.{}.{}.{}"
"""Name of a collective, given the number of the optimizer, the bucket, and a place in the ring of names."""


class HandedOver(NamedTuple):
    """Bucket of a step's gradient (None: an empty one), with the version it was computed at and the step's number."""

    bucket: int
    vector: Vector | None
    version: int
    step: int


class Entered(NamedTuple):
    """Place, behind a step's buckets, at which this rank reports that it is in ``step()``; ``hyper`` as in the
    event."""

    step: int
    hyper: Hyper | None


@dataclass
class _Pending:
    """Sum of the gradients of a bucket that no round has carried yet, and the versions they were computed at."""

    vector: Vector | None = None
    versions: list[int] = field(default_factory=list)


@dataclass
class _HostQueue:
    """Gradients of a bucket (None: an empty one) and their versions, until the host's other ranks have theirs."""

    gradients: deque[tuple[Vector | None, int]] = field(default_factory=deque)
    released: int = 0
    """Number of gradients released since the last drain or cut."""


@dataclass
class _Flight:
    """Round of which some buckets are submitted and that is not complete yet."""

    sums: list[Vector | None]
    counts: list[int]
    weights: list[float]
    started: float
    taken: list[_Pending]
    """Gradients of this rank in the round, by bucket; empty unless the engine is elastic."""
    whole: list[int | None]
    """By bucket, the number of gradients of this rank's host that belong to the round; None if the bucket has not
    started, or the rank steps separately."""
    hyper: Hyper | None = None
    ready: int = 0
    """Number of buckets whose sums may be taken."""
    incomplete: int = 0
    """Number of buckets that are not complete yet."""
    is_early: bool = False
    """Whether a sum is used before it is complete."""
    in_graph: int = 0
    """Number of buckets that have started and that this rank's training graph submits."""


class RoundsInFlight:
    """Gradients of an optimizer on their way: handed over, pending, and in rounds in flight.

    The engine thread owns it. Any thread may call ``give``, ``count_bytes`` and ``counts``.

    Args:
        engine: the engine of this rank.
        wire: the format of vectors.
        deliver: called with rounds that are ready to be applied, in order.
        ranks: the ranks that share the optimizer.
        host: number of the host that this rank steps with; None if it steps separately.
        settle: called with each round that was delivered before it was complete, and its counts by bucket, once it is.
        confirms: whether rounds are delivered only once they are complete, on any data plane.
        names: maximum number of a bucket's collectives in flight.
    """

    def __init__(
        self,
        engine: RankRuntime,
        wire: GradientFormat,
        deliver: Callable[[list[ReducedRound]], None],
        ranks: Sequence[int],
        host: int | None = None,
        settle: Callable[[int, tuple[int, ...]], None] = lambda index, counts: None,
        confirms: bool = False,
        names: int = NAMES_IN_RING,
    ) -> None:
        self._engine, self._wire, self._deliver, self._host = engine, wire, deliver, host
        self._settle, self._confirms, self._names = settle, confirms, names
        self._carrier = Carrier(engine)
        self.timeline = recorder(engine.rank)
        self._buckets = len(wire.nbytes)
        self._queue: deque[HandedOver | Entered] = deque()
        """Buckets and reports on their way from the training thread: ``given`` since the start, of which the first
        ``_reported`` are taken out. If its device may not have computed them when they are handed over, at least the
        first ``arrived`` have arrived."""
        self.given = self.arrived = self._reported = 0
        self.is_entering = False
        """Whether the training thread hands over the rest of a step and is about to report it (where gradients are
        computed when they are handed over)."""
        self.started = [0] * self._buckets
        """By bucket, the last round that the coordinator has started."""
        self._pending = [_Pending() for _ in range(self._buckets)]
        self._host_queues = [_HostQueue() for _ in range(self._buckets)]
        self._units: dict[str, float] = {}
        """By name, the divisor of gradients in the next round of that name. All ranks derive it from the previous round
        of that name, which completes on each of them before the next is submitted."""
        self._flights: dict[int, _Flight] = {}
        self._promised = 0
        """The last step whose buckets this rank's training graph submits."""
        self._announced = 0
        """The last step that this rank announced at the hand-over of its first bucket."""
        self._lacking: set[int] = set()
        """Buckets of that step that have not come: their rounds start later, with all collectives after them."""
        self._unanswered: ReportReceived | None = None
        """A roll call to be answered when they have."""
        self.announced_start = 0
        """The last announced step whose round has started in a bucket; the training thread reads it."""
        self._last_hyper: Hyper | None = None
        """Hyperparameters that the coordinator sent last."""
        self._triggers: dict[tuple[int, int], RoundTrigger] = {}
        """By bucket and round, for the timeline, until the round is complete."""
        self._next_ready = 1
        self.landed = [0] * self._buckets
        """Number of completed rounds, by bucket."""
        self.at_cut: list[PendingGradient] | None = None
        """Copy of the pending gradients at the last cut, until the next step. (Ranks that continue earlier may start
        rounds in between.)"""
        # Statistics:
        self._lock = threading.Lock()
        self._held_bytes = self._peak_bytes = 0  # guarded by the lock; the engine thread counts all others
        self._staleness: Counter[int] = Counter()
        self._contributors: Counter[int] = Counter()
        self._held_s = dict.fromkeys(ranks, 0.0)
        self._sent = self._complete = 0
        self._latency = self._longest = 0.0

    # -- any thread -------------------------------------------------------------------------------------------

    def give(self, one: HandedOver | Entered, nbytes: int = 0) -> None:
        """Append a bucket of ``nbytes``, or the place of a report, to the queue, from which ``report`` takes it."""
        if nbytes:
            self.count_bytes(nbytes)
        self._queue.append(one)
        self.given += 1

    def count_bytes(self, nbytes: int) -> None:
        """Add ``nbytes``, which may be negative, to the number of bytes in use by gradients."""
        with self._lock:
            held = self._held_bytes + nbytes
            self._peak_bytes = max(self._peak_bytes, held)  # (first, since ``counts`` reads it last, without the lock)
            self._held_bytes = held

    def counts(self) -> dict[str, Any]:
        """Return the fields of ``Stats`` that are counted here."""
        return {
            "staleness": dict(sorted(self._staleness.copy().items())),
            "contributors": dict(sorted(self._contributors.copy().items())),
            "held_s": tuple(self._held_s.values()),
            "bytes_sent": self._sent,
            "latency_s": self._latency / self._complete if self._complete else 0.0,
            "latency_max_s": self._longest,
            "held_bytes": self._held_bytes,
            "peak_bytes": self._peak_bytes,
        }

    # -- gradients that become pending ------------------------------------------------------------------------

    def report(self, number: int, step: int = 0, given: int = 0) -> None:
        """Take in what has arrived, and send an event for each of its steps.

        Args:
            number: number of the optimizer.
            step: what was given up to this step has arrived. Nothing is taken while the training thread is about to
                report it, as one event then covers it all.
            given: how much has arrived of what was given since the start; ``arrived`` may be more.
        """
        arrived: list[HandedOver | Entered] = []
        while self._queue and not self.is_entering:
            if self._queue[0].step > step and self._reported >= max(given, self.arrived):
                break
            arrived.append(self._queue.popleft())
            self._reported += 1
        for reported, ones in itertools.groupby(arrived, operator.attrgetter("step")):
            taken, entered = [], None
            for one in ones:
                if isinstance(one, HandedOver):
                    taken.append(one)
                    self.arrive(one.bucket, one.vector, one.version)
                else:
                    entered = one
            buckets, empty = [one.bucket for one in taken], [one.bucket for one in taken if one.vector is None]
            complete = min(self.landed)
            if entered is None:
                self._engine.send(GradientReady(number, buckets, reported, complete, empty))
            else:
                self._engine.send(StepEntered(number, reported, entered.hyper, buckets, complete, empty))

    def promise(self, number: int, step: int, hyper: Hyper | None) -> None:
        """Report a step, with all its buckets, which this rank's training graph submits.

        Args:
            number: number of the optimizer.
            step: number of the step.
            hyper: hyperparameters of the step; None if they equal the ones sent last.
        """
        self._promised = step
        self._engine.send(StepEntered(number, step, hyper, list(range(self._buckets)), min(self.landed)))

    # -- steps that are announced at the hand-over of their first bucket --------------------------------------------

    def announce(self, number: int, step: int, hyper: Hyper | None, order: list[int]) -> None:
        """Report a step with all its buckets, of which some have yet to come; other arguments as in ``promise``.

        Args:
            order: all buckets, in the order in which they are expected: collectives start in it.
        """
        self._announced, self._lacking = step, set(order)
        self._engine.send(StepEntered(number, step, hyper, order, min(self.landed)))
        self.take_in(step)

    def take_in(self, step: int) -> None:
        """Take in the queued buckets of a step, and submit those for which an announced round waits."""
        before = len(self._lacking)
        while self._queue and self._queue[0].step == step:
            self._reported += 1
            if isinstance(one := self._queue.popleft(), HandedOver):
                self.arrive(one.bucket, one.vector, one.version)
                self._lacking.discard(one.bucket)
        if len(self._lacking) < before:
            self._continue()

    def give_up(self) -> None:
        """Submit zeros for the buckets of an announced step that have not come: they never will."""
        self.take_in(self._announced)
        self._lacking.clear()
        self._continue()

    def _continue(self) -> None:
        self._carrier.advance()
        if self._unanswered is not None:
            self.answer(self._unanswered)

    def answer(self, call: ReportReceived) -> None:
        """Answer a roll call, once this rank has submitted all that has started."""
        is_late = bool(self._lacking) and self.announced_start == self._announced
        self._unanswered = call if is_late else None
        if not is_late:
            self._engine.send(RoundsReceived(call.optimizer, call.call, list(self.landed)))

    def has_announced(self, step: int) -> bool:
        """Return whether an announced step has no bucket that has yet to come (any thread)."""
        return self._announced == step and not self._lacking

    def _has(self, bucket: int, round_: int) -> bool:
        """Return whether this rank can submit a bucket of a round that has started."""
        return round_ != self._announced or bucket not in self._lacking

    def arrive(self, bucket: int, vector: Vector | None, version: int) -> None:
        """Take in a gradient computed at ``version``; None if it is empty."""
        if self._host is not None:
            self._host_queues[bucket].gradients.append((vector, version))
        elif vector is not None:
            self.add(bucket, vector, version)

    def release(self, bucket: int, whole: int | None) -> None:
        """Make the first ``whole`` gradients since the last drain or cut pending; None: all of them."""
        queue = self._host_queues[bucket]
        while queue.gradients and (whole is None or queue.released < whole):
            queue.released += 1
            vector, version = queue.gradients.popleft()
            if vector is not None:
                self.add(bucket, vector, version)

    def take_in_all(self) -> None:
        """Make all queued gradients pending, after the engine has ended."""
        for one in self._queue:
            if isinstance(one, HandedOver):
                self.arrive(one.bucket, one.vector, one.version)
        self._queue.clear()
        for bucket in range(self._buckets):
            self.release(bucket, None)

    def end_step(self, whole: int) -> None:
        """Make a late step of the host pending, except in buckets whose pending gradients an earlier round has yet to
        take."""
        for bucket in range(self._buckets):
            if not self._carrier.waits(bucket):
                self.release(bucket, whole)

    def end(self) -> None:
        """Make all gradients pending and count the host's steps from 0, after all ranks have finished."""
        for bucket, queue in enumerate(self._host_queues):
            self.release(bucket, None)
            queue.released = 0
        for flight in self._flights.values():
            flight.whole = [None if whole is None else 0 for whole in flight.whole]

    def add(self, bucket: int, vector: Vector, version: int) -> None:
        """Add a gradient, computed at ``version``, to the pending ones."""
        pending = self._pending[bucket]
        if pending.vector is None:
            pending.vector = vector
        else:
            pending.vector = self._wire.add(pending.vector, vector)
            self.count_bytes(-self._wire.nbytes[bucket])
        pending.versions.append(version)

    def restore(self, pending: list[PendingGradient]) -> None:
        """Start with the pending gradients of an earlier run's cut, before registration."""
        for bucket, (vector, versions) in enumerate(pending):
            self._pending[bucket] = _Pending(vector, list(versions))
            if vector is not None:
                self.count_bytes(self._wire.nbytes[bucket])

    def pending(self) -> list[PendingGradient]:
        """Return the pending gradients, by bucket; after a drain or cut, all that no round has carried."""
        return [PendingGradient(pending.vector, list(pending.versions)) for pending in self._pending]

    def unfinished(self) -> dict[int, list[PendingGradient]]:
        """Return this rank's gradients in rounds that did not complete on it, by round, then by bucket. Called after an
        elastic engine has ended."""
        return {
            number: [PendingGradient(taken.vector, list(taken.versions)) for taken in flight.taken]
            for number, flight in self._flights.items()
        }

    def keep_for_cut(self) -> None:
        """Keep a copy of the pending gradients as the state to save after a cut, without the gradients that a started
        round, which still waits for its name, will carry."""
        kept = [
            PendingGradient(None, [])
            if vector is None or self._carrier.waits(bucket)
            else PendingGradient(vector + 0, at)
            for bucket, (vector, at) in enumerate(self.pending())
        ]
        self.count_bytes(self._nbytes(kept))
        self.at_cut = kept

    def forget_cut(self) -> None:
        """Drop the copy of ``keep_for_cut``, before a step, drain or cut (training thread or engine thread)."""
        kept, self.at_cut = self.at_cut, None
        if kept is not None:
            self.count_bytes(-self._nbytes(kept))

    def _nbytes(self, pending: list[PendingGradient]) -> int:
        pairs = zip(pending, self._wire.nbytes, strict=True)
        return sum(nbytes for (vector, _), nbytes in pairs if vector is not None)

    # -- rounds -----------------------------------------------------------------------------------------------

    def go(self, go: StartRound | ExplainRound) -> None:
        """Submit the pending gradients of some buckets for a round, or record why a round is about to start."""
        if isinstance(go, ExplainRound):
            self._triggers[go.bucket, go.round] = go.trigger
            return
        self._held_s[go.by] += go.held
        if go.settled:
            self.set_hyper(go.round, go.hyper)
        for bucket in go.buckets:
            self.started[bucket] = go.round
        flight, whole = self._flight(go.round), None
        if self._host is not None and go.whole is not None:
            whole = go.whole.of(self._host)
        if go.round == self._promised:
            flight.in_graph += len(go.buckets)
            if 0 in go.buckets:
                self._contributors[go.arrived[go.buckets.index(0)]] += 1
            self._wake_if_started(go.round)
            return
        if go.round == self._announced:
            # (first: the training thread wakes the engine for what it hands over from now on)
            self.announced_start = go.round
            self.take_in(go.round)
        for bucket, arrived in zip(go.buckets, go.arrived, strict=True):
            flight.whole[bucket] = whole
            name = NAME.format(go.optimizer, bucket, go.round % self._names)
            prepare = partial(self._prepare, go, bucket, arrived, name)
            self._carrier.carry(bucket, go.round, name, prepare, partial(self._has, bucket, go.round))

    def _wake_if_started(self, round_: int) -> None:
        if self.has_started(round_):
            with self._engine.changed:
                self._engine.changed.notify_all()

    def _prepare(self, go: StartRound, bucket: int, arrived: int, name: str) -> Collective:
        """Take the pending gradients of a bucket for a round, and return its collective."""
        round_, flight = go.round, self._flight(go.round)
        wire, collectives = self._wire, self._engine.collectives
        if (whole := flight.whole[bucket]) is not None:
            self.release(bucket, whole)
        taken, self._pending[bucket] = self._pending[bucket], _Pending()
        late_by = [round_ - 1 - version for version in taken.versions]
        if bucket == 0:
            self._staleness.update(late_by)
            self._contributors[arrived] += 1
        self._sent += (wire.sent or wire.nbytes)[bucket]
        if taken.vector is None:
            self.count_bytes(wire.nbytes[bucket])  # of the vector that the collective returns
        if self._engine.elastic:
            flight.taken[bucket] = taken
        keep = self._engine.elastic or taken.vector is None
        vector = wire.zeros(bucket) if taken.vector is None else taken.vector
        unit = self._units.get(name) or wire.first_unit
        submitted, is_used = self._engine.clock(), False

        def start() -> Handle:
            return collectives.allreduce_sum(wire.encode(vector, unit), name, wire.process_set, keep, wire.scale)

        def usable(take: Take) -> None:
            nonlocal is_used
            is_used = flight.is_early = True
            flight.weights[bucket] = 1.0
            flight.ready += 1
            flight.sums[bucket] = lambda: wire.decode(take(), bucket)
            self._pass_on()

        def settled(sums: Vector) -> None:
            self.landed[bucket] = max(self.landed[bucket], round_)
            trigger = self._triggers.pop((bucket, round_), None)
            if self.timeline is not None and trigger is not None:
                self.timeline.round(go.optimizer, bucket, round_, trigger, submitted, self._engine.clock(), late_by)
            # Now, rather than at the last bucket, for which all ranks wait:
            read = wire.read_tail if is_used and wire.read_tail is not None else wire.decode
            sums = read(sums, bucket)
            flight.counts[bucket], weight, self._units[name] = wire.tally(sums, unit)
            if not is_used:
                flight.sums[bucket], flight.weights[bucket] = sums, weight
                flight.ready += 1
            flight.incomplete -= 1
            if not flight.incomplete:
                self._note_complete(round_, flight)
            self._pass_on()

        confirms = self._confirms or go.confirm
        return Collective(start, settled, None if confirms else usable, group=(go.optimizer, round_))

    def _note_complete(self, round_: int, flight: _Flight) -> None:
        """Note that a round is complete in all buckets."""
        seconds = self._engine.clock() - flight.started
        self._complete, self._latency = self._complete + 1, self._latency + seconds
        self._longest = max(self._longest, seconds)
        if flight.is_early:
            self._settle(round_, tuple(flight.counts))

    def set_hyper(self, round_: int, hyper: Hyper | None) -> None:
        """Set the hyperparameters of a round; None: the ones sent last."""
        self._last_hyper = self._last_hyper if hyper is None else hyper
        assert self._last_hyper is not None, "the first round came without hyperparameters"
        self._flight(round_).hyper = self._last_hyper
        self._pass_on()
        if round_ == self._promised:
            self._wake_if_started(round_)

    # -- rounds whose buckets the training graph submits -----------------------------------------------------------
    # The training thread calls these methods. From the start of such a round until its rank reports the next step, no
    # command changes the optimizer's rounds, since none starts without this rank.

    def has_started(self, round_: int) -> bool:
        """Return whether all buckets of a round have started, and its hyperparameters are known."""
        flight = self._flights.get(round_)
        return flight is not None and flight.in_graph == self._buckets and flight.hyper is not None

    def complete(self, number: int, round_: int, tails: Sequence[Sequence[float]], given: Sequence[bool]) -> None:
        """Deliver a round that has started, without its sums, which the training graph has.

        Args:
            number: number of the optimizer.
            round_: number of the round.
            tails: the last elements of each bucket's sum.
            given: for each bucket, whether this rank had a gradient.
        """
        flight, wire = self._flights[round_], self._wire
        for bucket, tail in enumerate(tails):
            self.landed[bucket] = round_
            trigger = self._triggers.pop((bucket, round_), None)
            if self.timeline is not None and trigger is not None:
                now, late_by = self._engine.clock(), [0] * given[bucket]
                self.timeline.round(number, bucket, round_, trigger, flight.started, now, late_by)
            flight.counts[bucket] = wire.tail.read(tail, wire.scale).gradients
            flight.weights[bucket] = float(flight.counts[bucket] > 0)
        if given[0]:
            self._staleness[0] += 1
        self._sent += sum(wire.sent or wire.nbytes)
        flight.ready, flight.incomplete = self._buckets, 0
        self._note_complete(round_, flight)
        self._pass_on()

    def _flight(self, round_: int) -> _Flight:
        flight = self._flights.get(round_)
        if flight is None:
            buckets = self._buckets
            flight = self._flights[round_] = _Flight(
                sums=[None] * buckets,
                counts=[0] * buckets,
                weights=[0.0] * buckets,
                started=self._engine.clock(),
                taken=[_Pending() for _ in range(buckets)],
                whole=[None] * buckets,
                incomplete=buckets,
            )
        return flight

    def _pass_on(self) -> None:
        """Deliver, in order, the rounds that have all buckets and their hyperparameters."""
        ready: list[ReducedRound] = []
        while (flight := self._flights.get(self._next_ready)) is not None:
            if flight.ready < self._buckets or flight.hyper is None:
                break
            sums = tuple(s for s in flight.sums if s is not None)
            del self._flights[self._next_ready]
            counts, weights = tuple(flight.counts), tuple(flight.weights)
            if flight.is_early:  # (also if it is complete here by now: all ranks must treat it alike)
                counts = ()
            whole = min((whole for whole in flight.whole if whole is not None), default=0)
            ready.append(ReducedRound(self._next_ready, sums, flight.hyper, counts, whole, weights))
            self._next_ready += 1
        if ready:
            self._deliver(ready)


# -- gradients that outlive a membership change ------------------------------------------------------------------------


@dataclass(frozen=True)
class Remains:
    """Gradients of a rank that its weights do not include, and the rank's progress, across a membership change.

    Attributes:
        version: number of rounds that the rank's weights include.
        in_rounds: gradients that later rounds had taken, by round, then by bucket.
        pending: gradients that no round had taken, by bucket.
        begun: number of steps whose gradients were handed over.
        ended: number of steps that have ended.
        counted: whether statistics count the last of them.
        handed: buckets of the step after ``begun`` that were handed over.
        fit: whether other ranks may continue from these weights; if not, a round was half applied.
        tail: the counting elements at the end of each vector.
        produced, applied: numbers of gradients so far, by bucket: as in ``EagerWorker``, with those of earlier workers.
    """

    version: int = 0
    in_rounds: Mapping[int, list[PendingGradient]] = field(default_factory=dict)
    pending: list[PendingGradient] = field(default_factory=list)
    begun: int = 0
    ended: int = 0
    counted: bool = True
    handed: frozenset[int] = frozenset()
    fit: bool = True
    tail: Tail = field(default_factory=Tail)
    produced: list[int] = field(default_factory=list)
    applied: list[int] = field(default_factory=list)

    @property
    def brought(self) -> frozenset[int]:
        """Buckets in which the gradient of the next step is already pending."""
        return frozenset(range(len(self.pending))) if self.begun > self.ended else self.handed

    def after(self, version: int, ended: int) -> Remains:
        """Return what remains when all ranks continue from the same weights.

        Gradients in rounds that these weights include are applied, whether this rank knows of the rounds or not. All
        other gradients are pending. If this rank has begun a step that no rank has ended, that step's gradient is
        already pending.

        Args:
            version: number of rounds that these weights include.
            ended: number of steps that the most advanced rank has ended; all ranks continue with the step after it.
        """
        back = [gradients for round_, gradients in sorted(self.in_rounds.items()) if round_ > version]
        return dataclasses.replace(
            self,
            version=version,
            in_rounds={},
            pending=[_sum(each) for each in zip(*back, self.pending, strict=True)],
            begun=max(self.begun, ended),
            ended=ended,
            handed=self.handed if self.begun == ended else frozenset(),
            fit=True,
        )

    def pending_in(self, wire: GradientFormat) -> list[PendingGradient]:
        """Return the pending gradients as vectors of another format, whose counting elements may differ."""
        if wire.tail == self.tail:
            return self.pending
        old = len(self.tail)

        def recounted(vector: Vector) -> Vector:
            return wire.recount(vector, old, wire.tail.moved(wire.peek(vector, old), self.tail))

        return [one if one.vector is None else one._replace(vector=recounted(one.vector)) for one in self.pending]

    def counted_from(self, rounds: int, steps: int) -> Remains:
        """Return a copy whose rounds and steps are counted from an earlier origin, by adding ``rounds`` and
        ``steps``."""
        return dataclasses.replace(
            self,
            version=self.version + rounds,
            in_rounds={number + rounds: _moved(taken, rounds) for number, taken in self.in_rounds.items()},
            pending=_moved(self.pending, rounds),
            begun=self.begun + steps,
            ended=self.ended + steps,
        )


def _added(before: list[int], since: list[int]) -> list[int]:
    return [a + b for a, b in zip(before, since, strict=True)]


def _moved(gradients: list[PendingGradient], rounds: int) -> list[PendingGradient]:
    return [one._replace(versions=[version + rounds for version in one.versions]) for one in gradients]


def _sum(gradients: Iterable[PendingGradient]) -> PendingGradient:
    """Return the sum of pending gradients of one bucket."""
    vector, versions = None, list[int]()
    for one in gradients:
        if one.vector is not None:
            vector = one.vector if vector is None else vector + one.vector
            versions += one.versions
    return PendingGradient(vector, versions)


# -- the rank ----------------------------------------------------------------------------------------------------------


Apply = Callable[[ReducedRound], None]
Emptied = Callable[[bool], Sequence[Sequence[int]]]
Arrives = Callable[[Vector | None, bool, Callable[[], None]], None]
"""Calls an action, on any thread, once the device has computed a vector (None: the last one) or, if True, is about to.
Actions are called in the order in which they were given."""


class EagerWorker(Worker):
    """Optimizer of a rank in partial allreduce.

    Args:
        engine: the engine of this rank.
        config: configuration, the same on all ranks.
        wire: format of the binding's vectors.
        finish: called at the end of each drain (True) or cut (False), when all rounds are applied.
        apply: applies a round that completes while this rank drains.
        emptied: returns, for each step about which this is known since the last call, the buckets that have turned out
            to hold no gradient. True: wait until it is known of all that were handed over.
        arrives: tells when vectors arrive; None if they are computed when they are handed over, or need not be.

    Attributes:
        version: number of rounds that this rank's weights include.
        produced: number of gradients handed over since the start, by bucket; each must be applied once.
        applied: number of gradients of all ranks in applied rounds, by bucket.
        copied_from: rank whose weights all ranks took over at the last drain or cut, since it had applied the most
            rounds; None if there was none.
    """

    def __init__(
        self,
        engine: RankRuntime,
        config: EagerConfig,
        wire: GradientFormat,
        finish: Callable[[bool], object],
        apply: Apply = lambda round_: None,
        emptied: Emptied = lambda wait: (),
        arrives: Arrives | None = None,
    ) -> None:
        super().__init__(engine, config, wire.members, wire.process_set, wire.process_set_id, finish)
        self.config, self.wire, self.apply, self._emptied = config, wire, apply, emptied
        self._arrives = arrives
        ranks = wire.members or range(engine.size)
        self._host = ranks.index(engine.rank) // config.local_size if config.local_size > 1 else None
        # Elastic ranks continue from their weights after a loss; with samples, a sum says how to apply it.
        confirms = config.confirm or engine.elastic or config.local_size > 1
        confirms = confirms or wire.tail.weighted or wire.read_tail is None
        # (all ranks wait for each round, so that a name is free when the next one starts; and a training graph, whose
        # names do not change, can submit some ranks' part)
        names = 1 if config.quorum == "all" and hasattr(engine.collectives, "sum_in_graph") else NAMES_IN_RING
        self._in_flight = RoundsInFlight(engine, wire, self._deliver, ranks, self._host, self._settle, confirms, names)
        self._confirms = confirms
        self._records_timeline = self._in_flight.timeline is not None
        # Set by the engine thread, under ``engine.changed``:
        self._rounds: deque[ReducedRound] = deque()
        """Rounds that wait to be applied, in order."""
        self._discards = False
        self._settled_counts: dict[int, tuple[int, ...]] = {}
        """Counts of complete rounds that were delivered before they were complete, until they are added to
        ``applied``."""
        self._host_steps = self._ends_at = 0
        """Number of steps since the last drain or cut that all ranks of this host are known to have handed over (0 if
        ranks do not step host by host), and the version at which the last of these steps ends."""
        # State of the training thread:
        self.whole = Uninterrupted(self._raise_failure)
        self._steps = self._base = 0  # steps in total; round number minus step number, re-based by drains and cuts
        self._settled_at = 0  # steps at the last drain or cut
        self._near = 0  # steps that the device has computed, or is about to; set by the thread that ``arrives`` uses
        self._last_given: tuple[int, Vector | None] = 0, None  # bucket and vector, until the step is reported
        self._ended = 0  # steps for whose end this rank has waited
        self._handed: dict[int, None] = {}
        """Buckets of the current step that were handed over, in order."""
        self._brought = frozenset[int]()
        """Buckets of the current step whose gradient has been pending since before a reset; vectors that are handed
        over for them are dropped."""
        self._lacks = False
        """Whether a bucket of the current step holds no gradient."""
        self._may_agree = config.agree and config.quorum == "all" and engine.collectives.in_order and not confirms
        self._used_early = False
        """Whether the last round was applied before it was complete."""
        self.steady = 0
        """Number of steps in a row, as in ``STEADY``."""
        self._foreseen: Hyper | None = None
        """The hyperparameters at the hand-over of the current step's first bucket, if ``foresee`` was called."""
        self._announced_step = 0
        """The last step that was announced."""
        self._order: list[int] = []
        """Buckets in the order in which the last step has handed them over."""
        self._half_applied = False
        self._unsettled = deque[ReducedRound]()
        """Rounds, without sums, that were applied and whose counts are not in ``applied`` yet, in order."""
        self._in_graph = False
        """Whether the training graph has collectives of a step that has not ended."""
        self.version = 0
        self.produced, self.applied = [0] * config.buckets, [0] * config.buckets
        self._before = list(self.produced), list(self.applied)
        """``produced`` and ``applied`` of earlier workers, before a membership change, for ``stats``."""
        self._applied_rounds = self._skipped = 0
        self._total_produced: int | None = None
        self.copied_from: int | None = None

    # -- progress -------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a step may begin: no step or drain was interrupted (Ctrl-C, HVD_ASYNC_TIMEOUT)."""
        return self._agreed and not self._announced and not self._broken_off and self.whole.fine

    @property
    def _behind(self) -> int:
        """Number of rounds up to its last step that its weights do not include yet."""
        return self._steps + self._base - self.version

    @property
    def _broken_off(self) -> bool:
        """Whether its last step was interrupted before it ended."""
        return self._behind > 0 or self._ended < self._steps

    @property
    def gone(self) -> frozenset[int]:
        """Buckets of the current step that have been handed over."""
        return frozenset(self._handed)

    @property
    def settled(self) -> bool:
        """Whether no step was taken and no gradient handed over since the last drain or cut."""
        return self._steps == self._settled_at and not self._handed

    @property
    def may_lose(self) -> bool:
        """Whether gradients of the steps since the last drain or cut may not have been applied everywhere."""
        return not (self.settled or self.config.quorum == "all" or self.config.max_staleness == 0)

    def _check_able(self) -> int:
        """Return the optimizer's number; raise if this rank can neither hand over nor apply.

        An elastic rank keeps gradients even after a loss.
        """
        if not self.engine.elastic:
            self.engine.check()
        return self._check_drained()

    # -- stepping (training thread) ---------------------------------------------------------------------------

    @property
    def wants_hyper(self) -> bool:
        """Whether ``foresee`` is of use now: before the first bucket of a step, so that the ranks can agree on the step
        while backward computes the others.

        All later collectives of this rank wait for the buckets that it has announced. So it must have one optimizer.
        """
        return self._may_agree and self._used_early and not self._handed and len(self.engine.participants()) == 1

    def foresee(self, hyper: Hyper) -> None:
        """Expect a step with these hyperparameters. If they have been right ``STEADY`` times in a row, the hand-over of
        the first bucket announces the step; a round keeps the announced ones, should ``step`` come with others."""
        self._foreseen = hyper

    def hand_over(self, bucket: int, vector: Vector | None) -> None:
        """Hand over a bucket of the current step, before ``step``. Any thread may call this, one at a time.

        Args:
            bucket: bucket that this step has not handed over yet.
            vector: gradient, of which the worker takes ownership. None: counts as no gradient (NaN, overflow).
        """
        number = self._check_able()
        if bucket in self._handed:
            raise ReplicaStateError(f"bucket {bucket} was handed over twice in one step: a bug in the binding")
        with self.whole(f"bucket {bucket} could not be handed over"):
            step, in_flight, is_first = self._steps + 1 + self._base, self._in_flight, not self._handed
            self._give(bucket, vector, step)
            if is_first and self._foreseen is not None and self.steady >= STEADY:
                self._announced_step = step
                unsent = self._unsent(self._foreseen)
                self.engine.notify(partial(in_flight.announce, number, step, unsent, self._order), hurry=False)
            elif self._arrives is not None:
                self._await_arrival(number, bucket, vector, step)
            elif self._announced_step != step:
                self.engine.notify(partial(in_flight.report, number, step), hurry=False)
            elif in_flight.announced_start == step:  # (else the engine takes it in when the round starts)
                is_last = len(self._handed) == self.config.buckets
                self.engine.notify(partial(in_flight.take_in, step), hurry=is_last)

    def _unsent(self, hyper: Hyper) -> Hyper | None:
        """Return hyperparameters to send: None if they equal the ones sent last."""
        unsent, self._hyper_sent = None if hyper == self._hyper_sent else hyper, hyper
        return unsent

    def check_may_be_joined(self) -> None:
        is_open = self._announced_step == self._steps + 1 + self._base and len(self._handed) < self.config.buckets
        if is_open and not self.deleted:
            raise ReplicaStateError(
                f"another optimizer takes its first step between backward() and step() of {self.label}, for whose "
                f"step this rank has promised gradients: call step() first, or set HVD_ASYNC_AGREE=0 on all ranks"
            )

    def _give(self, bucket: int, vector: Vector | None, step: int) -> None:
        """Count a bucket of the current step, and queue it for the engine."""
        if bucket in self._brought:
            vector = None
        else:
            self._lacks = self._lacks or vector is None
            self.produced[bucket] += vector is not None
        self._handed[bucket] = None
        nbytes = 0 if vector is None else self.wire.nbytes[bucket]
        self._in_flight.give(HandedOver(bucket, vector, self.version, step), nbytes)

    # -- gradients that the device may not have computed when they are handed over (quorums on a GPU) -------------
    # A round may start as soon as a rank's gradient has arrived, and all ranks then wait for it. So it arrives when the
    # device is about to have it. If its round has started without it by then, it arrives when it is computed: a later
    # round that takes it does not wait. This thread stays as close to its device in any case: otherwise gradients would
    # be computed at old weights.

    def _await_arrival(self, number: int, bucket: int, vector: Vector | None, step: int, in_step: int = 0) -> None:
        """Report what was given so far, up to this bucket, once it has arrived.

        Args:
            in_step: this thread's number of steps, this one included, if that is all of the step; else 0.
        """
        assert self._arrives is not None
        arrives, given = self._arrives, self._in_flight.given

        def arrived() -> None:  # (any thread)
            if self.config.pace == "steps":  # (else this rank may report its version before what arrives later)
                self._in_flight.arrived = max(self._in_flight.arrived, given)
            report = self._report_near if in_step else self._in_flight.report
            self.engine.notify(partial(report, number, given=given), hurry=in_step > 0)

        def is_near() -> None:
            if self.config.pace != "steps":
                with self.engine.changed:  # (this thread sees it only then, and reports its version after the step)
                    arrived()
                    self._near = max(self._near, in_step)
                return
            self._near = max(self._near, in_step)
            if self._in_flight.started[bucket] < step:
                arrived()
                return
            if in_step:
                self.engine.notify(partial(self._report_near, number, given=0))
            arrives(vector, False, arrived)

        self._last_given = bucket, vector
        arrives(vector, not self._confirms, is_near)

    def _report_near(self, number: int, given: int) -> None:
        """Report what has arrived, and wake the training thread if the rounds of its step are there (engine thread)."""
        self._in_flight.report(number, given=given)
        with self.engine.changed:
            if self._rounds:
                self.engine.changed.notify_all()

    def _take_back_empty(self, wait: bool) -> None:
        """Subtract the buckets that have turned out to hold no gradient; ``wait``: until all is known."""
        for buckets in self._emptied(wait):
            for bucket in buckets:
                self.produced[bucket] -= 1
            self._skipped += bool(buckets)

    def step(self, vectors: Mapping[int, Vector | None], hyper: Hyper, apply: Apply | None = None) -> int:
        """Finish the step, apply its rounds by ``apply`` (None: that of the constructor), and return their number."""
        rounds = self.run(self.finish_step_program(vectors, hyper))
        count = len(rounds)
        self._apply_all(rounds, apply or self.apply)
        return count

    def finish_step(
        self, vectors: Mapping[int, Vector | None], hyper: Hyper, most: int | None = None
    ) -> list[ReducedRound]:
        """Hand over the rest of this step, wait for its round, and return the rounds that wait to be applied.

        After an interrupted step (Ctrl-C, HVD_ASYNC_TIMEOUT) this completes that step. ``vectors`` are then the same
        gradient again, or one computed at weights that lack a round. They are dropped: no gradient may count twice, or
        exceed the staleness bound.

        Args:
            vectors: buckets that were not handed over by ``hand_over``; the worker takes ownership.
            hyper: hyperparameters to apply the round with, if this rank leads it.
            most: maximum number of rounds to return, even if more wait (user code sees one round at a time).

        Returns:
            Rounds in order, to be applied one after the other, each in ``applying``; none if this step's round is
            already applied.
        """
        return [round_.taken() for round_ in self.run(self.finish_step_program(vectors, hyper, most))]

    def finish_step_program(
        self, vectors: Mapping[int, Vector | None], hyper: Hyper, most: int | None = None
    ) -> Program[list[ReducedRound]]:
        """Return the program of ``finish_step``."""
        self.whole.check()
        number = self._check_able()
        if most is not None and self._host is not None and self.config.pace == "rounds":
            raise ReplicaStateError(
                "synchronize() applies one round per step, but with hierarchical= and pace='rounds' a host's ranks "
                "skip rounds together. Move the code between synchronize() and step() into round_transform="
            )
        if self._broken_off:
            warn(f"rank {self.engine.rank}: the last step was interrupted. This one completes it and adds no gradient")
        else:
            if sorted([*self._handed, *vectors]) != list(range(self.config.buckets)):
                raise ReplicaStateError(
                    f"step() lacks buckets: it has only {sorted(self._handed)} and {sorted(vectors)}"
                )
            with self.whole("a step could not be handed over"):
                self._hand_in(number, vectors, hyper)
        yield Wait(partial(self._has_ended, most))
        with self.whole("a step could not be ended"):
            self._ended = self._steps
            self._take_back_empty(wait=False)
            rounds = self._waiting(most if self._host is None else self._most(most))
            if self.config.pace == "rounds":
                taken = VersionTaken(number, self.version + len(rounds))
                self._base = taken.version - self._steps
                self.send(taken)
        return rounds

    def _hand_in(self, number: int, vectors: Mapping[int, Vector | None], hyper: Hyper) -> None:
        """Hand over the rest of this step, and have the engine report it."""
        step, in_flight = self._steps + 1 + self._base, self._in_flight
        in_flight.is_entering = self._arrives is None
        for bucket, vector in vectors.items():
            self._give(bucket, vector, step)
            if self._arrives is not None:
                self._await_arrival(number, bucket, vector, step)
        in_flight.forget_cut()
        self._steps += 1
        self._skipped, self._lacks = self._skipped + self._lacks, False
        self._brought = frozenset()
        self._order = list(self._handed)
        self._handed.clear()
        if self._foreseen is not None:
            self.steady = self.steady + 1 if hyper == self._foreseen else 0
            self._foreseen = None
        is_announced = self._announced_step == step
        if not is_announced:
            in_flight.give(Entered(step, self._unsent(hyper)))
        in_flight.is_entering = False
        if self._arrives is not None:
            self._await_arrival(number, *self._last_given, step, self._steps)
            self._last_given = 0, None
        elif not is_announced:
            self.engine.notify(partial(in_flight.report, number, step))
        elif in_flight.announced_start < step or not in_flight.has_announced(step):
            self.engine.notify(partial(in_flight.take_in, step))

    # -- steps whose buckets the training graph submits (training thread) -----------------------------------------
    # The graph submits the same collectives, by the same names, as the engines of the ranks that have finished. So the
    # coordinator's command is needed for these, and for hyperparameters, and not to submit.

    def promise(self, hyper: Hyper) -> None:
        """Begin a step, all of whose buckets the training graph is about to submit by ``NAME``; ``fulfil`` follows.

        Args:
            hyper: as in ``finish_step``.

        Raises:
            ReplicaStateError: an earlier step has not ended, or gradients of other steps are pending.
        """
        number = self._check_able()
        if self._handed or self._broken_off or (self._restored and not self._steps):
            raise ReplicaStateError(
                f"{self.label}: gradients outside the graph of this step are on their way: of an interrupted step, or "
                f"of a loaded state. Restart with HVD_ASYNC_CONFIRM=1"
            )
        self.whole("a step that its graph had begun did not end")
        self._in_graph = True
        self._in_flight.forget_cut()
        self._steps += 1
        self._in_flight.count_bytes(sum(self.wire.nbytes))
        step = self._steps + self._base
        self.engine.notify(partial(self._in_flight.promise, number, step, self._unsent(hyper)))

    def fulfil(self, tails: Sequence[Sequence[float]], given: Sequence[bool], waited_s: float = 0.0) -> ReducedRound:
        """Wait until the round of the promised step has started, and return it; it lies between ``begin`` and ``end``.

        Args:
            tails, given: as in ``RoundsInFlight.complete``.
            waited_s: seconds for which the graph has already waited for the sums.
        """
        self._wait_s += max(waited_s, 0.0)  # (the system's clock may have been set back)
        return self.run(self.fulfil_program(tails, given))

    def fulfil_program(self, tails: Sequence[Sequence[float]], given: Sequence[bool]) -> Program[ReducedRound]:
        """Return the program of ``fulfil``."""
        round_ = self._steps + self._base
        yield Wait(partial(self._in_flight.has_started, round_))
        self.produced = [produced + had for produced, had in zip(self.produced, given, strict=True)]
        self._skipped += not all(given)
        self._in_flight.complete(self.number, round_, tails, given)
        self._ended = self._steps
        self._in_graph = False
        self.whole.end()
        (reduced,) = self._waiting(1)
        self.begin(reduced)
        return reduced

    def _raise_failure(self) -> None:
        """Raise the failure of the engine, if that may be why a section did not finish. A collective of the training
        graph has failed before the engine knows of a lost rank, so ask the coordinator, which answers in any case."""
        if self._in_graph:
            self._in_graph = False
            failed = Failed("a step's graph did not end", horovod=True)
            self.engine.notify(lambda: self.engine.send(failed))
            self.engine.wait(lambda: self.engine.failure is not None)
        if self.engine.failure is not None and not self.engine.elastic:
            self.engine.check()

    def _has_ended(self, most: int | None) -> bool:
        """Return whether the rounds of the last step may be applied, and all ranks of the host have handed it over.

        At most ``UNSETTLED`` rounds are incomplete, so that the training thread is not far ahead of its device.
        """
        if self._incomplete > UNSETTLED or (self._arrives is not None and self._near < self._steps):
            return False
        if len(self._rounds) < self._behind or self._host is None:
            return len(self._rounds) >= self._behind
        return self._host_steps >= self._steps - self._settled_at and len(self._rounds) >= self._most(most)

    def _most(self, most: int | None) -> int:
        """Return how many rounds this step applies: the same number on all ranks of a host, whose weights stay
        equal."""
        own = max(0, self._ends_at - self.version)
        return own if most is None else min(own, most)

    # -- applying rounds (training thread) --------------------------------------------------------------------

    def _waiting(self, most: int | None = None) -> list[ReducedRound]:
        """Return at most ``most`` rounds to be applied. They stay in the queue until they are applied, so that an
        interrupted step finds them again. During an end, later rounds, which a rank that has left it may have started,
        belong to the next step."""
        with self.engine.changed:
            drained = self._drained
            return [one for one in self._rounds if drained is None or one.index <= drained.rounds][:most]

    def _apply_all(self, rounds: list[ReducedRound], apply: Apply) -> None:
        rounds.reverse()
        while rounds:  # free each round as soon as it is applied
            with self.applying(rounds[-1]):
                apply(rounds.pop().taken())

    @contextlib.contextmanager
    def applying(self, round_: ReducedRound) -> Iterator[None]:
        """Context for applying the next round, which counts as applied afterwards."""
        self.begin(round_)
        try:
            yield
        except BaseException as error:
            self.whole.fail(error)
            raise
        self.end()

    def begin(self, round_: ReducedRound) -> None:
        """Begin to apply a round if ``applying`` cannot be used as a block; ``end`` must follow."""
        self.whole(f"round {round_.index} could not be applied")
        self._half_applied = True

    def end(self) -> None:
        """Count the next round as applied."""
        with self.engine.changed:
            round_ = self._rounds.popleft()
        if self._in_flight.timeline is not None:
            self._in_flight.timeline.applied(self.number, round_.index, self.engine.clock())
        self.version = round_.index
        self._used_early = not round_.counts
        if round_.counts:
            self._count_applied(round_.counts)
        else:
            self._unsettled.append(replace(round_, sums=()))
            self._count_settled()
        self._in_flight.count_bytes(-sum(self.wire.nbytes))
        self._half_applied = False
        self.whole.end()

    def _count_applied(self, counts: Sequence[int]) -> None:
        self.applied = [a + b for a, b in zip(self.applied, counts, strict=True)]
        self._applied_rounds += any(counts)

    def _count_settled(self) -> None:
        """Count the applied rounds that are complete by now."""
        while self._unsettled and (counts := self._settled_counts.pop(self._unsettled[0].index, None)) is not None:
            round_ = self._unsettled.popleft()
            self._count_applied(counts)
            if missing := [b for b, count in enumerate(counts) if count == 0 and round_.weight(b)]:
                warn(
                    f"rank {self.engine.rank}: {self.label}: no rank had a finite gradient in bucket(s) {missing} of "
                    f"round {round_.index}. It was applied with zeros there, so momentum and weight decay moved them"
                )

    @property
    def _incomplete(self) -> int:
        """Number of rounds that were applied and are not known to be complete."""
        return sum(one.index not in self._settled_counts for one in self._unsettled)

    @property
    def unsettled(self) -> int | None:
        """The first round that was applied and is not known to be complete; None if there is none."""
        return next((one.index for one in self._unsettled if one.index not in self._settled_counts), None)

    # -- draining (training thread) ---------------------------------------------------------------------------

    def check_finished(self, flush: bool) -> None:
        """Raise if this rank cannot finish now.

        Inside ``consensus()`` it can: that begins with a drain, so that the drain of another optimizer finds nothing to
        do.

        Raises:
            ReplicaStateError: gradients of a step were handed over and ``step`` did not follow; or an operation was
                interrupted half-way.
        """
        self.whole.check()
        if self._handed:
            raise ReplicaStateError(
                f"{self.label}: backward() has handed gradients over and no step() has followed: call "
                f"optimizer.step() first, or optimizer.discard() if it will not be trained any more"
            )

    def _counts(self) -> list[int]:
        self._take_back_empty(wait=True)
        return list(self.produced)

    def _is_complete(self) -> bool:
        drained = self._drained
        return drained is not None and self.version >= drained.rounds and not self._incomplete

    @property
    def has_available(self) -> bool:
        return super().has_available or bool(self._waiting(1))

    def apply_available(self) -> bool:
        self._check_refused()
        self.whole.check()
        self._apply_all(self._waiting(), self.apply)
        return super().apply_available()

    def announce_finished(self, flush: bool) -> None:
        """Announce that this rank has finished; at the end of the process, even between backward() and step()."""
        if self._handed:
            warn(
                f"rank {self.engine.rank} ends after backward() without step(): {self.label} adds the gradients that "
                f"were handed over to the last round"
            )
        if not self._announced:
            self.engine.check()
            with self.whole("a drain could not be begun"):
                self._end_begun()
                if self._arrives is not None:
                    self._take_back_empty(wait=True)  # (and all is computed)
                    given = self._in_flight.given
                    self.engine.notify(partial(self._in_flight.report, self.number, given=given))
                super().announce_finished(flush)
            if flush:
                self.wire.release()

    def _end_begun(self) -> None:
        """Have zeros submitted for the rest of a step of which some buckets were handed over, and wait for its round,
        in which other ranks count on this one."""
        if not self._handed:
            return
        step, number, in_flight = self._steps + 1 + self._base, self.number, self._in_flight
        if self._announced_step == step:
            self.engine.notify(in_flight.give_up)
        else:
            for bucket in set(range(self.config.buckets)).difference(self._handed):
                self._give(bucket, None, step)
            in_flight.give(Entered(step, None))
            self.engine.notify(partial(in_flight.report, number, step))
        self.engine.wait(lambda: self.version >= step or any(one.index >= step for one in self._rounds))

    def complete_drain_program(self) -> Program[None]:
        """Re-base the counters, check that no gradient was lost (GradientLossError), and let the binding end the drain,
        after all ranks have finished."""
        with self.whole("a drain could not be ended"):
            self._count_settled()
            drained = self._take_drained()
            self._settled_at, self._ended = self._steps, self._steps
            self.shown, self.copied_from = 0, drained.copied_from
            self._base = drained.rounds - self._steps
            self._total_produced = max(drained.produced)
        if drained.flushed and self.applied != drained.produced:
            raise GradientLossError(
                f"drain: {drained.produced} gradients (by bucket) were produced but {self.applied} were applied "
                f"on rank {self.engine.rank}. This is a bug in hvd_async; please report it with stats()."
            )
        yield from self._finish(drained.flushed)

    def discard_results(self) -> None:
        self._discards = True  # (without the lock: ``_deliver`` runs on this thread too)
        self._rounds.clear()
        self._in_flight.give_up()
        if self._number is not None:
            self._in_flight.report(self._number, given=self._in_flight.given)  # (the others count as produced)

    # -- checkpoints (training thread) ------------------------------------------------------------------------

    def pending(self) -> list[PendingGradient]:
        """Return the gradients that no round has carried yet, by bucket; complete after a cut."""
        if self._in_flight.at_cut is not None and self.settled:
            return self._in_flight.at_cut
        if self.engine.replaced and self.settled:  # the engine was shut down, after a drain
            return [PendingGradient(None, [])] * self.config.buckets
        return self.run(self._pending_program())

    def _pending_program(self) -> Program[list[PendingGradient]]:
        """Return the program that reads the engine's pending gradients."""
        found: list[list[PendingGradient]] = []

        def look() -> None:
            with self.engine.changed:
                found.append(self._in_flight.pending())
                self.engine.changed.notify_all()

        self.engine.call_soon(look)
        yield Wait(lambda: bool(found), counts=False)
        return found[0]

    def restore(self, pending: list[PendingGradient]) -> None:
        """Start with the pending gradients of an earlier run, before ``connect``; versions are those at its cut."""
        self._in_flight.restore(pending)
        self._restored = max((len(versions) for _, versions in pending), default=0)
        for bucket, (_, versions) in enumerate(pending):
            self.produced[bucket] += len(versions)

    # -- elastic training (training thread) ---------------------------------------------------------------------

    def remains(self) -> Remains:
        """Apply the rounds in the inbox and return the gradients in none of them, after the engine has ended."""
        fit, ended = not self._half_applied, self._steps - self._broken_off  # (as user code sees it)
        if fit:
            self.whole = Uninterrupted()  # (nothing is lost: all that was handed over is still on this rank)
            self._apply_all(list(self._rounds), self.apply)
        self._in_flight.take_in_all()
        self._take_back_empty(wait=True)
        all_brought = len(self._brought) == self.config.buckets
        return Remains(
            version=self.version,
            in_rounds=self._in_flight.unfinished(),
            pending=self._in_flight.pending(),
            begun=self._steps + all_brought,
            ended=ended,
            counted=not all_brought,
            handed=frozenset() if all_brought else self._brought | self.gone,
            fit=fit,
            tail=self.wire.tail,
            produced=_added(self._before[0], self.produced),
            applied=_added(self._before[1], self.applied),
        )

    def take_over(self, remains: Remains) -> None:
        """Start with gradients from before a reset, before ``connect``; the current version counts as 0."""
        self.restore(remains.pending_in(self.wire))
        self._brought = remains.brought
        again = [len(one.versions) for one in remains.pending]  # (which ``restore`` has counted)
        self._before = [every - own for every, own in zip(remains.produced, again, strict=True)], remains.applied

    def stats(self) -> Stats:
        return Stats(
            steps=self._steps,
            rounds=self.version,
            wait_s=self._wait_s,
            rounds_applied=self._applied_rounds,
            gradients_produced=max(_added(self._before[0], self.produced)),
            gradients_applied=max(_added(self._before[1], self.applied)),
            gradients_skipped=self._skipped,
            total_produced=self._total_produced,
            **self._in_flight.counts(),
        )

    # -- engine thread ----------------------------------------------------------------------------------------

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command."""
        match command:
            case StartRound() | ExplainRound():
                self._in_flight.go(command)
            case SetHyperparameters(_, round_, hyper):
                self._in_flight.set_hyper(round_, hyper)
            case EndStep(_, host, steps, version):
                if host == self._host:
                    self._in_flight.end_step(steps)
                    self._note_steps(steps, version)
            case ReportReceived():
                self._in_flight.answer(command)
            case Drained():
                self._in_flight.end()
                with self.engine.changed:
                    self._host_steps, self._ends_at = 0, command.rounds
                self._in_flight.forget_cut()
                if not command.flushed:
                    self._in_flight.keep_for_cut()
                super().on_command(command)
            case _:
                super().on_command(command)

    def _deliver(self, rounds: list[ReducedRound]) -> None:
        """Append rounds, in order, to the queue of rounds to apply."""
        with self.engine.changed:
            if not self._discards:
                self._rounds.extend(rounds)
            for round_ in rounds:
                self._note_steps(round_.whole, round_.index)

    def _settle(self, index: int, counts: tuple[int, ...]) -> None:
        """Note the counts of a complete round that was delivered before."""
        with self.engine.changed:
            if not self._discards:
                self._settled_counts[index] = counts
            self.engine.changed.notify_all()

    def _note_steps(self, whole: int, version: int) -> None:
        """Note that ``whole`` steps of the host are handed over, and that the last of them ends at ``version``."""
        with self.engine.changed:
            if whole > self._host_steps:
                self._host_steps, self._ends_at = whole, version
            self.engine.changed.notify_all()
