"""``quorum="auto"``: the count of ranks that brings the most fresh gradients per second, learned from arrival times.

What a rank needs from the moment it is free (its round fired, or it came too late to wait) to its next arrival does
not depend on the quorum. So the last steps' durations are replayed under each count, by the rules of ``rounds.py``,
and the best count is taken. Pure: times are arguments.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

WINDOW = 48
"""Steps of each rank that are remembered."""
LEARN = 2
"""Steps of each rank that are needed for a choice; until then rounds are synchronous."""
RENEW = 8
"""Rounds between two choices."""
MARGIN = 1.03
"""How much better another count must be, so that noise does not make it flap."""
CANDIDATES = 9
"""Counts that are tried at the most."""


class Choice(NamedTuple):
    """A count of ranks, and why it was chosen."""

    quorum: int
    why: str


class AutoQuorum:
    """Learns durations, and chooses.

    Args:
        ranks: that share the optimizer.
        max_staleness: rounds.
        pace: "steps" or "rounds".
    """

    def __init__(self, ranks: Sequence[int], max_staleness: int, pace: str) -> None:
        self._max_staleness, self._pace = max_staleness, pace
        self._free: dict[int, float] = {}
        self._waiting: set[int] = set()
        self._durations: dict[int, deque[float]] = {rank: deque(maxlen=WINDOW) for rank in ranks}
        self._choice = Choice(len(ranks), "auto: learning how long the ranks take")
        self._renew_at = 0
        self._news: str | None = self._choice.why

    def arrived(self, rank: int, now: float, late: bool) -> None:
        """A rank has handed over a whole step at ``now`` (s); ``late``: its round has fired, so it goes on at once."""
        if rank in self._free:
            self._durations[rank].append(now - self._free.pop(rank))
        if late:
            self._free[rank] = now
        else:
            self._waiting.add(rank)

    def fired(self, now: float) -> None:
        """A whole round has fired at ``now`` (s): who waited for it is free."""
        self._free.update(dict.fromkeys(self._waiting, now))
        self._waiting.clear()

    def interrupted(self) -> None:
        """Ranks have done something else (a drain): the time until their next arrival says nothing."""
        self._free.clear()
        self._waiting.clear()

    def choose(self, round_: int, active: AbstractSet[int] | None = None) -> Choice:
        """The count for a round, renewed every few rounds, from what the ``active`` ranks (all if None) have needed."""
        measured = [durations for rank, durations in self._durations.items() if active is None or rank in active]
        known = min((len(durations) for durations in measured), default=0)
        if round_ >= self._renew_at and known >= LEARN:
            self._renew_at = round_ + RENEW
            self._renew([list(durations)[-known:] for durations in measured])
        return self._choice

    def take_notice(self) -> str | None:
        """Return a text on changes since the last call; None if there was none."""
        news, self._news = self._news, None
        return news

    def _renew(self, durations: list[list[float]]) -> None:
        size = len(durations)
        held = min(self._choice.quorum, size)
        counts = {*candidates(size), held}
        rates = {count: fresh_rate(durations, count, self._max_staleness, self._pace) for count in counts}
        best = max(rates, key=lambda count: (rates[count], count))
        if rates[best] <= MARGIN * rates[held]:
            best = held
        others = ", ".join(f"{count}: {rate:.1f}" for count, rate in sorted(rates.items()))
        steps = len(durations[0])
        why = f"auto: {best} of {size} ranks; fresh gradients per second by the last {steps} steps are {others}"
        if best != held or self._choice.why.startswith("auto: learning"):
            self._news = why
        self._choice = Choice(best, why)


def candidates(size: int) -> list[int]:
    """The counts to try at ``size`` ranks: all, or a spread of ``CANDIDATES`` of them with both ends."""
    if size <= CANDIDATES:
        return list(range(1, size + 1))
    spread = {1 + round(i * (size - 1) / (CANDIDATES - 2)) for i in range(CANDIDATES - 1)}
    return sorted(spread | {size - 1})


def fresh_rate(durations: Sequence[Sequence[float]], count: int, max_staleness: int, pace: str = "steps") -> float:
    """Gradients of staleness 0 per second, had the rounds needed ``count`` ranks.

    Args:
        durations: for each rank those of its steps (s), equally many.
        count: of ranks, 1 or more.
        max_staleness: rounds.
        pace: "steps" or "rounds".
    """
    size, steps = len(durations), len(durations[0])
    arrivals = [(durations[rank][0], rank) for rank in range(size)]
    heapq.heapify(arrivals)
    taken, position, version = [0] * size, [0] * size, [0] * size
    pending: list[int] = []
    waiting: list[int] = []
    fired = fresh = 0
    while True:
        now, rank = heapq.heappop(arrivals)
        taken[rank] += 1
        position[rank] += 1
        pending.append(version[rank])
        if position[rank] > fired:
            waiting.append(rank)
            free = []
        else:
            free = [rank]
        if len(waiting) >= count and fired + 1 - min(position) <= max_staleness:
            fresh += pending.count(fired)
            fired += 1
            pending.clear()
            free, waiting = free + waiting, []
        for each in free:
            if taken[each] == steps:  # no more is known of it: what the others would do without it is not what they do
                return fresh / now if now > 0 else 0.0
            version[each] = fired
            if pace == "rounds":
                position[each] = fired
            heapq.heappush(arrivals, (now + durations[each][taken[each]], each))
