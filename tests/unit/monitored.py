"""A stand-in for a wrapped optimizer, whose counts a test sets, and a clock that it moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hvd_async.stats import GossipStats, LeaderStats, Stats

EAGER = {"algorithm": "eager", "quorum": "solo", "pace": "steps", "max_staleness": 16, "local_size": 1}


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Optimizer:
    """Has what a monitor looks at."""

    def __init__(self, stats: Stats | GossipStats | LeaderStats, size: int = 4, place: int = 0, **settings: Any):
        self.now = stats
        self._async = SimpleNamespace(settings={**EAGER, **settings})
        self.be(place, size)

    def be(self, place: int, size: int) -> None:
        """Be another rank, of so many; two ranks share a host."""
        self._async.rank_group = SimpleNamespace(index=place, ranks=tuple(range(size)))
        hosts = tuple(f"n{rank // 2}" for rank in range(size))
        self._async.worker = SimpleNamespace(engine=SimpleNamespace(hosts=hosts))

    def stats(self) -> Stats | GossipStats | LeaderStats:
        return self.now
