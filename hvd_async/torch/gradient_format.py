"""The format of torch's gradients: where each lies in the flat buckets, and how these are compressed."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_async.algorithms.eager.gradient_format import (
    SAMPLE_DIGITS,
    GradientFormat,
    ReducedRound,
    Tail,
    count_slots,
    divide,
    largest_summand,
)
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.torch import streams
from hvd_async.torch.horovod_api import hvd
from hvd_async.torch.streams import ReusedMemory, record_ready

# -- buckets -----------------------------------------------------------------------------------------------------------


MIB = 2**20
SETS_KEPT = 2
"""Vectors per bucket whose memory is kept for the next step: one that is applied, and one in flight."""


class Bucket:
    """Parameters whose gradients are sent together, of one device and accumulation dtype.

    Half-precision gradients accumulate and travel as float32.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self.elements = sum(p.numel() for p in parameters)
        self.device, self.dtype = kind(parameters[0])
        self._sizes = [p.numel() for p in parameters]
        self._forms = [(place, p.shape, strides(p)) for place, p in enumerate(parameters) if p.dim() != 1]
        self._joined = not any(memory_order(p) or p.dtype != self.dtype for p in parameters)
        """Whether a vector is the gradients concatenated, in their own memory order and dtype."""

    def parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' parts of a vector, as tensors with the parameters' memory order: copies between them
        do not reorder elements, and optimizers take gradients and parameters in one kernel."""
        *parts, _ = torch.split_with_sizes(vector, [*self._sizes, vector.numel() - self.elements])
        for place, shape, strides in self._forms:
            parts[place] = parts[place].as_strided(shape, strides)
        return parts

    def gradients(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return ``parts`` as gradients, which have their parameters' strides: fused kernels on a CPU do not compare
        these. (Copies, where a parameter's memory has another order than the vector.)"""
        parts = self.parts(vector)
        for place, shape, strides in self._forms:
            parameter = self.parameters[place]
            if parameter.stride() != strides and parameter.shape == shape:
                parts[place] = torch.empty_like(parameter, dtype=self.dtype).copy_(parts[place])
        return parts

    def copy_gradients(self, vector: torch.Tensor, tail: torch.Tensor) -> None:
        """Fill a vector with each ``p.grad`` (0 for a parameter without one) and a tail."""
        gradients = [p.grad for p in self.parameters]
        dense = [gradient for gradient in gradients if gradient is not None and not gradient.is_sparse]
        if self._joined and len(dense) == len(gradients):
            for place, *_ in self._forms:
                dense[place] = dense[place].reshape(-1)
            torch.cat([*dense, tail], out=vector)
            return
        there = [vector[self.elements :]]
        for part, gradient in zip(self.parts(vector), gradients, strict=True):
            if gradient is None:
                part.zero_()
            elif gradient.is_sparse:
                part.copy_(gradient.to_dense())
            else:
                there.append(part)
        torch._foreach_copy_(there, [tail, *dense])


