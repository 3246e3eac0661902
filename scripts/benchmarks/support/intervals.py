"""Medians, spreads and 95% intervals. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats


class Interval(NamedTuple):
    """An estimate and the bounds of its interval."""

    value: float
    low: float
    high: float

    @property
    def wide(self) -> float:
        """The longer of the two sides."""
        return max(self.value - self.low, self.high - self.value)

    def within(self, low: float, high: float) -> bool:
        """Return whether the whole interval lies between these."""
        return low <= self.low and self.high <= high


def spread(values: Sequence[float]) -> Interval:
    """The median, the least and the greatest."""
    return Interval(statistics.median(values), min(values), max(values))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean and Student's interval; endless for fewer than two values."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    error = statistics.stdev(values) / math.sqrt(len(values))
    reach = float(stats.t.ppf(0.5 + confidence / 2, len(values) - 1)) * error
    return Interval(mean, mean - reach, mean + reach)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median and an interval that supposes nothing of the distribution: between two of the ordered values.

    The median lies below the k-th of n ordered values with the probability of at most k - 1 heads in n throws, so
    k is the largest for which both tails together have at most 1 - confidence. Endless if there are too few values.
    """
    ordered = sorted(values)
    count = len(ordered)
    below = int(stats.binom.ppf((1 - confidence) / 2, count, 0.5))  # heads that are too few with this probability
    while below > 0 and stats.binom.cdf(below - 1, count, 0.5) > (1 - confidence) / 2:
        below -= 1
    middle = statistics.median(ordered)
    if below == 0:
        return Interval(middle, -math.inf, math.inf)
    return Interval(middle, ordered[below - 1], ordered[count - below])


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The least-squares slope of y over x; 0 for fewer than two different x."""
    if len(set(x)) < 2:
        return 0.0
    return float(statistics.linear_regression(x, y).slope)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
