"""Training without a model: gradients of whole numbers whose sum is exact, and what became of them.

Each gradient is a row: a 1 at its own place, zeros at every other gradient's, and some numbers drawn at random. The sum
of all rounds must be 1 at every place: 0 is a gradient lost, 2 one counted twice, whatever the counters say.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_async.algorithms.eager.config import EagerConfig
from hvd_async.algorithms.eager.gradient_format import GradientFormat, ReducedRound
from hvd_async.algorithms.eager.quorum import Quorum, needed
from hvd_async.algorithms.eager.rank import EagerWorker
from hvd_async.errors import GradientLossError
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.stats import Stats
from hvd_async.testing import Cluster

RANDOM_COLUMNS = 4
LARGEST = 1000
GATE_TIMEOUT = 30.0
Vector = np.ndarray[Any, np.dtype[np.float32]]


class Progress:
    """Gates that make a rank slow without a clock: it waits until the others have come far enough."""

    def __init__(self, size: int) -> None:
        self._entered = [0.0] * size
        self._changed = threading.Condition()

    def enter(self, rank: int, step: float) -> None:
        """``rank`` is about to take this step (infinity: it is done)."""
        with self._changed:
            self._entered[rank] = step
            self._changed.notify_all()

    def others_at(self, rank: int, step: float) -> float:
        """Wait until the fastest of the other ranks has entered ``step``; return the step that it has entered."""
        others = [r for r in range(len(self._entered)) if r != rank]
        if others:
            with self._changed:
                assert self._changed.wait_for(lambda: max(self._entered[r] for r in others) >= step, GATE_TIMEOUT), (
                    f"rank {rank} waited for others to enter step {step}: {self._entered}"
                )
                return max(self._entered[r] for r in others)
        return step


@dataclass(frozen=True)
class Plan:
    """The steps of each rank.

    Attributes:
        steps: for each drain, for each rank, how many steps come before it.
        slow: this rank takes its step s when another has entered step s + lag.
        early: another thread hands some buckets over before each step.
    """

    config: EagerConfig
    steps: Sequence[Sequence[int]]
    slow: int | None = None
    lag: int = 0
    early: bool = False

    @property
    def size(self) -> int:
        return len(self.steps[0])

    @property
    def total(self) -> int:
        """Gradients of all ranks."""
        return sum(map(sum, self.steps))

    def row(self, rank: int, step: int, bucket: int) -> Vector:
        """The gradient of a rank's step (from 1) in a bucket, with its count at the end."""
        counts = [sum(segment[r] for segment in self.steps) for r in range(self.size)]
        vector = np.zeros(self.total + RANDOM_COLUMNS + 1, np.float32)
        vector[sum(counts[:rank]) + step - 1] = 1
        drawn = np.random.default_rng([rank, step, bucket]).integers(-LARGEST, LARGEST, RANDOM_COLUMNS)
        vector[self.total : -1] = drawn
        vector[-1] = 1
        return vector

    def rows(self, rank: int, step: int) -> dict[int, Vector]:
        """All buckets of a step."""
        return {bucket: self.row(rank, step, bucket) for bucket in range(self.config.buckets)}

    def worker(self, engine: Engine) -> EagerWorker:
        """One that is not open yet."""
        empty = self.row(0, 1, 0) * 0
        wire = GradientFormat(zeros=lambda bucket: empty, nbytes=(empty.nbytes,) * self.config.buckets)
        return EagerWorker(engine, self.config, wire, lambda flush: None)


@dataclass
class Record:
    """The rounds that one rank saw."""

    rounds: list[ReducedRound] = field(default_factory=list)
    per_step: list[int] = field(default_factory=list)
    """How many rounds each step applied."""
    lost: GradientLossError | None = None
    stats: Stats | None = None


def plan(
    quorum: Quorum, staleness: int, steps: Sequence[int], slow: int | None = None, buckets: int = 1, **options: Any
) -> Plan:
    """One drain; the slow rank as slow as the quorum and the bound let it be."""
    local = options.get("local_size", 1)
    config = EagerConfig(
        quorum, staleness, options.get("grace", 0.0), options.get("seed", 0), buckets, local_size=local
    )
    hosts = len(steps) // local
    waits_for_slow = quorum in ("all", "majority") or (not isinstance(quorum, str) and needed(quorum, hosts) >= hosts)
    waits_for_slow = waits_for_slow or hosts == 1
    return Plan(config, [steps], slow, 0 if waits_for_slow else staleness, options.get("early", False))


