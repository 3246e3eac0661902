"""Eager-SGD as one rank sees it, in any framework: hand gradients over, get rounds back, apply each exactly once.

The training thread calls ``open``, ``step`` and ``drain``; the engine thread carries out the coordinator's commands.
What the engine takes for a round is what is pending at that moment; whatever comes later stays for the next round, so
nothing is lost and nothing counts twice. Li et al., PPoPP 2020, with the promises of partial allreduce it left open.

A *vector* of bucket b is its gradients, flat, and one more element: how many gradients it holds (1 when it is handed
over). So the sum over the ranks that a round brings back tells how many gradients it really carried.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvd_async.engine import Engine
from hvd_async.errors import GradientLossError, ReplicaMismatchError, ReplicaStateError
from hvd_async.events import (
    Agreed,
    Arrived,
    Command,
    Done,
    Drained,
    EagerConfig,
    Go,
    Hyper,
    Opened,
    Refused,
    Settle,
    Stepped,
)
from hvd_async.protocols import Vector

NAMES_IN_RING = 4
"""Collectives of one bucket that may be in flight at once; their names come back, as Horovod's cache likes it."""


@dataclass(frozen=True)
class Round:
    """A round that is ready to be applied.

    Attributes:
        index: its number, from 1.
        sums: for each bucket the sum over all ranks, shape (elements + 1,); the last element counts gradients.
        hyper: the hyperparameters to apply it with.
        gradients: how many gradients it carried (in the bucket that carried most); 0 if it must not be applied.
        counts: how many in each bucket.
    """

    index: int
    sums: tuple[Vector, ...]
    hyper: Hyper
    gradients: int
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stats:
    """What one rank's optimizer has done so far.

    Attributes:
        steps: of this rank.
        rounds: fired and taken in by this rank.
        rounds_applied: of these, how many carried a gradient.
        gradients_produced: by this rank.
        gradients_applied: of all ranks, by this rank.
        total_produced: by all ranks; None before the first ``drain()``.
        staleness: how many of this rank's gradients were how many rounds stale when a round took them.
        wait_s: seconds this rank's training thread waited for rounds in ``step()`` and ``drain()``.
    """

    steps: int = 0
    rounds: int = 0
    rounds_applied: int = 0
    gradients_produced: int = 0
    gradients_applied: int = 0
    total_produced: int | None = None
    staleness: dict[int, int] = field(default_factory=dict)
    wait_s: float = 0.0


@dataclass
class _Pending:
    """One bucket's gradients that no round has carried yet, summed, and the versions they were computed at."""

    vector: Vector | None = None
    versions: list[int] = field(default_factory=list)


@dataclass
class _Flight:
    """A round some of whose buckets have gone but which is not ready yet."""

    sums: list[Vector | None]
    hyper: Hyper | None = None


