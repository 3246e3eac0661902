"""The format of Keras' gradients: where each lies in the flat buckets, and how these are compressed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_async.algorithms.eager.gradient_format import EXACT, Tail, count_slots, divide, largest_summand
from hvd_async.tensorflow.variables import raw, signature

# -- buckets -----------------------------------------------------------------------------------------------------------


def accumulated(variable: Any) -> tf.DType:
    """Return the dtype in which a variable's gradients are added up: float32 for half precision."""
    return tf.float64 if raw(variable).dtype == tf.float64 else tf.float32


def has_gradients(variable: Any) -> bool:
    """Return whether a variable can have gradients: integers, such as counters, are ignored."""
    dtype = raw(variable).dtype
    return not (dtype.is_integer or dtype.is_bool)


class Bucket(NamedTuple):
    """Variables whose gradients travel together.

    Attributes:
        dtype: of the flat vector.
        indices: of the variables, ascending, as they lie in the vector.
        sizes: number of elements of each variable.
    """

    dtype: tf.DType
    indices: tuple[int, ...]
    sizes: tuple[int, ...]


def partition(variables: Sequence[Any], cap_bytes: float, groups: int | Sequence[Sequence[Any]] | None) -> list[Bucket]:
    """Split variables into buckets, each of one dtype; the bucket that backward fills first comes first.

    Args:
        variables: in the order of the forward pass.
        cap_bytes: bytes per bucket, at most, without ``groups``. A larger variable has its own bucket.
        groups: Horovod's: a number of groups of about equal numbers of variables, or lists of variables; variables in
            no list are split by size. None: buckets by size.

    Raises:
        ValueError: a variable is complex; a list has a variable that is not there, or one twice.
    """
    for variable in variables:
        if raw(variable).dtype.is_complex:
            raise ValueError(
                f"{signature(variable)} cannot be averaged: make it two real ones, or keep it out of the optimizer"
            )
    kinds = [accumulated(variable) for variable in variables]
    sizes = [variable.shape.num_elements() for variable in variables]
    gradients = [(kind, size * kind.size) for kind, size in zip(kinds, sizes, strict=True)]
    if not (groups is None or isinstance(groups, int)):
        groups = [[_place(variable, variables) for variable in group] for group in groups]
    parts = [[i for i in part if has_gradients(variables[i])] for part in divide(gradients, cap_bytes, groups)]
    ordered = sorted((sorted(part) for part in parts if part), reverse=True)
    return [Bucket(kinds[part[0]], tuple(part), tuple(sizes[i] for i in part)) for part in ordered]


def _place(variable: Any, variables: Sequence[Any]) -> int:
    for index, one in enumerate(variables):
        if one is raw(variable):
            return index
    raise ValueError(f"groups: {signature(variable)} is not among the optimizer's variables: list trainable ones only")


