"""Who is there? Asked when Horovod has failed on some rank: that is a symptom, and says nothing of whose fault it is.

A rank that has stopped, or is cut off, answers nobody; to the others all that shows is that a collective has failed. So
each rank that finds one failed reports to the coordinator, which asks all. Pure: time is an argument.

A leaf module.
"""

from __future__ import annotations

from collections.abc import Collection

SETTLE = 2.0
"""Seconds a roll call takes at the least: a rank that fails reports it itself, maybe just after it has answered."""


class RollCall:
    """One roll call.

    Args:
        ranks: that are to answer.
        now: when it begins (s).
        limit: seconds that ranks have to answer.

    Attributes:
        missing: ranks that have not answered.
        errors: what Horovod said, by the ranks it said it to; the first report first.
        limit: as given.
    """

    def __init__(self, ranks: Collection[int], now: float, limit: float) -> None:
        self.missing = set(ranks)
        self.errors: dict[int, str] = {}
        self.limit = limit
        self._began = now

    def present(self, rank: int, error: str | None = None) -> None:
        """``rank`` has answered, or has reported that Horovod failed there."""
        self.missing.discard(rank)
        if error is not None:
            self.errors.setdefault(rank, error)

    def deadline(self) -> float:
        """When it is over, if nothing else comes."""
        return self._began + (max(self.limit, SETTLE) if self.missing else SETTLE)
