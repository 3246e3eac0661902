"""Says which ranks hold up the others for good, once, and again when that changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_async.monitor.advice import advice, named, waiting
from hvd_async.monitor.sample import Sample
from hvd_async.monitor.slow_ranks import WINDOWS, Blame, SlowRanks, by_own_waits, by_waits_for
from hvd_async.runtime.log import warn


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
