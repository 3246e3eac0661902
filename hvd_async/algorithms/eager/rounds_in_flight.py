"""A rank's gradients on their way, on the engine thread: pending until a round takes them, in flight until it is whole.

What the engine takes for a round is what is pending at that moment; whatever comes later stays for the next round, so
nothing is lost and nothing counts twice. Where ranks step host by host, a gradient is not pending before those of the
host's other ranks are there, as the round's command says; so they go in the same round.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from hvd_async.algorithms.eager.counters import Counters
from hvd_async.algorithms.eager.gradient_format import GradientFormat, PendingGradient, ReducedRound
from hvd_async.algorithms.eager.messages import ExplainRound, RoundTrigger, StartRound
from hvd_async.algorithms.eager.timeline import recorder
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.messages import Hyper

NAMES_IN_RING = 4
"""Collectives of one bucket that may be in flight at once; their names are used again, which Horovod's cache needs."""


@dataclass
class _Pending:
    """One bucket's gradients that no round has carried yet, summed, and the versions they were computed at."""

    vector: Vector | None = None
    versions: list[int] = field(default_factory=list)


@dataclass
class _Held:
    """One bucket's gradients (None: an empty one) and their versions, while others of the host may be missing."""

    gradients: deque[tuple[Vector | None, int]] = field(default_factory=deque)
    released: int = 0
    """How many are pending or gone, since the last drain or cut."""


@dataclass
class _Flight:
    """A round some of whose buckets have gone but which is not whole yet."""

    sums: list[Vector | None]
    counts: list[int]
    weights: list[float]
    started: float
    taken: list[_Pending]
    """This rank's gradients in it, by bucket; empty unless the engine is elastic."""
    hyper: Hyper | None = None
    whole: int | None = None
    """``ReducedRound.whole``: the least of the buckets that have gone."""


@dataclass(frozen=True)
class _Start:
    """One bucket of a ``StartRound``."""

    optimizer: int
    bucket: int
    round: int
    arrived: int
    whole: int | None
    """The number of gradients of this rank's host that belong to it; None if the rank steps by itself."""


