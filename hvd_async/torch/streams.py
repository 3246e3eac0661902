"""CUDA streams, by which engine and training thread work concurrently without waiting for the device.

The engine's kernels go to the training thread's stream (``bind_training_stream``), so work on shared tensors is in
order. But a collective must not wait for work that the training thread has queued since its vector was computed. So it
is submitted from the engine's own stream, which waits only for the vector's event (``record_ready``,
``on_engine_stream_after``); results of collectives are read there too (``copy_to_host``). On a CPU all of this does
nothing.

All calls of a step to ``torch.cuda`` go through ``gpu``, which tests replace.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hvd_async.runtime.interfaces import RankRuntime
from hvd_async.runtime.memory import ReusedBlocks
from hvd_async.torch.horovod_api import hvd

READY = "_hvd_async_ready"
"""Attribute of a tensor: (event after which it is computed, or None if it is; the tensor's version counter)."""
EARLY = os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION", "0") not in ("", "0")
"""Whether Horovod reports a collective on a GPU as done when it is queued; its result is then ready for the default
stream."""
_followed: WeakKeyDictionary[RankRuntime, dict[torch.device, Any]] = WeakKeyDictionary()
"""The streams of each engine's kernels, by device."""


LINGERS = 5.0
"""Seconds after which a watcher that has nothing to do ends."""


class Watcher:
    """A thread that waits for events in the order in which it gets them. It begins with the first one, and ends when
    none has come for ``LINGERS``."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: deque[tuple[Any, Callable[[], None]]] = deque()
        self._runs = False

    def add(self, event: Any, action: Callable[[], None]) -> None:
        """Call ``action`` once ``event`` is done."""
        with self._changed:
            self._events.append((event, action))
            if self._runs:
                self._changed.notify()
            else:
                self._runs = True
                threading.Thread(target=self._run, name="hvd_async-watcher", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: bool(self._events), LINGERS):
                    self._runs = False
                    return
                event, action = self._events.popleft()
            # If the device has failed, so does what the action begins, on a thread that reports it.
            with contextlib.suppress(RuntimeError):
                event.synchronize()
            action()
            del event, action  # (which may hold tensors)


class Gpu:
    """The operations on a GPU that the torch bindings use.

    Streams and events are those of ``torch.cuda``. Only their methods ``record_event``, ``wait_event``,
    ``wait_stream``, ``query`` and ``synchronize`` are called.
    """

    holds: Callable[[torch.Tensor], bool] = operator.attrgetter("is_cuda")
    """Whether a tensor is on a GPU. (A C function, since it is called for each bucket on a CPU too.)"""

    def __init__(self) -> None:
        self._engine_streams: dict[torch.device, Any] = {}
        self._reading_streams: dict[torch.device, Any] = {}
        self.free_numbers: dict[tuple[torch.dtype, tuple[int]], list[torch.Tensor]] = {}
        """Free pinned memory for ``Later``, by dtype and shape: allocating it would take longer than the copy."""
        self._watcher = Watcher()

    def has_allocator(self, device: torch.device) -> bool:
        """Return whether torch caches freed memory of the device."""
        return device.type != "cpu"

    @property
    def has_nccl(self) -> bool:
        """Whether Horovod can send tensors on the GPU by NCCL."""
        return bool(hvd.nccl_built())

    def new_stream(self, device: torch.device) -> Any:
        """Return a new stream of the device."""
        return torch.cuda.Stream(device)

    def engine_stream(self, device: torch.device) -> Any:
        """Return the engine's own stream."""
        if device not in self._engine_streams:
            self._engine_streams[device] = self.new_stream(device)
        return self._engine_streams[device]

    def reading_stream(self, device: torch.device) -> Any:
        """Return the stream of copies to the host of what is complete, behind no other work."""
        if device not in self._reading_streams:
            self._reading_streams[device] = self.new_stream(device)
        return self._reading_streams[device]

    def current_stream(self, device: torch.device) -> Any:
        """Return the stream that this thread's kernels go to."""
        return torch.cuda.current_stream(device)

    def default_stream(self, device: torch.device) -> Any:
        """Return the default stream, which a thread's kernels go to unless it selects another."""
        return torch.cuda.default_stream(device)

    def record(self, device: torch.device, timed: bool = False) -> Any:
        """Record an event on this thread's stream: one for which a thread can sleep, or also take the time."""
        return self.current_stream(device).record_event(torch.cuda.Event(enable_timing=timed, blocking=True))

    def seconds(self, first: Any, last: Any) -> float:
        """Return the seconds between two timed events, which are done."""
        milliseconds: float = first.elapsed_time(last)
        return milliseconds / 1e3

    def when_done(self, event: Any, action: Callable[[], None]) -> None:
        """Call ``action`` once ``event``, of ``record``, is done: on another thread, in the order of the calls."""
        self._watcher.add(event, action)

    def set_stream(self, stream: Any) -> None:
        """Send this thread's later kernels to ``stream``."""
        torch.cuda.set_stream(stream)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which this thread's kernels go to ``stream``."""
        return torch.cuda.stream(stream)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """After the tensor is freed, keep its memory until ``stream`` has finished the work queued by then."""
        tensor.record_stream(stream)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in pinned memory of the host: copies to and from it need no wait."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor on the CPU in pinned memory."""
        return tensor.pin_memory()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the CPU; waits for this thread's stream."""
        return tensor.cpu()


gpu = Gpu()
_NOTHING = contextlib.nullcontext()


def record_ready(vector: torch.Tensor) -> torch.Tensor:
    """Mark a vector as computed by the work queued on this thread's stream so far; return it."""
    if gpu.holds(vector):
        _mark(vector, gpu.record(vector.device))
    return vector


def record_received(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as the result of a collective, to be used on this thread's stream; return it."""
    if gpu.holds(tensor):
        current = gpu.current_stream(tensor.device)
        event = gpu.default_stream(tensor.device).record_event() if EARLY else None
        if event is not None:
            current.wait_event(event)
        gpu.record_stream(tensor, current)
        _mark(tensor, event)
    return tensor


def _mark(tensor: torch.Tensor, event: Any) -> None:
    setattr(tensor, READY, (event, tensor._version))


def on_engine_stream_after(*vectors: torch.Tensor) -> AbstractContextManager[None]:
    """Return ``on_engine_stream`` for kernels that use vectors of a device: they wait only for these, unless one was
    changed since it was marked. On a CPU the context does nothing."""
    return _on_engine_stream_after(vectors) if gpu.holds(vectors[0]) else _NOTHING


@contextlib.contextmanager
def _on_engine_stream_after(vectors: Sequence[torch.Tensor]) -> Iterator[None]:
    own = gpu.engine_stream(vectors[0].device)
    for vector in vectors:
        event, version = getattr(vector, READY, (None, None))
        if version != vector._version:
            own.wait_stream(gpu.current_stream(vector.device))
        elif event is not None:
            own.wait_event(event)
        gpu.record_stream(vector, own)
        if EARLY:  # (Horovod releases it before NCCL has read it; by then the default stream waits for NCCL)
            gpu.record_stream(vector, gpu.default_stream(vector.device))
    with on_engine_stream(vectors[0].device):
        yield


@contextlib.contextmanager
def on_engine_stream(device: torch.device) -> Iterator[None]:
    """Return a context in which kernels go to the engine's own stream of a GPU, and wait for nothing else. Afterwards
    this thread's stream waits for them; pass their results to ``use_here``."""
    own = gpu.engine_stream(device)
    with gpu.on(own):
        yield
    gpu.current_stream(device).wait_stream(own)


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU of a small tensor that is complete; wait for no other work of the device."""
    if not gpu.holds(tensor):
        return tensor
    with gpu.on(gpu.reading_stream(tensor.device)):
        return gpu.to_host(tensor)


def use_here(tensor: torch.Tensor) -> torch.Tensor:
    """Let this thread's stream use a tensor that was made on another one; return it."""
    if gpu.holds(tensor):
        gpu.record_stream(tensor, gpu.current_stream(tensor.device))
    return tensor


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU of a small result of a collective; wait only for that."""
    if not gpu.holds(tensor):
        return tensor
    own = gpu.engine_stream(tensor.device)
    if EARLY:
        own.wait_stream(gpu.default_stream(tensor.device))
    with gpu.on(own):
        return gpu.to_host(tensor)


class Later:
    """Numbers that are being copied from a GPU to the CPU; nothing waits until they are read.

    Args:
        numbers: a tensor of any shape; for ``float()``, of one element.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        shape = (numbers.numel(),)
        self._free = gpu.free_numbers.setdefault((numbers.dtype, shape), [])
        try:
            self._there = self._free.pop()  # (another thread may have been quicker)
        except IndexError:
            self._there = gpu.pinned(shape, numbers.dtype)
        self._there.copy_(numbers.reshape(shape), non_blocking=True)
        self._copied = gpu.current_stream(numbers.device).record_event()
        self._numbers: list[float] | None = None

    def is_ready(self) -> bool:
        """Return whether the numbers are copied, so that reading them does not wait."""
        if self._numbers is None and self._copied.query():
            self._read()
        return self._numbers is not None

    def numbers(self) -> list[float]:
        """Return the numbers; wait until they are copied."""
        if self._numbers is None:
            self._copied.synchronize()
            return self._read()
        return self._numbers

    def _read(self) -> list[float]:
        numbers: list[float] = self._there.double().tolist()
        self._numbers = numbers
        self._free.append(self._there)
        return numbers

    def __float__(self) -> float:
        self.is_ready()  # (which waits for nothing)
        (number,) = self.numbers()
        return float(number)


def bind_training_stream(engine: RankRuntime, tensors: Iterable[torch.Tensor]) -> bool:
    """Send the engine's later kernels to this thread's current streams on the devices of these tensors; return whether
    any is on a GPU."""
    devices = sorted({tensor.device for tensor in tensors if gpu.holds(tensor)}, key=str)
    if not devices:
        return False
    known = _followed.setdefault(engine, {})
    streams = {device: gpu.current_stream(device) for device in devices}
    others = [stream for device, stream in streams.items() if known.get(device) != stream]
    if others:
        known.update(streams)
        engine.call_soon(lambda: _follow(others))
    return True


def _follow(streams: Sequence[Any]) -> None:
    for stream in streams:
        stream.wait_stream(gpu.current_stream(stream.device))  # (which may still have this thread's work)
        gpu.set_stream(stream)


# -- memory of vectors -------------------------------------------------------------------------------------------------


class ReusedMemory(ReusedBlocks):
    """Memory of vectors that is reused from step to step. A block is free when the last tensor on it is gone, views and
    Horovod's references included. On a GPU torch's own allocator does it."""

    def empty(self, nbytes: int, device: torch.device, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return an uninitialized tensor of ``nbytes`` bytes."""
        if gpu.has_allocator(device):
            return torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
        return torch.from_numpy(self.take(nbytes)).view(dtype)
