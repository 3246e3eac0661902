"""Figures of blocks: groups of them, medians, spreads and 95% intervals, ratios of arms. Pure.

A block is what a job found for one arm in one setting: what was asked, and ``by_rank``, the results of each rank.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from scipy import stats

Block = dict[str, Any]
Own = dict[str, Any]
"""Results of one rank."""
Key = TypeVar("Key", bound=Hashable)


# -- intervals ---------------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """An estimate and the ends of its interval."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The longer of the two sides."""
        return max(self.value - self.low, self.high - self.value)

    def within(self, low: float, high: float) -> bool:
        """Return whether the whole interval lies between these."""
        return low <= self.low and self.high <= high


def spread(values: Sequence[float]) -> Interval:
    """Return the median, the least and the greatest value."""
    return Interval(statistics.median(values), min(values), max(values))


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean with its 95% interval (Student's), which is infinite for fewer than two values."""
    if len(values) < 2:
        return Interval(statistics.fmean(values), -math.inf, math.inf)
    error = statistics.stdev(values) / math.sqrt(len(values))
    reach = float(stats.t.ppf(0.975, len(values) - 1)) * error
    mean = statistics.fmean(values)
    return Interval(mean, mean - reach, mean + reach)


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median with a 95% interval that assumes nothing about the distribution: two of the values, or infinite
    if there are too few."""
    low, high = stats.quantile_test(values, q=statistics.median(values), p=0.5).confidence_interval(0.95)
    ends = (-math.inf, math.inf) if math.isnan(low) or math.isnan(high) else (float(low), float(high))
    return Interval(statistics.median(values), *ends)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the least-squares slope of y over x; 0 for fewer than two different x."""
    return float(statistics.linear_regression(x, y).slope) if len(set(x)) > 1 else 0.0


# -- blocks ------------------------------------------------------------------------------------------------------------


def grouped(blocks: Iterable[Block], key: Callable[[Block], Key]) -> dict[Key, list[Block]]:
    """Return the blocks of each key, keys in the order in which they first come."""
    groups: dict[Key, list[Block]] = {}
    for block in blocks:
        groups.setdefault(key(block), []).append(block)
    return groups


def by_arm(blocks: Iterable[Block]) -> dict[str, list[Block]]:
    """Return the blocks of each arm."""
    return grouped(blocks, lambda block: str(block["arm"]))


def everywhere(blocks: Iterable[Block]) -> list[Own]:
    """Return the results of every rank in every block."""
    return [own for block in blocks for own in block["by_rank"]]


def identical(blocks: Iterable[Block]) -> bool:
    """Return whether all ranks ended every block with the same weights."""
    return all(own["identical"] for own in everywhere(blocks))


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def elapsed(block: Block) -> float:
    """Return the seconds until the last rank has done all its steps."""
    return float(max(own["ends"][-1] for own in block["by_rank"]))


def step_seconds(block: Block) -> float:
    """Return the seconds per step, until the last rank has done all its steps; ranks have equally many."""
    return elapsed(block) / len(block["by_rank"][0]["ends"])


def late_counts(stats: Iterable[Mapping[str, Any]]) -> Counter[int]:
    """Return the number of gradients (or messages) by their staleness, over all ranks' ``stats()``."""
    counts = Counter[int]()
    for own in stats:
        counts.update({int(late): count for late, count in own.get("staleness", {}).items()})
    return counts


def mean_of(counts: Mapping[int, int]) -> float | None:
    """Return the mean of a histogram, {number: count}; None if it is empty."""
    total = sum(counts.values())
    return sum(number * count for number, count in counts.items()) / total if total else None


def mean_staleness(block: Block) -> float | None:
    """Return the mean staleness of gradients, rounds; None for arms without any."""
    return mean_of(late_counts(own["stats"] for own in block["by_rank"]))


def mean_contributors(block: Block) -> float | None:
    """Return the ranks that had arrived when a round started, mean over rounds; None for arms without rounds."""
    counts = block["by_rank"][0]["stats"].get("contributors", {})
    return mean_of({int(ranks): rounds for ranks, rounds in counts.items()})


# -- ratios ------------------------------------------------------------------------------------------------------------


class Ratios:
    """Step times of each arm over the baseline's in the same repetition: what disturbs one disturbs both.

    Args:
        baseline: the arm that others are compared with.
        blocks: of all arms; a repetition that lacks an arm does not count.
    """

    def __init__(self, baseline: str, blocks: Iterable[Block]) -> None:
        cycles = grouped(blocks, lambda block: int(block["repetition"]))
        self._found: dict[str, list[float]] = {}
        arms = max((len(cycle) for cycle in cycles.values()), default=0)
        self.cycles = [cycle for cycle in cycles.values() if len(cycle) == arms]
        for cycle in self.cycles:
            seconds = {str(block["arm"]): mean_seconds(block) for block in cycle}
            for arm, value in seconds.items():
                self._found.setdefault(arm, []).append(value / seconds[baseline])

    def median(self, arm: str) -> Interval:
        return median_interval(self._found[arm])

    def mean(self, arm: str) -> Interval:
        return mean_interval(self._found[arm])

    def width(self, arms: Iterable[str]) -> float:
        """Return the longest side of these arms' intervals of the median, as a share of the median."""
        intervals = [self.median(arm) for arm in arms if arm in self._found]
        return max((each.width / each.value for each in intervals), default=math.inf)


def mean_seconds(block: Block) -> float:
    """Return the seconds per step, mean over the ranks."""
    return statistics.fmean(own["ends"][-1] / len(own["ends"]) for own in block["by_rank"])
