"""Gradient compression: Horovod's names and one more, and what the engine makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_async.algorithms.eager.gradient_format import EXACT, count_slots, largest_summand


class BF16Compressor:
    """Floating point gradients as bfloat16: the range of float32 in half the bytes, with 8 bits of precision."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """The tensor as bfloat16 (if it is floating point), and the dtype it had."""
        return (tf.cast(tensor, tf.bfloat16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """The tensor in the dtype it had."""
        return tf.cast(tensor, dtype) if dtype.is_floating else tensor


class Int8Messages:
    """Stands for messages of 8 bits an element, with error feedback: ``GossipOptimizer`` codes them itself."""


class Compression(hvd.Compression):
    """Horovod's ``Compression`` (``none``, ``fp16``) with ``bf16``, and ``int8`` for ``GossipOptimizer``'s messages."""

    bf16 = BF16Compressor
    int8 = Int8Messages


class Codec:
    """The form of vectors on the wire.

    Args:
        compression: a class with ``compress(tensor) -> (tensor, context)`` and ``decompress(tensor, context)``. Sums of
            what it makes must be what it would make of the sums, and the context must follow from the dtype alone.
        dtypes: in which gradients are accumulated.
        size: ranks that share the optimizer.
        max_staleness: rounds.
        after: what sums are to be multiplied by.

    Raises:
        ValueError: the compression makes no float type, or one that cannot count as far as ``max_staleness`` asks.
    """

    def __init__(
        self, compression: Any, dtypes: Iterable[tf.DType], size: int, max_staleness: int, after: float = 1.0
    ) -> None:
        self._compression, self._size = compression, size
        self.scale = after if compression is hvd.Compression.none else 1.0
        """How much of ``after`` the collectives do; half precision is multiplied when it is none any more."""
        self._contexts: dict[tf.DType, Any] = {}
        self.wire: dict[tf.DType, tf.DType] = {}
        """Return the dtype that each of ``dtypes`` has while it travels."""
        for dtype in dtypes:
            sample, context = compression.compress(tf.ones([1], dtype))
            if sample.dtype.name not in EXACT:
                raise ValueError(
                    f"compression={compression!r} makes {sample.dtype.name} of {dtype.name}: a round adds gradients up "
                    f"and counts them, which takes one of {', '.join(EXACT)}"
                )
            self._contexts[dtype], self.wire[dtype] = context, sample.dtype
        counted = [count_slots(size, max_staleness, dtype.name) for dtype in self.wire.values()]
        self.slots = max(counted, default=1)
        """Elements at a vector's end that count gradients."""

    def nbytes(self, dtype: tf.DType) -> int:
        """Bytes of one element on the wire."""
        return int(self.wire[dtype].size)

    def encode(self, vector: tf.Tensor) -> tf.Tensor:
        """A vector as it travels.

        float16 ends at 65504: what could overflow in the sum over the ranks is brought to the largest number that
        cannot, since an infinity would reach every rank's weights. Its counts are not.
        """
        if self.wire[vector.dtype] == tf.float16 and vector.dtype != tf.float16:
            limit = tf.constant(largest_summand(self._size), vector.dtype)
            gradients, counts = vector[: -self.slots], vector[-self.slots :]
            vector = tf.concat([tf.clip_by_value(gradients, -limit, limit), counts], axis=0)
        encoded, _ = self._compression.compress(vector)
        return encoded

    def decode(self, vector: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """A sum over the ranks, in the dtype that gradients are accumulated in."""
        return self._compression.decompress(vector, self._contexts[dtype])
