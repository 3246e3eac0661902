"""A fake GPU for machines without one: CPU tensors count as tensors on it; streams and events order nothing.

For tests, and for counting what a step on a GPU costs the host. Kernels run immediately, on the CPU.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hvd_async.runtime.interfaces import Handle, Rows, Vector
from hvd_async.testing import InjectedError, MemoryCollectives, _MemoryHandle
from hvd_async.torch import streams


class Event:
    """An event of a fake stream, which the host sees to be complete as the GPU says."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def query(self) -> bool:
        return self._gpu.reached()

    def synchronize(self) -> None:
        self._gpu.host_waits("Event.synchronize")


class Stream:
    """A stream whose kernels run immediately."""

    def __init__(self, gpu: FakeGpu, device: torch.device) -> None:
        self._gpu, self.device = gpu, device

    def record_event(self) -> Event:
        return Event(self._gpu)

    def wait_event(self, event: Any) -> None:
        """Do nothing: work is complete at once."""

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())


class FakeGpu(streams.Gpu):
    """A fake GPU that replaces ``streams.gpu`` inside ``installed()``. Every tensor is on it.

    Args:
        lags: whether the host learns of an event only when it waits for that: it is as far ahead as it can be.

    Attributes:
        reached: whether the host sees an event to be complete when it looks at it; a test may replace it.
        waits: number of the host's waits, by the name of the thread and of the operation: copies to the host and
            events. (To count reads of single numbers, such as ``.item()``, look for ``aten::_local_scalar_dense`` in a
            ``TorchDispatchMode``.)
    """

    has_nccl = True

    def __init__(self, lags: bool = False) -> None:
        super().__init__()
        self.reached: Callable[[], bool] = lambda: not lags
        self.waits: Counter[tuple[str, str]] = Counter()
        self._current = threading.local()
        self._default: Any = Stream(self, torch.device("cpu"))
        self.holds = lambda tensor: True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Make this the GPU of the process inside the context. Enter it before creating optimizers."""
        before, streams.gpu = streams.gpu, self
        try:
            yield
        finally:
            streams.gpu = before

    def host_waits(self, what: str) -> None:
        """Count a wait of this thread."""
        self.waits[threading.current_thread().name, what] += 1

    def has_allocator(self, device: torch.device) -> bool:
        return True

    def new_stream(self, device: torch.device) -> Any:
        return Stream(self, device)

    def current_stream(self, device: torch.device) -> Any:
        return getattr(self._current, "stream", None) or self.default_stream(device)

    def default_stream(self, device: torch.device) -> Any:
        return self._default

    def record(self, device: torch.device, timed: bool = False) -> Any:
        return self.current_stream(device).record_event()

    def seconds(self, first: Any, last: Any) -> float:
        return 0.0

    def when_done(self, event: Any, action: Callable[[], None]) -> None:
        action()

    def set_stream(self, stream: Any) -> None:
        self._current.stream = stream

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = getattr(self._current, "stream", None)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Do nothing: memory is freed after the work is complete."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.host_waits("to_host")
        return tensor.clone()


# -- results that are taken before they are complete, as on NCCL -----------------------------------------------------


class _LateHandle(_MemoryHandle):
    """A collective whose result may be taken before it is complete. It is seen to be complete only some looks later.

    Args:
        handle: of the collective.
        plane: of this rank. Once its engine has failed, what is taken is garbage.
        given: what the rank has submitted.
        name: of the collective.
    """

    def __init__(self, handle: Any, plane: MemoryCollectives, given: Any, name: str) -> None:
        super().__init__(handle._meeting, handle._place)
        self._plane, self._given = plane, given
        self._looks = random.Random(f"{name} {plane.rank}").randrange(6)
        self._lock = threading.Lock()
        self._result: Any = None
        self.take = self._take

    def _take(self) -> Any:
        for _ in range(600):
            if self._meeting.complete.wait(0.1):
                return self.result()
            if not self._plane.started:
                return self._given
        raise InjectedError("a collective whose result was taken is never complete")

    def done(self) -> bool:
        if super().done():
            self._looks -= 1
        return self._looks < 0

    def result(self) -> Any:
        with self._lock:  # (both threads have the same tensor, as on a GPU)
            if self._result is None:
                self._result = super().result()
        return self._result

    def seconds_to_poll(self) -> float | None:
        return 0.001


class LateCollectives(MemoryCollectives):
    """Collectives as on NCCL: started in one order; torch's are usable once they are submitted.

    A vector that was submitted holds NaN where a result may be written, so that one that is read without being taken
    shows.
    """

    in_order = True

    def allreduce_sum(
        self, vector: Vector, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Handle:
        sent = self._given(vector, keep)
        return self._late(super().allreduce_sum(sent, name, process_set, keep, scale), vector, name)

    def broadcast(self, vector: Vector, root: int, name: str, process_set: Any = None) -> Handle:
        sent = self._given(vector, self.rank == root)
        return self._late(super().broadcast(sent, root, name, process_set), vector, name)

    def alltoall(
        self,
        rows: Rows,
        splits: list[int],
        coming: list[int],
        name: str,
        process_set: Any = None,
        into: Rows | None = None,
    ) -> Handle:
        return self._late(super().alltoall(rows, splits, coming, name, process_set, into), rows, name)

    def _given(self, vector: Vector, keep: bool) -> Vector:
        """Return the vector to be sent, and let the given one look as its memory may meanwhile."""
        if not _is_of_torch(vector):
            return vector
        sent = vector + 0
        if not keep:
            vector.fill_(float("nan") if vector.is_floating_point() else 77)
        return sent

    def _late(self, handle: Handle, given: Any, name: str) -> Handle:
        return _LateHandle(handle, self, given, name) if _is_of_torch(given) else handle


def _is_of_torch(vector: Any) -> bool:
    return type(vector).__module__ == "torch"
