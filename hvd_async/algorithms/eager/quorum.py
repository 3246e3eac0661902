"""Rules for the start of a round: its quorum, how ``"auto"`` learns one, and the grace that follows.

Pure: times are arguments.

Sources: solo and majority are those of Li et al., "Taming Unbalanced Training Workloads in Deep Learning with Partial
Collective Operations", PPoPP 2020 (majority: an initiator drawn each round from a seed that all ranks share, so that
on average half of the ranks are in the round). A count or a fraction is a real quorum; "all" is synchronous.
"""

from __future__ import annotations

import functools
import math
import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

# -- quorums -----------------------------------------------------------------------------------------------------------


Quorum = str | int | float
NAMES = ("solo", "majority", "all", "auto")


def check_quorum(quorum: Quorum, size: int | None, whom: str = "ranks") -> None:
    """Check that rounds of ``size`` ranks or hosts (None: not known yet) can have a quorum.

    Raises:
        ValueError: it is not "solo", "majority", "all", "auto", a count in 1..size, or a fraction in (0, 1].
    """
    if isinstance(quorum, bool) or not isinstance(quorum, str | int | float):
        valid = False
    elif isinstance(quorum, str):
        valid = quorum in NAMES
    elif isinstance(quorum, int):
        valid = quorum >= 1 and (size is None or quorum <= size)
    else:
        valid = 0.0 < quorum <= 1.0
    if not valid:
        most = "" if size is None else f" to {size}"
        raise ValueError(
            f'quorum must be "solo", "majority", "all", "auto", a number of {whom} from 1{most}, or a fraction '
            f"in (0, 1] such as 0.75, got {quorum!r}"
        )


def parse_quorum(text: str) -> Quorum:
    """Return a quorum from a command line: a name, "3" or "0.75" (checked later, when the size is known)."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def needed(quorum: int | float, size: int) -> int:
    """Return how many of ``size`` ranks a count or a fraction requires."""
    return quorum if isinstance(quorum, int) else math.ceil(quorum * size - 1e-9)


def waits_for_all(quorum: Quorum, size: int) -> bool:
    """Return whether no round starts unless all ``size`` ranks or hosts have arrived."""
    if isinstance(quorum, str):
        return quorum == "all" or size == 1
    return needed(quorum, size) >= size


def initiator(round: int, seed: int, active: Collection[int], ranks: Sequence[int]) -> int:
    """Return majority's initiator of a round: the first active rank of a permutation drawn from (seed, round).

    With a permutation, a rank that finishes changes only the draws that it would have won.
    """
    return next(rank for rank in _order(round, seed, tuple(ranks)) if rank in active)


@functools.lru_cache(maxsize=64)
def _order(round: int, seed: int, ranks: tuple[int, ...]) -> list[int]:
    order = list(ranks)
    random.Random(f"{seed}:{round}").shuffle(order)
    return order


@dataclass
class RoundQuorum:
    """Quorum of a round, for all its buckets. If ranks step host by host, a host is represented by its first rank.

    Args:
        quorum: a quorum that ``check_quorum`` accepts, with a number instead of "auto".
        round: number of the round.
        ranks: all ranks that share the optimizer.
        seed: seed of majority's draw.
        why: reason for this quorum, if it was chosen automatically.
        whose: "the host of " if hosts are counted, for messages.
    """

    quorum: Quorum
    round: int
    ranks: Sequence[int] = field(repr=False)
    seed: int
    why: str = ""
    whose: str = ""

    def __post_init__(self) -> None:
        alone = self.quorum in ("solo", "majority")
        self._least = (
            1 if alone else len(self.ranks) if isinstance(self.quorum, str) else needed(self.quorum, len(self.ranks))
        )
        self._drawn: int | None = None

    def initiator(self, arrived: Collection[int], active: Collection[int]) -> int | None:
        """Return the round's initiator if it may start. Called at each arrival, so its cost does not grow with the
        ranks.

        Args:
            arrived: the active ranks that have arrived for this round, in order of arrival.
            active: the ranks that have not finished; a quorum never requires more than these.

        Returns:
            The rank whose hyperparameters the round takes, if possible; None if it may not start yet.
        """
        present = len(arrived)
        if not present or (present < self._least and present < len(active)):
            return None
        if self.quorum != "majority":
            return next(iter(arrived))
        drawn = self.drawn(active)
        return drawn if drawn in arrived else None

    def least(self, active: int) -> int:
        """Return how many ranks must arrive before the round may start, if ``active`` ranks have not finished."""
        return min(self._least, active)

    def drawn(self, active: Collection[int]) -> int:
        """Return majority's initiator; drawn again only if the previous one has finished."""
        if self._drawn is None or self._drawn not in active:
            self._drawn = initiator(self.round, self.seed, active, self.ranks)
        return self._drawn

    def reason(self, arrived: Collection[int], active: Collection[int]) -> str:
        """Return why the round may start, as a human-readable text."""
        present, left = len(arrived), len(active)
        if self.quorum == "solo":
            return f"solo: {self.whose}rank {next(iter(arrived))} came first"
        if self.quorum == "majority":
            return f"majority: {self.whose}rank {self.drawn(active)} was drawn; {present} of {left} are in"
        text = f"quorum: {present} of {left} are in, {min(self._least, left)} needed"
        return f"{text} ({self.why})" if self.why else text


