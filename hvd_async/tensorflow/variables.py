"""Keras variables as one vector and back; their checksums and signatures."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_async.algorithms.gossip.message_format import vector_with_room
from hvd_async.optimizers.agreement import Buffers
from hvd_async.runtime.memory import ReusedBlocks
from hvd_async.tensorflow.memory import given_to_tensor

Array = np.ndarray[Any, Any]


def raw(variable: Any) -> Any:
    """The ``tf.Variable`` behind a Keras variable (or the variable itself)."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def checksum(variable: Any) -> int:
    """CRC-32 of the variable's bytes."""
    return zlib.crc32(raw(variable).numpy().tobytes())


def signature(variable: Any) -> str:
    """Name, shape and dtype in one string, for comparison over ranks."""
    name = getattr(variable, "path", None) or variable.name
    return f"{name} {tuple(variable.shape)} {raw(variable).dtype.name}"


def own_name(variable: Any) -> str:
    """A variable's name without its optimizer's, which Keras numbers anew for each optimizer of a process."""
    return str(variable.path).rpartition("/")[2]


def buffers_by_kind(variables: Sequence[Any]) -> list[Buffers]:
    """Return variables that are no weights, by dtype. Integers, random seeds of dropout layers, stay the rank's own."""
    by_dtype: dict[tf.DType, list[Any]] = {}
    for variable in map(raw, variables):
        if variable.dtype.is_floating:
            by_dtype.setdefault(variable.dtype, []).append(variable)
    return [
        Buffers(dtype.name, True, partial(_counted, group), partial(_scatter, group))
        for dtype, group in by_dtype.items()
    ]


def _counted(variables: Sequence[Any]) -> Array:
    with tf.init_scope():
        parts = [v.numpy().reshape(-1) for v in variables]
    return np.concatenate([*parts, np.ones(1, parts[0].dtype)])


def _scatter(variables: Sequence[Any], vector: Any) -> None:
    with tf.init_scope():
        sizes = [v.shape.num_elements() for v in variables]
        for variable, part in zip(variables, np.split(np.asarray(vector), np.cumsum(sizes)[:-1]), strict=True):
            variable.assign(part.reshape(variable.shape))


def flat_double(variables: Sequence[Any]) -> Array:
    """Return variables as one new vector, shape (n,), float64."""
    with tf.init_scope():
        return np.concatenate([raw(v).numpy().reshape(-1).astype(np.float64) for v in variables])


class Flat:
    """Variables as one vector; in a graph and eagerly.

    Args:
        variables: at least one, in the same order on all ranks.
        memory: of vectors.

    Raises:
        ValueError: there is none, or one in half precision.
    """

    def __init__(self, variables: Sequence[Any], memory: ReusedBlocks) -> None:
        self.variables, self._memory = [raw(v) for v in variables], memory
        if not self.variables:
            raise ValueError("there is nothing to mix: every variable is local, or the model has none to train")
        for variable, given in zip(self.variables, variables, strict=True):
            if variable.dtype not in (tf.float32, tf.float64):
                raise ValueError(
                    f"{signature(given)} cannot be mixed without losing what it learns: keep weights in float32, as "
                    f"the dtype policies 'mixed_float16' and 'mixed_bfloat16' do; compression= makes messages small"
                )
        self.dtype = tf.float64 if any(v.dtype == tf.float64 for v in self.variables) else tf.float32
        self._shared: tf.Tensor | None = None
        """Memory of this tensor is the variables', until they are updated."""
        self._sizes = [int(v.shape.num_elements()) for v in self.variables]

    @property
    def elements(self) -> int:
        """Elements of the vector."""
        return sum(self._sizes)

    def joined(self) -> tf.Tensor:
        """Return the variables now as one new tensor, shape (elements,)."""
        return tf.concat([tf.reshape(tf.cast(v, self.dtype), [-1]) for v in self.variables], axis=0)

    def values(self) -> list[tf.Tensor]:
        """Return the variables' values now, in their memory on a CPU."""
        return [v.read_value() for v in self.variables]

    def vector(self, values: Sequence[tf.Tensor]) -> Array:
        """Return values as one new vector, shape (elements,), with room behind it for a message's header. Not in a
        graph."""
        flat = vector_with_room(self.elements, self.dtype.as_numpy_dtype, self._memory)
        np.concatenate([np.asarray(value).reshape(-1) for value in values], out=flat)
        return flat

    def read(self) -> Array:
        """Return the variables now as one new vector, shape (elements,). Not in a graph."""
        return self.vector(self.values())

    def taken(self, vector: Array) -> tf.Tensor:
        """Return a vector, which is given away, as the tensor to ``write`` next."""
        # (kept, since TensorFlow updates the last variable in place that holds an array's memory)
        self._shared = given_to_tensor(vector)
        return self._shared

    def write(self, vector: Any) -> None:
        """Assign a vector to the variables: an array, which is given away, or a tensor."""
        tensor = self.taken(vector) if isinstance(vector, np.ndarray) else vector
        for variable, part in self._with_parts(tensor):
            variable.assign(part)

    def add(self, vector: tf.Tensor) -> None:
        """Add a vector to the variables."""
        for variable, part in self._with_parts(vector):
            variable.assign_add(part)

    def _with_parts(self, vector: tf.Tensor) -> Iterator[tuple[tf.Variable, tf.Tensor]]:
        """Yield each variable and its part of a vector."""
        flat = tf.ensure_shape(tf.convert_to_tensor(vector, self.dtype), [self.elements])
        starts = itertools.accumulate(self._sizes, initial=0)
        for variable, start, size in zip(self.variables, starts, self._sizes, strict=False):
            # (a slice shares the vector's memory where it begins and ends on 64 bytes; tf.split would copy it)
            yield variable, tf.cast(tf.reshape(tf.slice(flat, [start], [size]), variable.shape), variable.dtype)

    def scale(self, factor: tf.Tensor) -> None:
        """Multiply the variables."""
        for variable in self.variables:
            variable.assign(variable * tf.cast(factor, variable.dtype))
