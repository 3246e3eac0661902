"""Leader-pull, driven: losses are drawn, not-a-number and infinite ones too."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_async.algorithms.eager.config import GradientReady, StepEntered
from hvd_async.algorithms.gossip.config import AverageEntered, MessageQueued, PairRequested
from hvd_async.algorithms.leader.config import LeaderConfig, PullDone, StartPull, StepTaken
from hvd_async.algorithms.leader.machine import LeaderStateMachine
from hvd_async.algorithms.leader.rank import LeaderWorker, group_of
from hvd_async.algorithms.leader.selection import Strengths
from hvd_async.runtime.interfaces import Program, Wait
from hvd_async.runtime.protocol import Command, Drained, Finished, OptimizerEvent, Registered
from tests.machines.driver import PAUSE, Drive, Job, Rank, programs
from tests.machines.leader_ledger import PullLedger

LOSSES = (0.5, 1.0, 1.0, 2.0, 3.0, math.nan, math.inf, -math.inf)


@dataclass(frozen=True)
class LeaderJob(Job):
    """A job of leader-pull.

    Attributes:
        losses: drawn in each step.
    """

    config: LeaderConfig = dataclasses.field(default_factory=lambda: LeaderConfig("lsgd", [[0, 1]], 1, 1, ""))
    losses: tuple[float, ...] = LOSSES


def leader(
    *texts: str,
    algorithm: str = "lsgd",
    groups: list[list[int]] | None = None,
    periods: tuple[int, int] = (1, 1),
    window: int = 100,
    **own: Any,
) -> LeaderJob:
    """Return a job of ranks with these programs."""
    config = LeaderConfig(algorithm, groups or [list(range(len(texts)))], *periods, "", loss_window=window)
    return LeaderJob(programs(*texts), config=config, **own)


class LeaderDrive(Drive):
    """Moves a job of leader-pull.

    Attributes:
        weights: what all ranks held after each drain.
    """

    job: LeaderJob

    def __init__(self, job: LeaderJob, quick: bool = False) -> None:
        self.config = job.config
        self.ledger = PullLedger(job.config, job.numbers)
        self.plain = not any({"leave", "sum"} & set(program) for program in job.programs)
        self.weights: dict[int, Any] = {}
        super().__init__(job, LeaderStateMachine(0, job.numbers), quick)

    def worker(self, rank: Rank) -> LeaderWorker:
        group = self.group(rank)
        places = self.config.groups[group_of(self.config, group)]
        own = tuple(self.numbers[place] for place in places)
        window = self.config.loss_window
        worker = LeaderWorker(rank, self.config, Strengths(), group, own, window, lambda flush: self._gather(rank))
        rank.applied = np.zeros(len(self.numbers))
        worker.begin(rank.applied + 0)
        worker.log = []
        return worker

    def step(self, rank: Rank) -> Generator[Wait, None, None]:
        worker: LeaderWorker = rank.worker
        worker.record_loss(rank.random.choice(self.job.losses))
        yield PAUSE
        worker.check_step()
        after = rank.applied + 0
        after[rank.place] += 1.0
        rank.applied = worker.mix(rank.applied, after) + 0
        yield PAUSE
        worker.publish(rank.applied + 0)

    def _gather(self, rank: Rank) -> Program[None]:
        rank.applied = (yield from rank.worker.gather_program(rank.applied + 0, True)) + 0

    def ended(self, rank: Rank, drained: Drained[Any]) -> None:
        if drained.flushed:
            first = self.weights.setdefault(rank.ends, rank.applied + 0)
            np.testing.assert_array_equal(first, rank.applied)
            before = list(itertools.takewhile(lambda entry: entry[0] != "drained", rank.worker.log))
            assert all(entry[1] <= drained.rounds for entry in before if entry[0] == "sent"), (
                "a pull is before its drain"
            )
            check_taken(rank.worker.log)
            rank.worker.log.clear()

    def over(self) -> None:
        """Check that a rank whose others were gone at two ends has pulled alone in between."""
        for first, second in itertools.pairwise(self.drains):
            alone = len(self.numbers) - len(first.gone) == 1 and self.config.global_period == 1
            steps = second.produced[0] - first.produced[0]
            places = [place for place, command in enumerate(self.log) if command is first or command is second]
            between = self.log[places[0] : places[1]]
            if alone and steps and all(map(math.isfinite, self.job.losses)):
                assert any(isinstance(command, StartPull) for command in between), "a rank that is gone counts"

    # -- the coordinator --------------------------------------------------------------------------------------

    def hear(self, rank: int, event: OptimizerEvent) -> None:
        self.ledger.hear(rank, event)

    def check(self, commands: list[Command], rank: int | None) -> None:
        if self.plain and rank is not None:
            self.ledger.check([each for each in commands if type(each).__name__ != "RunCollective"], rank)

    def illegal(self, rank: Rank) -> list[OptimizerEvent]:
        ledger, number = self.ledger, rank.rank
        if number not in ledger.opened:
            return [StepTaken(0, 1.0), PullDone(0, 1), Finished(0, [0])]
        if not self.plain:
            return []
        moves: list[OptimizerEvent] = [
            *(Registered(0, self.config, ["w"], [1]), StepEntered(0, 1, []), GradientReady(0, [0], 1)),
            *(MessageQueued(0, 1), PairRequested(0), AverageEntered(0, 1, [1.0])),
            *(PullDone(0, 0), PullDone(0, ledger.pulls + 1), Finished(0, []), Finished(0, [10**6, 10**6])),
            Finished(0, [ledger.produced[number] - 1]),
        ]
        if number in ledger.done or not ledger.agreed:
            moves.append(StepTaken(0, 1.0))
        if number in ledger.done:
            moves.append(Finished(0, [10**6]))
        return moves


def check_taken(log: list[Any]) -> None:
    """Check that each step takes the results of the pulls since the last one, and a drain drops the rest."""
    landed: set[int] = set()
    for kind, *more in log:
        if kind == "landed":
            landed.add(more[0])
        elif kind == "taken":
            taken = {number for number, _ in more[1].values()}
            assert taken <= landed, "results of a pull are taken twice, or after a drain"
            assert bool(taken) == bool(landed), "results of a pull are not taken"
            landed.clear()
        elif kind == "drained":
            landed.clear()
