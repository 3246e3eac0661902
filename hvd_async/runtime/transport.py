"""The control plane on ZeroMQ: one ROUTER at the coordinator, one DEALER a rank, encrypted and authenticated by CURVE.

Each rank makes a key pair; the public keys travel by a Horovod allgather (``rendezvous``), and only those are let in.
A connection that ends (a killed process closes it at once; a frozen host or a cut link is found by ZeroMQ's own
heartbeats) shows up as ``Gone``: ZeroMQ's I/O thread answers heartbeats by itself, so a rank that is merely slow, or
holds Python's interpreter lock for long, is never taken for dead.

What strangers can do is bounded: nobody is listened to before the keys are known, or once all ranks are in; those that
knock between are few, for a limited time, and no frame is longer than ``LARGEST``. A rank that is let in and sends what
cannot be read is ``Gone``; one that sends without end is read in turn with the others, and waits when too much of it
is unread.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import zmq
import zmq.auth.thread
from zmq.utils.monitor import recv_monitor_message

from hvd_async.errors import EngineError
from hvd_async.runtime import time_limits
from hvd_async.runtime.codec import Codec, DecodeError, encode
from hvd_async.runtime.interfaces import Gone
from hvd_async.runtime.listener import ListeningSocket
from hvd_async.runtime.messages import Command, Event

READABLE = int(zmq.POLLIN)
LINGER_MS = 2_000
LONGEST_SILENCE = 86_400.0
"""Seconds; ZeroMQ counts milliseconds in 32 bits."""
ENDED = "died: the connection to the coordinator ended, unless it was this rank that stood still or was cut off"
LARGEST = 16 << 20
"""Bytes of a message: those that open a model have some 100 for each of its parameters, all others are small."""
HANDSHAKE_MS = 15_000
"""Who has not shown its key by then is put out."""
KNOCKING = 64
"""Connections that may be open at a time of which it is not known whose they are, beside three of each rank (which
tries several addresses, each with a connection of its own)."""
MOST_UNREAD = 1 << 16
"""Messages of a rank; it is not listened to, not even to its heartbeats, until some of them have been read."""
PASS = 256
"""Messages that are read at a time before they are looked at, one of each rank in turn."""


class _Waker:
    """Lets any thread end a poll: a socket pair, of which one end is polled."""

    def __init__(self) -> None:
        self.receiver, self._sender = socket.socketpair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake already; closed: nobody sleeps
            self._sender.send(b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self.receiver.recv(4096)  # (whatever is left ends the next poll)

    def close(self) -> None:
        self.receiver.close()
        self._sender.close()


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
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


class _Endpoint:
    """Base of both ends: a socket, the monitor that tells of lost connections, a waker, a poll over the three.

    The poll is the system's: ZeroMQ's own looks at each of them four times, and wakes up cold. A descriptor of ZeroMQ's
    only says that something has changed since the socket was last used; so before each sleep, and after anything else
    that is done with it, the socket itself is asked whether it has something to read.
    """

    def __init__(self, kind: int, watched: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _socket(self._context, kind)
        self._monitor = self._socket.get_monitor_socket(watched)
        self._waker = _Waker()
        self._poller = select.poll()
        woken = self._waker.receiver.fileno()
        for descriptor in (int(self._socket.get(zmq.FD)), int(self._monitor.get(zmq.FD)), woken):
            self._poller.register(descriptor, select.POLLIN)
        self._woken = (woken, select.POLLIN)
        """The poll's entry for the waker, when something has woken it."""
        self._closed = False

    def wake(self) -> None:
        self._waker.wake()

    def _wait(self, timeout: float | None) -> bool:
        """Wait; returns whether the socket may have something to read, or the monitor something to tell."""
        if _readable(self._socket) or _readable(self._monitor):
            return True
        if timeout is not None and 0 < timeout < 0.001:  # the system counts in whole milliseconds
            time.sleep(timeout)
            timeout = 0.0
        milliseconds = None if timeout is None else max(0, round(timeout * 1000 + 0.499))
        ready = self._poller.poll(milliseconds)
        if self._woken in ready:
            self._waker.clear()
            return len(ready) > 1
        return bool(ready)

    def _monitored(self) -> Iterator[tuple[int, int]]:
        """Yield the monitor's events that are there: (event, value)."""
        while _readable(self._monitor):
            told = recv_monitor_message(self._monitor)
            yield told["event"], told["value"]

    def _close(self, linger: int | None = None) -> None:
        """Close it all.

        Args:
            linger: milliseconds that what was not sent yet may take; None: as it was set.
        """
        if not self._closed:
            self._closed = True
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(linger)
            self._waker.close()
            self._context.term()


