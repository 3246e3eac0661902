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
        rounds: rounds to look ahead; 0: updates stay as they are.
        before: the extrapolation of the same optimizer among other ranks, whose leads go on; None at first.

    Attributes:
        leads: of each trainable variable, by how much it is ahead of its updates; empty where nothing is extrapolated.
    """

    def __init__(self, optimizer: Any, rounds: float, before: Extrapolation | None = None) -> None:
        self._optimizer, self._rounds = optimizer, rounds
        self.leads: list[tf.Variable] = before.leads if before is not None and rounds else []
        if self.wants_leads():
            self.make_leads()

    def wants_leads(self) -> bool:
        """Tell whether updates are extrapolated with the optimizer's momentum of now."""
        return self._factor() != 0

    def make_leads(self) -> None:
        """Make sure that there are leads, of 0 if there were none. Not in a graph."""
        if not self.leads:
            self.leads = [tf.Variable(tf.zeros_like(raw(v)), trainable=False) for v in self._variables()]

    def forget_leads(self) -> None:
        """Start from zero: the weights are others now."""
        for lead in self.leads:
            lead.assign(tf.zeros_like(lead))

    def _variables(self) -> list[Any]:
        return list(self._optimizer._trainable_variables)

    def _factor(self) -> float:
        if isinstance(self._optimizer, SCHEDULE_FREE):
            return 0.0
        return factor(momentum_of(vars(self._optimizer)), self._rounds)

    @contextlib.contextmanager
    def around_update(self, moved: Sequence[Any]) -> Iterator[None]:
        """Extend the update of variables, of which the ops are made inside; before constraints and averages."""
        lead_of = {id(raw(v)): lead for v, lead in zip(self._variables(), self.leads, strict=bool(self.leads))}
        pairs = [(raw(v), lead_of[id(raw(v))]) for v in moved] if self.leads else []
        before = [tf.identity(variable) for variable, _ in pairs]
        yield
        for (variable, lead), start in zip(pairs, before, strict=True):
            new = tf.cast(self._factor(), variable.dtype) * (variable - start)
            variable.assign_add(new - lead)
            lead.assign(new)
