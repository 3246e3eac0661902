"""Keras variables and flat vectors: gradients out, rounds in, checksums, batch-norm statistics, replicas' distance."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_async.engine import Engine


def raw(variable: Any) -> Any:
    """The ``tf.Variable`` behind a Keras variable (or the variable itself)."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


class Layout:
    """Where each variable lies in the buckets: one bucket for each accumulation dtype.

    Half-precision gradients accumulate and travel as float32; a bucket's last element counts gradients.

    Args:
        variables: in the same order on all ranks.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = [raw(v) for v in variables]
        self._buckets: dict[tf.DType, list[int]] = {}
        for index, variable in enumerate(self._variables):
            dtype = tf.float64 if variable.dtype == tf.float64 else tf.float32
            self._buckets.setdefault(dtype, []).append(index)

    @property
    def dtypes(self) -> list[tf.DType]:
        """Of the buckets, in order."""
        return list(self._buckets)

    def specs(self) -> list[tf.TensorSpec]:
        """Shape and dtype of each bucket's vector."""
        return [
            tf.TensorSpec([sum(self._variables[i].shape.num_elements() for i in indices) + 1], dtype)
            for dtype, indices in self._buckets.items()
        ]

    def zeros(self, bucket: int) -> tf.Tensor:
        """A vector of bucket ``bucket`` that holds no gradient."""
        spec = self.specs()[bucket]
        return tf.zeros(spec.shape, spec.dtype)

    def flatten(self, gradients: dict[int, tf.Tensor]) -> list[tf.Tensor]:
        """Every bucket's gradients (by the variable's index), copied once; a missing one counts as zero."""
        vectors = []
        for dtype, indices in self._buckets.items():
            parts = [tf.reshape(tf.cast(gradients[i], dtype), [-1]) if i in gradients else self._nothing(i, dtype)
                     for i in indices]  # fmt: skip
            vectors.append(tf.concat([*parts, tf.ones([1], dtype)], axis=0))
        return vectors

    def _nothing(self, index: int, dtype: tf.DType) -> tf.Tensor:
        return tf.zeros([self._variables[index].shape.num_elements()], dtype)

    def averages(self, sums: Sequence[tf.Tensor], scale: float) -> list[tf.Tensor]:
        """``sums`` x ``scale`` as one gradient a variable, in the variables' order, shapes and dtypes."""
        gradients: dict[int, tf.Tensor] = {}
        for vector, (dtype, indices) in zip(sums, self._buckets.items(), strict=True):
            sizes = [self._variables[i].shape.num_elements() for i in indices]
            average = tf.reshape(vector, [sum(sizes) + 1])[:-1] * tf.constant(scale, dtype)
            for i, part in zip(indices, tf.split(average, sizes), strict=True):
                variable = self._variables[i]
                gradients[i] = tf.cast(tf.reshape(part, variable.shape), variable.dtype)
        return [gradients[i] for i in range(len(self._variables))]


def checksum(variable: Any) -> int:
    """CRC-32 of the variable's bytes."""
    return zlib.crc32(raw(variable).numpy().tobytes())


def signature(variable: Any) -> str:
    """Name, shape and dtype in one string, for comparison over ranks."""
    name = getattr(variable, "path", None) or variable.name
    return f"{name} {tuple(variable.shape)} {raw(variable).dtype.name}"


def unify_buffers(engine: Engine, variables: Sequence[Any], policy: str) -> None:
    """Make batch-norm statistics agree on all ranks: their ``average``, or those of the ``root`` (rank 0).

    Integer variables (random seeds of dropout layers) stay each rank's own. A collective.
    """
    by_dtype: dict[tf.DType, list[Any]] = {}
    for variable in map(raw, variables):
        if variable.dtype.is_floating:
            by_dtype.setdefault(variable.dtype, []).append(variable)
    for dtype, group in by_dtype.items():
        flat = tf.concat([tf.reshape(v, [-1]) for v in group], axis=0)
        name = f"hvd_async.buffers.{policy}.{dtype.name}"
        average = policy == "average"
        unified = engine.sum(flat, name) / engine.size if average else engine.broadcast(flat, 0, name)
        for variable, part in zip(group, tf.split(unified, [v.shape.num_elements() for v in group]), strict=True):
            variable.assign(tf.reshape(part, variable.shape))


def consensus_distance(engine: Engine, variables: Sequence[Any]) -> float:
    """sqrt(mean over ranks of |x_i - mean x|^2), x_i rank i's weights; 0 if all are equal. A collective."""
    flat = tf.concat([tf.reshape(tf.cast(raw(v), tf.float64), [-1]) for v in variables], axis=0)
    mean = engine.sum(flat, "hvd_async.consensus.mean") / engine.size
    square = tf.reshape(tf.reduce_sum((flat - mean) ** 2), [1])
    total = engine.sum(square, "hvd_async.consensus.square")
    return float((total[0] / engine.size) ** 0.5)
