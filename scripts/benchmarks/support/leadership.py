"""Who led whom, when: pulls on a training's clock, and their picture."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import plot

ALL = -1
"""In place of a group: all ranks."""
Pull = Sequence[Any]
"""(Seconds, group or -1 for all, leader.)"""


@dataclass
class Clock:
    """A training's clock, which stops between stretches.

    Attributes:
        now: seconds of all stretches together.
    """

    now: float = 0.0
    _begun: list[float] = field(default_factory=list)
    _before: list[float] = field(default_factory=list)

    def went(self, unix: float, seconds: float) -> None:
        """A stretch began at a Unix time and took so long."""
        self._begun.append(unix)
        self._before.append(self.now)
        self.now += seconds

    def at(self, unix: float) -> float:
        """Return what the clock showed then."""
        number = bisect.bisect_right(self._begun, unix) - 1
        if number < 0:
            return 0.0
        end = self._before[number + 1] if number + 1 < len(self._before) else self.now
        return min(self._before[number] + unix - self._begun[number], end)


class Reign(NamedTuple):
    """A rank led a group, or all, for so long."""

    group: int
    leader: int
    start: float
    end: float


def merged(histories: Sequence[Sequence[Pull]], size: int) -> list[Pull]:
    """The pulls of all groups, each once, in order.

    Args:
        histories: of all ranks; each knows the pulls of its own group, and of all.
        size: ranks of a group.
    """
    found = [pull for pull in histories[0] if pull[1] == ALL]
    for rank in range(0, len(histories), size):
        found += [pull for pull in histories[rank] if pull[1] != ALL]
    return sorted(found)


def reigns(pulls: Sequence[Pull], end: float) -> list[Reign]:
    """Who led whom from when to when: from one pull of a group to the next that another leads."""
    found = []
    for group in sorted({pull[1] for pull in pulls}):
        mine = [pull for pull in pulls if pull[1] == group]
        start, leader = mine[0][0], mine[0][2]
        for at, _, other in [*mine[1:], (end, group, None)]:
            if other != leader:
                found.append(Reign(group, leader, start, at))
                start, leader = at, other
    return found


def shares(pulls: Sequence[Pull], group: int = ALL) -> dict[int, float]:
    """Return the share of a group's pulls, or those of all, that each rank led."""
    counts = Counter(pull[2] for pull in pulls if pull[1] == group)
    return {leader: count / counts.total() for leader, count in sorted(counts.items())}


def draw(axes: Any, pulls: Sequence[Pull], ranks: int, size: int, end: float, late: int | None = None) -> None:
    """A line a rank: below when it led its group, above when it led all; at the right its share of those pulls.

    Args:
        axes: matplotlib's.
        pulls: see ``merged``.
        ranks, size: of the job, of a group.
        end: seconds.
        late: the rank that is delayed.
    """
    grouped = size < ranks
    fills = (plot.COLOURS[2], plot.COLOURS[3])
    for rank in range(ranks):
        group = rank // size
        if grouped:
            axes.axhspan(rank - 0.5, rank + 0.5, color="#000000", alpha=0.05 * (group % 2), linewidth=0)
        axes.axhline(rank - 0.5, color="#999999", linewidth=1.2 if rank % size == 0 and rank else 0.3)
    for reign in reigns(pulls, end):
        whole = reign.group == ALL
        if not grouped and not whole:
            continue
        look = {"facecolor": plot.COLOURS[6] if whole else fills[reign.group % 2]}
        if not whole:
            look["hatch"] = ("", "////")[reign.group % 2]
        # rank 0 is at the top, where y is least
        place = (reign.leader - 0.42, 0.40) if whole else (reign.leader + 0.04, 0.36)
        axes.broken_barh([(reign.start, reign.end - reign.start)], place, edgecolor="black", linewidth=0.3, **look)
    led, beside = shares(pulls), {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 9}
    for rank in range(ranks):
        axes.text(1.01, rank, f"{led.get(rank, 0.0):.0%}", **beside)
    names = [f"rank {rank}{' (late)' if rank == late else ''}" for rank in range(ranks)]
    axes.set_yticks(range(ranks), names)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(0, end)
    edge = {"edgecolor": "black", "linewidth": 0.3}
    axes.fill([], [], facecolor=plot.COLOURS[6], label="led all ranks (at the right: of how many pulls)", **edge)
    if grouped:
        axes.fill([], [], facecolor=fills[0], label="led its group", **edge)
        axes.fill([], [], facecolor=fills[1], hatch="////", label="led its group (every second group)", **edge)
