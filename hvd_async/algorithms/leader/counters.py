"""What a rank that follows leaders has seen so far, counted by its engine thread."""

from __future__ import annotations

import time
from collections import Counter, deque

from hvd_async.algorithms.leader.state_machine import ALL
from hvd_async.runtime.interfaces import Vector
from hvd_async.stats import LeaderStats

REMEMBERED = 10_000
"""Pulls of which each is told; of earlier ones how many."""


class PullCounters:
    """Of one optimizer.

    Attributes:
        pulls: that have landed.
        bytes_received: by them.
    """

    def __init__(self) -> None:
        self.pulls = self.bytes_received = 0
        self._led: Counter[tuple[bool, int]] = Counter()
        """By whether it is of all ranks, and by leader."""
        self._seconds = self._distance = 0.0
        self._distances = 0
        self._history: deque[tuple[float, int, int]] = deque(maxlen=REMEMBERED)

    @staticmethod
    def clock() -> float:
        """Seconds, to be given to ``landed``."""
        return time.perf_counter()

    def landed(self, group: int, leader: int, started: float) -> None:
        """A pull of a group is over, that was submitted at ``started``."""
        self.pulls += 1
        self._led[group == ALL, leader] += 1
        self._seconds += self.clock() - started
        self._history.append((time.time(), group, leader))

    def distance(self, difference: Vector) -> None:
        """How far this rank was from a leader, or the centre: a vector whose length counts."""
        self._distance += float(difference @ difference) ** 0.5
        self._distances += 1

    def stats(self, steps: int, wait_s: float, mean_loss: float | None) -> LeaderStats:
        """A snapshot, with what others have counted."""
        led = sorted(self._led.copy().items())
        return LeaderStats(
            steps=steps,
            pulls=self.pulls,
            led={leader: times for (of_all, leader), times in led if of_all},
            led_group={leader: times for (of_all, leader), times in led if not of_all},
            distance=self._distance / self._distances if self._distances else 0.0,
            pull_s=self._seconds / self.pulls if self.pulls else 0.0,
            bytes_received=self.bytes_received,
            wait_s=wait_s,
            mean_loss=mean_loss,
            history=tuple(self._history.copy()),
            distances=self._distances,
        )
