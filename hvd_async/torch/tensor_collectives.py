"""Parts that both data planes share: descriptions of vectors, process sets, a GPU's tensors by way of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_async.runtime.interfaces import Handle
from hvd_async.runtime.process_sets import process_set_among
from hvd_async.torch import streams
from hvd_async.torch.horovod_api import hvd

FINEST_POLL = 0.001
"""Seconds between two polls of a collective on a CPU, at least."""
POLLS_OF_GPU = (0.0002, 0.005)
"""Seconds between two polls of a collective on a GPU, at least and at most. The GPU is idle while the training thread
waits; otherwise the engine polls less often."""


class Staged:
    """A collective of a tensor on a GPU that travels by way of the CPU: down, over the network, up again.

    Args:
        tensor: this rank's part.
        begin: starts the collective of a tensor on the CPU.
    """

    in_stages = True
    take = None

    def __init__(self, tensor: torch.Tensor, begin: Callable[[torch.Tensor], Handle]) -> None:
        self._device, self._begin = tensor.device, begin
        self._handle: Handle | None = None
        self._result: torch.Tensor | None = None
        with streams.on_engine_stream_after(tensor):
            self._host = streams.gpu.pinned(tensor.shape, tensor.dtype)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = streams.gpu.current_stream(self._device).record_event()

    def done(self) -> bool:
        if not self._copied.query():
            return False
        if self._handle is None:
            self._handle = self._begin(self._host)
        if self._result is None and self._handle.done():
            self._result = self._up(self._handle.result())
            return self._copied.query()
        return self._result is not None

    def _up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the result to the GPU; it is there when ``_copied`` is complete."""
        with streams.on_engine_stream(self._device):
            there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            there.copy_(tensor, non_blocking=True)
            self._host = tensor  # (it must stay until it has been copied)
            self._copied = streams.gpu.current_stream(self._device).record_event()
        return there

    def result(self) -> torch.Tensor:
        assert self._result is not None
        return streams.record_received(self._result)

    def seconds_to_poll(self) -> float:
        if self._handle is None or self._result is not None:
            return POLLS_OF_GPU[0]
        return self._handle.seconds_to_poll() or POLLS_OF_GPU[0]


class TensorCollectives:
    """Base class of the data planes for torch tensors."""

    rank: int
    in_order = False

    def __init__(self) -> None:
        self._cuda: torch.device | None = None
        """This rank's GPU, known from the first tensor on it: the engine's thread has its own current device."""

    @property
    def on_gpu(self) -> bool:
        return torch.cuda.is_initialized()

    def describe(self, vector: torch.Tensor) -> tuple[int, str]:
        return vector.numel(), f"{str(vector.dtype).removeprefix('torch.')} {vector.device.type}"

    def zeros(self, length: int, kind: str) -> torch.Tensor:
        dtype, device = kind.split()
        where = self._cuda if device == "cuda" and self._cuda is not None else torch.device(device)
        return torch.zeros(length, dtype=getattr(torch, dtype), device=where)

    def empty_like(self, vector: torch.Tensor) -> torch.Tensor:
        return streams.record_ready(torch.empty_like(vector))

    def release(self, optimizer: int) -> None:
        pass

    def process_set_of(self, groups: Sequence[Sequence[int]], make: bool) -> Any:
        return process_set_among(hvd.process_sets, hvd.known_process_sets(), groups, self.rank, make)
