"""``quorum="auto"``: the count of ranks that brings the most fresh gradients per second, learned from arrival times.

What a rank needs from the moment it is free (its round fired, or it came too late to wait) to its next arrival does
not depend on the quorum. So the last steps' durations are replayed under each count, by the rules of the state machine,
and the best count is taken. Pure: times are arguments.

A replay is exact, and goes round by round over arrays of all ranks, so that thousands of ranks do not hold the
coordinator up. With more than 500 ranks it is of fewer steps (``ELEMENTS``), so it may not see a bound of more rounds
than that reached; each step says more of how the ranks differ, then.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

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
ELEMENTS = 24_000
"""Steps of all ranks together that are replayed at the most, but ``FEWEST`` of each."""
FEWEST = 10


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

    def choose(self, round_: int, active: Collection[int] | None = None) -> Choice:
        """The count for a round, renewed every few rounds, from what the ``active`` ranks (all if None) have needed."""
        if round_ < self._renew_at:
            return self._choice
        measured = [durations for rank, durations in self._durations.items() if active is None or rank in active]
        known = min((len(durations) for durations in measured), default=0)
        if known >= LEARN:
            self._renew_at = round_ + RENEW
            steps = min(known, max(FEWEST, ELEMENTS // len(measured)))
            self._renew([list(durations)[-steps:] for durations in measured])
        return self._choice

    def take_notice(self) -> str | None:
        """Return a text on changes since the last call; None if there was none."""
        news, self._news = self._news, None
        return news

    def _renew(self, durations: list[list[float]]) -> None:
        size = len(durations)
        held = min(self._choice.quorum, size)
        counts = {*candidates(size), held}
        table = np.array(durations)
        rates = {count: fresh_rate(table, count, self._max_staleness, self._pace) for count in counts}
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


def fresh_rate(durations: Any, count: int, max_staleness: int, pace: str = "steps") -> float:
    """Gradients of staleness 0 per second, had the rounds needed ``count`` ranks.

    Args:
        durations: of each rank those of its steps (s), equally many; an array of shape (ranks, steps), or what becomes
            one.
        count: of ranks, 1 or more.
        max_staleness: rounds.
        pace: "steps" or "rounds".
    """
    table = np.ascontiguousarray(np.asarray(durations, dtype=np.float64).T)
    return (_by_rounds if pace == "rounds" else _by_steps)(table, count, max_staleness)


class _Moment(NamedTuple):
    """When something happens, and by which rank; ranks that come at the same time come in order."""

    time: float
    rank: int


def _nth(times: Any, count: int) -> _Moment:
    """Return the arrival of the ``count``-th of the ranks."""
    time = np.partition(times, count - 1)[count - 1] if count < len(times) else times.max()
    before = int(np.count_nonzero(times < time))
    return _Moment(float(time), int(np.flatnonzero(times == time)[count - 1 - before]))


def _until(times: Any, moment: _Moment) -> Any:
    """Return which ranks have come by a moment, as a mask."""
    by = times <= moment.time
    late = np.flatnonzero(times[moment.rank + 1 :] == moment.time)
    by[moment.rank + 1 + late] = False
    return by


def _by_steps(table: Any, count: int, max_staleness: int) -> float:
    """Each rank's step t is its t-th arrival, for round t, in time or late.

    The arrival of step t + 1 is one duration after round t has fired for those that were in it, else one after the
    arrival of step t. So of each round one array says it all. All that come in time are fresh.
    """
    steps, fresh = len(table), 0
    fires: list[_Moment] = []
    last: list[_Moment] = []
    """When the last rank arrives, by step."""
    arrivals, late = np.empty_like(table), np.empty(table.shape, dtype=bool)
    for step in range(steps):
        before = np.where(late[step - 1], arrivals[step - 1], fires[-1].time) if step else 0.0
        arrivals[step] = own = before + table[step]
        if step + max_staleness < steps:
            last.append(_nth(own, len(own)))
        reached = _nth(own, count)
        fires.append(max(reached, last[step - max_staleness]) if step >= max_staleness else reached)
        by = _until(own, fires[-1])
        fresh += int(np.count_nonzero(by))
        late[step] = ~by
    now = fires[-1].time
    return (fresh + _fresh_though_late(arrivals, late, fires)) / now if now > 0 else 0.0


def _fresh_though_late(arrivals: Any, late: Any, fires: Sequence[_Moment]) -> int:
    """Return how many gradients were too late for their step's round, and fresh in another: those of ranks that were
    late before, and began after the round before that other."""
    steps, ranks = np.nonzero(late[1:] & late[:-1])
    ends, begins = arrivals[steps + 1, ranks], arrivals[steps, ranks]
    in_a_round = ends <= fires[-1].time
    ends, begins, ranks = ends[in_a_round], begins[in_a_round], ranks[in_a_round]
    times = np.array([fire.time for fire in fires])
    begun = np.searchsorted(times, begins, "right")  # rounds that have fired, the one that its own arrival fires too
    ended = np.searchsorted(times, ends, "left")
    ties = np.flatnonzero((times[begun - 1] == begins) | (times[np.minimum(ended, len(times) - 1)] == ends))
    moments = [(fire.time, fire.rank) for fire in fires]
    for tie in ties.tolist():  # at the same moment ranks come in order
        begun[tie] = bisect.bisect_right(moments, (begins[tie], ranks[tie]))
        ended[tie] = bisect.bisect_left(moments, (ends[tie], ranks[tie]))
    return int(np.count_nonzero((begun == ended) & (ended < len(times))))


def _by_rounds(table: Any, count: int, max_staleness: int) -> float:
    """A rank that comes late goes on from the version that there is, and so skips rounds.

    It waits for the next round at its next arrival, then. Ranks are told apart by the version they compute at: those at
    the newest are in the next round when they come, others when they come once more.
    """
    steps, size = table.shape
    ranks = np.arange(size)
    arrivals, taken, version = table[0].copy(), np.zeros(size, dtype=np.intp), np.zeros(size, dtype=np.intp)
    fresh = fired = 0
    while True:
        behind = version < fired
        again = np.flatnonzero(behind & (taken + 1 < steps))
        ready = np.where(behind, np.inf, arrivals)
        ready[again] = arrivals[again] + table[taken[again] + 1, again]
        fires = _nth(ready, count)
        oldest = np.flatnonzero(version <= fired - max_staleness)
        if len(oldest):
            held = _nth(arrivals[oldest], len(oldest))
            fires = max(fires, _Moment(held.time, int(oldest[held.rank])))
        over = np.flatnonzero(behind & (taken + 1 == steps))
        if len(over):  # no more is known of it: what the others would do without it is not what they do
            ends = _nth(arrivals[over], 1)
            if _Moment(ends.time, int(over[ends.rank])) < fires:
                return fresh / ends.time if ends.time > 0 else 0.0
        by = _until(ready, fires)
        late = behind & ~by & _until(arrivals, fires)
        fresh += int(np.count_nonzero(by))
        taken += by.astype(np.intp) + (by & behind) + late
        fired += 1
        arrivals = np.where(late, ready, arrivals)
        version[late] = fired - 1
        free = by
        if late[fires.rank]:  # whoever is late and lets the round fire goes on from it
            free[fires.rank] = True
        version[free] = fired
        if bool((taken[free] == steps).any()):
            return fresh / fires.time if fires.time > 0 else 0.0
        going = ranks[free]
        arrivals[going] = fires.time + table[taken[going], going]
