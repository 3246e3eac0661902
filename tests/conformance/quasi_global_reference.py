"""Quasi-global momentum in float64 NumPy, as a problem for the references of gossip."""

from __future__ import annotations

import numpy as np

from hvd_async.algorithms.gossip.config import SMOOTHING
from tests.conformance.gossip_reference import Problem
from tests.conformance.reference import Array, State


class Corrected:
    """A problem whose optimizers' momenta are corrected, in float64, for the references of gossip.

    What a rank's weights have become since its last update, next to that update, is what gossip has done.
    c <- mu c + (1 - mu) k (half - z) / h;  momentum <- momentum + c;  Keras' velocity is -eta times torch's momentum.
    h is eta, or after a fall what is left of a larger one: h <- max(eta, mu h). A step with eta = 0 ends c.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self.start, self.states = problem, problem.start, problem.states
        self._halves: dict[int, tuple[Array, float]] = {}
        self._corrections = [np.zeros_like(own) for own in problem.start]
        self._held = [0.0] * len(problem.start)
        self._rank, self._z = 0, problem.start[0]

    def gradient(self, z: Array, rank: int, step: int) -> Array:
        self._rank, self._z = rank, z.copy()
        return self._problem.gradient(z, rank, step)

    def update(self, x: Array, g: Array, state: State) -> tuple[Array, State]:
        rate = self._problem.lr(state.t)
        unit = 1.0 if self._problem.framework == "torch" else -rate
        state = state._replace(first=state.first + unit * self._correction(self._rank, self._z, rate))
        x_next, state = self._problem.update(x, g, state)
        self._halves[self._rank] = x_next.copy(), float(x @ self._z / (self._z @ self._z))
        return x_next, state

    def _correction(self, rank: int, z: Array, rate: float) -> Array:
        """Return that of the step before, which had this rate."""
        if rank in self._halves:
            half, weight = self._halves[rank]
            self._held[rank] = max(rate, SMOOTHING.memory * self._held[rank])
            pull = SMOOTHING.strength * (half - weight * z) / self._held[rank] if rate else 0.0
            kept = SMOOTHING.memory * self._corrections[rank] if rate else 0.0 * z
            self._corrections[rank] = kept + (1 - SMOOTHING.memory) * pull
        return self._corrections[rank]
