"""ZeroMQ sockets of the control plane: encrypted by CURVE, bounded, watched by a monitor, polled by the system.

A connection that ends (a killed process closes it at once; a frozen host or a cut link is found by ZeroMQ's own
heartbeats) is told by the monitor: ZeroMQ's I/O thread answers heartbeats by itself, so a rank that is merely slow, or
holds Python's interpreter lock for long, is never taken for dead.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from hvd_async.runtime import time_limits

READABLE = int(zmq.POLLIN)
MILLISECOND = 0.001
"""The unit of the system's poll, in seconds. Its select counts microseconds."""
SELECTABLE = 1024
"""Lower descriptors only are known to select."""
LINGER_MS = 2_000
LONGEST_SILENCE = 86_400.0
"""Seconds; ZeroMQ counts milliseconds in 32 bits."""
LARGEST = 16 << 20
"""Bytes of a message: those that open a model have some 100 for each of its parameters, all others are small."""
HANDSHAKE_MS = 15_000
"""Who has not shown its key by then is put out."""
MOST_UNREAD = 1 << 16
"""Messages of one connection; it is not listened to, not even to its heartbeats, until some of them have been read."""


class Waker:
    """Lets any thread end a poll: a socket pair, of which one end is polled."""

    def __init__(self) -> None:
        self.receiver, self._sender = socket.socketpair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)

    def wake(self) -> None:
        """End the poll that is under way, or the next one."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake already; closed: nobody sleeps
            self._sender.send(b"!")

    def clear(self) -> None:
        """Forget what has woken it."""
        with contextlib.suppress(BlockingIOError, OSError):
            self.receiver.recv(4096)  # (whatever is left ends the next poll)

    def close(self) -> None:
        """Close both ends."""
        self.receiver.close()
        self._sender.close()


class Endpoint:
    """A socket and the monitor that tells of its connections.

    Args:
        kind: ZeroMQ's type of the socket.
        watched: events of connections that the monitor tells.
        context: to share its I/O thread; else the endpoint has one of its own.

    Attributes:
        descriptors: to poll. They only say that something has changed since the sockets were last used.
        unsure: whether there may be a message: a descriptor is ready, or a socket was used since both were empty.
    """

    def __init__(self, kind: int, watched: int, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self._own_context = context is None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context() if context is None else context
        self._socket = _made(self._context, kind)
        self._monitor = self._socket.get_monitor_socket(watched)
        self.descriptors = int(self._socket.get(zmq.FD)), int(self._monitor.get(zmq.FD))
        self.unsure = True
        self.closed = False

    def is_readable(self) -> bool:
        """Whether the socket has something to read, or the monitor something to tell."""
        self.unsure = self.unsure and (_readable(self._socket) or _readable(self._monitor))
        return self.unsure

    def note(self, ready: Collection[int]) -> bool:
        """Record the descriptors that a poll has found ready; return ``unsure``."""
        self.unsure = self.unsure or any(descriptor in ready for descriptor in self.descriptors)
        return self.unsure

    def has_message(self) -> bool:
        """Whether the socket has something to read."""
        return _readable(self._socket)

    def monitored(self) -> Iterator[tuple[int, int]]:
        """Yield the monitor's events that are there: (event, value)."""
        self.unsure = True
        while _readable(self._monitor):
            told = recv_monitor_message(self._monitor)
            yield told["event"], told["value"]

    def close(self, linger: int | None = None) -> None:
        """Close it; calling it again does nothing.

        Args:
            linger: milliseconds that what was not sent yet may take; None: two seconds.
        """
        if not self.closed:
            self.closed = True
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(linger)
            if self._own_context:
                self._context.term()


