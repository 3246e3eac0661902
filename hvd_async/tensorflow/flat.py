"""The weights that ranks mix, as one vector, and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_async.tensorflow.buffers import raw, signature


class Flat:
    """Variables as one vector; in a graph and eagerly.

    Args:
        variables: at least one, in the same order on all ranks.
        device: where the vector is put together ("": wherever TensorFlow likes).

    Raises:
        ValueError: there is none, or one in half precision.
    """

    def __init__(self, variables: Sequence[Any], device: str = "") -> None:
        self.variables, self._device = [raw(v) for v in variables], device
        if not self.variables:
            raise ValueError("there is nothing to mix: every variable is local, or the model has none to train")
        for variable, given in zip(self.variables, variables, strict=True):
            if variable.dtype not in (tf.float32, tf.float64):
                raise ValueError(
                    f"{signature(given)} cannot be mixed without losing what it learns: keep weights in float32, as "
                    f"the dtype policies 'mixed_float16' and 'mixed_bfloat16' do; compression= makes messages small"
                )
        self.dtype = tf.float64 if any(v.dtype == tf.float64 for v in self.variables) else tf.float32
        self._sizes = [int(v.shape.num_elements()) for v in self.variables]

    @property
    def elements(self) -> int:
        """Elements of the vector."""
        return sum(self._sizes)

    def read(self) -> tf.Tensor:
        """The variables now, shape (elements,)."""
        with tf.device(self._device or None):
            return tf.concat([tf.reshape(tf.cast(v, self.dtype), [-1]) for v in self.variables], axis=0)

    def array(self) -> np.ndarray[Any, Any]:
        """Return an array of the caller's own, otherwise as ``read``. Not in a graph."""
        return self.read().numpy()

    def write(self, vector: Any) -> None:
        """Assign a vector to the variables."""
        flat = tf.ensure_shape(tf.convert_to_tensor(vector, self.dtype), [self.elements])
        starts = itertools.accumulate(self._sizes, initial=0)
        for variable, start, size in zip(self.variables, starts, self._sizes, strict=False):
            # (a slice shares the vector's memory where it begins and ends on 64 bytes; tf.split would copy it)
            variable.assign(tf.cast(tf.reshape(tf.slice(flat, [start], [size]), variable.shape), variable.dtype))

    def scale(self, factor: tf.Tensor) -> None:
        """Multiply the variables."""
        for variable in self.variables:
            variable.assign(variable * tf.cast(factor, variable.dtype))
