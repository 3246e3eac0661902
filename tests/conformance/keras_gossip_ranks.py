"""One rank that gossips in Keras: least squares on two variables, an optimizer by case. As ``keras_ranks``."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from tests.conformance import gossip_reference
from tests.conformance.gossip_reference import Problem
from tests.conformance.keras_ranks import flat, plain
from tests.conformance.reference import Array

SHAPES = ((2, 2), (2,))
"""Shapes of the variables that hold the six weights."""
least_squares = functools.partial(gossip_reference.least_squares, framework="keras")


class GossipTrainer:
    """One rank.

    Args:
        problem: its weights, data and optimizer.
        rank: which.
        graph: whether a step is a ``tf.function``.
        make: another optimizer than the problem's.
        normed: whether it has batch-norm statistics.
        options: of ``GossipOptimizer``.

    Attributes:
        path: the weights after each step.
        before: those with which the last one began.
    """

    wrapper = staticmethod(hvd.GossipOptimizer)

    def __init__(
        self,
        problem: Problem,
        rank: int,
        graph: bool = False,
        make: Callable[[], Any] | None = None,
        normed: bool = False,
        **options: Any,
    ) -> None:
        self.problem, self.rank = problem, rank
        self.variables = [keras.Variable(np.zeros(shape, np.float32), name=f"x{len(shape)}") for shape in SHAPES]
        if normed:
            options["model"] = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
            self.statistics = options["model"].layers[0].moving_mean
        self.opt = self.wrapper(plain(problem.case) if make is None else make(), **options)
        self.opt.build(self.variables)
        self._apply = tf.function(self._take) if graph else self._take
        self.path: list[Array] = []
        self.assign(problem.start[rank])

    @property
    def steps(self) -> int:
        """So far, those of an earlier job included."""
        return len(self.path)

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
        """Inputs of the next step: the gradients at the weights ``before``."""
        gradient = self.problem.gradient(before, self.rank, len(self.path) + 1)
        return [tf.constant(part) for part in split(gradient)]

    def step(self) -> None:
        """Take one."""
        self.before = self.weights()
        self._apply(*self.given(self.before))
        self.path.append(self.weights())

    def step_with(self, gradient: Any) -> None:
        """Take a step with this gradient, flat."""
        self._apply(*map(tf.constant, split(gradient)))

    def train(self, steps: int) -> Self:
        """Take several steps."""
        for _ in range(steps):
            self.step()
        return self

    @property
    def mean(self) -> float:
        """Mean of the batch-norm statistics."""
        return float(self.statistics[0])

    @mean.setter
    def mean(self, value: float) -> None:
        self.statistics.assign([value] * 2)

    def moments(self) -> Array:
        """The momentum that the optimizer has, flat."""
        return flat(self.opt.momentums)

    def eager(self) -> Any:
        """An ``EagerOptimizer`` of the same weights."""
        opt = hvd.EagerOptimizer(plain(self.problem.case))
        opt.build(self.variables)
        return opt

    def saved(self) -> dict[str, Any]:
        """Weights and state as a script would save them, through a file without pickles."""
        file = io.BytesIO()
        np.savez(file, weights=self.weights(), **self.opt.get_state())
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)

    def resumed(self, state: dict[str, Any], done: int) -> Self:
        """Take up what was saved after so many steps."""
        own = dict(state)
        self.assign(own.pop("weights"))
        self.opt.set_state(own)
        self.path = [np.empty(0)] * done
        return self


def split(weights: Any) -> list[Any]:
    """A flat vector as the variables' values."""
    parts = np.split(np.asarray(weights, np.float32), np.cumsum([np.prod(shape) for shape in SHAPES])[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]
