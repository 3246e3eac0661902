"""Partial allreduce, driven: gradients are one-hot vectors, so each shows in the round that has carried it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_async.algorithms.eager.config import EagerConfig, GradientReady, StepEntered, VersionTaken
from hvd_async.algorithms.eager.gradient_format import GradientFormat, PendingGradient, ReducedRound
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.algorithms.eager.rank import STEADY, EagerWorker
from hvd_async.runtime.interfaces import Wait
from hvd_async.runtime.protocol import Accepted, Command, Drained, Finished, Hyper, OptimizerEvent, Registered
from tests.machines.driver import PAUSE, Drive, Job, Rank, programs
from tests.machines.eager_ledger import Ledger

MOST = 64
"""Steps of a rank."""


@dataclass(frozen=True)
class EagerJob(Job):
    """A job of partial allreduce.

    Attributes:
        one_by_one: places of ranks that take one round a step (``synchronize()``).
        loaded: places of ranks that bring a gradient of an earlier run.
        empty: how probable it is that a bucket is handed over empty.
        in_order: whether buckets are handed over in order, all in ``step()`` or all before it, as drawn.
    """

    config: EagerConfig = field(default_factory=lambda: EagerConfig("solo", 1, 0.0, 0, 1))
    one_by_one: frozenset[int] = frozenset()
    loaded: frozenset[int] = frozenset()
    empty: float = 0.0


def eager(
    *texts: str,
    quorum: str | int | float = "solo",
    staleness: int = 1,
    buckets: int = 1,
    pace: str = "steps",
    grace: float = 0.0,
    local_size: int = 1,
    agree: bool = False,
    **own: Any,
) -> EagerJob:
    """Return a job of ranks with these programs."""
    config = EagerConfig(quorum, staleness, grace, 0, buckets, pace, local_size, agree=agree)
    return EagerJob(programs(*texts), config=config, **own)


class ForeseeingWorker(EagerWorker):
    """A worker that can announce a step on a plane where results cannot be taken early."""

    @property
    def wants_hyper(self) -> bool:
        return self.config.agree and self.config.quorum == "all" and not self._handed


class EagerDrive(Drive):
    """Moves a job of partial allreduce.

    Attributes:
        produced: by bucket, the gradients (place, step) in the order in which they were handed over; step 0 is of an
            earlier run.
        rounds: by number, the round as the first rank that has applied it has seen it.
    """

    job: EagerJob

    def __init__(self, job: EagerJob, quick: bool = False) -> None:
        self.config, self.size = job.config, len(job.programs)
        self.ledger = Ledger(job.config, job.numbers)
        self.produced: list[list[tuple[int, int]]] = [[] for _ in range(self.config.buckets)]
        self.rounds: dict[int, ReducedRound] = {}
        self.skipped: set[tuple[int, int]] = set()
        """Steps (place, step) in which a bucket was empty."""
        hosts = job.config.local_size > 1
        self.plain = not hosts and not any({"leave", "sum"} & set(program) for program in job.programs)
        """Whether the ledger knows all that ranks do: it knows neither hosts nor ranks that leave."""
        super().__init__(job, EagerStateMachine(0, job.numbers), quick)

    def worker(self, rank: Rank) -> EagerWorker:
        group, buckets = self.group(rank), self.config.buckets
        length = self.size * MOST + 1
        empty = np.zeros(length)
        wire = GradientFormat(
            zeros=lambda bucket: empty,  # (always the same one, as bindings have it)
            nbytes=(8 * length,) * buckets,
            process_set=group.process_set,
            members=group.members,
        )
        rank.applied = np.zeros((buckets, self.size * MOST))

        def apply(round_: ReducedRound) -> None:
            self._apply(rank, round_)

        worker = ForeseeingWorker(rank, self.config, wire, lambda flush: None, apply)
        worker._records_timeline = rank.place == 0  # (so that the ledger hears why rounds start)
        if rank.place in self.job.loaded:
            versions = [-rank.random.randint(0, self.config.max_staleness)]
            worker.restore([PendingGradient(self._gradient(rank, bucket, 0), versions) for bucket in range(buckets)])
        return worker

    def _gradient(self, rank: Rank, bucket: int, step: int) -> Any:
        self.produced[bucket].append((rank.place, step))
        vector = np.zeros(self.size * MOST + 1)
        vector[rank.place * MOST + step] = vector[-1] = 1.0
        return vector

    def first_hyper(self, rank: Rank) -> Hyper:
        return self._hyper(rank, 0)

    def _hyper(self, rank: Rank, step: int) -> Hyper:
        """Return what a rank reports in a step; it changes at every second one."""
        return [{"lr": rank.rank + step // 2 / 1024, "momentum": 0.5}]

    def step(self, rank: Rank) -> Generator[Wait, None, None]:
        worker: EagerWorker = rank.worker
        order = list(range(self.config.buckets))
        rank.random.shuffle(order)
        early = rank.random.randint(0, len(order))
        yield from self._hand_over(rank, order[:early])
        rest = {bucket: self._handed(rank, bucket) for bucket in order[early:]}
        most = 1 if rank.place in self.job.one_by_one else None
        rounds = yield from worker.finish_step_program(rest, self._hyper(rank, rank.steps), most)
        for round_ in rounds:
            with worker.applying(round_):
                self._apply(rank, round_)
            yield PAUSE

    def begin(self, rank: Rank) -> Generator[Wait, None, None]:
        order = list(range(self.config.buckets))
        rank.random.shuffle(order)
        yield from self._hand_over(rank, order[: rank.random.randint(1, len(order))])

    def _hand_over(self, rank: Rank, buckets: Sequence[int]) -> Generator[Wait, None, None]:
        """Hand buckets over before ``step()``; announce it at times, and at times with the rate of the step before."""
        worker: ForeseeingWorker = rank.worker
        worker.steady = STEADY * (worker._order != [] and rank.random.random() < 0.7)
        for bucket in buckets:
            if worker.wants_hyper:
                worker.foresee(self._hyper(rank, rank.steps - rank.random.randint(0, 1)))
            worker.hand_over(bucket, self._handed(rank, bucket))
            yield PAUSE

    def _handed(self, rank: Rank, bucket: int) -> Any:
        if rank.random.random() < self.job.empty:
            self.skipped.add((rank.place, rank.steps))
            return None
        return self._gradient(rank, bucket, rank.steps)

    def _apply(self, rank: Rank, round_: ReducedRound) -> None:
        """Apply a round: the same on all ranks, to the bit."""
        first = self.rounds.setdefault(round_.index, round_)
        assert (first.hyper, first.counts) == (round_.hyper, round_.counts), f"round {round_.index} differs"
        for bucket, total in enumerate(round_.sums):
            assert np.array_equal(first.sums[bucket], total), f"round {round_.index} differs between ranks"
            rank.applied[bucket] += total[:-1]
        assert rank.applied.max(initial=0.0) <= 1.0, "a gradient counts twice"

    def ended(self, rank: Rank, drained: Drained[Any]) -> None:
        if rank.ends == len(self.drains) - 1 and rank.steps > MOST - 2:
            raise AssertionError(f"a rank takes more than {MOST} steps: make MOST larger")
        held: list[PendingGradient] = []
        if not drained.flushed and rank.worker.settled and self.plain:
            held = rank.worker.pending()
        for bucket, made in enumerate(self.produced):
            own = [step for place, step in made if place == rank.place]
            if drained.flushed:
                expected = np.zeros(self.size * MOST)
                for place, step in made[: drained.produced[bucket]]:
                    expected[place * MOST + step] = 1.0
                assert np.array_equal(rank.applied[bucket], expected), "a gradient is lost, or stayed behind"
            elif held:
                there = rank.applied[bucket][rank.place * MOST : (rank.place + 1) * MOST] + (
                    0.0
                    if held[bucket].vector is None
                    else held[bucket].vector[rank.place * MOST : (rank.place + 1) * MOST]
                )
                assert np.flatnonzero(there).tolist() == sorted(own), "lost or twice"
                assert there.max(initial=0.0) <= 1.0, "lost or twice"

    def over(self) -> None:
        late = self.staleness
        assert max(late, default=0) <= self.config.max_staleness, f"gradients were {dict(late)} rounds late"
        for rank in self.ranks if self.plain else ():
            self._check_stats(rank)

    def _check_stats(self, rank: Rank) -> None:
        """Check what a rank has counted."""
        stats = rank.worker.stats()
        made = [sum(place == rank.place for place, _ in own) for own in self.produced]
        assert (stats.steps, stats.gradients_produced) == (rank.steps, max(made))
        assert stats.gradients_skipped == sum(place == rank.place for place, _ in self.skipped)
        assert stats.rounds_applied == sum(max(round_.counts) > 0 for round_ in self.rounds.values())
        if self.drains[-1].flushed:
            assert sum(stats.staleness.values()) == made[0]

    @property
    def staleness(self) -> Counter[int]:
        """Return how late the gradients of the first bucket were."""
        return sum((Counter(rank.worker.stats().staleness) for rank in self.ranks), Counter())

    def carried(self, round_: int) -> int:
        """Return how many gradients a round has carried in the bucket that has carried most."""
        return max(self.rounds[round_].counts)

    # -- the coordinator --------------------------------------------------------------------------------------

    def hear(self, rank: int, event: OptimizerEvent) -> None:
        if self.plain:
            self.ledger.hear(rank, event, self.now)

    def check(self, commands: list[Command], rank: int | None) -> None:
        if self.plain:
            self.ledger.check(commands, rank, self.now)
            self._check_due()
        for command in commands:
            if isinstance(command, Drained):
                assert command.produced == [len(made) for made in self.produced]

    def _check_due(self) -> None:
        """Check that each round that can start has, and that there is a deadline for the ones that wait for grace."""
        ledger, active, quorum = self.ledger, self.ledger.active(), self.config.quorum
        for bucket, fired in enumerate(ledger.fired):
            arrived = ledger.arrivals.get((bucket, fired + 1), {})
            late = max((fired + 1 - ledger.position[bucket][rank] for rank in active), default=0)
            if quorum == "auto" or not active or not ledger.met(fired + 1, quorum, arrived, active):
                continue
            if late <= self.config.max_staleness:
                assert self.config.grace, f"round {fired + 1} can start and has not"
                assert set(arrived) != active, f"round {fired + 1} waits for more ranks although all are there"
                assert self.machine.deadline() is not None, f"no rank will look when the grace of {fired + 1} is over"

    def illegal(self, rank: Rank) -> list[OptimizerEvent]:
        number, buckets = rank.rank, self.config.buckets
        many = [10**6] * buckets
        if not rank.opened:
            return [StepEntered(0, 1, []), GradientReady(0, [0], 1), VersionTaken(0, 0), Finished(0, [0] * buckets)]
        if not any(isinstance(command, Accepted) for command in self.log):
            return [
                Registered(0, self.config, ["w"], [1]),
                StepEntered(0, 1, []),
                GradientReady(0, [0], 1),
                VersionTaken(0, 0),
            ]
        if not self.plain:
            return []
        bucket, ledger = self.random.randrange(buckets), self.ledger
        position, fired = ledger.position[bucket][number], ledger.fired[bucket]
        moves: list[OptimizerEvent] = [
            Registered(0, self.config, ["w"], [1]),
            GradientReady(0, [-1], position + 1),
            GradientReady(0, [buckets], position + 1),
            GradientReady(0, [bucket, buckets], position + 1),
            GradientReady(0, [bucket, bucket], position + 1),
            GradientReady(0, [bucket], position),
            GradientReady(0, [bucket], position + 2),
            GradientReady(0, [bucket], fired + 2),
            VersionTaken(0, fired + 1),
            VersionTaken(0, position - 1),
            Finished(0, many[1:]),
        ]
        if self.config.pace == "steps":
            moves.append(VersionTaken(0, position))
        if number in ledger.done:
            moves += [
                GradientReady(0, [bucket], position + 1),
                StepEntered(0, 10**6, []),
                VersionTaken(0, fired),
                Finished(0, many),
            ]
        if any(number in ledger.arrivals.get((b, ledger.fired[b] + 1), {}) for b in range(buckets)):
            moves.append(Finished(0, many))
        return moves