# -- quorum="auto" -----------------------------------------------------------------------------------------------------
# The count of ranks with the most fresh gradients per second, learned from arrival times.
#
# The time that a rank needs from the moment it is free (its round started, or it arrived too late to wait) to its next
# arrival does not depend on the quorum. So the durations of the last steps are replayed under each count, by the rules
# of the state machine, and the best count is chosen.
#
# A replay is exact where no two ranks arrive at the same instant. It processes round after round with arrays over all
# ranks, so that thousands of ranks do not delay the coordinator. With more than 500 ranks it covers fewer steps
# (``ELEMENTS``), so it may not reach a staleness bound of more rounds than that; but each step then shows more of the
# differences between ranks.


WINDOW = 48
"""Number of steps per rank that are remembered."""
LEARN = 2
"""Number of steps per rank that a choice needs; until then rounds are synchronous."""
RENEW = 8
"""Number of rounds between two choices."""
MARGIN = 1.03
"""Factor by which another count must be better, so that noise does not change the choice back and forth."""
CANDIDATES = 9
"""Maximum number of counts to try."""
ELEMENTS = 24_000
"""Maximum number of steps to replay, summed over ranks; but at least ``FEWEST`` per rank."""
FEWEST = 10


class Choice(NamedTuple):
    """A count of ranks, and why it was chosen."""

    quorum: int
    why: str


class AutoQuorum:
    """Quorum that is chosen automatically, from the durations of steps.

    Args:
        ranks: the ranks that share the optimizer.
        max_staleness: staleness bound, rounds.
        pace: "steps" or "rounds".
    """

    def __init__(self, ranks: Sequence[int], max_staleness: int, pace: str) -> None:
        self._max_staleness, self._pace = max_staleness, pace
        self._free: dict[int, float] = {}
        self._waiting: set[int] = set()
        self._durations: dict[int, deque[float]] = {rank: deque(maxlen=WINDOW) for rank in ranks}
        self._choice = Choice(len(ranks), "auto: learning how long the ranks take")
        self._renew_at = 0
        self._notice: str | None = self._choice.why

    def arrived(self, rank: int, now: float, late: bool) -> None:
        """Record that a rank has handed over all of a step at ``now`` (s); ``late``: after the start of its round, so
        that it does not wait."""
        if rank in self._free:
            self._durations[rank].append(now - self._free.pop(rank))
        if late:
            self._free[rank] = now
        else:
            self._waiting.add(rank)

    def fired(self, now: float) -> None:
        """Record that all buckets of a round have started by ``now`` (s), which frees the ranks that waited for it."""
        self._free.update(dict.fromkeys(self._waiting, now))
        self._waiting.clear()

    def interrupted(self) -> None:
        """Ignore the time until the next arrivals, in which ranks do something else (a drain)."""
        self._free.clear()
        self._waiting.clear()

    def choose(self, round_: int, active: Collection[int] | None = None) -> Choice:
        """Return the count for a round, renewed every ``RENEW`` rounds from the durations of ``active`` ranks (None:
        all)."""
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
        """Return a text on the latest change; None if there was no change since the last call."""
        notice, self._notice = self._notice, None
        return notice

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
            self._notice = why
        self._choice = Choice(best, why)


def candidates(size: int) -> list[int]:
    """Return the counts to try for ``size`` ranks: all, or ``CANDIDATES`` spread evenly, both ends included."""
    if size <= CANDIDATES:
        return list(range(1, size + 1))
    spread = {1 + round(i * (size - 1) / (CANDIDATES - 2)) for i in range(CANDIDATES - 1)}
    return sorted(spread | {size - 1})


def fresh_rate(durations: Any, count: int, max_staleness: int, pace: str = "steps") -> float:
    """Return the gradients of staleness 0 per second that a quorum of ``count`` ranks would have given.

    Args:
        durations: durations of each rank's steps (s), shape (ranks, steps).
        count: number of ranks, at least 1.
        max_staleness: staleness bound, rounds.
        pace: "steps" or "rounds".
    """
    table = np.ascontiguousarray(np.asarray(durations, dtype=np.float64).T)
    return (_by_rounds if pace == "rounds" else _by_steps)(table, count, max_staleness)