def hand_over_some(worker: EagerWorker, rows: dict[int, Vector], chance: random.Random) -> None:
    """Some of the buckets in any order, from another thread, as autograd's; they are taken out of ``rows``."""
    early = chance.sample(sorted(rows), chance.randint(0, len(rows)))

    def backward() -> None:
        for bucket in early:
            worker.hand_over(bucket, rows.pop(bucket))

    thread = threading.Thread(target=backward, name=f"rank-{worker.engine.rank}-backward")
    thread.start()
    thread.join(GATE_TIMEOUT)


def await_rounds(worker: EagerWorker, rounds: int) -> None:
    """Wait until the first rounds have come to a worker, applied or not."""
    worker.engine.wait(lambda: worker.version + len(worker._rounds) >= rounds)


def work(plan: Plan, tweak: Callable[[EagerWorker], None] = lambda worker: None) -> Callable[[int], Record]:
    """Return what ``Cluster.run`` calls for a rank. ``tweak`` changes a rank's worker, to break it."""
    progress = Progress(plan.size)

    def train(rank: int) -> Record:
        engine = local_engine()
        assert engine is not None
        worker = plan.worker(engine)
        tweak(worker)
        record = Record()
        worker.apply = record.rounds.append
        worker.connect(["w"], [1])
        done = 0
        for segment in plan.steps:
            for _ in range(segment[rank]):
                if rank == plan.slow:
                    entered = progress.others_at(rank, done + 1 + plan.lag)
                    if plan.lag and len(plan.steps) == 1 and entered < float("inf"):
                        await_rounds(worker, int(entered) - 1)  # (one a step of the fastest)
                done += 1
                progress.enter(rank, done)
                rows = plan.rows(rank, done)
                if plan.early:
                    hand_over_some(worker, rows, random.Random(f"{rank}:{done}"))
                record.per_step.append(worker.step(rows, [{"lr": rank + done / 1024}], record.rounds.append))
            progress.enter(rank, float("inf"))
            try:
                worker.drain()
            except GradientLossError as error:
                record.lost = error
        record.stats = worker.stats()
        return record

    return train


def check_conservation(plan: Plan, records: Sequence[Record]) -> None:
    """Every gradient is in the rounds exactly once, by its values, in every bucket, on every rank.

    Raises:
        AssertionError: it is not.
    """
    for rank, record in enumerate(records):
        for bucket in range(plan.config.buckets):
            produced = sum(
                (
                    plan.row(r, s, bucket).astype(np.float64)
                    for r in range(plan.size)
                    for s in range(1, 1 + sum(segment[r] for segment in plan.steps))
                ),
                start=np.zeros(plan.total + RANDOM_COLUMNS + 1),
            )
            applied = sum((r.sums[bucket].astype(np.float64) for r in record.rounds), start=np.zeros_like(produced))
            assert np.abs(produced).max(initial=0) < 2**24, "float32 would not be exact"
            assert applied[: plan.total].tolist() == [1.0] * plan.total, f"rank {rank}, bucket {bucket}: lost or twice"
            assert (applied == produced).all(), f"rank {rank}, bucket {bucket}: other values"


def check_promises(plan: Plan, records: Sequence[Record]) -> None:
    """Conservation; one order of identical rounds on all ranks; staleness within its bound; the statistics add up."""
    check_conservation(plan, records)
    first = records[0]
    for record in records:
        assert record.lost is None
        assert [r.index for r in record.rounds] == list(range(1, len(first.rounds) + 1))
        for own, other in zip(record.rounds, first.rounds, strict=True):
            assert own.hyper == other.hyper
            assert own.gradients == other.gradients
            assert all(a.tobytes() == b.tobytes() for a, b in zip(own.sums, other.sums, strict=True))
        stats = record.stats
        assert stats is not None
        assert stats.rounds == len(record.rounds)
        assert stats.rounds_applied == sum(r.gradients > 0 for r in record.rounds)
        assert stats.gradients_applied == stats.total_produced == plan.total
        assert sum(stats.staleness.values()) == stats.gradients_produced == stats.steps
        assert max(stats.staleness, default=0) <= plan.config.max_staleness
        assert min(stats.staleness, default=0) >= 0


def run(plan: Plan, **cluster: Any) -> list[Record]:
    """The plan on a new cluster."""
    return Cluster(plan.size, **cluster).run(work(plan))
