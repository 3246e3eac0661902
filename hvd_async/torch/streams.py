"""CUDA streams: how the engine works beside the training thread without either waiting for the device.

The engine's kernels go to the training thread's stream (``bind_training_stream``), so whatever both touch is in order.
But a collective must not wait for all that the training thread has queued since its vector was computed. So it is
submitted from a stream of the engine's own, that waits for the vector's event alone (``record_ready``,
``on_engine_stream_after``); and what a collective has brought is read from there too (``copy_to_host``). On a CPU all
of this does nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hvd_async.runtime.engine import Engine

READY = "_hvd_async_ready"
"""The attribute of a tensor that says when it is computed: (event, or None if it is; the tensor's version counter)."""
EARLY = os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION", "0") not in ("", "0")
"""Whether Horovod says that a collective on a GPU is done when it is queued: its results are then in the order of the
default stream."""
_own: dict[torch.device, Any] = {}
_followed: WeakKeyDictionary[Engine, dict[torch.device, Any]] = WeakKeyDictionary()
"""To which streams each engine's kernels go."""


def _own_stream(device: torch.device) -> Any:
    """The engine's own stream on a device."""
    if device not in _own:
        _own[device] = torch.cuda.Stream(device)
    return _own[device]


def record_ready(vector: torch.Tensor) -> torch.Tensor:
    """Say that the vector is computed by what this thread's stream holds so far; returns it."""
    if vector.is_cuda:
        _mark(vector, torch.cuda.current_stream(vector.device).record_event())
    return vector


def record_received(tensor: torch.Tensor) -> torch.Tensor:
    """Say that a collective has brought this tensor, for this thread's stream to go on with; returns it."""
    if tensor.is_cuda:
        current = torch.cuda.current_stream(tensor.device)
        event = torch.cuda.default_stream(tensor.device).record_event() if EARLY else None
        if event is not None:
            current.wait_event(event)
        tensor.record_stream(current)
        _mark(tensor, event)
    return tensor


def _mark(tensor: torch.Tensor, event: Any) -> None:
    setattr(tensor, READY, (event, tensor._version))


@contextlib.contextmanager
def on_engine_stream_after(vector: torch.Tensor) -> Iterator[None]:
    """``on_engine_stream`` for kernels that read a vector: they wait for it alone, if it was not changed since."""
    if vector.is_cuda:
        own = _own_stream(vector.device)
        event, version = getattr(vector, READY, (None, None))
        if version != vector._version:
            own.wait_stream(torch.cuda.current_stream(vector.device))
        elif event is not None:
            own.wait_event(event)
        vector.record_stream(own)
    with on_engine_stream(vector.device):
        yield


@contextlib.contextmanager
def on_engine_stream(device: torch.device) -> Iterator[None]:
    """In it kernels go to the engine's own stream, and wait for nothing else. Afterwards this thread's stream waits for
    them; ``use_here`` what they have made."""
    if device.type != "cuda":
        yield
        return
    own = _own_stream(device)
    with torch.cuda.stream(own):
        yield
    torch.cuda.current_stream(device).wait_stream(own)


def use_here(tensor: torch.Tensor) -> torch.Tensor:
    """This thread's stream goes on with a tensor that was made on another one; returns it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU of something small that a collective has brought; waits for that alone."""
    if not tensor.is_cuda:
        return tensor
    own = _own_stream(tensor.device)
    if EARLY:
        own.wait_stream(torch.cuda.default_stream(tensor.device))
    with torch.cuda.stream(own):
        return tensor.cpu()


class Later:
    """A number on a GPU, on its way to the CPU; nothing waits until it is asked for.

    Args:
        number: shape (), or of one element.
    """

    def __init__(self, number: torch.Tensor) -> None:
        self._there = torch.empty((), dtype=number.dtype, pin_memory=True)
        self._there.copy_(number.reshape(()), non_blocking=True)
        self._copied = torch.cuda.current_stream(number.device).record_event()

    def __float__(self) -> float:
        self._copied.synchronize()
        return float(self._there)


def bind_training_stream(engine: Engine, tensors: Iterable[torch.Tensor]) -> None:
    """Let the engine's kernels go to this thread's present streams on the devices of these tensors, from now on."""
    devices = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
    if not devices:
        return
    known = _followed.setdefault(engine, {})
    streams = {device: torch.cuda.current_stream(device) for device in devices}
    others = [stream for device, stream in streams.items() if known.get(device) != stream]
    if others:
        known.update(streams)
        engine.call_soon(lambda: _follow(others))


def _follow(streams: Sequence[Any]) -> None:
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(stream.device))  # (what this thread has left on the one before)
        torch.cuda.set_stream(stream)
