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

from hvd_async.runtime.interfaces import Vector
from hvd_async.testing import InjectedError, MemoryCollectives, _Meeting, _MemoryHandle
from hvd_async.torch import streams


class Event:
    """An event of a fake stream, complete as soon as it is recorded."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def query(self) -> bool:
        return True

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

    Attributes:
        waits: number of the host's waits, by the name of the thread and of the operation: copies to the host and
            events. (To count reads of single numbers, such as ``.item()``, look for ``aten::_local_scalar_dense`` in a
            ``TorchDispatchMode``.)
    """

    has_nccl = True

    def __init__(self) -> None:
        super().__init__()
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


# -- sums that are taken before they are complete, as on NCCL ---------------------------------------------------------


class _LateHandle(_MemoryHandle):
    """A sum that may be taken before it is complete. It is seen to be complete only some looks later."""

    def __init__(self, meeting: _Meeting, seed: str) -> None:
        super().__init__(meeting)
        self._looks = random.Random(seed).randrange(6)
        self._lock = threading.Lock()
        self._result: Any = None
        self.take = self._take

    def _take(self) -> Any:
        if not self._meeting.complete.wait(60.0):
            raise InjectedError("a sum that was taken is never complete")
        return self.result()

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
    """Collectives as on NCCL: started in one order; torch gradients' sums are usable once they are submitted.

    A vector that was submitted holds NaN, so that a sum that is read without being taken shows.
    """

    in_order = True

    def allreduce_sum(
        self, vector: Vector, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> _MemoryHandle:
        if type(vector).__module__ != "torch" or not name.startswith("hvd_async.eager") or scale != 1.0:
            return super().allreduce_sum(vector, name, process_set, keep, scale)
        sent = vector + 0
        if not keep:
            vector.fill_(float("nan"))
        handle = super().allreduce_sum(sent, name, process_set)
        return _LateHandle(handle._meeting, f"{name} {self.rank}")
