"""Flat vectors of a model's weights: the order of their elements, their memory, and each parameter's part of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvd_async.algorithms.gossip.message_format import row_bytes
from hvd_async.torch import streams
from hvd_async.torch.bucket_layout import memory_order

FREE_BLOCKS = 2
"""Free blocks that are kept for the next step, beside the one that was lent last: enough for each algorithm's steps."""
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
"""Returns how many tensors share a storage; torch before 2.5 has it in builds for GPUs only."""


class _Block:
    """The memory of one vector, and views of the parameters' parts.

    The views are made once, since making them costs the host three times as much as copying the weights.

    Args:
        vector: covers all of the memory.
        parts: the views.
        stream: the stream whose kernels use it; None on a CPU.
        use_count: returns how many tensors share a storage.
    """

    def __init__(
        self, vector: torch.Tensor, parts: list[torch.Tensor], stream: Any, use_count: Callable[[int], int]
    ) -> None:
        self._vector, self.parts, self.stream = vector, parts, stream
        self.address = vector.data_ptr()
        self._storage, self._use_count = vector.untyped_storage(), use_count
        self._idle = use_count(self._storage._cdata)

    def is_free(self) -> bool:
        """Return whether no reference to the vector or a view of it is left; Horovod's references count too."""
        return self._use_count(self._storage._cdata) == self._idle

    def lend(self) -> torch.Tensor:
        """Return the vector as a new tensor."""
        return self._vector.detach()


class WeightVectors:
    """Flat vectors of all weights that are mixed.

    A parameter's elements have the same order in a vector as in the parameter's memory (``torch.channels_last``), so
    copies between the two do not reorder elements. The order must be the same on all ranks: they compare ``orders``
    when they meet.

    Args:
        parameters: those that are mixed, on one device.
        dtype: of the vectors, float32 or float64.
        orders: ``memory_order`` of each parameter.

    Attributes:
        dtypes: of the parameters.
        sizes: number of elements of each parameter.
        elements: their sum.
        device: of the parameters, and of the vectors.
        on_gpu: whether it is a GPU.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], dtype: torch.dtype, orders: Sequence[str]) -> None:
        self.dtype, self.orders = dtype, list(orders)
        self.dtypes = [p.dtype for p in parameters]
        self.sizes = [p.numel() for p in parameters]
        self.elements = sum(self.sizes)
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self.on_gpu = bool(parameters) and streams.gpu.holds(parameters[0])
        ends = itertools.accumulate(self.sizes, initial=0)
        self._places = [
            (p.shape, _strides(p.shape, order), start)
            for p, order, start in zip(parameters, self.orders, ends, strict=False)
        ]
        self._lock = threading.Lock()
        self._blocks: list[_Block] = []
        """Lent and free blocks; the list is replaced, never changed."""

    @torch.no_grad()
    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return new views of the parameters' parts of a vector, shape (n,)."""
        start = vector.storage_offset()
        return [vector.as_strided(shape, strides, start + place) for shape, strides, place in self._places]

    def parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' parts of a vector, shape (n,). Use them immediately: the memory may belong to another
        vector later."""
        address = vector.data_ptr()
        known = next((block for block in self._blocks if block.address == address), None)
        return self.views(vector) if known is None or vector.dtype != self.dtype else known.parts

    def empty(self) -> torch.Tensor:
        """Return an uninitialized vector, with room for a message's header behind it.

        Any thread may call it. The memory is reused when the last tensor on it is gone; on a GPU only for kernels of
        the same stream, which waits for the engine's own stream by then.
        """
        if _use_count is None:
            return self._new_vector()
        stream = streams.gpu.current_stream(self.device) if self.on_gpu else None
        with self._lock:
            free: list[_Block] = []
            lent: list[_Block] = []
            for block in self._blocks:
                if not block.is_free():
                    lent.append(block)
                elif block.stream == stream:  # (torch frees a dropped block of another stream once that has used it)
                    free.append(block)
            if not free:
                with torch.inference_mode(False):  # (else they could not be written to outside of that mode)
                    vector = self._new_vector()
                    free.append(_Block(vector, self.views(vector), stream, _use_count))
            block = free.pop()
            self._blocks = [*lent, *free[-FREE_BLOCKS:], block]
            return block.lend()

    def _new_vector(self) -> torch.Tensor:
        nbytes = self.elements * self.dtype.itemsize
        return torch.empty(row_bytes(nbytes), dtype=torch.uint8, device=self.device)[:nbytes].view(self.dtype)

    @torch.no_grad()
    def read(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a new vector of the parameters' elements."""
        vector = self.empty()
        torch._foreach_copy_(self.parts(vector), list(parameters))
        return vector

    @torch.no_grad()
    def write(self, parameters: Sequence[torch.Tensor], vector: torch.Tensor) -> None:
        """Copy a vector's elements into the parameters."""
        torch._foreach_copy_(list(parameters), self.parts(vector))


def orders_of(parameters: Sequence[torch.Tensor], known: Mapping[int, str]) -> dict[int, str]:
    """Return ``memory_order`` of each parameter by its id; where it is known, that of before."""
    return {id(p): known[id(p)] if id(p) in known else memory_order(p) for p in parameters}


def _strides(shape: torch.Size, order: str) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose elements lie in this ``memory_order``."""
    kind: torch.memory_format = getattr(torch, order or "contiguous_format")
    return torch.empty(shape, device="meta", memory_format=kind).stride()
