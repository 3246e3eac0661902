"""Extrapolated updates in TensorFlow: each update of the wrapped Keras optimizer is extended in its graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_async.algorithms.eager.extrapolation import factor, momentum_of
from hvd_async.tensorflow.variables import raw

SCHEDULE_FREE = getattr(keras.optimizers, "ScheduleFreeAdamW", ())
"""Optimizers whose ``beta_1`` is no momentum: they derive averages from the weights (Keras 3.13 and later)."""


class Extrapolation:
    """The extrapolated updates of one optimizer, over its trainable variables.

    Args:
        optimizer: ours, built.
        rounds: rounds to look ahead; 0 ends what leads there are.
        before: the extrapolation of the same optimizer among other ranks, whose leads go on; None at first.

    Attributes:
        leads: of each trainable variable, by how much it is ahead of its updates; empty where nothing is extrapolated.
    """

    def __init__(self, optimizer: Any, rounds: float, before: Extrapolation | None = None) -> None:
        self._optimizer, self._rounds = optimizer, rounds
        variables = [raw(v) for v in optimizer._trainable_variables]
        self.leads: list[tf.Variable] = [] if before is None else before.leads
        if not self.leads and self._factor():
            self.leads = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
        self._lead_of = {id(v): lead for v, lead in zip(variables, self.leads, strict=False)}

    def _factor(self) -> float:
        if isinstance(self._optimizer, SCHEDULE_FREE):
            return 0.0
        return factor(momentum_of(vars(self._optimizer)), self._rounds)

    @contextlib.contextmanager
    def around_update(self, moved: Sequence[Any]) -> Iterator[None]:
        """Extend the update of variables, of which the ops are made inside; before constraints and averages."""
        pairs = [(raw(v), self._lead_of[id(raw(v))]) for v in moved if id(raw(v)) in self._lead_of]
        before = [tf.identity(variable) for variable, _ in pairs]
        yield
        for (variable, lead), start in zip(pairs, before, strict=True):
            new = tf.cast(self._factor(), variable.dtype) * (variable - start)
            variable.assign_add(new - lead)
            lead.assign(new)
