"""Grace: how long a round whose quorum is there still waits for more ranks. Pure: times are arguments.

``grace="auto"``: as long as those take that usually come right after the quorum, and no longer than 5% of the time
between two rounds. Without it a rank that is a millisecond behind the first is a round late, in every round.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

AUTO = "auto"
SHARE = 0.05
"""The longest wait, as a share of the time between two rounds."""
WINDOW = 16
"""Rounds from which it is learned."""
SETTLED = 4
"""Rounds after which a round's arrivals are counted: whoever has not come by then did not come right after."""


@dataclass
class _Arrivals:
    """Arrivals for one round: until when they count, and how many have."""

    until: float
    count: int = 0


class Grace:
    """One optimizer's.

    Args:
        given: seconds, or "auto".
    """

    def __init__(self, given: float | str) -> None:
        self._fixed = None if isinstance(given, str) else float(given)
        self._fired_at: float | None = None
        self._intervals: deque[float] = deque(maxlen=WINDOW)
        self._open: dict[int, _Arrivals] = {}
        self._counts: deque[int] = deque(maxlen=WINDOW)
        self._longest = self._usual = 0.0

    def seconds(self, arrived: int) -> float:
        """Return how long a round waits after its quorum came together, with so many ranks (or hosts) in by now."""
        if self._fixed is not None:
            return self._fixed
        return self._longest if arrived < self._usual else 0.0

    def quorum_reached(self, round_: int, arrived: int, now: float) -> None:
        """The quorum of a round came together at ``now`` (s), with so many ranks (or hosts) in."""
        if self._fixed is None:
            self._open[round_] = _Arrivals(now + self._longest, arrived)

    def arrived(self, round_: int, now: float) -> None:
        """One more has arrived for a round."""
        known = self._open.get(round_)
        if known is not None and now <= known.until:
            known.count += 1

    def fired(self, round_: int, now: float) -> None:
        """A round has fired at ``now`` (s)."""
        if self._fixed is not None:
            return
        if self._fired_at is not None:
            self._intervals.append(now - self._fired_at)
            self._longest = SHARE * _median(self._intervals)
        self._fired_at = now
        for old in [number for number in self._open if number <= round_ - SETTLED]:
            self._counts.append(self._open.pop(old).count)
            self._usual = _median(self._counts)

    def interrupted(self) -> None:
        """Ranks have done something else (a drain): the time until the next round says nothing."""
        self._fired_at = None
        self._open.clear()


def _median(values: deque[float] | deque[int]) -> float:
    """Return the lower median; 0 of nothing."""
    return float(sorted(values)[(len(values) - 1) // 2]) if values else 0.0
