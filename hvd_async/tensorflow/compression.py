"""Gradient compression: Horovod's names and one more, and what the engine makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_async.algorithms.eager.gradient_format import EXACT, Tail, count_slots, largest_summand


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
        index: this rank's, among those that share the optimizer.
        weighted: whether samples are counted.

    Raises:
        ValueError: the compression makes no float type, or one that cannot count as far as ``max_staleness`` asks.
    """

    def __init__(
        self,
        compression: Any,
        dtypes: Iterable[tf.DType],
        size: int,
        max_staleness: int,
        after: float = 1.0,
        index: int = 0,
        weighted: bool = False,
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
        slots = max((count_slots(size, max_staleness, dtype.name) for dtype in self.wire.values()), default=1)
        self.tail = Tail(slots, index % slots, weighted)
        """The elements at a vector's end that count."""
        self.narrow = tf.float16 in self.wire.values()
        """Whether gradients x samples may be out of the range in which they travel."""

    def nbytes(self, dtype: tf.DType) -> int:
        """Bytes of one element on the wire."""
        return int(self.wire[dtype].size)

    def encode(self, vector: tf.Tensor, unit: float = 1.0) -> tf.Tensor:
        """A vector as it travels, its gradients divided by ``unit``.

        float16 ends at 65504: what could overflow in the sum over the ranks is brought to the largest number that
        cannot, since an infinity would reach every rank's weights. Its counts are not.
        """
        clips = self.wire[vector.dtype] == tf.float16 and vector.dtype != tf.float16
        if clips or unit != 1.0:
            gradients, counts = vector[: -len(self.tail)], vector[-len(self.tail) :]
            gradients = gradients if unit == 1.0 else gradients * tf.constant(1.0 / unit, vector.dtype)
            if clips:
                limit = tf.constant(largest_summand(self._size), vector.dtype)
                gradients = tf.clip_by_value(gradients, -limit, limit)
            vector = tf.concat([gradients, counts], axis=0)
        encoded, _ = self._compression.compress(vector)
        return encoded

    def decode(self, vector: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """A sum over the ranks, in the dtype that gradients are accumulated in."""
        return self._compression.decompress(vector, self._contexts[dtype])
