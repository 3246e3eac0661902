"""When targets are reached, which learning rate is best, and which arm to take. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from .intervals import Interval, mean_interval

Curve = Sequence[Sequence[float]]
"""(Seconds, accuracy) of each look at a training."""
LOSS = 0.01
"""Accuracy that an arm to take may lose against the synchronous one, with its whole interval."""


def reached_at(curve: Curve, target: float) -> float:
    """Seconds until a target is reached: between two looks in proportion; infinite if none found it reached."""
    if curve[0][1] >= target:
        return curve[0][0]
    for (before, low), (at, high) in itertools.pairwise(curve):
        if high >= target:
            return before + (at - before) * (target - low) / (high - low)
    return math.inf


def best_rate(scores: Mapping[float, float]) -> float:
    """The rate of the best score; of several the lowest."""
    return max(sorted(scores), key=lambda rate: scores[rate])


def on_edge(rate: float, tried: Collection[float]) -> bool:
    """Return whether a rate is the lowest or highest of several: a better one may lie beyond."""
    return len(set(tried)) > 1 and rate in (min(tried), max(tried))


class Candidate(NamedTuple):
    """An arm under a kind of imbalance.

    Attributes:
        arm: its name.
        seconds: until the higher target, of each seed.
        loss: its accuracy less the synchronous one's, of the same seeds.
        rival: whether it is another library's.
    """

    arm: str
    seconds: Sequence[float]
    loss: Interval
    rival: bool

    @property
    def median(self) -> float:
        """Seconds until both targets; infinite if half of the seeds never reached them."""
        return statistics.median(self.seconds)

    @property
    def fit(self) -> bool:
        """Whether it may be recommended."""
        return math.isfinite(self.median) and self.loss.low >= -LOSS


class Choice(NamedTuple):
    """A recommendation.

    Attributes:
        taken: the arm that reaches both targets soonest, of those that lose no accuracy.
        level: others of these that the seeds do not tell apart from it.
        rival: the soonest of the others' libraries; None if none of them is fit.
        ours: the soonest of ours; None likewise.
    """

    taken: Candidate
    level: list[Candidate]
    rival: Candidate | None
    ours: Candidate | None


def choose(candidates: Sequence[Candidate]) -> Choice | None:
    """Return what to take; None if no arm is fit."""
    fit = sorted((each for each in candidates if each.fit), key=lambda each: each.median)
    if not fit:
        return None
    taken, *others = fit
    return Choice(
        taken,
        [each for each in others if level(taken.seconds, each.seconds)],
        next((each for each in fit if each.rival), None),
        next((each for each in fit if not each.rival), None),
    )


def level(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether the seeds leave open who is sooner: by the 95% interval of their differences, of those seeds in
    which both reached the target."""
    pairs = [b - a for a, b in zip(first, second, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not pairs:
        return True
    found = mean_interval(pairs)
    return found.low <= 0.0 <= found.high