class Layout:
    """The buckets of an optimizer, the last parameters first: backward has their gradients ready first.

    Args:
        parameters: in the same order on all ranks.
        cap: bytes per bucket, at most, unless a single parameter is larger.
        groups: lists of parameters that travel together (Horovod's ``groups``), or the number of groups.
        tail: counting elements at the end of a vector.

    Raises:
        ValueError: a parameter is complex, or ``groups`` is invalid.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        cap: float = 25 * MIB,
        groups: int | Sequence[Sequence[torch.Tensor]] = 0,
        tail: Tail = Tail(),  # noqa: B008  (it is frozen)
    ) -> None:
        self.parameters = list(parameters)
        self.orders = [memory_order(parameter) for parameter in parameters]
        """``memory_order`` of each parameter when the layout was made; that of its part of a vector does not change."""
        self._tail = tail
        for parameter in parameters:
            if parameter.is_complex():
                raise ValueError(
                    f"a parameter of dtype {parameter.dtype} cannot be averaged: make it two real ones, or keep it out "
                    f"of the optimizer"
                )
        kinds = [kind(parameter) for parameter in parameters]
        sizes = [(own, p.numel() * own[1].itemsize) for own, p in zip(kinds, parameters, strict=True)]
        parts = divide(sizes, cap, _places(self.parameters, groups))
        self.buckets = [Bucket([self.parameters[place] for place in part]) for part in parts]
        self.nbytes = tuple((b.elements + len(tail)) * b.dtype.itemsize for b in self.buckets)
        """Bytes of each bucket's vector."""
        self.memory = ReusedMemory(SETS_KEPT * len(self.buckets))
        """Memory of the vectors."""
        self._tails = [torch.tensor(tail.of(), dtype=b.dtype, device=b.device) for b in self.buckets]
        """The tail of each bucket's gradient without ``weighting="samples"``."""
        self.bucket_of = {id(p): index for index, bucket in enumerate(self.buckets) for p in bucket.parameters}

    def __len__(self) -> int:
        return len(self.buckets)

    def vector(self, index: int, scale: float | torch.Tensor, samples: int | None = None) -> torch.Tensor:
        """Return a bucket's ``p.grad`` x ``scale``, copied once; a missing gradient counts as zero, as in Horovod.

        Sparse gradients become dense: ranks do not know in advance which gradients will be sparse.

        Args:
            index: number of the bucket.
            scale: factor of all gradients.
            samples: further factor, the number of samples; 0 makes the gradients zero whatever they hold (the mean over
                no samples is NaN). None: gradients are not weighted.
        """
        bucket = self.buckets[index]
        flat = self.memory.empty(self.nbytes[index], bucket.device, bucket.dtype)
        bucket.copy_gradients(flat, self._tails[index])
        factor = scale if samples is None else scale * samples
        if samples == 0:
            flat.zero_()
        elif isinstance(factor, torch.Tensor) or factor != 1.0:
            flat[: bucket.elements].mul_(factor)
        if samples is not None:
            self._count(flat[bucket.elements :], samples)
        return flat

    def _count(self, tail: torch.Tensor, samples: int) -> None:
        """Fill a tail, as ``Tail.of`` says. (Setting an item copies from the host, and waits for the stream.)"""
        tail.zero_()
        tail.narrow(0, self._tail.slot, 1).fill_(1.0)
        places = torch.arange(SAMPLE_DIGITS, device=tail.device)
        own = tail.narrow(0, self._tail.slots + self._tail.slot * SAMPLE_DIGITS, SAMPLE_DIGITS)
        own.copy_(torch.bitwise_right_shift(samples, places).bitwise_and_(1))

    def set_gradients(self, round_: ReducedRound, scale: float, frozen: set[int], sparse: bool = False) -> None:
        """Point each ``p.grad`` into a round's sums, which are multiplied in place by ``scale`` and the round's weight.

        Gradients of ``frozen`` parameters (ids), and of buckets that carried no gradient or no samples, become None:
        momentum and decay must not move parameters for which no rank had a gradient.

        Args:
            round_: the round.
            scale: factor of the sums.
            frozen: ids of the frozen parameters.
            sparse: whether to make sparse tensors, for an optimizer that takes no others.
        """
        for index, (vector, bucket) in enumerate(zip(round_.sums, self.buckets, strict=True)):
            weight = round_.weight(index)
            if weight == 0:
                for parameter in bucket.parameters:
                    parameter.grad = None
                continue
            if scale * weight != 1.0:
                vector[: bucket.elements].mul_(scale * weight)
            pairs = zip(bucket.parameters, bucket.gradients(vector), strict=True)
            # (a frozen parameter may have other memory by now, which would take no gradient of this shape)
            for parameter, part in [pair for pair in pairs if id(pair[0]) not in frozen] if frozen else pairs:
                average = part if part.dtype == parameter.dtype else part.to(parameter.dtype)
                parameter.grad = average.to_sparse(1) if sparse else average
        for parameter in self.parameters if frozen else ():
            if id(parameter) in frozen:
                parameter.grad = None


def differentiable(parameter: torch.Tensor) -> bool:
    """Return whether a parameter can have a gradient."""
    return parameter.is_floating_point() or parameter.is_complex()


def memory_order(parameter: torch.Tensor) -> str:
    """Return the order of a parameter's elements in vectors: "channels_last", "channels_last_3d", or "" (row-major)."""
    kind = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.dim())
    if kind is None or parameter.is_contiguous() or not parameter.is_contiguous(memory_format=kind):
        return ""
    return str(kind).removeprefix("torch.")


def strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's part of a vector."""
    own = parameter.is_contiguous() or memory_order(parameter)  # (strides of dimensions of size 1 say nothing)
    return (parameter if own else torch.empty(parameter.shape, device="meta")).stride()


def zeros_of(
    nbytes: Sequence[int], devices: Sequence[torch.device], dtypes: Sequence[torch.dtype]
) -> Callable[[int], torch.Tensor]:
    """Return a function that returns the read-only vector of a bucket without a gradient, the same one each time.

    It does not reference parameters, since the engine may outlive the model.

    Args:
        nbytes, devices, dtypes: of the buckets' vectors.
    """

    @functools.cache
    def zeros(index: int) -> torch.Tensor:
        if streams.gpu.has_allocator(devices[index]):
            return record_ready(
                torch.zeros(nbytes[index], dtype=torch.uint8, device=devices[index]).view(dtypes[index])
            )
        # (no memory: private pages that are never written to share one physical page)
        memory = mmap.mmap(-1, nbytes[index], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=dtypes[index])

    return zeros


def kind(parameter: torch.Tensor) -> tuple[torch.device, torch.dtype]:
    """Return device and accumulation dtype of a parameter: parameters of different kinds cannot share a bucket."""
    return parameter.device, torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _places(
    parameters: Sequence[torch.Tensor], groups: int | Sequence[Sequence[torch.Tensor]]
) -> int | list[list[int]]:
    """Return groups as an argument of ``divide``.

    Raises:
        ValueError: they are neither a number nor lists of these parameters.
    """
    if isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
        return groups
    if not (isinstance(groups, list | tuple) and all(isinstance(group, list | tuple) for group in groups)):
        raise ValueError(f"groups must be an integer of at least 0 (none) or lists of parameters, got {groups!r}")
    place = {id(p): index for index, p in enumerate(parameters)}
    groups = [[p for p in group if not isinstance(p, torch.Tensor) or differentiable(p)] for group in groups]
    if any(id(p) not in place for group in groups for p in group):
        raise ValueError(
            "groups must list parameters of this optimizer, and an entry is no parameter of this optimizer"
        )
    return [[place[id(p)] for p in group] for group in groups]


