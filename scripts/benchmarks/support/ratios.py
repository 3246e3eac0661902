"""Ratios of arms measured in alternation, cycle by cycle. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .intervals import Interval, mean_interval, median_interval


def mean_seconds(block: Mapping[str, Any]) -> float:
    """Seconds a step of a block of ``jobs/cycles.py``, mean over the ranks."""
    return statistics.fmean(own["elapsed"] / own["steps"] for own in block["by_rank"])


class Ratios:
    """Each arm's time over the baseline's in the same cycle: what disturbs a cycle disturbs both.

    Args:
        baseline: the arm that is compared with.
    """

    def __init__(self, baseline: str) -> None:
        self._baseline = baseline
        self._found: dict[str, list[float]] = {}

    def add(self, seconds: Mapping[str, float]) -> None:
        """One cycle's times, by arm."""
        for arm, value in seconds.items():
            self._found.setdefault(arm, []).append(value / seconds[self._baseline])

    @classmethod
    def of(cls, baseline: str, blocks: Sequence[Mapping[str, Any]]) -> Ratios:
        """Return the ratios of all cycles of a job."""
        found = cls(baseline)
        for cycle in sorted({block["cycle"] for block in blocks}):
            found.add({block["arm"]: mean_seconds(block) for block in blocks if block["cycle"] == cycle})
        return found

    def median(self, arm: str) -> Interval:
        """The median ratio, with an interval that supposes nothing of its distribution."""
        return median_interval(self._found[arm])

    def mean(self, arm: str) -> Interval:
        """The mean ratio, with Student's interval."""
        return mean_interval(self._found[arm])

    def wide(self, arms: Sequence[str]) -> float:
        """The longest side of these arms' intervals of the median, as a share of the median."""
        intervals = [self.median(arm) for arm in arms if arm in self._found]
        return max((each.wide / each.value for each in intervals), default=math.inf)