class RoundsInFlight:
    """One optimizer's gradients.

    Args:
        engine: this rank's.
        wire: how vectors travel.
        deliver: called with rounds that are ready to be applied, in order.
        counters: of the optimizer.
        host: the number of this rank's host, with which it steps; None if it steps by itself.
    """

    def __init__(
        self,
        engine: Engine,
        wire: GradientFormat,
        deliver: Callable[[list[ReducedRound]], None],
        counters: Counters,
        host: int | None = None,
    ) -> None:
        self._engine, self._wire, self._deliver, self._counters = engine, wire, deliver, counters
        self._host = host
        self.timeline = recorder(engine.rank)
        self._buckets = len(wire.nbytes)
        self._pending = [_Pending() for _ in range(self._buckets)]
        self._held_back = [_Held() for _ in range(self._buckets)]
        self._busy: set[str] = set()
        self._units: dict[str, float] = {}
        """By what gradients are divided in the next round of a name: the one before by this name says it on all ranks,
        and has landed on each before the next goes."""
        self._held: deque[_Start] = deque()
        self._flights: dict[int, _Flight] = {}
        self._last_hyper: Hyper | None = None
        """The hyperparameters that were sent last."""
        self._triggers: dict[tuple[int, int], RoundTrigger] = {}
        """By bucket and round, for the timeline, until the round is back."""
        self._next_ready = 1
        self.landed = [0] * self._buckets
        """Completed rounds, by bucket."""
        self.at_cut: list[PendingGradient] | None = None
        """Pending gradients of the last cut, until the next step: ranks that go on earlier may start rounds."""

    @property
    def complete(self) -> int:
        """Rounds that have landed in all buckets, and have their hyperparameters."""
        return self._next_ready - 1

    def arrive(self, bucket: int, vector: Vector | None, version: int) -> None:
        """Take in a gradient, computed at ``version``; None if it is empty."""
        if self._host is not None:
            self._held_back[bucket].gradients.append((vector, version))
        elif vector is not None:
            self.add(bucket, vector, version)

    def release(self, bucket: int, whole: int | None) -> None:
        """Make the first ``whole`` gradients since the last drain or cut pending, or all that are here."""
        held = self._held_back[bucket]
        while held.gradients and (whole is None or held.released < whole):
            held.released += 1
            vector, version = held.gradients.popleft()
            if vector is not None:
                self.add(bucket, vector, version)

    def take_in(self, rest: Iterable[tuple[int, Vector | None, int]]) -> None:
        """Make all gradients pending that are here, and ``rest`` (as of ``arrive``): the engine has ended."""
        for one in rest:
            self.arrive(*one)
        for bucket in range(self._buckets):
            self.release(bucket, None)

    def end_step(self, whole: int) -> None:
        """Add a late step of the host to what is pending, unless a round that started before has yet to take that."""
        for bucket in {*range(self._buckets)} - {held.bucket for held in self._held}:
            self.release(bucket, whole)

    def end(self) -> None:
        """All ranks have ended: whatever is here is pending, and the host's steps count from 0."""
        for bucket, held in enumerate(self._held_back):
            self.release(bucket, None)
            held.released = 0
        for flight in self._flights.values():
            flight.whole = 0
        self._held = deque(replace(start, whole=None if start.whole is None else 0) for start in self._held)

    def add(self, bucket: int, vector: Vector, version: int) -> None:
        """Add a gradient, computed at ``version``, to the pending ones."""
        pending = self._pending[bucket]
        if pending.vector is None:
            pending.vector = vector
        else:
            pending.vector += vector
            self._counters.add_held_bytes(-self._wire.nbytes[bucket])
        pending.versions.append(version)

    def restore(self, held: list[PendingGradient]) -> None:
        """Begin with the pending gradients of an earlier run's cut, before the engine knows this optimizer."""
        for bucket, (vector, versions) in enumerate(held):
            self._pending[bucket] = _Pending(vector, list(versions))
            if vector is not None:
                self._counters.add_held_bytes(self._wire.nbytes[bucket])

    def pending(self) -> list[PendingGradient]:
        """Return gradients that no round has carried yet and that may go, by bucket; all after an end."""
        return [PendingGradient(pending.vector, list(pending.versions)) for pending in self._pending]

    def unfinished(self) -> dict[int, list[PendingGradient]]:
        """Return this rank's gradients in rounds that are not whole here, by round, then by bucket; of an elastic
        engine that has ended."""
        return {
            number: [PendingGradient(taken.vector, list(taken.versions)) for taken in flight.taken]
            for number, flight in self._flights.items()
        }

    def keep_for_cut(self) -> None:
        """Keep a copy of the pending gradients, as the state to save after a cut; not of those that a round will carry
        which has started, and waits for its name."""
        going = {start.bucket for start in self._held}
        held = [
            PendingGradient(None, []) if vector is None or bucket in going else PendingGradient(vector + 0, at)
            for bucket, (vector, at) in enumerate(self.pending())
        ]
        self._counters.add_held_bytes(self._nbytes(held))
        self.at_cut = held

    def forget_cut(self) -> None:
        """Drop that copy: a step or another end follows (training thread, or engine thread)."""
        held, self.at_cut = self.at_cut, None
        if held is not None:
            self._counters.add_held_bytes(-self._nbytes(held))

    def _nbytes(self, held: list[PendingGradient]) -> int:
        pairs = zip(held, self._wire.nbytes, strict=True)
        return sum(nbytes for (vector, _), nbytes in pairs if vector is not None)

    def go(self, go: StartRound | ExplainRound) -> None:
        """Take the pending gradients of some buckets and submit them for a round, or note why one is about to."""
        if isinstance(go, ExplainRound):
            self._triggers[go.bucket, go.round] = go.trigger
            return
        self._counters.started(go.by, go.held)
        if go.settled:
            self._set_hyper(go.round, go.hyper)
        whole = None if self._host is None or go.whole is None else go.whole.of(self._host)
        for bucket, arrived in zip(go.buckets, go.arrived, strict=True):
            self._start(_Start(go.optimizer, bucket, go.round, arrived, whole))

    def _start(self, go: _Start) -> None:
        name = f"hvd_async.eager.{go.optimizer}.{go.bucket}.{go.round % NAMES_IN_RING}"
        if name in self._busy or any(held.bucket == go.bucket for held in self._held):
            self._held.append(go)  # its name, or that of a round before it, is still in flight here
            return
        self._busy.add(name)
        flight = self._flight(go.round)
        if go.whole is not None:
            self.release(go.bucket, go.whole)
            flight.whole = go.whole if flight.whole is None else min(flight.whole, go.whole)
        late_by = [go.round - 1 - version for version in self._pending[go.bucket].versions]
        keep = self._engine.elastic
        if keep:
            flight.taken[go.bucket] = self._pending[go.bucket]
        taken = self._take(go.bucket, go.arrived, late_by)
        vector = self._wire.zeros(go.bucket) if taken is None else taken
        unit = self._units.get(name, self._wire.first_unit)
        submitted = time.monotonic()

        def landed(sums: Vector) -> None:
            self._busy.discard(name)
            self.landed[go.bucket] = max(self.landed[go.bucket], go.round)
            trigger = self._triggers.pop((go.bucket, go.round), None)
            if self.timeline is not None and trigger is not None:
                self.timeline.round(go.optimizer, go.bucket, go.round, trigger, submitted, time.monotonic(), late_by)
            flight.sums[go.bucket] = decoded = self._wire.decode(sums, go.bucket)
            tally = self._wire.tally(decoded)  # now, and not when the last has come and all wait
            flight.counts[go.bucket] = tally.gradients
            flight.weights[go.bucket] = self._wire.weight(tally, unit)
            self._units[name] = self._wire.next_unit(tally, unit)
            self._pass_on()
            held, self._held = self._held, deque()
            for late in held:
                self._start(late)

        wire, keep = self._wire, keep or taken is None
        self._engine.submit(
            lambda: self._engine.collectives.allreduce_sum(
                wire.encode(vector, unit), name, wire.process_set, keep, wire.scale
            ),
            landed,
            group=(go.optimizer, go.round),
        )

    def settle(self, round_: int, hyper: Hyper | None) -> None:
        """A round's hyperparameters; None if they are those that were sent last."""
        self._set_hyper(round_, hyper)
        self._pass_on()

    def _set_hyper(self, round_: int, hyper: Hyper | None) -> None:
        self._last_hyper = self._last_hyper if hyper is None else hyper
        assert self._last_hyper is not None, "a round has the hyperparameters of one before, and there was none"
        self._flight(round_).hyper = self._last_hyper

    def _take(self, bucket: int, arrived: int, staleness: list[int]) -> Vector | None:
        taken, self._pending[bucket] = self._pending[bucket], _Pending()
        if bucket == 0:
            self._counters.took(staleness)
        self._counters.went(bucket, arrived, self._wire.bytes_sent(bucket))
        if taken.vector is None:
            self._counters.add_held_bytes(self._wire.nbytes[bucket])  # of what comes back
        return taken.vector

    def _flight(self, round_: int) -> _Flight:
        flight = self._flights.get(round_)
        if flight is None:
            none, taken = [0] * self._buckets, [_Pending() for _ in range(self._buckets)]
            flight = self._flights[round_] = _Flight([None] * self._buckets, none, [*none], time.monotonic(), taken)
        return flight

    def _pass_on(self) -> None:
        """Deliver, in order, the rounds that have all their buckets and their hyperparameters."""
        ready: list[ReducedRound] = []
        while (flight := self._flights.get(self._next_ready)) is not None:
            sums = tuple(s for s in flight.sums if s is not None)
            if len(sums) < self._buckets or flight.hyper is None:
                break
            del self._flights[self._next_ready]
            self._counters.came(time.monotonic() - flight.started)
            counts, weights, whole = tuple(flight.counts), tuple(flight.weights), flight.whole or 0
            ready.append(ReducedRound(self._next_ready, sums, flight.hyper, counts, whole, weights))
            self._next_ready += 1
        if ready:
            self._deliver(ready)