def _by_steps(table: Any, count: int, max_staleness: int) -> float:
    """Replay pace "steps": a rank's t-th arrival is for round t, in time or late.

    A rank arrives for step t + 1 one duration after the start of round t if it was in that round, else one duration
    after its arrival for step t. So one array per round describes all ranks. All arrivals in time are fresh.
    """
    steps, fires = len(table), np.empty(len(table))
    arrivals, late = np.empty_like(table), np.empty(table.shape, dtype=bool)
    for step in range(steps):
        before = np.where(late[step - 1], arrivals[step - 1], fires[step - 1]) if step else 0.0
        arrivals[step] = own = before + table[step]
        held = arrivals[step - max_staleness].max() if step >= max_staleness else 0.0
        fires[step] = max(np.partition(own, count - 1)[count - 1], held)
        late[step] = own > fires[step]
    fresh = int(np.count_nonzero(~late)) + _fresh_though_late(arrivals, late, fires)
    return fresh / float(fires[-1]) if fires[-1] > 0 else 0.0


def _fresh_though_late(arrivals: Any, late: Any, fires: Any) -> int:
    """Return how many gradients were too late for their step's round, but fresh in a later round: gradients of ranks
    that had been late before too, and that began after the round before this later one."""
    steps, ranks = np.nonzero(late[1:] & late[:-1])
    begun = np.searchsorted(fires, arrivals[steps, ranks], "right")  # (with one that its own arrival starts)
    ended = np.searchsorted(fires, arrivals[steps + 1, ranks], "left")
    return int(np.count_nonzero((begun == ended) & (ended < len(fires))))


def _by_rounds(table: Any, count: int, max_staleness: int) -> float:
    """Replay pace "rounds": a late rank continues from the newest version, and so skips rounds.

    It then waits for the next round at its next arrival. Ranks differ in the version that they compute at: ranks at the
    newest version are in the next round at their next arrival, the others at the arrival after that.
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
        held = arrivals[version <= fired - max_staleness].max(initial=0.0)
        fire = max(float(np.partition(ready, count - 1)[count - 1]), float(held))
        # (the later steps of a rank that is over are unknown, and without it the others would behave differently)
        over = float(arrivals[behind & (taken + 1 == steps)].min(initial=np.inf))
        if over < fire:
            return fresh / over if over > 0 else 0.0
        by = ready <= fire
        late = behind & ~by & (arrivals <= fire)
        fresh += int(np.count_nonzero(by))
        taken += by.astype(np.intp) + (by & behind) + late
        fired += 1
        free = by | (late & (arrivals == fire))  # (a late rank whose arrival starts the round continues from it)
        arrivals = np.where(late, ready, arrivals)
        version[late] = fired - 1
        version[free] = fired
        if bool((taken[free] == steps).any()):
            return fresh / fire if fire > 0 else 0.0
        going = ranks[free]
        arrivals[going] = fire + table[taken[going], going]


# -- grace -------------------------------------------------------------------------------------------------------------
# Grace is the time that a round waits for more ranks after its quorum is reached.
#
# ``grace="auto"``: until the ranks that usually arrive right after the quorum have arrived, at most 5% of the time
# between two rounds. Without grace, a rank that is a millisecond behind the first is one round late in every round.


AUTO = "auto"
SHARE = 0.05
"""Longest wait, as a share of the time between two rounds."""
GRACE_WINDOW = 16
"""Number of rounds to learn from."""
SETTLED = 4
"""Number of rounds after which the arrivals of a round are counted; later arrivals are not near the quorum."""


@dataclass
class _Arrivals:
    """Arrivals for a round: the time until which they count, and their number."""

    until: float
    count: int = 0


class Grace:
    """Grace of an optimizer's rounds.

    Args:
        given: seconds, or "auto".
    """

    def __init__(self, given: float | str) -> None:
        self._fixed = None if isinstance(given, str) else float(given)
        self._fired_at: float | None = None
        self._intervals: deque[float] = deque(maxlen=GRACE_WINDOW)
        self._open: dict[int, _Arrivals] = {}
        self._counts: deque[int] = deque(maxlen=GRACE_WINDOW)
        self._longest = self._usual = 0.0

    def seconds(self, arrived: int) -> float:
        """Return how long (s) a round waits after its quorum is reached, with ``arrived`` ranks (or hosts) so far."""
        if self._fixed is not None:
            return self._fixed
        return self._longest if arrived < self._usual else 0.0

    def quorum_reached(self, round_: int, arrived: int, now: float) -> None:
        """Record that a round's quorum is reached at ``now`` (s), with ``arrived`` ranks (or hosts)."""
        if self._fixed is None:
            self._open[round_] = _Arrivals(now + self._longest, arrived)

    def arrived(self, round_: int, now: float) -> None:
        """Record one more arrival for a round."""
        known = self._open.get(round_)
        if known is not None and now <= known.until:
            known.count += 1

    def fired(self, round_: int, now: float) -> None:
        """Record that a round has started at ``now`` (s)."""
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
        """Ignore the time until the next round, in which ranks do something else (a drain)."""
        self._fired_at = None
        self._open.clear()


def _median(values: deque[float] | deque[int]) -> float:
    """Return the lower median; 0 for no values."""
    return float(sorted(values)[(len(values) - 1) // 2]) if values else 0.0