class EagerWorker:
    """One optimizer of one rank.

    Args:
        engine: this rank's.
        config: the same on all ranks.
        zeros: makes an empty vector for a bucket (what a rank that has nothing contributes).
        finish: drains, for the process's normal exit; the binding's ``drain``.
    """

    def __init__(
        self, engine: Engine, config: EagerConfig, zeros: Callable[[int], Vector], finish: Callable[[], None]
    ) -> None:
        self.engine, self.config, self.finish = engine, config, finish
        self._zeros = zeros
        self._condition = threading.Condition()
        # Training thread's:
        self._number: int | None = None
        self._steps = self._base = 0
        """Steps in all, and round number minus step number: step counters are re-based by ``drain``."""
        self._version = 0
        self._applied: Counter[int] = Counter()
        self._rounds_applied = self._produced = 0
        self._wait_s = 0.0
        self._announced = False
        self._total_produced: int | None = None
        self.last_done = -1
        # Engine thread's:
        self._pending = [_Pending() for _ in range(config.buckets)]
        self._busy: set[str] = set()
        self._held: deque[Go] = deque()
        self._flights: dict[int, _Flight] = {}
        self._next_ready = 1
        self._staleness: Counter[int] = Counter()
        # Passed from the engine to the training thread, under the condition:
        self._ready: deque[Round] = deque()
        self._agreed = False
        self._refused: str | None = None
        self._drained: Drained | None = None

    # -- training thread --------------------------------------------------------------------------------------

    @property
    def agreed(self) -> bool:
        """Whether the ranks have met over this optimizer and fit together."""
        return self._agreed

    @property
    def version(self) -> int:
        """Rounds this rank's weights have seen."""
        return self._version

    def open(self, names: list[str], checksums: list[int]) -> None:
        """Meet the other ranks: settings, names and checksums (parameters', and optimizer state's) must be the same.

        Raises:
            ReplicaMismatchError: they are not; the message says what mends it. This worker is of no more use then.
        """
        self.offer(names, checksums)
        self.meet()

    def offer(self, names: list[str], checksums: list[int]) -> None:
        """The first half of ``open``: tell the coordinator, do not wait for the others."""
        if self._number is None:
            number = self.engine.register(self)
            self._number = number
            self.engine.post(lambda: self.engine.send(Opened(number, self.config, names, checksums)))

    def meet(self) -> None:
        """The second half of ``open``: wait until every rank has offered.

        Raises:
            ReplicaMismatchError: as ``open``.
        """
        self.engine.wait(lambda: self._agreed or self._refused is not None, self._condition)
        if self._refused is not None:
            self.engine.unregister(self._opened_number())
            raise ReplicaMismatchError(self._refused)

    def step(self, vectors: Sequence[Vector], hyper: Hyper, most: int | None = None) -> list[Round]:
        """Hand over this step's gradients, wait for the step's own round, and return the rounds that are waiting.

        Args:
            vectors: one a bucket, with the count in the last element; they belong to the worker from now on.
            hyper: what the round is applied with if this rank leads it.
            most: return no more rounds than this, though more may wait (user code sees one round at a time).

        Returns:
            Rounds in order, to be applied one after the other; none if this step's round was applied before.
        """
        number = self._opened_number()
        # A step that was broken off (Ctrl-C, HVD_ASYNC_TIMEOUT) was handed over all the same: its round comes first.
        self._await(lambda: self._version + len(self._ready) >= self._steps + self._base)
        version = self._version
        self._steps += 1
        self._produced += 1
        step = self._steps + self._base

        def hand_over() -> None:
            self.engine.send(Stepped(number, step, hyper))
            for bucket, vector in enumerate(vectors):
                self._add(bucket, vector, version)
                self.engine.send(Arrived(number, bucket, step))

        self.engine.post(hand_over)
        self._await(lambda: self._version + len(self._ready) >= step)
        return self._take(most)

    def announce(self) -> None:
        """Say "done" to the coordinator, once."""
        if not self._announced:
            self._announced = True
            number, produced = self._opened_number(), self._produced
            self.engine.post(lambda: self.engine.send(Done(number, produced)))

    def drain(self, apply: Callable[[Round], None]) -> None:
        """Say "done", apply what comes until all ranks are done, and check that no gradient was lost.

        Raises:
            GradientLossError: gradients applied are not gradients produced.
        """
        self.announce()

        def complete() -> bool:
            return self._drained is not None and self._version >= self._drained.rounds

        while not complete():
            self._await(lambda: bool(self._ready) or complete())
            for round_ in self._take(None):
                apply(round_)
        with self._condition:
            drained, self._drained = self._drained, None
        assert drained is not None
        self._announced = False
        self._base = drained.rounds - self._steps
        self._total_produced = drained.produced
        self.last_done = drained.last
        if any(self._applied[bucket] != drained.produced for bucket in range(self.config.buckets)):
            raise GradientLossError(
                f"drain: {drained.produced} gradients were produced but {dict(self._applied)} (bucket: gradients) were "
                f"applied on rank {self.engine.rank}. This is a bug in hvd_async; please report it with stats()."
            )

    def stats(self) -> Stats:
        """A snapshot."""
        with self._condition:
            staleness = dict(sorted(self._staleness.items()))
        return Stats(
            steps=self._steps,
            rounds=self._version,
            rounds_applied=self._rounds_applied,
            gradients_produced=self._produced,
            gradients_applied=self._applied[0],
            total_produced=self._total_produced,
            staleness=staleness,
            wait_s=self._wait_s,
        )

    def _opened_number(self) -> int:
        if self._number is None:
            raise ReplicaStateError("the optimizer was used before it was opened: a bug in the binding")
        return self._number

    def _take(self, most: int | None) -> list[Round]:
        rounds: list[Round] = []
        with self._condition:
            # In drain(): a rank that is out of it already may have fired rounds since; they belong to the next step.
            last = float("inf") if self._drained is None else self._drained.rounds
            while self._ready and self._ready[0].index <= last and (most is None or len(rounds) < most):
                rounds.append(self._ready.popleft())
        for round_ in rounds:
            self._version = round_.index
            for bucket, carried in enumerate(round_.counts):
                self._applied[bucket] += carried
            self._rounds_applied += round_.gradients > 0
        return rounds

    def _await(self, ready: Callable[[], bool]) -> None:
        started = time.perf_counter()
        try:
            self.engine.wait(ready, self._condition)
        finally:
            self._wait_s += time.perf_counter() - started

    # -- engine thread ----------------------------------------------------------------------------------------

    def obey(self, command: Command) -> None:
        """Carry out a command."""
        match command:
            case Go():
                self._go(command)
            case Settle(_, round_, hyper):
                self._flight(round_).hyper = hyper
                self._settle()
            case Agreed():
                self._tell(agreed=True)
            case Refused(_, problem):
                self._tell(refused=problem)
            case Drained():
                self._tell(drained=command)

    def fail(self, error: Exception) -> None:
        """The engine failed: wake the training thread, which finds out from the engine."""
        with self._condition:
            self._condition.notify_all()

    def _tell(self, agreed: bool = False, refused: str | None = None, drained: Drained | None = None) -> None:
        with self._condition:
            self._agreed = self._agreed or agreed
            self._refused = refused or self._refused
            self._drained = drained or self._drained
            self._condition.notify_all()

    def _add(self, bucket: int, vector: Vector, version: int) -> None:
        pending = self._pending[bucket]
        if pending.vector is None:
            pending.vector = vector
        else:
            pending.vector += vector
        pending.versions.append(version)

    def _go(self, go: Go) -> None:
        name = f"hvd_async.eager.{go.optimizer}.{go.bucket}.{go.round % NAMES_IN_RING}"
        if name in self._busy or any(held.bucket == go.bucket for held in self._held):
            self._held.append(go)  # its name, or that of a round before it, is still in flight here
            return
        self._busy.add(name)
        flight = self._flight(go.round)
        if go.hyper is not None:
            flight.hyper = go.hyper
        taken, self._pending[go.bucket] = self._pending[go.bucket], _Pending()
        if go.bucket == 0:
            with self._condition:
                self._staleness.update(go.round - 1 - version for version in taken.versions)
        vector = self._zeros(go.bucket) if taken.vector is None else taken.vector

        def landed(sums: Vector) -> None:
            self._busy.discard(name)
            flight.sums[go.bucket] = sums
            self._settle()
            held, self._held = self._held, deque()
            for late in held:
                self._go(late)

        self.engine.submit(lambda: self.engine.collectives.sum(vector, name), landed)

    def _flight(self, round_: int) -> _Flight:
        return self._flights.setdefault(round_, _Flight([None] * self.config.buckets))

    def _settle(self) -> None:
        """Pass on, in order, the rounds that have all their buckets and their hyperparameters."""
        ready: list[Round] = []
        while (flight := self._flights.get(self._next_ready)) is not None:
            sums = tuple(s for s in flight.sums if s is not None)
            if len(sums) < self.config.buckets or flight.hyper is None:
                break
            del self._flights[self._next_ready]
            counts = tuple(count(s) for s in sums)
            ready.append(Round(self._next_ready, sums, flight.hyper, max(counts), counts))
            self._next_ready += 1
        if ready:
            with self._condition:
                self._ready.extend(ready)
                self._condition.notify_all()


def count(sums: Vector) -> int:
    """How many gradients a vector holds."""
    return round(float(sums[-1]))
