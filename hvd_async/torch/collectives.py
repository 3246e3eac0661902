"""Horovod's collectives for torch tensors, and this process's torch engine.

``hvd.synchronize`` spins and starves the training thread, so handles are polled: not before a collective can be done
(going by how long the quickest of the last of its kind took), and finely around the time it should be. Each look costs
a wake-up of the engine, whose Python code takes the interpreter lock.

Tensors on a GPU go to NCCL where Horovod was built with it. Elsewhere, or where ranks share a GPU, which NCCL refuses
(HVD_ASYNC_STAGE=1), they are staged here, through pinned memory, and not by Horovod, whose thread would copy each back
in the order of all that the device has to do.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common import process_sets
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from hvd_async.algorithms.registry import FAMILIES
from hvd_async.errors import NotInitializedError
from hvd_async.runtime.interfaces import CompletedHandle, Handle, pack, unpack
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.process_sets import SingleRank, process_set_among
from hvd_async.torch import streams
from hvd_async.torch.inference import outside_inference_mode

FINEST_POLL = 0.001
POLLS = (FINEST_POLL, 0.005)
"""Seconds between two looks, at the least and at the most."""
POLLS_OF_GPU = (0.0002, 0.005)
"""The same on a GPU, which is idle while the training thread waits. (Otherwise the engine looks less often.)"""
RESOLUTION = 0.05
"""Share of its duration by which a collective may be seen to be done too late, within these limits."""
RESOLUTION_OF_LONG = 0.02
"""The same for a long collective, for which this is more than the upper limit."""
NOT_BEFORE = 0.9
"""Share of the quickest of the last durations after which a collective is looked at for the first time."""
REMEMBERED = 4
"""Durations: one collective that was slow for once does not delay the next look."""


class _Durations:
    """How long the last collectives of each kind have taken, s. A kind's take about as long as each other."""

    def __init__(self) -> None:
        self._last: dict[str, deque[float]] = {}

    def add(self, kind: str, seconds: float) -> None:
        self._last.setdefault(kind, deque(maxlen=REMEMBERED)).append(seconds)

    def least(self, kind: str) -> float:
        return min(self._last.get(kind, (0.0,)))


class _HorovodHandle:
    """A Horovod handle, polled.

    Args:
        handle: Horovod's.
        kind: of collectives that take about as long as each other.
        durations: of those before, as they were last seen not to be done. (When one was seen to be done depends on when
            it was looked for, and would keep the next look as late.)
        polls: seconds between two looks, at the least and at the most.
    """

    in_stages = False

    def __init__(self, handle: int, kind: str, durations: _Durations, polls: tuple[float, float]) -> None:
        self._handle, self._kind, self._durations = handle, kind, durations
        self._finest, self._coarsest = polls
        self._started = time.monotonic()
        self._first_look = NOT_BEFORE * durations.least(kind)
        self._not_yet = 0.0

    def done(self) -> bool:
        elapsed = time.monotonic() - self._started
        if hvd.poll(self._handle):
            return True
        self._not_yet = elapsed
        return False

    def result(self) -> Any:
        self._durations.add(self._kind, self._not_yet)
        result = hvd.synchronize(self._handle)
        return (
            tuple(map(streams.record_received, result))
            if isinstance(result, tuple)
            else streams.record_received(result)
        )

    def seconds_to_poll(self) -> float:
        elapsed = time.monotonic() - self._started
        coarsely = max(self._coarsest, RESOLUTION_OF_LONG * elapsed)
        finely = min(max(self._finest, RESOLUTION * elapsed), coarsely)
        return max(self._first_look - elapsed, finely)


class _Received(_HorovodHandle):
    """An alltoall: what has come, and how much of whom."""

    def result(self) -> Any:
        rows, counts = super().result()
        return rows, counts.tolist()


