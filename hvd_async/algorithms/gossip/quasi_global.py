"""Quasi-global momentum: the change of a rank's weights by gossip corrects its optimizer's momentum.

After Lin, Karimireddy, Stich and Jaggi, ICML 2021, Algorithm 1: a momentum computed from the movement of the mixed
weights, not from this rank's gradients only, is close to the mean momentum of all ranks, and costs no communication.
With beta the wrapped optimizer's momentum, eta its learning rate, g_i rank i's gradient:

    local step:   m_i = beta mhat_i + g_i,   x_half = x - eta m_i   (Nesterov: x_half = x - eta (g_i + beta m_i))
    gossip:       x_next, from x_half and the neighbours' messages
    theirs:       d = (x - x_next) / eta,   mhat_i <- mu mhat_i + (1 - mu) d
    here:         c_i <- mu c_i + (1 - mu) k (x_half - x_next) / eta,   mhat_i <- m_i + c_i

Their method also smooths the rank's own steps: if ranks agree, it is a momentum with a memory 1 / (1 - mu) times as
long as the optimizer's, too long for a short training. Here only the effect of gossip is smoothed, so if ranks agree,
it is the optimizer's own momentum. With k = 1 both have the fixed point m_i - mean m = g_i - mean g, where local
momentum has 1 / (1 - beta) times that. If mixing matrices are doubly stochastic, the c_i sum to 0, and the ranks' mean
momentum is that of one optimizer with the gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvd_async.algorithms.gossip.push_sum import Vector

ROUNDING = {4: 2.0**-21, 8: 2.0**-50}
"""Relative change of a weight, by its itemsize, up to which a change by gossip may be rounding error: some units in the
last place. At a rate of 1e-8, at the start of a warm-up, rounding divided by the rate would be as large as a
gradient."""


class Smoothing(NamedTuple):
    """Constants of the correction.

    Attributes:
        strength: k, the factor of the change by gossip.
        memory: mu, the decay of the correction per step, in [0, 1).
    """

    strength: float
    memory: float


class Correction:
    """Correction c of a rank's momentum.

    Args:
        smoothing: k and mu.

    Attributes:
        vector: c after the last step, shape (n,), not changed afterwards; None before the first step since the start
            or a drain.
        rates: learning rates by which the last step's changes were divided, one per part of the weights.
    """

    def __init__(self, smoothing: Smoothing) -> None:
        self._smoothing = smoothing
        self.vector: Vector | None = None
        self.rates: list[float] = []

    def after_step(self, half: Vector, mixed: Vector, parts: Sequence[tuple[int, float]]) -> Vector:
        """Return c after a step, shape (n,), to be added to the momentum.

        Args:
            half: the weights after the wrapped optimizer's update, before mixing, shape (n,); takes ownership.
            mixed: the weights after mixing, shape (n,).
            parts: (elements, rate) of consecutive parts of the weights: a momentum m changes the weights by -rate m. If
                the rate is 0, c is 0 there.
        """
        strength, memory = self._smoothing
        rounding = abs(half)
        rounding *= ROUNDING[half.itemsize]
        half -= mixed
        half *= abs(half) > rounding
        before = self.rates or [0.0] * len(parts)
        # (after a steep fall of the rate, ranks still differ by as much as the old rate has caused)
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
