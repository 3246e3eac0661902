"""A job in virtual time: ranks that compute for given times around the real state machine, with no latency anywhere."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
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
        seconds: virtual, from its start to its end.
        rounds: fired.
        fresh: gradients that were carried with staleness 0.
        staleness: of every gradient that was carried -> how many.
        given: rank -> gradients handed over.
        needed: round -> the count of ranks that its reason names.
    """

    seconds: float = 0.0
    rounds: int = 0
    fresh: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    given: Counter[int] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Fresh gradients per second."""
        return self.fresh / self.seconds if self.seconds else 0.0


class VirtualJob:
    """One-bucket training of ``size`` ranks.

    Args:
        config: of the optimizer.
        size: ranks.
        duration: (rank, its step from 1) -> seconds from being free to the next arrival; None ends the job when that
            rank comes to be free.
        rounds: end after this many; None: only by ``duration``.
    """

    def __init__(
        self,
        config: EagerConfig,
        size: int,
        duration: Callable[[int, int], float | None],
        rounds: int | None = None,
    ) -> None:
        self.config, self.size, self.duration, self.most = config, size, duration, rounds
        self.rounds = EagerStateMachine(0, range(size))
        self.course = Course()
        self._version = [0] * size
        self._steps = [0] * size
        self._step = [0] * size
        """Of a rank: the number of the step it has handed over last."""
        self._waiting: list[int] = []
        self._pending: list[tuple[int, int]] = []
        self._arrivals: list[tuple[float, int]] = []
        self._over = False

    def run(self) -> Course:
        """Until it is over."""
        opening = [
            command for rank in range(self.size) for command in self.rounds.handle(rank, self._opened(rank), 0.0)
        ]
        assert opening == [Accepted(0)]
        self._release(list(range(self.size)), 0.0)
        while not self._over:
            now, rank = heapq.heappop(self._arrivals)
            self._arrive(rank, now)
            self.course.seconds = now
        return self.course

    def _opened(self, rank: int) -> Registered:
        return Registered(0, self.config, ["w"], [1], timeline=rank == 0)

    def _arrive(self, rank: int, now: float) -> None:
        self._step[rank] = step = self._version[rank] + 1 if self.config.pace == "rounds" else self._step[rank] + 1
        self._pending.append((rank, self._version[rank]))
        self.course.given[rank] += 1
        self._waiting.append(rank)
        self._on_command(self.rounds.handle(rank, StepEntered(0, step, []), now), now)
        self._on_command(self.rounds.handle(rank, GradientReady(0, [0], step), now), now)
        self._continue(rank, now)

    def _continue(self, rank: int, now: float) -> None:
        """Let those continue whose round has fired: first the rank that came, then the others as they came."""
        free = [r for r in self._waiting if self._step[r] <= self.course.rounds]
        self._waiting = [r for r in self._waiting if r not in free]
        self._release(sorted(free, key=lambda r: r != rank), now)

    def _release(self, free: list[int], now: float) -> None:
        for rank in free:
            self._version[rank] = self.course.rounds
            if self.config.pace == "rounds" and self._steps[rank]:
                self._on_command(self.rounds.handle(rank, VersionTaken(0, self.course.rounds), now), now)
            self._steps[rank] += 1
            seconds = self.duration(rank, self._steps[rank])
            if seconds is None or (self.most is not None and self.course.rounds >= self.most):
                self._over = True
                return
            heapq.heappush(self._arrivals, (now + seconds, rank))

    def _on_command(self, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, ExplainRound):
                self.course.reasons.append(command.trigger.reason)
            elif isinstance(command, StartRound):
                course = self.course
                course.rounds = command.round
                stale = [command.round - 1 - version for _, version in self._pending]
                course.staleness.update(stale)
                course.fresh += stale.count(0)
                self._pending.clear()
