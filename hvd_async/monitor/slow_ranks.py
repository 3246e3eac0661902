"""Permanent stragglers: the rule that finds them, the warning, and its remedies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvd_async.algorithms.eager.quorum import needed
from hvd_async.algorithms.registry import ALGORITHMS
from hvd_async.monitor.sample import Sample
from hvd_async.runtime.log import warn

# -- the rule: the others wait long for a rank, much longer than for the rest, in several windows in a row; pure -------

BEGIN, END = 0.1, 0.05
"""Shares of the others' time: a rank may be called slow at or above the first, and no longer below the second."""
BEGIN_RATIO, END_RATIO = 2.5, 1.5
"""Likewise, ratios of the others' wait for a rank to their average wait for the remaining ranks."""
WINDOWS = 3
"""Consecutive windows in which a rank must stand out to be called slow, or must not, to be cleared."""


class Blame(NamedTuple):
    """Delay of the other ranks by one rank in a window.

    Attributes:
        share: share of the others' time that they wait for it.
        ratio: their wait for it over their average wait for the remaining ranks. If ranks report their own waits: the
            mean wait of the remaining ranks over its own.
    """

    share: float
    ratio: float


def by_waits_for(shares: Sequence[float]) -> list[Blame]:
    """Return each rank's blame, from the shares of their time that the other ranks wait for it."""
    total, rest = sum(shares), max(1, len(shares) - 1)
    return [Blame(share, _ratio(share, max(0.0, total - share) / rest)) for share in shares]


def by_own_waits(shares: Sequence[float]) -> list[Blame]:
    """Return each rank's blame, from the share of its own time that it waits. If neighbours wait for each other, all
    ranks except the slow one end up waiting."""
    total, rest = sum(shares), max(1, len(shares) - 1)
    means = [max(0.0, total - share) / rest for share in shares]
    return [Blame(max(0.0, mean - own), _ratio(mean, own)) for own, mean in zip(shares, means, strict=True)]


def _ratio(one: float, other: float) -> float:
    if one <= 0.0:
        return 0.0
    return one / other if other > 0.0 else math.inf


class SlowRanks:
    """Slow ranks, by place, updated after each window.

    Args:
        size: number of ranks.
        windows: consecutive windows after which a rank becomes slow, or is cleared.

    Attributes:
        slow: places of the slow ranks.
    """

    def __init__(self, size: int, windows: int = WINDOWS) -> None:
        self._windows = windows
        self._against = [0] * size
        """By place, the number of last consecutive windows that contradict the rank's current state."""
        self.slow: frozenset[int] = frozenset()

    def judge(self, blames: Sequence[Blame]) -> bool:
        """Judge a window; return whether the slow ranks have changed."""
        before = self.slow
        for place, blame in enumerate(blames):
            if place in before:
                differs = blame.share < END or blame.ratio < END_RATIO
            else:
                differs = blame.share >= BEGIN and blame.ratio > BEGIN_RATIO
            self._against[place] = self._against[place] + 1 if differs else 0
            if self._against[place] >= self._windows:
                self._against[place] = 0
                self.slow ^= {place}
        return self.slow != before


# -- text of the warning; pure -----------------------------------------------------------------------------------------


def named(places: Sequence[int], ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the ranks at these places with their hosts: "rank 5 on host n3 and rank 7 on host n4"."""
    by_host: dict[str, list[str]] = {}
    for place in sorted(places):
        by_host.setdefault(hosts[place], []).append(str(ranks[place]))
    return " and ".join(
        f"rank{'s' if len(some) > 1 else ''} {', '.join(some)} on host {host}" for host, some in by_host.items()
    )


def advice(settings: Mapping[str, Any], size: int, slow: int) -> str:
    """Return the options that would spare the other ranks these waits; "" if there are none.

    Args:
        settings: of the optimizer.
        size: number of ranks that share it.
        slow: number of slow ranks.
    """
    match ALGORITHMS[settings["algorithm"]].waits_for:
        case "quorum":
            return _advice_on_rounds(settings, size, slow)
        case "neighbours" | "period" | "all":
            return (
                'GossipOptimizer(algorithm="adpsgd") waits only after max_local_steps without an averaging '
                "(it loses accuracy where ranks see different classes)"
            )
        case "none" if settings.get("max_local_steps"):
            return f"a higher max_local_steps (now {settings['max_local_steps']}) would make such waits rarer"
    return ""


def _advice_on_rounds(settings: Mapping[str, Any], size: int, slow: int) -> str:
    quorum, local_size = settings["quorum"], settings.get("local_size", 1)
    parties = size // local_size
    always = quorum in ("solo", "auto")
    fires_without = always if isinstance(quorum, str) else needed(quorum, parties) <= parties - slow
    if settings["pace"] == "rounds":
        if fires_without:
            return f"a higher max_staleness (now {settings['max_staleness']}) would have rounds wait for it later"
        return 'quorum="solo" would let rounds start without it'
    changes = [] if fires_without and settings["max_staleness"] else ['quorum="solo"']
    changes += ['pace="rounds"', *(["max_staleness=16"] if not settings["max_staleness"] else [])]
    others = "the other hosts" if local_size > 1 else "the others"
    return f"{', '.join(changes)} would let it contribute fewer gradients instead of delaying {others}"


# -- the warning -------------------------------------------------------------------------------------------------------


class Warner:
    """Judge of windows of samples, or of the reports of all ranks, which warns when the set of slow ranks changes.

    Args:
        ranks: by place.
        steps: minimum number of steps of a window.
        windows: see ``SlowRanks``.
    """

    def __init__(self, ranks: Sequence[int], steps: int, windows: int = WINDOWS) -> None:
        self._ranks, self._steps = ranks, steps
        self._rule = SlowRanks(len(ranks), windows)
        self._begin_window()

    def _begin_window(self) -> None:
        self._waited = [0.0] * len(self._ranks)
        """Mean seconds that the others have waited for each rank, by place."""
        self._taken, self._seconds = 0, 0.0

    def add(self, sample: Sample, hosts: Sequence[str], settings: Mapping[str, Any]) -> None:
        """Add a sample to the window, and judge the window if it is full.

        Args:
            sample: with the waits of all ranks.
            hosts: by place.
            settings: of the optimizer.
        """
        waited = [share * sample.seconds for share in sample.shares()]
        self._waited = [a + b for a, b in zip(self._waited, waited, strict=True)]
        self._taken, self._seconds = self._taken + sample.steps, self._seconds + sample.seconds
        if self._taken >= self._steps and self._seconds > 0.0:
            blames = by_waits_for([seconds / self._seconds for seconds in self._waited])
            step_s = self._seconds / self._taken
            self._begin_window()
            self._judge(blames, step_s, hosts, settings)

    def compare(
        self, shares: Sequence[float], step_s: float, hosts: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        """Judge the share of its time that each rank waits; ``step_s``: seconds of a step."""
        self._judge(by_own_waits(shares), step_s, hosts, settings)

    def _judge(self, blames: Sequence[Blame], step_s: float, hosts: Sequence[str], settings: Mapping[str, Any]) -> None:
        if not self._rule.judge(blames):
            return
        slow = sorted(self._rule.slow)
        if not slow:
            warn("the ranks do not wait for one of them more than for others any more")
            return
        share = min(1.0, sum(blames[place].share for place in slow))
        wait_ms, who = 1e3 * share * step_s, named(slow, self._ranks, hosts)
        hint = advice(settings, len(self._ranks), len(slow))
        text = f"the other ranks wait {share:.0%} of their time, {wait_ms:.3g} ms a step, for {who}"
        warn(f"{text}; {hint}" if hint else text)
