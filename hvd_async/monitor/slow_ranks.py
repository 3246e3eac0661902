"""Ranks that hold up the others for good: how one is found, the warning, and what would help."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_async.algorithms.eager.quorum import needed
from hvd_async.algorithms.registry import ALGORITHMS
from hvd_async.monitor.sample import Sample
from hvd_async.runtime.log import warn

# -- the rule (pure) ---------------------------------------------------------------------------------------------------
# The rule by which a rank is called slow for good: others wait for it much, far more than for the rest, and again and
# again. Pure.


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


# -- words of the warning (pure) ---------------------------------------------------------------------------------------


def named(places: Sequence[int], ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the ranks at these places with their hosts: "rank 5 on host n3 and rank 7 on host n4"."""
    by_host: dict[str, list[str]] = {}
    for place in sorted(places):
        by_host.setdefault(hosts[place], []).append(str(ranks[place]))
    return " and ".join(
        f"rank{'s' if len(some) > 1 else ''} {', '.join(some)} on host {host}" for host, some in by_host.items()
    )


def waiting(share: float, step_s: float, whose: str) -> str:
    """Return how much the others wait.

    Args:
        share: of their time.
        step_s: seconds of a step, as they are.
        whose: the ranks that are waited for, in words.
    """
    return f"the other ranks wait {share:.0%} of their time, {1e3 * share * step_s:.3g} ms a step, for {whose}"


def advice(settings: Mapping[str, Any], size: int, slow: int) -> str:
    """Return what would spare the other ranks these waits; "" where nothing of this library's would.

    Args:
        settings: of the optimizer.
        size: how many ranks share it.
        slow: how many of them are slow.
    """
    match ALGORITHMS[settings["algorithm"]].waits_for:
        case "quorum":
            return _of_rounds(settings, size, slow)
        case "neighbours" | "period" | "all":
            return (
                'GossipOptimizer(algorithm="adpsgd") waits for nobody, but after max_local_steps without an averaging '
                "(it loses accuracy where ranks see different classes)"
            )
        case "nobody" if settings.get("max_local_steps"):
            return f"a higher max_local_steps (now {settings['max_local_steps']}) would make such waits rarer"
    return ""


def _of_rounds(settings: Mapping[str, Any], size: int, slow: int) -> str:
    """Return it for partial allreduce."""
    quorum, by_host = settings["quorum"], settings.get("local_size", 1) > 1
    parties = size // settings.get("local_size", 1)
    without = _starts_without(quorum, parties, slow)
    if settings["pace"] == "rounds":
        late = f"a higher max_staleness (now {settings['max_staleness']}) would have rounds wait for it later"
        return late if without else 'quorum="solo" would let rounds start without it'
    whom = "the other hosts" if by_host else "the others"
    changes = [] if without and settings["max_staleness"] else ['quorum="solo"']
    changes += ['pace="rounds"', *(["max_staleness=16"] if not settings["max_staleness"] else [])]
    return f"{', '.join(changes)} would let it give fewer gradients in place of holding up {whom}"


def _starts_without(quorum: Any, parties: int, slow: int) -> bool:
    """Whether rounds start without the slow ranks, once these need not do as many steps as the others."""
    if isinstance(quorum, str):
        return quorum in ("solo", "auto")
    return needed(quorum, parties) <= parties - slow


# -- the warning -------------------------------------------------------------------------------------------------------
# Says which ranks hold up the others for good, once, and again when that changes.


class Warner:
    """Judges windows of samples, or of what all ranks have reported.

    Args:
        size: how many ranks there are.
        steps: of a window of samples, at the least.
        windows: as of ``SlowRanks``.
    """

    def __init__(self, size: int, steps: int, windows: int = WINDOWS) -> None:
        self._rule, self._steps = SlowRanks(size, windows), steps
        self._begin_window()

    def _begin_window(self) -> None:
        self._shares: list[float] = []
        self._taken, self._seconds = 0, 0.0

    def add(self, sample: Sample) -> tuple[list[Blame], float] | None:
        """Take in a sample whose waits are those of all ranks.

        Returns:
            What ``say`` needs, where other ranks are slow now than before: the blames of the window that has shown it,
            and its seconds a step.
        """
        if not self._shares:
            self._shares = [0.0] * len(sample.waits)
        weighted = [share * sample.seconds for share in sample.shares()]
        self._shares = [a + b for a, b in zip(self._shares, weighted, strict=True)]
        self._taken, self._seconds = self._taken + sample.steps, self._seconds + sample.seconds
        if self._taken < self._steps or self._seconds <= 0.0:
            return None
        blames = by_waits_for([share / self._seconds for share in self._shares])
        step_s = self._seconds / self._taken
        self._begin_window()
        return (blames, step_s) if self._rule.judge(blames) else None

    def compare(self, waits: Sequence[float]) -> list[Blame] | None:
        """Take in the share of its time that each rank waits; returns the blames where other ranks are slow now."""
        blames = by_own_waits(waits)
        return blames if self._rule.judge(blames) else None

    def say(
        self, blames: Sequence[Blame], step_s: float, ranks: Sequence[int], hosts: Sequence[str], settings: Any
    ) -> None:
        """Write the warning to stderr.

        Args:
            blames: by place.
            step_s: seconds of a step.
            ranks, hosts: by place.
            settings: of the optimizer.
        """
        slow = sorted(self._rule.slow)
        if not slow:
            warn("the ranks do not wait for one of them more than for others any more")
            return
        share = min(1.0, sum(blames[place].share for place in slow))
        told = waiting(share, step_s, named(slow, ranks, hosts))
        hint = advice(settings, len(ranks), len(slow))
        warn(f"{told}{f'; {hint}' if hint else ''}")