class _BFloat16Sum:
    """A sum of bfloat16 vectors, which Horovod does not add: every rank sums one part of all, in float32, and all
    gather the parts. It moves as many bytes as an allreduce.

    Args:
        vector: shape (n,), bfloat16.
        size: ranks that take part.
        begin: starts the exchange of parts, ``gather`` that of their sums; both take int16 vectors of these bits.
    """

    in_stages = True

    def __init__(
        self,
        vector: torch.Tensor,
        size: int,
        scale: float,
        begin: Callable[[torch.Tensor], Handle],
        gather: Callable[[torch.Tensor], Handle],
    ) -> None:
        self._elements, self._size, self._scale, self._gather = vector.numel(), size, scale, gather
        padded = torch.nn.functional.pad(vector, (0, -self._elements % size))
        self._stage = begin(padded.view(torch.int16))
        self._summed = False

    def done(self) -> bool:
        if self._stage.done() and not self._summed:
            parts = self._stage.result()[0].view(torch.bfloat16).view(self._size, -1)
            self._summed = True
            own = parts.sum(0, dtype=torch.float32)
            own = own if self._scale == 1.0 else own * self._scale
            self._stage = self._gather(own.to(torch.bfloat16).view(torch.int16))
        return self._summed and self._stage.done()

    def result(self) -> torch.Tensor:
        gathered: torch.Tensor = self._stage.result()
        return gathered.view(torch.bfloat16)[: self._elements]

    def seconds_to_poll(self) -> float | None:
        return self._stage.seconds_to_poll()


class _Staged:
    """A collective of a tensor on a GPU that travels by way of the CPU: down, over the network, up again.

    Args:
        tensor: what this rank brings.
        begin: starts the collective of a tensor on the CPU.
    """

    in_stages = True

    def __init__(self, tensor: torch.Tensor, begin: Callable[[torch.Tensor], Handle]) -> None:
        self._device, self._begin = tensor.device, begin
        self._handle: Handle | None = None
        self._result: tuple[Any, ...] | None = None
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

    def _up(self, brought: Any) -> tuple[Any, ...]:
        """The result on the GPU, once ``_copied`` says so; of an exchange with its counts."""
        tensor, *counts = brought if isinstance(brought, tuple) else (brought,)
        with streams.on_engine_stream(self._device):
            there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            there.copy_(tensor, non_blocking=True)
            self._host = tensor  # (it must stay until it has been copied)
            self._copied = streams.gpu.current_stream(self._device).record_event()
        return (there, *counts)

    def result(self) -> Any:
        assert self._result is not None
        tensor, *counts = self._result
        return (streams.record_received(tensor), *counts) if counts else streams.record_received(tensor)

    def seconds_to_poll(self) -> float:
        if self._handle is None or self._result is not None:
            return POLLS_OF_GPU[0]
        return self._handle.seconds_to_poll() or POLLS_OF_GPU[0]


