"""Quasi-global momentum's equations, pure: what gossip does to a rank's weights corrects its optimizer's momentum.

After Lin, Karimireddy, Stich and Jaggi, ICML 2021, Algorithm 1: a momentum that is made of how far the mixed weights
have moved, and not of this rank's gradients alone, is nearly that of all ranks, and costs no bytes. With beta the
wrapped optimizer's momentum, eta its learning rate, g_i rank i's gradient:

    local step:   m_i = beta mhat_i + g_i,   x_half = x - eta m_i   (Nesterov: x_half = x - eta (g_i + beta m_i))
    gossip:       x_next, of x_half and of what the neighbours have sent
    theirs:       d = (x - x_next) / eta,   mhat_i <- mu mhat_i + (1 - mu) d
    here:         c_i <- mu c_i + (1 - mu) k (x_half - x_next) / eta,   mhat_i <- m_i + c_i

Theirs smooths the rank's own steps too: where ranks agree it is a momentum whose memory is 1 / (1 - mu) times as long
as the optimizer's, which a short training has no time for. Here only what gossip adds is smoothed, so where ranks agree
it is the optimizer's own momentum. With k = 1 both rest at m_i - mean m = g_i - mean g, where local momentum rests at
1 / (1 - beta) times that. Where mixing matrices are doubly stochastic the c_i sum to 0, and the ranks' mean momentum is
beta times itself plus the mean gradient: that of one optimizer with all ranks' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvd_async.algorithms.gossip.push_sum import Vector

ROUNDING = {4: 2.0**-21, 8: 2.0**-50}
"""The part of a weight up to which what gossip changes may be rounding, by bytes of a weight: some units in its last
place. Where a rate is 1e-8, at the start of a warm-up, rounding over the rate would be as large as a gradient."""


class Smoothing(NamedTuple):
    """How an algorithm's correction follows what gossip does.

    Attributes:
        strength: k, how much of it counts.
        memory: mu, the part of the correction that stays from step to step, in [0, 1).
    """

    strength: float
    memory: float


class Correction:
    """A rank's correction of its momentum, c.

    Args:
        smoothing: k and mu.

    Attributes:
        vector: c after the last step, shape (n,), which is not changed any more; None: there was no step yet since the
            start or a drain.
        rates: those that the last step's changes were divided by, one a part of the weights.
    """

    def __init__(self, smoothing: Smoothing) -> None:
        self._smoothing = smoothing
        self.vector: Vector | None = None
        self.rates: list[float] = []

    def after_step(self, half: Vector, mixed: Vector, parts: Sequence[tuple[int, float]]) -> Vector:
        """Return c after a step, which is to be added to the momentum.

        Args:
            half: the weights after the wrapped optimizer's update, before they were mixed; it is given away.
            mixed: those after that.
            parts: (elements, rate) of the weights' parts, one after the other: a momentum of m moves weights by
                -rate m. Where the rate is 0 it moves nothing: c is 0 there.
        """
        strength, memory = self._smoothing
        rounding = abs(half)
        rounding *= ROUNDING[half.itemsize]
        half -= mixed
        half *= abs(half) > rounding
        before = self.rates or [0.0] * len(parts)
        # (after a steep fall of the rate the ranks are still as far apart as the old one has made them)
        self.rates = [max(abs(rate), memory * old) for (_, rate), old in zip(parts, before, strict=True)]
        start = 0
        for (elements, rate), held in zip(parts, self.rates, strict=True):
            part = half[start : start + elements]
            part *= (1.0 - memory) * strength / (held if rate > 0 else -held) if rate else 0.0
            if self.vector is not None and rate:
                part += memory * self.vector[start : start + elements]
            start += elements
        self.vector = half
        return half
