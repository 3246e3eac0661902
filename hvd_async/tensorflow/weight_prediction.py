"""Weight prediction in TensorFlow: between rounds variables hold predicted weights; a round starts from the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_async.algorithms.eager.weight_prediction import factor, momentum_of
from hvd_async.tensorflow.variables import raw


class WeightPrediction:
    """One optimizer's, over its trainable variables.

    Args:
        optimizer: ours, built.
        rounds: how many rounds ahead; 0 predicts nothing.

    Attributes:
        weights: of each variable while it holds predicted ones; none where nothing is predicted.
    """

    def __init__(self, optimizer: Any, rounds: float) -> None:
        self._optimizer, self._rounds = optimizer, rounds
        self._variables = [raw(v) for v in optimizer._trainable_variables] if self._factor() else []
        self.weights = [tf.Variable(v, trainable=False) for v in self._variables]
        self._weights_of = {id(v): weights for v, weights in zip(self._variables, self.weights, strict=True)}
        self._predicted = False

    def _factor(self) -> float:
        return factor(momentum_of(vars(self._optimizer)), self._rounds)

    def begin(self) -> None:
        """Prepare for a round, outside of the graph of its update: variables may have been written since the end."""
        if not self._predicted:
            for variable, weights in zip(self._variables, self.weights, strict=True):
                weights.assign(variable)
            self._predicted = True

    def begin_round(self, moved: Sequence[Any]) -> None:
        """Let the variables that a round moves hold their weights, in the graph of the update."""
        for variable, weights in self._pairs(moved):
            variable.assign(weights)

    def end_round(self, moved: Sequence[Any]) -> None:
        """Keep the weights that a round has led to, and let the variables hold predicted ones, in that graph."""
        ahead = self._factor()
        for variable, weights in self._pairs(moved):
            change = variable - weights
            weights.assign(variable)
            variable.assign_add(tf.cast(ahead, variable.dtype) * change)

    def end(self) -> None:
        """Let the variables hold the weights again."""
        if self._predicted:
            self._predicted = False
            for variable, weights in zip(self._variables, self.weights, strict=True):
                variable.assign(weights)

    def _pairs(self, moved: Sequence[Any]) -> list[tuple[Any, Any]]:
        pairs = ((raw(v), self._weights_of.get(id(raw(v)))) for v in moved)
        return [(variable, weights) for variable, weights in pairs if weights is not None]