class HorovodCollectives:
    """The data plane on Horovod: over all ranks, or over those of a process set.

    Raises:
        NotInitializedError: ``hvd.init()`` was not called.
    """

    failure: type[Exception] = HorovodInternalError

    def __init__(self) -> None:
        if not hvd.is_initialized():
            raise NotInitializedError()
        self.rank, self.size = hvd.rank(), hvd.size()
        self.host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        self._durations = _Durations()
        self._cuda: torch.device | None = None
        """This rank's GPU, once one of its tensors was there: the engine's thread has a current device of its own."""
        staged = os.environ.get("HVD_ASYNC_STAGE", "0") not in ("", "0")
        self._nccl = streams.gpu.has_nccl and not staged

    @property
    def on_gpu(self) -> bool:
        return torch.cuda.is_initialized()

    def start(self, wake: Callable[[], None]) -> None:
        """Nothing to do: handles are polled."""

    def stop(self) -> None:
        """Nothing to do."""

    def _start(
        self,
        tensor: torch.Tensor,
        name: str,
        start: Callable[[torch.Tensor], int],
        kind: type[_HorovodHandle] = _HorovodHandle,
    ) -> Handle:
        """Start a collective of a tensor: where it is, or by way of the CPU."""
        on_gpu = streams.gpu.holds(tensor)
        polls = POLLS_OF_GPU if on_gpu else POLLS

        def begin(there: torch.Tensor) -> Handle:
            return kind(start(there), name.rpartition(".")[0], self._durations, polls)

        self._cuda = tensor.device if on_gpu else self._cuda
        if on_gpu and not self._nccl:
            return _Staged(tensor, begin)
        with streams.on_engine_stream_after(tensor):
            return begin(tensor)

    def allreduce_sum(
        self, vector: torch.Tensor, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Handle:
        if isinstance(process_set, SingleRank):
            return CompletedHandle(vector * scale if keep or scale != 1.0 else vector)
        ranks = hvd.global_process_set if process_set is None else process_set
        if vector.dtype != torch.bfloat16:
            start = hvd.allreduce_async if keep else hvd.allreduce_async_
            how = {"op": hvd.Sum, "name": name, "process_set": ranks, "postscale_factor": scale}
            return self._start(vector, name, lambda there: start(there, **how))
        stem, _, number = name.rpartition(".")

        def begin(padded: torch.Tensor) -> Handle:
            own = f"{stem}.parts.{number}"
            return self._start(padded, own, lambda there: hvd.alltoall_async(there, name=own, process_set=ranks))

        def gather(part: torch.Tensor) -> Handle:
            own = f"{stem}.sums.{number}"
            return self._start(part, own, lambda there: hvd.allgather_async(there, name=own, process_set=ranks))

        return _BFloat16Sum(vector, ranks.size(), scale, begin, gather)

    def allreduce_extreme(self, vector: torch.Tensor, name: str, largest: bool) -> Handle:
        op = hvd.Max if largest else hvd.Min
        return self._start(vector, name, lambda there: hvd.allreduce_async_(there, op=op, name=name))

    def broadcast(self, vector: torch.Tensor, root: int, name: str, process_set: Any = None) -> Handle:
        if isinstance(process_set, SingleRank):
            return CompletedHandle(vector)
        ranks = hvd.global_process_set if process_set is None else process_set
        return self._start(vector, name, lambda there: hvd.broadcast_async_(there, root, name=name, process_set=ranks))

    def describe(self, vector: torch.Tensor) -> tuple[int, str]:
        return vector.numel(), f"{str(vector.dtype).removeprefix('torch.')} {vector.device.type}"

    def zeros(self, length: int, kind: str) -> torch.Tensor:
        dtype, device = kind.split()
        where = self._cuda if device == "cuda" and self._cuda is not None else torch.device(device)
        return torch.zeros(length, dtype=getattr(torch, dtype), device=where)

    def empty_like(self, vector: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(vector)

    def alltoall(
        self,
        rows: torch.Tensor,
        splits: list[int],
        name: str,
        process_set: Any = None,
        into: torch.Tensor | None = None,
    ) -> Handle:
        if isinstance(process_set, SingleRank):
            return CompletedHandle((rows[:0], [0]))
        ranks = hvd.global_process_set if process_set is None else process_set
        counts = torch.tensor(splits, dtype=torch.int32)

        def start(there: torch.Tensor) -> int:
            # ``hvd.alltoall_async`` has no argument for the result, for which it takes fresh memory each time
            result = there.new() if into is None else into
            return int(mpi_ops._alltoall_async(there, counts, result, counts.new(), name, ranks))

        return self._start(rows, name, start, _Received)

    def process_set_of(self, groups: Sequence[Sequence[int]], make: bool) -> Any:
        return process_set_among(process_sets, groups, self.rank, make)

    def allgather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        data = bytearray(pack(payload))
        handle = self._start(
            torch.frombuffer(data, dtype=torch.uint8), name, lambda there: hvd.allgather_async(there, name=name)
        )
        while not handle.done():
            time.sleep(handle.seconds_to_poll() or FINEST_POLL)
        gathered: bytes = handle.result().numpy().tobytes()
        return unpack(gathered)


class _TorchLifecycle(Lifecycle):
    """The lifecycle of torch optimizers, whose calls may come from inside ``torch.inference_mode()``."""

    join = outside_inference_mode(Lifecycle.join)
    settle = outside_inference_mode(Lifecycle.settle)
    shutdown = outside_inference_mode(Lifecycle.shutdown)


LIFECYCLE = _TorchLifecycle(
    HorovodCollectives, FAMILIES, lambda: (hvd.rank(), hvd.size()) if hvd.is_initialized() else None, hvd.shutdown
)