@dataclass(eq=False)
class _Connection:
    """One TCP connection to the hub; whose it is shows when it has said something."""

    rank: int | None = None


class ZmqHub(_Endpoint):
    """The coordinator's end. ``allow`` names the keys once they are known; nobody is listened to before.

    Attributes:
        public: the server's CURVE public key (Z85).
        port: the TCP port, reserved; it listens there once keys are allowed.

    Args:
        codec: reads what ranks send.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        super().__init__(zmq.ROUTER, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._ranks: dict[str, int] = {}
        self._identities: dict[int, bytes] = {}
        self._connections: dict[int, _Connection] = {}
        """Those that are open, by file descriptor; the numbers come back, so one that has ended must not stay."""
        self._ended: dict[int, _Connection] = {}
        self._gone: list[_Connection] = []
        """Those that have ended and were not told, as something that was said on them may be unread."""
        self._ready: deque[tuple[int, Event | Gone]] = deque()
        self._encoded: tuple[Command | None, bytes] = (None, b"")
        self._door = ListeningSocket()
        self.port = self._door.port
        self._guard = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback("*", credentials_provider=self)
        self.public, secret = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = self.public, secret

    def allow(self, keys: list[bytes], local: bool = False) -> None:
        """Let in exactly the ranks whose public keys (Z85) these are, in rank order, until all of them have spoken.

        Args:
            local: whether all of them are on this machine.
        """
        self._ranks = {key.decode(): rank for rank, key in enumerate(keys)}
        self._socket.setsockopt(zmq.USE_FD, self._door.open(local))
        self._socket.bind(f"tcp://*:{self.port}")

    def callback(self, domain: str, key: bytes) -> bool:
        """The authenticator asks, in its own thread: is this public key (Z85) one of ours?"""
        return key.decode() in self._ranks

    def send(self, rank: int, command: Command) -> None:
        if rank in self._identities:
            if command is not self._encoded[0]:
                self._encoded = command, encode(command)  # most commands go to every rank
            self._socket.send(self._identities[rank], zmq.SNDMORE)
            self._socket.send(self._encoded[1])

    def receive(self, timeout: float | None) -> tuple[int, Event | Gone] | None:
        if not self._ready and (self._wait(0.0 if self._gone else timeout) or self._gone):
            self._read_all()
        return self._ready.popleft() if self._ready else None

    def _read_all(self) -> None:
        """Take in what the socket and its monitor have: all of it, or so much that it is time to look at it.

        Each lags behind the other. A rank's probe of the port, or a stranger, may have had a descriptor just before the
        rank's own connection got it; so messages find their connection only when the monitor has told of every one
        opened and ended before.
        """
        heard: list[tuple[int, Event | Gone, int]] = []
        most = max(PASS, 2 * len(self._ranks))
        before = len(self._gone)
        told = True
        while told:
            heard += self._read(most - len(heard))
            told = False
            for kind, descriptor in self._monitored():
                told = True
                if kind == zmq.EVENT_ACCEPTED:
                    self._connections[descriptor] = _Connection()
                elif (connection := self._connections.pop(descriptor, None)) is not None:
                    self._ended[descriptor] = connection
                    self._gone.append(connection)
        for rank, event, descriptor in heard:
            connection = self._connections.get(descriptor) or self._ended.get(descriptor)
            if connection is not None:
                connection.rank = rank
            self._ready.append((rank, event))
        unread = {connection.rank for connection in self._gone[before:]} | {rank for rank, *_ in heard} | {None}
        self._tell_gone(unread if len(heard) == most else set())
        self._open_or_shut()

    def _tell_gone(self, unread: Collection[int | None]) -> None:
        """Tell whose connections have ended, after what they said before that.

        Args:
            unread: those of whom something may be unread. (Each in turn is read, so of one that was not heard in a
                whole pass there is nothing.)
        """
        for connection in self._gone:
            if connection.rank is not None and connection.rank not in unread:
                reason = "died: its connection to the coordinator ended without a goodbye"
                self._ready.append((connection.rank, Gone(reason)))
        self._gone = [connection for connection in self._gone if connection.rank in unread]
        if not self._gone:
            self._ended.clear()

    def _open_or_shut(self) -> None:
        """Let nobody in once all ranks have spoken, nor while many are there that have not said whose they are."""
        if not self._ranks:
            return
        if len(self._identities) == len(self._ranks):
            self._door.shut(True)
            return
        knocking = sum(connection.rank is None for connection in self._connections.values())
        most = KNOCKING + 3 * len(self._ranks)
        if knocking >= most:
            self._door.shut(True)
        elif knocking <= most // 2:
            self._door.shut(False)

    def _read(self, most: int) -> list[tuple[int, Event | Gone, int]]:
        """The messages that are there, so many at the most: sender, event, file descriptor."""
        heard: list[tuple[int, Event | Gone, int]] = []
        while len(heard) < most:
            try:
                identity = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            frames = [self._socket.recv(copy=False)]
            while frames[-1].more:
                frames.append(self._socket.recv(copy=False))
            rank = self._ranks[str(frames[-1].get("User-Id"))]  # the guard let nobody else in
            self._identities[rank] = identity
            heard.append((rank, self._event(frames), int(frames[-1].get(zmq.SRCFD))))
        return heard

    def _event(self, frames: Sequence[zmq.Frame]) -> Event | Gone:
        """A rank's message. (Dropping one would leave others to wait for what it said.)"""
        try:
            if len(frames) != 1:
                raise DecodeError(f"it has {len(frames)} frames")
            return self._codec.decode_event(frames[0].bytes)
        except DecodeError as error:
            return Gone(f"broke the protocol: it sent a message that cannot be read ({error})")

    def close(self) -> None:
        if not self._closed:
            self._guard.stop()
        self._close()
        self._door.close()