# -- compression -------------------------------------------------------------------------------------------------------


class BF16Compressor:
    """Sends gradients as bfloat16: float32's range, 8 bits of precision."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor as bfloat16, and its own dtype."""
        return tensor.to(torch.bfloat16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """Return the tensor in its own dtype."""
        return tensor.to(ctx)


class Int8Messages:
    """Marker of messages of 8 bits per element, with error feedback: ``GossipOptimizer`` encodes them itself."""


class Compression(hvd.Compression):
    """Horovod's ``Compression`` (``none``, ``fp16``) with ``bf16``, and ``int8`` for ``GossipOptimizer``'s messages."""

    bf16 = BF16Compressor
    int8 = Int8Messages


def wire_dtype(compression: Any, dtype: torch.dtype) -> str:
    """Return the name of the dtype of a compressed vector of ``dtype``."""
    return str(compression.compress(torch.zeros(1, dtype=dtype))[0].dtype).removeprefix("torch.")


def slots(compression: Any, parameters: Sequence[torch.Tensor], size: int, max_staleness: int) -> int:
    """Return the number of counting elements that every bucket's vector needs.

    Raises:
        ValueError: the compressed dtype cannot be summed, or cannot count far enough.
    """
    needed = 1
    for dtype in {torch.float64 if p.dtype == torch.float64 else torch.float32 for p in parameters}:
        name = wire_dtype(compression, dtype)
        try:
            needed = max(needed, count_slots(size, max_staleness, name))
        except KeyError:
            raise ValueError(f"compression to {name} cannot be summed over ranks: take one to a float type") from None
    return needed


def make_wire(layout: Layout, compression: Any, tail: Tail, rank_group: RankGroup) -> GradientFormat:
    """Return the wire format of the layout's vectors. float16 gradients are clipped so that their sum over the ranks
    stays finite; counts are not clipped."""
    samples = [compression.compress(torch.zeros(1, dtype=b.dtype)) for b in layout.buckets]
    travelling, contexts = [sample.dtype for sample, _ in samples], [context for _, context in samples]
    narrowed = {b.dtype for b, dtype in zip(layout.buckets, travelling, strict=True) if dtype == torch.float16}
    limit = largest_summand(rank_group.size)
    as_it_is = compression is Compression.none
    """Whether vectors travel as they are, so that no kernel or stream is needed."""

    def encode(vector: torch.Tensor, unit: float = 1.0) -> torch.Tensor:
        if as_it_is and unit == 1.0:
            return vector
        with streams.on_engine_stream_after(vector):
            cut = vector
            if unit != 1.0:
                cut = cut * (1.0 / unit)
            if vector.dtype in narrowed:
                cut = cut.clamp(-limit, limit)  # (else the sum might be infinite on all ranks)
            if cut is not vector:
                cut[-len(tail) :] = vector[-len(tail) :]
            compressed: torch.Tensor = compression.compress(cut)[0]
            return compressed if compressed is vector else streams.record_ready(compressed)

    def decode(vector: torch.Tensor, bucket: int) -> torch.Tensor:
        if as_it_is:
            return vector
        with streams.on_engine_stream_after(vector):
            decompressed: torch.Tensor = compression.decompress(vector, contexts[bucket])
        return streams.use_here(decompressed)

    def read_tail(vector: torch.Tensor, bucket: int) -> torch.Tensor:
        tail_there = streams.read(vector[-len(tail) :])
        decompressed: torch.Tensor = compression.decompress(tail_there, contexts[bucket])
        return decompressed

    def add(total: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
        with streams.on_engine_stream_after(total, late):
            total += late
            return streams.record_ready(total)

    return GradientFormat(
        zeros=zeros_of(layout.nbytes, [b.device for b in layout.buckets], [b.dtype for b in layout.buckets]),
        nbytes=layout.nbytes,
        tail=tail,
        encode=encode,
        decode=decode,
        read_tail=read_tail if compression in (Compression.none, Compression.fp16, BF16Compressor) else None,
        narrow=bool(narrowed),
        peek=lambda sums, count: streams.copy_to_host(sums[-count:]).tolist(),
        add=add,
        recount=lambda vector, count, elements: torch.cat([vector[:-count], vector.new_tensor(elements)]),
        sent=tuple((b.elements + len(tail)) * d.itemsize for b, d in zip(layout.buckets, travelling, strict=True)),
        release=layout.memory.clear,
        process_set=rank_group.process_set,
        members=rank_group.members,
        process_set_id=rank_group.id,
    )