class NearEnd:
    """One end of a connection between two threads of a process, with the interface of a socket's end.

    Attributes:
        wake: ends the wait of the thread that reads this end.
        closed: whether it was closed here.
    """

    descriptors: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.closed = False
        self._messages: deque[bytes] = deque()
        self._other: NearEnd | None = None
        self._ended = False

    @property
    def is_connected(self) -> bool:
        """Whether there is another end."""
        return self._other is not None

    def connect(self, other: NearEnd) -> None:
        """Connect two ends, whose ``wake`` is set already."""
        self._other, other._other = other, self

    def send(self, payload: bytes) -> None:
        """Send a message; never blocks."""
        assert self._other is not None
        self._other._messages.append(payload)
        self._other.wake()

    def read(self) -> list[bytes] | None:
        """Return the next message, as a list of one; None if there is none."""
        return [self._messages.popleft()] if self._messages else None

    def is_readable(self) -> bool:
        """Whether there is a message, or the other end was closed and ``refused`` has not reported it yet."""
        return bool(self._messages) or self._ended

    def note(self, ready: Collection[int]) -> bool:
        """Return ``is_readable``: a poll reports nothing about it."""
        return self.is_readable()

    def refused(self) -> bool | None:
        """Return False, once, if the other end was closed and sends nothing more; else None."""
        if not self._ended:
            return None
        self._ended = False
        return False

    def close(self, linger: int | None = None) -> None:
        """Close it, after what was sent; calling it again does nothing."""
        if not self.closed:
            self.closed = True
            if self._other is not None:
                self._other._ended = True
                self._other.wake()


class Sleeper:
    """Waits until an endpoint may have something, or another thread wakes it.

    The poll is the system's: ZeroMQ's own looks at each socket four times, and wakes up cold. A descriptor of ZeroMQ's
    says nothing of what was there before its socket was last used; so before the next sleep the sockets are asked.
    """

    def __init__(self, *endpoints: Endpoint | NearEnd) -> None:
        self._endpoints = endpoints
        self._waker = Waker()
        self._poller = select.poll()
        self._woken = self._waker.receiver.fileno()
        self._descriptors = [self._woken, *(one for endpoint in endpoints for one in endpoint.descriptors)]
        for descriptor in self._descriptors:
            self._poller.register(descriptor, select.POLLIN)
        self._sleeps = self._wake_pending = False

    def wake(self) -> None:
        """From any thread: end the wait that is under way, or the next one."""
        self._wake_pending = True
        if self._sleeps:  # (set before the sleeper looks whether a wake is pending: one of the two sees the other)
            self._waker.wake()

    def wait(self, timeout: float | None) -> bool:
        """Wait for so many seconds at the most, for ever if None; returns whether an endpoint may have something."""
        readable = any(endpoint.is_readable() for endpoint in self._endpoints)
        self._sleeps = True
        ready = self._ready(0.0 if readable or self._wake_pending else timeout)
        self._wake_pending = False  # (first: who wakes it between these two lines leaves a byte for the next wait)
        self._sleeps = False
        if self._woken in ready:
            self._waker.clear()
        return any(endpoint.note(ready) for endpoint in self._endpoints)

    def _ready(self, timeout: float | None) -> list[int]:
        """The descriptors of which there is something to say, after so many seconds at the most."""
        if timeout is not None and 0 < timeout < MILLISECOND and max(self._descriptors) < SELECTABLE:
            return select.select(self._descriptors, (), (), timeout)[0]
        milliseconds = None if timeout is None else math.ceil(timeout / MILLISECOND)
        return [descriptor for descriptor, _ in self._poller.poll(milliseconds)]

    def close(self) -> None:
        """Close the waker."""
        self._waker.close()


def _made(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.linger = LINGER_MS
    made.sndhwm = 0  # never drop: what is on its way is bounded by the protocol
    made.rcvhwm = MOST_UNREAD
    made.setsockopt(zmq.MAXMSGSIZE, LARGEST)
    made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    # Silence shows by a heartbeat that is not answered, so the interval until it is sent counts too.
    silence_ms = min(time_limits.dead_after(), LONGEST_SILENCE) * 1000
    made.setsockopt(zmq.HEARTBEAT_IVL, round(silence_ms / 5))
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(silence_ms * 4 / 5))
    return made


def _readable(asked: zmq.Socket[bytes]) -> bool:
    """Whether a socket has something to read."""
    return bool(int(asked.get(zmq.EVENTS)) & READABLE)