class ZmqChannel(_Endpoint):
    """A rank's end.

    Args:
        codec: reads what the coordinator sends.
        address, port, server_key: where the coordinator listens, and its public key (Z85).
        keys: this rank's (public, secret) CURVE keys (Z85).
        host: the coordinator's, for messages.
    """

    def __init__(
        self, codec: Codec, address: str, port: int, server_key: bytes, keys: tuple[bytes, bytes], host: str = "?"
    ) -> None:
        self._codec = codec
        super().__init__(zmq.DEALER, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._host = host
        self.port: int | None = port
        self._gone: Gone | None = None
        self._socket.curve_serverkey = server_key
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        if ":" in address:
            self._socket.ipv6, address = True, f"[{address}]"
        self._socket.connect(f"tcp://{address}:{port}")

    def send(self, event: Event) -> None:
        data = encode(event)
        if len(data) > LARGEST:
            what = f"{type(event).__name__} of {len(data)} bytes"
            raise EngineError(f"a message is too long for the coordinator: {what}, of {LARGEST} at the most")
        with contextlib.suppress(zmq.Again):  # this rank was refused: ``receive`` tells
            self._socket.send(data, zmq.NOBLOCK)

    def receive(self, timeout: float | None) -> Command | Gone | None:
        if self._gone is None:
            if not self._wait(timeout):
                return None
            for event, _ in self._monitored():
                refused = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                reason = "refused this rank's key" if refused else ENDED
                self._gone = self._gone or Gone(reason, self._host)  # the first event is the reason
        command = self._read()  # what the coordinator said before the connection ended comes first
        return self._gone if command is None else command

    def _read(self) -> Command | Gone | None:
        try:
            return self._codec.decode_command(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        except DecodeError as error:
            return Gone(f"sent a message that cannot be read ({error})", self._host)

    def close(self) -> None:
        self._close(None if self._gone is None else 0)  # (whom should it reach?)
