"""Horovod's gradient compression, with bfloat16 besides, and what it means for how vectors travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_async.algorithms.eager.gradient_format import GradientFormat, Tail, count_slots, largest_summand
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.torch import streams
from hvd_async.torch.bucket_layout import Layout, Zeros
from hvd_async.torch.horovod_api import hvd


class BF16Compressor:
    """Sends gradients as bfloat16: float32's range, 8 bits of precision."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """The tensor as bfloat16, and its own dtype."""
        return tensor.to(torch.bfloat16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """The tensor in the dtype it had."""
        return tensor.to(ctx)


class Int8Messages:
    """Stands for messages of 8 bits an element, with error feedback: ``GossipOptimizer`` codes them itself."""


class Compression(hvd.Compression):
    """Horovod's ``Compression`` (``none``, ``fp16``) with ``bf16``, and ``int8`` for ``GossipOptimizer``'s messages."""

    bf16 = BF16Compressor
    int8 = Int8Messages


def wire_dtype(compression: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a vector of ``dtype`` has while it travels."""
    travelling: torch.dtype = compression.compress(torch.zeros(1, dtype=dtype))[0].dtype
    return travelling


def slots(compression: Any, parameters: Sequence[torch.Tensor], size: int, max_staleness: int) -> int:
    """Counting elements that every bucket's vector needs.

    Raises:
        ValueError: the compressed dtype cannot count, or not far enough.
    """
    needed = 1
    for dtype in {torch.float64 if p.dtype == torch.float64 else torch.float32 for p in parameters}:
        name = str(wire_dtype(compression, dtype)).removeprefix("torch.")
        try:
            needed = max(needed, count_slots(size, max_staleness, name))
        except KeyError:
            raise ValueError(f"compression to {name} cannot be summed over ranks: take one to a float type") from None
    return needed


def make_wire(layout: Layout, compression: Any, tail: Tail, rank_group: RankGroup) -> GradientFormat:
    """How the layout's vectors travel. float16 is cut off at what as many ranks can add up; its counts are not."""
    contexts = [compression.compress(torch.zeros(1, dtype=b.dtype))[1] for b in layout.buckets]
    travelling = [wire_dtype(compression, b.dtype) for b in layout.buckets]
    narrowed = {b.dtype for b, dtype in zip(layout.buckets, travelling, strict=True) if dtype == torch.float16}
    limit = largest_summand(rank_group.size)

    def encode(vector: torch.Tensor, unit: float = 1.0) -> torch.Tensor:
        with streams.on_engine_stream_after(vector):
            cut = vector
            if unit != 1.0:
                cut = cut * (1.0 / unit)
            if vector.dtype in narrowed:
                cut = cut.clamp(-limit, limit)  # else the ranks' sum might be infinite, on all of them
            if cut is not vector:
                cut[-len(tail) :] = vector[-len(tail) :]
            compressed: torch.Tensor = compression.compress(cut)[0]
            return compressed if compressed is vector else streams.record_ready(compressed)

    def decode(vector: torch.Tensor, bucket: int) -> torch.Tensor:
        with streams.on_engine_stream_after(vector):
            decompressed: torch.Tensor = compression.decompress(vector, contexts[bucket])
        return streams.use_here(decompressed)

    return GradientFormat(
        zeros=Zeros(layout.nbytes, [b.device for b in layout.buckets], [b.dtype for b in layout.buckets]),
        nbytes=layout.nbytes,
        tail=tail,
        encode=encode,
        decode=decode,
        narrow=bool(narrowed),
        peek=lambda sums, count: streams.copy_to_host(sums[-count:]).tolist(),
        recount=lambda vector, count, elements: torch.cat([vector[:-count], vector.new_tensor(elements)]),
        sent=tuple((b.elements + len(tail)) * d.itemsize for b, d in zip(layout.buckets, travelling, strict=True)),
        release=layout.memory.clear,
        process_set=rank_group.process_set,
        members=rank_group.members,
        process_set_id=rank_group.id,
    )
