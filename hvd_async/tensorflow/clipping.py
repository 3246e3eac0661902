"""Gradient clipping whose result is the same, bit for bit, on ranks with different numbers of threads."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

BLOCK = 4096
"""Elements that are added up by one thread."""


def clip_by_global_norm(gradients: Sequence[tf.Tensor], clip_norm: float) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Scale gradients down to a global norm, as ``tf.clip_by_global_norm`` does, for use in ``round_transform=``.

    TensorFlow's own splits a large sum among its threads, so ranks with different numbers of threads may get norms that
    differ in the last bit, and replicas part. Here sums are taken in blocks of one size, in one order.

    Args:
        gradients: dense tensors of floating-point numbers, of any shapes.
        clip_norm: the largest global norm, above 0.

    Returns:
        The gradients times ``clip_norm / max(norm, clip_norm)``, and their global norm before, a float32 scalar. Where
        that is not finite, the gradients are NaN.
    """
    norm = tf.sqrt(_sum(tf.stack([_sum(tf.square(tf.cast(one, tf.float32))) for one in gradients])))
    scale = clip_norm / tf.maximum(norm, clip_norm)
    scale = tf.where(tf.math.is_finite(norm), scale, float("nan"))
    return [one * tf.cast(scale, one.dtype) for one in gradients], norm


def _sum(values: tf.Tensor) -> tf.Tensor:
    """Return the sum of a tensor whose shape is known: of blocks first, then of their sums."""
    flat = tf.reshape(values, [-1])
    while flat.shape[0] > BLOCK:
        rows = tf.reshape(tf.pad(flat, [[0, -flat.shape[0] % BLOCK]]), [-1, BLOCK])
        flat = tf.reduce_sum(rows, axis=1)
    return tf.reduce_sum(flat)
