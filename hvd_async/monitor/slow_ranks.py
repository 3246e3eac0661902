"""The rule by which a rank is called slow for good: others wait for it much, far more than for the rest, and again and
again. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BEGIN, END = 0.1, 0.05
"""Shares of the others' time: a rank that takes so much may be called slow; it is slow until it takes less than END."""
BEGIN_RATIO, END_RATIO = 2.5, 1.5
"""The same of how many times as long others wait for it as for a rank of the rest, on average."""
WINDOWS = 3
"""In so many windows, one after the other, the one or the other must be so."""


@dataclass(frozen=True)
class Blame:
    """How much one rank holds up the others in a window.

    Attributes:
        share: of the others' time that they wait for it.
        ratio: how many times as long as for a rank of the rest, on average; of waits that ranks report of themselves,
            how many times as long as itself the rest waits.
    """

    share: float
    ratio: float


def by_waits_for(shares: Sequence[float]) -> list[Blame]:
    """Return each rank's blame, from the shares of their time that the other ranks wait for it."""
    total, rest = sum(shares), max(1, len(shares) - 1)
    return [Blame(share, _ratio(share, max(0.0, total - share) / rest)) for share in shares]


def by_own_waits(shares: Sequence[float]) -> list[Blame]:
    """Return each rank's blame, from the share of its time that each waits itself: where neighbours wait for each
    other, all end up waiting but the one that is slow."""
    total, rest = sum(shares), max(1, len(shares) - 1)
    means = [max(0.0, total - share) / rest for share in shares]
    return [Blame(max(0.0, mean - own), _ratio(mean, own)) for own, mean in zip(shares, means, strict=True)]


def _ratio(one: float, other: float) -> float:
    if one <= 0.0:
        return 0.0
    return one / other if other > 0.0 else math.inf


class SlowRanks:
    """The ranks that are slow for good, by place, window after window.

    Args:
        size: how many ranks there are.
        windows: a rank must stand out in so many, one after the other, to be called slow, and fail to in so many to be
            called slow no more.
    """

    def __init__(self, size: int, windows: int = WINDOWS) -> None:
        self._windows = windows
        self._against = [0] * size
        """By place, in how many windows, up to now, it was not as the rank is called."""
        self.slow: frozenset[int] = frozenset()
        """Those that are."""

    def judge(self, blames: Sequence[Blame]) -> bool:
        """Take in a window; returns whether other ranks are slow now than before."""
        slow = set(self.slow)
        for place, blame in enumerate(blames):
            if place in slow:
                other = blame.share < END or blame.ratio < END_RATIO
            else:
                other = blame.share >= BEGIN and blame.ratio > BEGIN_RATIO
            self._against[place] = self._against[place] + 1 if other else 0
            if self._against[place] >= self._windows:
                self._against[place] = 0
                slow ^= {place}
        changed, self.slow = slow != self.slow, frozenset(slow)
        return changed
