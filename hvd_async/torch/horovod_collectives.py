"""Horovod's collectives for torch tensors.

``hvd.synchronize`` spins and starves the training thread, so handles are polled: not before a collective can be done,
judged by the shortest of the last durations of its kind, and often around the time at which it should be done. Each
poll wakes the engine, whose Python code takes the interpreter lock.

Tensors on a GPU go to NCCL if Horovod was built with it. Otherwise, or if ranks share a GPU, which NCCL refuses
(HVD_ASYNC_STAGE=1), they are staged here, through pinned memory, and not by Horovod, whose thread would queue each copy
back behind all other work of the device.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from hvd_async.errors import NotInitializedError
from hvd_async.runtime.interfaces import CompletedHandle, Handle, pack, unpack
from hvd_async.runtime.process_sets import SingleRank
from hvd_async.torch import streams
from hvd_async.torch.tensor_collectives import FINEST_POLL, POLLS_OF_GPU, Staged, TensorCollectives

POLLS = (FINEST_POLL, 0.005)
"""Seconds between two polls, at least and at most."""
RESOLUTION = 0.05
"""Delay with which a collective may be noticed to be done, as a share of its duration, within these limits."""
RESOLUTION_OF_LONG = 0.02
"""The same for a long collective, for which this is more than the upper limit."""
NOT_BEFORE = 0.9
"""Time of the first poll, as a share of the shortest of the last durations."""
REMEMBERED = 4
"""Number of durations that are kept, so that one slow collective does not delay the next poll."""


class _HorovodHandle:
    """A Horovod handle, polled.

    Args:
        handle: Horovod's.
        durations: of the last collectives of its kind, which take about the same time, in seconds; up to the last poll
            at which they were not done. (The poll at which one was done may have been late, and would make the next one
            as late.)
        polls: seconds between two polls, at least and at most.
    """

    in_stages = False
    take = None

    def __init__(self, handle: int, durations: deque[float], polls: tuple[float, float]) -> None:
        self._handle, self._durations = handle, durations
        self._finest, self._coarsest = polls
        self._started = time.monotonic()
        self._first_look = NOT_BEFORE * min(durations, default=0.0)
        self._not_yet = 0.0

    def done(self) -> bool:
        elapsed = time.monotonic() - self._started
        if hvd.poll(self._handle):
            return True
        self._not_yet = elapsed
        return False

    def result(self) -> Any:
        self._durations.append(self._not_yet)
        result = hvd.synchronize(self._handle)
        return streams.record_received(result[0] if isinstance(result, tuple) else result)  # (an alltoall's, counts)

    def seconds_to_poll(self) -> float:
        elapsed = time.monotonic() - self._started
        coarsely = max(self._coarsest, RESOLUTION_OF_LONG * elapsed)
        finely = min(max(self._finest, RESOLUTION * elapsed), coarsely)
        return max(self._first_look - elapsed, finely)


class _BFloat16Sum:
    """Sum of bfloat16 vectors, which Horovod does not add: every rank sums one part of all vectors, in float32, and all
    gather the parts. It moves as many bytes as an allreduce.

    Args:
        vector: shape (n,), bfloat16.
        size: number of ranks that take part.
        begin: starts the exchange of parts, ``gather`` that of their sums; both take int16 vectors of these bits.
    """

    in_stages = True
    take = None

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
            parts = self._stage.result().view(torch.bfloat16).view(self._size, -1)
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


class HorovodCollectives(TensorCollectives):
    """The data plane on Horovod: over all ranks, or over those of a process set.

    Raises:
        NotInitializedError: ``hvd.init()`` was not called.
    """

    failure: type[Exception] = HorovodInternalError

    def __init__(self) -> None:
        super().__init__()
        if not hvd.is_initialized():
            raise NotInitializedError()
        self.rank, self.size = hvd.rank(), hvd.size()
        self.host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        self._durations: dict[str, deque[float]] = {}
        """Durations of the last collectives, by the stem of their names."""
        staged = os.environ.get("HVD_ASYNC_STAGE", "0") not in ("", "0")
        self._nccl = streams.gpu.has_nccl and not staged

    def start(self, wake: Callable[[], None]) -> None:
        """Do nothing: handles are polled."""

    def stop(self) -> None:
        """Do nothing."""

    def _start(self, tensor: torch.Tensor, name: str, start: Callable[[torch.Tensor], int]) -> Handle:
        """Start a collective of a tensor: where it is, or by way of the CPU."""
        on_gpu = streams.gpu.holds(tensor)
        polls = POLLS_OF_GPU if on_gpu else POLLS
        durations = self._durations.setdefault(name.rpartition(".")[0], deque(maxlen=REMEMBERED))

        def begin(there: torch.Tensor) -> Handle:
            return _HorovodHandle(start(there), durations, polls)

        self._cuda = tensor.device if on_gpu else self._cuda
        if on_gpu and not self._nccl:
            return Staged(tensor, begin)
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

    def alltoall(
        self,
        rows: torch.Tensor,
        splits: list[int],
        coming: list[int],
        name: str,
        process_set: Any = None,
        into: torch.Tensor | None = None,
    ) -> Handle:
        if isinstance(process_set, SingleRank):
            return CompletedHandle(rows[:0])
        ranks = hvd.global_process_set if process_set is None else process_set
        counts = torch.tensor(splits, dtype=torch.int32)

        def start(there: torch.Tensor) -> int:
            # ``hvd.alltoall_async`` has no argument for the result, for which it takes fresh memory each time
            result = there.new() if into is None else into
            return int(mpi_ops._alltoall_async(there, counts, result, counts.new(), name, ranks))

        return self._start(rows, name, start)

    def allgather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        data = bytearray(pack(payload))
        handle = self._start(
            torch.frombuffer(data, dtype=torch.uint8), name, lambda there: hvd.allgather_async(there, name=name)
        )
        while not handle.done():
            time.sleep(handle.seconds_to_poll() or FINEST_POLL)
        gathered: bytes = handle.result().numpy().tobytes()
        return unpack(gathered)
