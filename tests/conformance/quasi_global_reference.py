"""Quasi-global momentum in float64 NumPy, as a problem for the references of gossip."""

from __future__ import annotations

import numpy as np

from hvd_async.algorithms.gossip.config import SMOOTHING
from tests.conformance.gossip_reference import Problem
from tests.conformance.reference import Array, State


class Corrected:
    """A problem whose optimizers' momenta are corrected, in float64, for the references of gossip.

    What a rank's weights have become since its last update, next to that update, is what gossip has done.
    c <- mu c + (1 - mu) k (half - z) / eta;  momentum <- momentum + c;  Keras' velocity is -eta times torch's momentum.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self.start, self.states = problem, problem.start, problem.states
        self._halves: dict[int, tuple[Array, float]] = {}
        self._corrections = [np.zeros_like(own) for own in problem.start]
        self._rank, self._z = 0, problem.start[0]

    def gradient(self, z: Array, rank: int, step: int) -> Array:
        self._rank, self._z = rank, z.copy()
        return self._problem.gradient(z, rank, step)

    def update(self, x: Array, g: Array, state: State) -> tuple[Array, State]:
        state = state._replace(first=state.first + self.corrections(self._rank, self._z))
        x_next, state = self._problem.update(x, g, state)
        self._halves[self._rank] = x_next.copy(), float(x @ self._z / (self._z @ self._z))
        return x_next, state

    def corrections(self, rank: int, z: Array) -> Array:
        if rank in self._halves:
            half, weight = self._halves[rank]
            rate = self._problem.case.lr if self._problem.framework == "torch" else -1.0
            pull = SMOOTHING.strength * (half - weight * z) / rate
            self._corrections[rank] = SMOOTHING.memory * self._corrections[rank] + (1 - SMOOTHING.memory) * pull
        return self._corrections[rank]