class Layout:
    """The place of each variable's gradient in the buckets.

    Args:
        variables: in the same order on all ranks.
        buckets: of these variables.
        factors: factors of a gradient before, and of a sum after, the ranks' gradients are added up.
        tail: counting elements at a vector's end.
        device: device on which vectors are concatenated; "": TensorFlow decides.

    Attributes:
        dtypes, elements, nbytes, specs: dtype, number of elements, bytes, and TensorFlow's description of each bucket's
            vector.
        tail: number of elements at a vector's end that count.
        weighted: whether rounds are weighted by samples.
    """

    def __init__(
        self, variables: Sequence[Any], buckets: Sequence[Bucket], factors: tuple[float, float], tail: Tail, device: str
    ) -> None:
        self._variables = [raw(v) for v in variables]
        self.buckets, self._tail, self._device = list(buckets), tail, device
        self._before, self._after = factors
        self.dtypes = [bucket.dtype for bucket in self.buckets]
        self.elements = [sum(bucket.sizes) + len(tail) for bucket in self.buckets]
        self.nbytes = tuple(n * dtype.size for n, dtype in zip(self.elements, self.dtypes, strict=True))
        self.specs = [tf.TensorSpec([n], dtype) for n, dtype in zip(self.elements, self.dtypes, strict=True)]
        self.tail, self.weighted = len(tail), tail.weighted

    def __len__(self) -> int:
        return len(self.buckets)

    def zeros(self, bucket: int) -> tf.Tensor:
        """Return a vector of a bucket that holds no gradient."""
        return tf.zeros([self.elements[bucket]], self.dtypes[bucket])

    def flatten(self, bucket: int, gradients: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """Return a bucket's gradients, given by the variable's index, copied once; a missing one counts as zero.

        Returns:
            Shape (elements,); its tail counts one gradient, without samples.
        """
        dtype, indices, sizes = self.buckets[bucket]
        with tf.device(self._device or None):
            parts = []
            for index, size in zip(indices, sizes, strict=True):
                if index not in gradients:
                    parts.append(tf.zeros([size], dtype))
                    continue
                part = tf.reshape(tf.cast(gradients[index], dtype), [-1])
                parts.append(part if self._before == 1.0 else part * tf.constant(self._before, dtype))
            return tf.concat([*parts, self._tail_of(dtype, 0)], axis=0)

    def nothing(self, bucket: int) -> tf.Tensor:
        """Return a vector of one gradient that is zero."""
        return self.flatten(bucket, {})

    def recounted(self, bucket: int, vector: tf.Tensor, factor: float, samples: int) -> tf.Tensor:
        """Return ``vector`` x ``factor`` as one gradient of ``samples`` samples, whatever its tail counts."""
        dtype = self.dtypes[bucket]
        gradients = vector[: -len(self._tail)] * tf.constant(factor, dtype)
        return tf.concat([gradients, self._tail_of(dtype, samples)], axis=0)

    def relaid(self, bucket: int, vector: tf.Tensor, layout: Layout) -> tf.Tensor:
        """Return gradients of a bucket of ``layout``, the same layout among other ranks, as a vector of this one."""
        gradients = vector[: -len(layout._tail)]
        return tf.concat([gradients, self._tail_of(self.dtypes[bucket], 1)], axis=0)

    def _tail_of(self, dtype: tf.DType, samples: int) -> tf.Tensor:
        return tf.constant(self._tail.of(samples), dtype)

    def without(self, indices: Sequence[int], sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return a round's sums, with zeros instead of the gradients of these variables."""
        if not indices:
            return list(sums)
        changed = []
        for vector, bucket in zip(sums, self.buckets, strict=True):
            left_out = np.isin(bucket.indices, indices)
            if left_out.any():
                mask = np.append(np.repeat(left_out, bucket.sizes), np.zeros(len(self._tail), bool))
                vector = tf.where(mask, tf.zeros([], bucket.dtype), vector)
            changed.append(vector)
        return changed

    def averages(self, sums: Sequence[tf.Tensor], weights: tf.Tensor | None = None) -> list[tf.Tensor]:
        """Return the gradients in a round's sums over the ranks, one per variable that can have one, in their order,
        shapes and dtypes.

        Args:
            sums: of the buckets.
            weights: further factor of each bucket, shape (buckets,); None: 1.
        """
        gradients: dict[int, tf.Tensor] = {}
        for number, (vector, (dtype, indices, sizes)) in enumerate(zip(sums, self.buckets, strict=True)):
            flat, after = tf.reshape(vector, [sum(sizes) + len(self._tail)]), self._after
            factor = tf.constant(after, dtype) if weights is None else tf.cast(weights[number] * after, dtype)
            starts = itertools.accumulate(sizes, initial=0)
            for index, start, size in zip(indices, starts, sizes, strict=False):
                # A slice shares the vector's memory where it begins and ends on 64 bytes; tf.split would copy it.
                part = tf.slice(flat, [start], [size])
                part = part if weights is None and after == 1.0 else part * factor
                variable = self._variables[index]
                gradients[index] = tf.cast(tf.reshape(part, variable.shape), variable.dtype)
        return [gradients[i] for i in sorted(gradients)]


# -- compression -------------------------------------------------------------------------------------------------------


class BF16Compressor:
    """Sends floating-point gradients as bfloat16: float32's range, 8 bits of precision."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """Return the tensor as bfloat16 if it is floating point, and its own dtype."""
        return (tf.cast(tensor, tf.bfloat16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Return the tensor in its own dtype."""
        return tf.cast(tensor, dtype) if dtype.is_floating else tensor


class Int8Messages:
    """Marker of messages of 8 bits per element, with error feedback: ``GossipOptimizer`` encodes them itself."""


class Compression(hvd.Compression):
    """Horovod's ``Compression`` (``none``, ``fp16``) with ``bf16``, and ``int8`` for ``GossipOptimizer``'s messages."""

    bf16 = BF16Compressor
    int8 = Int8Messages


class Codec:
    """The form of vectors on the wire.

    Args:
        compression: a class with ``compress(tensor) -> (tensor, context)`` and ``decompress(tensor, context)``.
            Compression must commute with sums, and the context must depend on the dtype alone.
        dtypes: dtypes in which gradients are accumulated.
        size: number of ranks that share the optimizer.
        max_staleness: in rounds.
        after: factor of sums.
        index: position of this rank among the ranks that share the optimizer.
        weighted: whether samples are counted.

    Raises:
        ValueError: the compressed dtype is not a float type, or cannot count as far as ``max_staleness`` needs.
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
        """Factor that the collectives apply: ``after``, or 1 if vectors are multiplied after decompression."""
        self._contexts: dict[tf.DType, Any] = {}
        self.wire: dict[tf.DType, tf.DType] = {}
        """Compressed dtype of each of ``dtypes``."""
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
        """Counting elements at a vector's end."""
        self.narrow = tf.float16 in self.wire.values()
        """Whether gradients x samples may exceed the range of the compressed dtype."""

    def nbytes(self, dtype: tf.DType) -> int:
        """Return the bytes of one compressed element."""
        return int(self.wire[dtype].size)

    def encode(self, vector: tf.Tensor, unit: float = 1.0) -> tf.Tensor:
        """Return a compressed vector, its gradients divided by ``unit``.

        float16 ends at 65504, so its gradients are clipped to the largest number whose sum over the ranks stays finite:
        an infinity would reach every rank's weights. Counts are not clipped.
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
        """Return a sum over the ranks in the dtype in which gradients are accumulated."""
        return self._compression.decompress(vector, self._contexts[dtype])
