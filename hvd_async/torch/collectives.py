"""Horovod's collectives for torch tensors, and this process's torch engine.

``hvd.synchronize`` spins and starves the training thread, so handles are polled: seldom while a collective cannot be
done yet (going by how long the last one of its kind took), finely around the time it should be.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_async.errors import NotInitializedError
from hvd_async.lifecycle import Lifecycle
from hvd_async.protocols import pack, unpack

FINEST_POLL = 0.0002
COARSEST_POLL = 0.005


class _HorovodHandle:
    """A Horovod handle, polled."""

    def __init__(self, handle: int, kind: str, durations: dict[str, float]) -> None:
        self._handle, self._kind, self._durations = handle, kind, durations
        self._started = time.monotonic()

    def done(self) -> bool:
        return bool(hvd.poll(self._handle))

    def result(self) -> torch.Tensor:
        self._durations[self._kind] = time.monotonic() - self._started
        result: torch.Tensor = hvd.synchronize(self._handle)
        return result

    def poll_in(self) -> float:
        elapsed = time.monotonic() - self._started
        left = self._durations.get(self._kind, 0.0) - elapsed
        if left > 0:
            return min(max(FINEST_POLL, 0.75 * left), COARSEST_POLL)  # the last one may have been slow for once
        return min(max(FINEST_POLL, elapsed / 10), COARSEST_POLL)


class HorovodCollectives:
    """The data plane on Horovod's global process set.

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

    def sum(self, vector: torch.Tensor, name: str) -> _HorovodHandle:
        return self._handle(hvd.allreduce_async_(vector, op=hvd.Sum, name=name), name)

    def extreme(self, vector: torch.Tensor, name: str, largest: bool) -> _HorovodHandle:
        return self._handle(hvd.allreduce_async_(vector, op=hvd.Max if largest else hvd.Min, name=name), name)

    def broadcast(self, vector: torch.Tensor, root: int, name: str) -> _HorovodHandle:
        return self._handle(hvd.broadcast_async_(vector, root, name=name), name)

    def gather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        data = bytearray(pack(payload))
        handle = self._handle(hvd.allgather_async(torch.frombuffer(data, dtype=torch.uint8), name=name), name)
        while not handle.done():
            time.sleep(handle.poll_in())
        gathered = handle.result().numpy().tobytes()
        return unpack(gathered)


LIFECYCLE = Lifecycle(HorovodCollectives, lambda: hvd.size() if hvd.is_initialized() else None)
