"""Horovod's collectives for torch tensors, and this process's torch engine.

``hvd.synchronize`` spins and starves the training thread, so handles are polled: seldom while a collective cannot be
done yet (going by how long the last one of its kind took), finely around the time it should be.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common import process_sets
from horovod.common.exceptions import HorovodInternalError

from hvd_async.errors import NotInitializedError
from hvd_async.lifecycle import Lifecycle
from hvd_async.protocols import Handle, Landed, pack, unpack
from hvd_async.sharers import Alone, process_set_among

FINEST_POLL = 0.0002
COARSEST_POLL = 0.005


class _HorovodHandle:
    """A Horovod handle, polled."""

    def __init__(self, handle: int, kind: str, durations: dict[str, float]) -> None:
        self._handle, self._kind, self._durations = handle, kind, durations
        self._started = time.monotonic()

    def done(self) -> bool:
        return bool(hvd.poll(self._handle))

    def result(self) -> Any:
        self._durations[self._kind] = time.monotonic() - self._started
        return hvd.synchronize(self._handle)

    def poll_in(self) -> float:
        elapsed = time.monotonic() - self._started
        left = self._durations.get(self._kind, 0.0) - elapsed
        if left > 0:
            return min(max(FINEST_POLL, 0.75 * left), COARSEST_POLL)  # the last one may have been slow for once
        return min(max(FINEST_POLL, elapsed / 10), COARSEST_POLL)


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

    def __init__(
        self,
        vector: torch.Tensor,
        size: int,
        scale: float,
        begin: Callable[[torch.Tensor], _HorovodHandle],
        gather: Callable[[torch.Tensor], _HorovodHandle],
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
        return self._stage.result().view(torch.bfloat16)[: self._elements]

    def poll_in(self) -> float:
        return self._stage.poll_in()


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
        self._durations: dict[str, float] = {}

    def start(self, wake: Callable[[], None]) -> None:
        """Nothing to do: handles are polled."""

    def stop(self) -> None:
        """Nothing to do."""

    def _handle(self, handle: int, name: str) -> _HorovodHandle:
        return _HorovodHandle(handle, name.rpartition(".")[0], self._durations)

    def sum(
        self, vector: torch.Tensor, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Handle:
        if isinstance(process_set, Alone):
            return Landed(vector * scale if keep or scale != 1.0 else vector)
        ranks = hvd.global_process_set if process_set is None else process_set
        if vector.dtype != torch.bfloat16:
            start = hvd.allreduce_async if keep else hvd.allreduce_async_
            handle = start(vector, op=hvd.Sum, name=name, process_set=ranks, postscale_factor=scale)
            return self._handle(handle, name)
        stem, _, number = name.rpartition(".")

        def begin(padded: torch.Tensor) -> _HorovodHandle:
            own = f"{stem}.parts.{number}"
            return self._handle(hvd.alltoall_async(padded, name=own, process_set=ranks), own)

        def gather(part: torch.Tensor) -> _HorovodHandle:
            own = f"{stem}.sums.{number}"
            return self._handle(hvd.allgather_async(part, name=own, process_set=ranks), own)

        return _BFloat16Sum(vector, ranks.size(), scale, begin, gather)

    def extreme(self, vector: torch.Tensor, name: str, largest: bool) -> _HorovodHandle:
        return self._handle(hvd.allreduce_async_(vector, op=hvd.Max if largest else hvd.Min, name=name), name)

    def broadcast(self, vector: torch.Tensor, root: int, name: str, process_set: Any = None) -> Handle:
        if isinstance(process_set, Alone):
            return Landed(vector)
        ranks = hvd.global_process_set if process_set is None else process_set
        return self._handle(hvd.broadcast_async_(vector, root, name=name, process_set=ranks), name)

    def blank(self, vector: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(vector)

    def exchange(self, rows: torch.Tensor, splits: list[int], name: str, process_set: Any = None) -> Handle:
        if isinstance(process_set, Alone):
            return Landed((rows[:0], [0]))
        ranks = hvd.global_process_set if process_set is None else process_set
        handle = hvd.alltoall_async(rows, torch.tensor(splits, dtype=torch.int32), name=name, process_set=ranks)
        return _Received(handle, name.rpartition(".")[0], self._durations)

    def subset(self, groups: Sequence[Sequence[int]], make: bool) -> Any:
        return process_set_among(process_sets, groups, self.rank, make)

    def gather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        data = bytearray(pack(payload))
        handle = self._handle(hvd.allgather_async(torch.frombuffer(data, dtype=torch.uint8), name=name), name)
        while not handle.done():
            time.sleep(handle.poll_in())
        gathered = handle.result().numpy().tobytes()
        return unpack(gathered)


LIFECYCLE = Lifecycle(HorovodCollectives, lambda: (hvd.rank(), hvd.size()) if hvd.is_initialized() else None)
