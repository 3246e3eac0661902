"""A job in virtual time: ranks that compute for given times around the real state machine, with no latency anywhere."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hvd_async.algorithms.eager.config import (
    EagerConfig,
    ExplainRound,
    GradientReady,
    StartRound,
    StepEntered,
    VersionTaken,
)
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.runtime.protocol import Accepted, Command, Registered


@dataclass
class Course:
    """How a job went.

    Attributes:
        machine: its state machine.
        seconds: virtual, from its start to its end.
        rounds: fired.
        staleness: of every gradient that was carried -> how many.
        given: rank -> gradients handed over.
        reasons: of the rounds.
    """

    machine: EagerStateMachine
    seconds: float = 0.0
    rounds: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    given: Counter[int] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Fresh gradients per second."""
        return self.staleness[0] / self.seconds if self.seconds else 0.0


def train(
    config: EagerConfig, size: int, duration: Callable[[int, int], float | None], rounds: int | None = None
) -> Course:
    """Play one-bucket training of ``size`` ranks.

    Args:
        config: of the optimizer.
        size: ranks.
        duration: (rank, its step from 1) -> seconds from being free to the next arrival; None ends the job when that
            rank comes to be free.
        rounds: end after this many; None: only by ``duration``.
    """
    course = Course(machine := EagerStateMachine(0, range(size)))
    version, steps, step = [0] * size, [0] * size, [0] * size  # of a rank: taken, begun, and handed over last
    waiting, pending, arrivals = list[int](), list[int](), list[tuple[float, int]]()

    def obey(commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, ExplainRound):
                course.reasons.append(command.trigger.reason)
            elif isinstance(command, StartRound):
                course.rounds = command.round
                course.staleness.update(command.round - 1 - computed_at for computed_at in pending)
                pending.clear()

    def release(free: Iterable[int], now: float) -> bool:
        """Have ranks take the newest version and compute; return whether the job continues."""
        for rank in free:
            version[rank] = course.rounds
            if config.pace == "rounds" and steps[rank]:
                obey(machine.handle(rank, VersionTaken(0, course.rounds), now))
            steps[rank] += 1
            seconds = duration(rank, steps[rank])
            if seconds is None or (rounds is not None and course.rounds >= rounds):
                return False
            heapq.heappush(arrivals, (now + seconds, rank))
        return True

    opening = [Registered(0, config, ["w"], [1], timeline=rank == 0) for rank in range(size)]
    assert [c for rank, one in enumerate(opening) for c in machine.handle(rank, one, 0.0)] == [Accepted(0)]
    continues = release(range(size), 0.0)
    while continues:
        now, rank = heapq.heappop(arrivals)
        course.seconds = now
        step[rank] = version[rank] + 1 if config.pace == "rounds" else step[rank] + 1
        pending.append(version[rank])
        course.given[rank] += 1
        waiting.append(rank)
        obey(machine.handle(rank, StepEntered(0, step[rank], []), now))
        obey(machine.handle(rank, GradientReady(0, [0], step[rank]), now))
        # Ranks whose round has fired continue: first the rank that came, then the others as they came.
        free = sorted((one for one in waiting if step[one] <= course.rounds), key=lambda one: one != rank)
        waiting = [one for one in waiting if one not in free]
        continues = release(free, now)
    return course
