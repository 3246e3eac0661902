"""One rank that gossips in Keras: least squares on two variables, an optimizer by case. As ``keras_ranks``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.algorithms.gossip.worker import PushSumWorker
from tests.conformance import gossip_reference
from tests.conformance.cases import Case
from tests.conformance.gossip_reference import Problem
from tests.conformance.keras_ranks import flat, plain
from tests.conformance.reference import Array

SHAPES = ((2, 2), (2,))
"""Of the six weights."""


@functools.cache
def _normal_equations(rank: int, step: int) -> tuple[Array, Array]:
    inputs, targets = gossip_reference.batch(rank, step)
    return inputs.T @ inputs / len(inputs), inputs.T @ targets / len(inputs)


def least_squares(size: int, case: Case) -> Problem:
    """As the reference's, with what it computes of the data kept."""

    def gradient(z: Array, rank: int, step: int) -> Array:
        square, linear = _normal_equations(rank, step)
        return np.asarray(square @ z - linear)

    return dataclasses.replace(gossip_reference.least_squares(size, case, "keras"), gradient=gradient)


class GossipTrainer:
    """One rank.

    Args:
        problem: its weights, data and optimizer.
        rank: which.
        graph: whether a step is a ``tf.function``.
        make: another optimizer than the problem's.
        options: of ``GossipOptimizer``.

    Attributes:
        log: of the optimizer's last worker.
        path: the weights after each step.
    """

    wrapper = staticmethod(hvd.GossipOptimizer)

    def __init__(
        self, problem: Problem, rank: int, graph: bool = False, make: Callable[[], Any] | None = None, **options: Any
    ) -> None:
        self.problem, self.rank = problem, rank
        self.variables = [keras.Variable(np.zeros(shape, np.float32), name=f"x{len(shape)}") for shape in SHAPES]
        self.opt = self.wrapper(plain(problem.case) if make is None else make(), **options)
        self.opt.build(self.variables)
        self._apply = tf.function(self._take) if graph else self._take
        self.log: list[Any] = []
        self.opt._async.make_worker = functools.partial(self._logged, self.opt._async.make_worker)
        self.restart()

    def _logged(self, make: Callable[..., PushSumWorker], *arguments: Any) -> PushSumWorker:
        worker = make(*arguments)
        self.log = worker.log = []
        return worker

    def restart(self) -> None:
        """Weights and optimizer as they were at first; after a drain."""
        self.assign(self.problem.start[self.rank])
        rate = self.opt.learning_rate
        for variable in self.opt.variables:
            if variable is not rate:
                variable.assign(np.zeros(variable.shape))
        self.path: list[Array] = []

    def assign(self, weights: Any) -> None:
        """Set the weights."""
        for variable, part in zip(self.variables, split(weights), strict=True):
            variable.assign(part)

    def weights(self) -> Array:
        """Flat, float64."""
        return flat(self.variables)

    def _take(self, *given: Any) -> None:
        self.opt.apply(given, self.variables)

    def given(self, before: Array) -> list[Any]:
        """What the next step takes: the gradients at the weights ``before``."""
        gradient = self.problem.gradient(before, self.rank, len(self.path) + 1)
        return [tf.constant(part) for part in split(gradient)]

    def step(self) -> None:
        """One."""
        self._apply(*self.given(self.weights()))
        self.path.append(self.weights())

    def train(self, steps: int) -> None:
        """Several steps."""
        for _ in range(steps):
            self.step()


def split(weights: Any) -> list[Any]:
    """A flat vector as the variables' values."""
    parts = np.split(np.asarray(weights, np.float32), np.cumsum([np.prod(shape) for shape in SHAPES])[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]
