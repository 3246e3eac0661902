"""Control plane on ZeroMQ: its sockets, connections from below, and the ends of the coordinator and of a rank.

Each rank creates a key pair. A Horovod allgather distributes the public keys (``rendezvous``), and only these keys are
accepted. If the coordinator is a thread of rank 0's process, rank 0 has no socket: the same messages go through memory.
Both ends queue outgoing messages until they next receive. A rank sends one message for all events since it last slept,
and receives one with all commands that these events, and those of other ranks, have caused.

Sockets are encrypted by CURVE, bounded, observed by a monitor, and polled by the system. The monitor reports a
connection that has ended. A killed process closes it at once; ZeroMQ's heartbeats detect a frozen host or a cut link.
ZeroMQ's I/O thread answers them, so a rank that is only slow, or holds Python's interpreter lock for long, is never
declared lost.

Other processes can do limited harm. No connection is accepted before the keys are known, or once all ranks are
connected; until then unauthenticated connections are limited in number and time; no message is longer than ``LARGEST``.
A connection that sends an unreadable message is closed permanently. Connections are read in turn, and one with too many
unread messages is blocked.
"""

from __future__ import annotations

import array
import contextlib
import math
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import zmq
import zmq.auth.thread
from zmq.utils.monitor import recv_monitor_message

from hvd_async.errors import EngineError
from hvd_async.runtime import time_limits
from hvd_async.runtime.interfaces import Gone
from hvd_async.runtime.protocol import Codec, Command, DecodeError, Event, encode, packed

# -- sockets and sleep ----------------------------------------------------------------------------------------

READABLE = int(zmq.POLLIN)
MILLISECOND = 0.001
"""The unit of the system's poll, in seconds. Its select counts microseconds."""
SELECTABLE = 1024
"""Limit of the descriptors that select can poll."""
LINGER_MS = 2_000
LONGEST_SILENCE = 86_400.0
"""Seconds; ZeroMQ counts milliseconds in 32 bits."""
LARGEST = 16 << 20
"""Limit of the bytes of a message. Registrations have about 100 per parameter; all other messages are small."""
HANDSHAKE_MS = 15_000
"""Time limit of the authentication of a connection."""
MOST_UNREAD = 1 << 16
"""Limit of unread messages per connection, beyond which nothing is read from it, not even its heartbeats."""


class Endpoint:
    """ZeroMQ socket with the monitor that reports its connections.

    Args:
        kind: ZeroMQ's type of the socket.
        watched: the events of connections that the monitor reports.
        context: a context whose I/O thread is shared; None for a separate one.

    Attributes:
        descriptors: the descriptors to poll. They only report a change since the sockets were last used.
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
        """Whether the socket or its monitor has something to read."""
        self.unsure = self.unsure and (_readable(self._socket) or _readable(self._monitor))
        return self.unsure

    def note(self, ready: Collection[int]) -> bool:
        """Record the descriptors that are ready after a poll; return ``unsure``."""
        self.unsure = self.unsure or any(descriptor in ready for descriptor in self.descriptors)
        return self.unsure

    def monitored(self) -> Iterator[tuple[int, int]]:
        """Yield the monitor's events that have arrived: (event, value)."""
        self.unsure = True
        while _readable(self._monitor):
            message = recv_monitor_message(self._monitor)
            yield message["event"], message["value"]

    def close(self, linger: int | None = None) -> None:
        """Close it; calling it again does nothing.

        Args:
            linger: milliseconds to wait for messages to be sent; None for two seconds.
        """
        if not self.closed:
            self.closed = True
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(linger)
            if self._own_context:
                self._context.term()


class NearEnd:
    """End of a connection between two threads of a process, with the interface of a socket's end.

    Attributes:
        wake: called to end the wait of the thread that reads this end.
        other: the other end; None before ``connect``.
        closed: whether it was closed here.
    """

    descriptors: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.closed = False
        self._messages: deque[bytes] = deque()
        self.other: NearEnd | None = None
        self._ended = False

    def connect(self, other: NearEnd) -> None:
        """Connect two ends, whose ``wake`` must be set."""
        self.other, other.other = other, self

    def send(self, payload: bytes) -> None:
        """Send a message; never blocks."""
        assert self.other is not None
        self.other._messages.append(payload)
        self.other.wake()

    def read(self) -> list[bytes] | None:
        """Return the next message as a list of one frame; None if there is none."""
        return [self._messages.popleft()] if self._messages else None

    def is_readable(self) -> bool:
        """Whether there is a message, or the other end was closed and ``refused`` has not reported that yet."""
        return bool(self._messages) or self._ended

    def note(self, ready: Collection[int]) -> bool:
        """Return ``is_readable``, as polls do not report this end."""
        return self.is_readable()

    def refused(self) -> bool | None:
        """Return False, once, if the other end was closed; otherwise None."""
        if not self._ended:
            return None
        self._ended = False
        return False

    def close(self, linger: int | None = None) -> None:
        """Close it after the messages already sent; calling it again does nothing."""
        if not self.closed:
            self.closed = True
            if self.other is not None:
                self.other._ended = True
                self.other.wake()


class Sleeper:
    """Wait for several endpoints, which ends when one may have a message, or when another thread wakes it.

    It uses the system's poll: ZeroMQ's own checks each socket four times, and wakes up slowly. A descriptor of ZeroMQ
    does not report messages that arrived before its socket was last used, so the sockets are checked before each sleep.
    """

    def __init__(self, *endpoints: Endpoint | NearEnd) -> None:
        self._endpoints = endpoints
        self._receiver, self._sender = socket.socketpair()
        """One end is polled, so that any thread can end the poll."""
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._poller = select.poll()
        self._woken = self._receiver.fileno()
        self._descriptors = [self._woken, *(one for endpoint in endpoints for one in endpoint.descriptors)]
        for descriptor in self._descriptors:
            self._poller.register(descriptor, select.POLLIN)
        self._sleeps = self._wake_pending = False

    def wake(self) -> None:
        """End the current wait, or the next one (any thread)."""
        self._wake_pending = True
        if self._sleeps:  # (set before the sleeper checks for a pending wake: one of the two threads sees the other)
            with contextlib.suppress(BlockingIOError, OSError):  # (full: it is awake already; closed: no thread waits)
                self._sender.send(b"!")

    def wait(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds, without a limit if None; return whether an endpoint may have a message."""
        readable = any(endpoint.is_readable() for endpoint in self._endpoints)
        self._sleeps = True
        ready = self._ready(0.0 if readable or self._wake_pending else timeout)
        self._wake_pending = False  # (first: a wake between these two lines leaves a byte for the next wait)
        self._sleeps = False
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError, OSError):
                self._receiver.recv(4096)  # (bytes that are left end the next poll)
        return any(endpoint.note(ready) for endpoint in self._endpoints)

    def _ready(self, timeout: float | None) -> list[int]:
        """Return the descriptors that are ready, after at most ``timeout`` seconds."""
        if timeout is not None and 0 < timeout < MILLISECOND and max(self._descriptors) < SELECTABLE:
            return select.select(self._descriptors, (), (), timeout)[0]
        milliseconds = None if timeout is None else math.ceil(timeout / MILLISECOND)
        return [descriptor for descriptor, _ in self._poller.poll(milliseconds)]

    def close(self) -> None:
        """Release what wakes it."""
        self._receiver.close()
        self._sender.close()


def _made(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.linger = LINGER_MS
    made.sndhwm = 0  # (never drop: the protocol bounds the messages in flight)
    made.rcvhwm = MOST_UNREAD
    made.setsockopt(zmq.MAXMSGSIZE, LARGEST)
    made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    # Silence is detected by an unanswered heartbeat, so the interval until it is sent counts as well.
    silence_ms = min(time_limits.dead_after(), LONGEST_SILENCE) * 1000
    made.setsockopt(zmq.HEARTBEAT_IVL, round(silence_ms / 5))
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(silence_ms * 4 / 5))
    return made


def _readable(asked: zmq.Socket[bytes]) -> bool:
    """Whether a socket has something to read."""
    return bool(int(asked.get(zmq.EVENTS)) & READABLE)


# -- the listening socket -------------------------------------------------------------------------------------


ATTACH_FILTER, DETACH_FILTER = 26, 27
"""Linux's SO_ATTACH_FILTER and SO_DETACH_FILTER, which Python does not name."""
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""Packet filter of one instruction: keep 0 bytes."""
BACKLOG = 4096
"""Limit of pending connections: all ranks of a large job may connect at once."""
LOOPBACK = "127.0.0.1"


class ListeningSocket:
    """Reserved TCP port, which refuses connections until ``open``, and while it is shut.

    ZeroMQ accepts every connection, and a silent one keeps its file descriptor until its handshake times out. So the
    port is only reserved until the ranks' keys are known, and shut once all of them are connected: on Linux the kernel
    then drops new connections, while open ones continue. (Unbinding would end these too.) On other systems only the
    keys protect the port.

    Attributes:
        port: the number of the port.
    """

    def __init__(self) -> None:
        self._socket = _bound("", 0)
        self.port: int = self._socket.getsockname()[1]
        self._shut = False

    def open(self, local: bool) -> int:
        """Listen on all interfaces, or on the loopback interface only, if there is one.

        Returns:
            The file descriptor from which to accept connections; the caller closes it.
        """
        if local:
            with contextlib.suppress(OSError):  # (else the keys protect the port)
                loopback = _bound(LOOPBACK, self.port)
                self._socket.close()
                self._socket = loopback
        self._socket.listen(BACKLOG)
        return self._socket.dup().detach()

    def shut(self, shut: bool) -> None:
        """Stop or resume accepting connections."""
        if shut == self._shut or not sys.platform.startswith("linux"):
            return
        self._shut = shut
        with contextlib.suppress(OSError):  # (a sandbox without filters: the keys protect the port)
            if shut:
                code = array.array("B", DROP_ALL)
                program = struct.pack("HL", 1, code.buffer_info()[0])  # (copied by the kernel)
                self._socket.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, program)
            else:
                self._socket.setsockopt(socket.SOL_SOCKET, DETACH_FILTER, 0)

    def close(self) -> None:
        """Release the port; calling it again does nothing."""
        self._socket.close()


def _bound(address: str, port: int) -> socket.socket:
    """Return a socket that does not listen yet, bound to an IPv4 address or, without one, to all of IPv4 and IPv6."""
    both = not address and socket.has_dualstack_ipv6()
    made = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # (another socket may still reserve the port)
        if both:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.setblocking(False)  # (a peer that connects and leaves at once would block the accepting thread)
        made.bind((address, port))
    except BaseException:
        made.close()
        raise
    return made


# -- connections from below -----------------------------------------------------------------------------------
# A message of a rank is a MessagePack array of events; a message to a rank is an array of commands. A relay decodes
# neither: it sends messages of several ranks upward as an array of ``Upward``, and receives commands with their
# recipients in a frame before.


class Child(NamedTuple):
    """Lower end of a connection: a rank or a relay.

    Attributes:
        owner: the rank, or the rank that has started the relay.
        behind: the ranks that are reached through it, the owner first.
        relay: whether it is a relay.
    """

    owner: int
    behind: tuple[int, ...]
    relay: bool


class Upward(msgspec.Struct, array_like=True):
    """Message of one or more ranks, or the end of their connections.

    Attributes:
        ranks: the ranks, each of which has sent this message.
        data: the message; empty for the end of the connections.
        gone: the reason why the connections have ended; empty for a message.
    """

    ranks: list[int]
    data: bytes
    gone: str = ""


_encoder = msgspec.msgpack.Encoder()
_upward = msgspec.msgpack.Decoder(list[Upward])
_ranks = msgspec.msgpack.Decoder(list[int])


def encode_upward(messages: Sequence[Upward]) -> bytes:
    """Return the wire form of messages of ranks."""
    return _encoder.encode(messages)


def decode_upward(data: bytes) -> list[Upward]:
    """Return the messages of ranks from their wire form.

    Raises:
        DecodeError: the data is not valid.
    """
    return _upward.decode(data)


def encode_ranks(ranks: Sequence[int] | None) -> bytes:
    """Return the wire form of the recipients of a command; empty for all."""
    return b"" if ranks is None else _encoder.encode(list(ranks))


def decode_ranks(data: bytes) -> list[int] | None:
    """Return the recipients of a command from their wire form; None for all.

    Raises:
        DecodeError: the data is not valid.
    """
    return _ranks.decode(data) if data else None


MAX_UNAUTHENTICATED = 64
"""Limit of open unauthenticated connections, in addition to three per child: a rank tries several addresses, each by a
separate connection."""
PASS = 256
"""Messages that are read before they are handled, one per connection in turn."""
DIED = "died: its connection to the coordinator ended without a goodbye"
RELAY_DIED = "died, or its relay died: the connection of the relay to the coordinator ended without a goodbye"
CUT_OFF = "was cut off: the relay on its host has ended"


@dataclass(eq=False)
class _Connection:
    """TCP connection. ``child`` is the number of its child; None until the child has sent its first message."""

    child: int | None = None


class Router(Endpoint):
    """Connections from ranks and relays below. It accepts none before ``allow`` has been called with their keys.

    Attributes:
        public: its CURVE public key (Z85).
        port: the TCP port, reserved; it listens there once keys are allowed.
    """

    def __init__(self) -> None:
        super().__init__(zmq.ROUTER, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._children: tuple[Child, ...] = ()
        self._numbers: dict[str, int] = {}
        """The number of each child, by its public key."""
        self._reached_by: dict[int, int] = {}
        """The number of the child through which each rank is reached."""
        self._identities: dict[int, bytes] = {}
        """ZeroMQ's names of the children that have sent a message."""
        self._connections: dict[int, _Connection] = {}
        """Open connections by file descriptor; the numbers are reused, so closed ones must not stay."""
        self._ended: dict[int, _Connection] = {}
        self._gone: list[_Connection] = []
        """Closed connections that were not reported yet, as some of their messages may be unread."""
        self._door = ListeningSocket()
        self.port = self._door.port
        self._guard = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback("*", credentials_provider=self)
        self.public, secret = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = self.public, secret

    @property
    def ranks(self) -> int:
        """The number of ranks behind all children."""
        return len(self._reached_by)

    @property
    def has_disconnects(self) -> bool:
        """Whether a connection has ended without being reported by ``read``."""
        return bool(self._gone)

    def allow(self, children: Sequence[Child], keys: Sequence[bytes], local: bool = False) -> None:
        """Accept connections of these children only, until all of them are connected.

        Args:
            children: the ranks and relays.
            keys: their public keys (Z85), in the same order.
            local: whether all of them are on this machine.
        """
        self._children = tuple(children)
        self._numbers = {key.decode(): number for number, key in enumerate(keys)}
        self._reached_by = {rank: number for number, child in enumerate(children) for rank in child.behind}
        self._socket.setsockopt(zmq.USE_FD, self._door.open(local))
        self._socket.bind(f"tcp://*:{self.port}")

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a public key (Z85) is allowed (the authenticator's thread)."""
        return key.decode() in self._numbers

    # -- downward ---------------------------------------------------------------------------------------------

    def deliver(self, ranks: Sequence[int] | None, payload: bytes) -> None:
        """Forward commands; never blocks. Children that have not sent a message receive nothing.

        Args:
            ranks: the recipients; None for all.
            payload: the commands, in their wire form.
        """
        if ranks is None or len(ranks) == self.ranks:
            header = encode_ranks(None)
            for number, identity in self._identities.items():
                self._send(identity, header if self._children[number].relay else None, payload)
            return
        by_child: dict[int, list[int]] = {}
        for rank in ranks:
            by_child.setdefault(self._reached_by[rank], []).append(rank)
        for number, some in by_child.items():
            known = self._identities.get(number)
            if known is not None:
                self._send(known, encode_ranks(some) if self._children[number].relay else None, payload)

    def _send(self, identity: bytes, header: bytes | None, payload: bytes) -> None:
        self.unsure = True
        self._socket.send(identity, zmq.SNDMORE)
        if header is not None:
            self._socket.send(header, zmq.SNDMORE)
        self._socket.send(payload)

    # -- upward -----------------------------------------------------------------------------------------------

    def read(self) -> list[Upward]:
        """Return messages and ends of connections that have arrived, all or a limited number of them.

        Socket and monitor are not synchronized. A descriptor may have belonged to a child's probe of the port, or to
        another process, just before the child's connection. So a message is assigned to its connection only once the
        monitor has reported every connection that was opened or closed before.
        """
        heard: list[tuple[int, Upward | list[Upward], int]] = []
        most = max(PASS, 2 * len(self._children))
        before = len(self._gone)
        has_changed = True
        while has_changed:
            heard += self._read(most - len(heard))
            has_changed = False
            for kind, descriptor in self.monitored():
                has_changed = True
                if kind == zmq.EVENT_ACCEPTED:
                    self._connections[descriptor] = _Connection()
                elif (connection := self._connections.pop(descriptor, None)) is not None:
                    self._ended[descriptor] = connection
                    self._gone.append(connection)
        found: list[Upward] = []
        for number, message, descriptor in heard:
            connection = self._connections.get(descriptor) or self._ended.get(descriptor)
            if connection is not None:
                connection.child = number
            found += message if isinstance(message, list) else [message]
        unread = {connection.child for connection in self._gone[before:]} | {number for number, *_ in heard} | {None}
        found += self._report_gone(unread if len(heard) == most else set())
        self._open_or_shut()
        return found

    def _report_gone(self, unread: Collection[int | None]) -> list[Upward]:
        """Return the ends of connections whose messages were all read.

        Args:
            unread: the children that may have unread messages. (Connections are read in turn, so one from which a full
                pass read nothing has none.)
        """
        found: list[Upward] = []
        for connection in self._gone:
            if connection.child is not None and connection.child not in unread:
                child = self._children[connection.child]
                found.append(Upward([child.owner], b"", RELAY_DIED if child.relay else DIED))
                if others := [rank for rank in child.behind if rank != child.owner]:
                    found.append(Upward(others, b"", CUT_OFF))
        self._gone = [connection for connection in self._gone if connection.child in unread]
        if not self._gone:
            self._ended.clear()
        return found

    def _open_or_shut(self) -> None:
        """Accept no connections once all children are connected, nor while too many are unauthenticated."""
        if not self._numbers:
            return
        if len(self._identities) == len(self._children):
            self._door.shut(True)
            return
        unauthenticated = sum(connection.child is None for connection in self._connections.values())
        most = MAX_UNAUTHENTICATED + 3 * len(self._children)
        if unauthenticated >= most:
            self._door.shut(True)
        elif unauthenticated <= most // 2:
            self._door.shut(False)

    def _read(self, most: int) -> list[tuple[int, Upward | list[Upward], int]]:
        """Return at most ``most`` messages that have arrived: child, content, file descriptor."""
        heard: list[tuple[int, Upward | list[Upward], int]] = []
        while len(heard) < most and _readable(self._socket):
            identity = self._socket.recv(zmq.NOBLOCK)
            frames = [self._socket.recv(copy=False)]
            while frames[-1].more:
                frames.append(self._socket.recv(copy=False))
            number = self._numbers[str(frames[-1].get("User-Id"))]  # (the guard refuses all other keys)
            self._identities[number] = identity
            heard.append((number, self._content(number, frames), int(frames[-1].get(zmq.SRCFD))))
        return heard

    def _content(self, number: int, frames: Sequence[zmq.Frame]) -> Upward | list[Upward]:
        """Decode a message of a child. (If one were dropped, other ranks would wait for its events.)"""
        child = self._children[number]
        if len(frames) != 1:
            return _broken(child, f"a message that cannot be read (it has {len(frames)} frames)")
        if not child.relay:
            return Upward([child.owner], frames[0].bytes)
        try:
            messages = decode_upward(frames[0].bytes)
        except DecodeError as error:
            return _broken(child, f"a message that cannot be read ({error})")
        strangers = [rank for message in messages for rank in message.ranks if self._reached_by.get(rank) != number]
        return _broken(child, f"messages of ranks {strangers} that are not behind it") if strangers else messages

    def close(self, linger: int | None = None) -> None:
        if not self.closed:
            self._guard.stop()
        super().close(linger)
        self._door.close()


def _broken(child: Child, what: str) -> Upward:
    return Upward([child.owner], b"", f"broke the protocol: it sent {what}")


# -- the two ends of the control plane ------------------------------------------------------------------------

ENDED = "died: the connection to the coordinator ended, unless it was this rank that stood still or was cut off"
RELAY_ENDED = "; or it was the relay of {relay}, which forwards this rank's messages"
REFUSED = "refused this rank's key"
PATIENCE = 16
"""Peers per event that is handled while commands are pending. Handling an event takes much less time than sending, and
its commands are sent with the pending ones."""
MOST_EVENTS = 1024
"""Limit of the events of a message. Messages of ranks are read in turn; a longer one would delay the other ranks."""


class ZmqHub:
    """The coordinator's end of all connections. It accepts none before ``allow`` has been called with the keys.

    Attributes:
        public: the server's CURVE public key (Z85).
        port: the TCP port, reserved; it listens there once keys are allowed.

    Args:
        codec: decodes the messages of ranks.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.router = Router()
        self.public, self.port = self.router.public, self.router.port
        self._near = NearEnd()
        self._sleeper = Sleeper(self.router, self._near)
        self._near.wake = self._sleeper.wake
        self._ready: deque[tuple[Sequence[int], Event | Gone]] = deque()
        self._queued: list[tuple[Sequence[int], list[msgspec.Raw]]] = []
        """Pending commands with their recipients; consecutive commands for the same ranks are combined."""
        self._since = 0
        """Events handled since the first pending command."""
        self._soon = 0
        """Limit of ``_since``, from which pending commands are sent."""

    def allow(self, keys: Sequence[bytes], local: bool = False, children: Sequence[Child] = ()) -> None:
        """Accept connections with these keys only, until all of them are connected.

        Args:
            keys: public keys (Z85) of the ranks, in their order, or of the ``children``.
            local: whether all of them are on this machine.
            children: ranks and relays; empty for all ranks. Rank 0 is not among them if it is ``connect``ed.
        """
        self._soon = len(keys) // PATIENCE
        direct = [Child(rank, (rank,), False) for rank in range(len(keys))]
        self.router.allow(children or direct, keys, local)

    def connect(self, end: NearEnd) -> None:
        """Connect rank 0, which is a thread of this process."""
        self._near.connect(end)

    def send(self, ranks: Sequence[int], command: Command) -> None:
        data = msgspec.Raw(encode(command))
        if self._queued and (self._queued[-1][0] is ranks or self._queued[-1][0] == ranks):
            self._queued[-1][1].append(data)
        else:
            self._queued.append((ranks, [data]))

    def flush(self) -> None:
        queued, self._queued, self._since = self._queued, [], 0
        for ranks, commands in queued:
            payload, far = packed(commands), ranks
            if self._near.other is not None and 0 in ranks:
                self._near.send(payload)
                far = [rank for rank in ranks if rank != 0]
            if far:
                self.router.deliver(far, payload)

    @property
    def has_more(self) -> bool:
        return bool(self._ready)

    def receive(self, timeout: float | None) -> tuple[Sequence[int], Event | Gone] | None:
        if self._queued and (not self._ready or self._since >= self._soon):
            self.flush()
        if not self._ready and (
            self._sleeper.wait(0.0 if self.router.has_disconnects else timeout) or self.router.has_disconnects
        ):
            far = self.router.read() if self.router.unsure or self.router.has_disconnects else []
            near: list[Upward] = []
            near_ended = self._near.refused() is not None  # (before its last messages are read)
            while (frames := self._near.read()) is not None:
                near.append(Upward([0], frames[0]))
            near += [Upward([0], b"", DIED)] if near_ended else []
            for message in [*near, *far]:
                self._ready.extend((message.ranks, event) for event in self._events(message.data, message.gone))
        if not self._ready:
            return None
        ranks, event = self._ready.popleft()
        self._since += len(ranks) if self._queued else 0
        return ranks, event

    def _events(self, data: bytes, gone: str) -> Sequence[Event | Gone]:
        """Decode the events of a message. (If one were dropped, other ranks would wait for it.)"""
        if gone:
            return [Gone(gone)]
        try:
            events = self._codec.decode_events(data)
        except DecodeError as error:
            return [Gone(f"broke the protocol: it sent a message that cannot be read ({error})")]
        if len(events) > MOST_EVENTS:
            return [Gone(f"broke the protocol: it sent {len(events)} events in a message")]
        return events

    def wake(self) -> None:
        self._sleeper.wake()

    def close(self) -> None:
        if not self.router.closed:
            self.flush()
        self.router.close()
        self._near.close()
        self._sleeper.close()


class Uplink(Endpoint):
    """Lower end of the connection of a rank or a relay to the coordinator or to a relay above.

    Args:
        address, port, server_key: the address of the other end, and its public key (Z85).
        keys: this end's (public, secret) CURVE keys (Z85).
        context: see ``Endpoint``.
    """

    def __init__(
        self,
        address: str,
        port: int,
        server_key: bytes,
        keys: tuple[bytes, bytes],
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        super().__init__(zmq.DEALER, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH, context)
        self._refused: bool | None = None
        self._socket.curve_serverkey = server_key
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        if ":" in address:
            self._socket.ipv6, address = True, f"[{address}]"
        self._socket.connect(f"tcp://{address}:{port}")

    def send(self, payload: bytes) -> None:
        """Send a message; never blocks."""
        self.unsure = True
        with contextlib.suppress(zmq.Again):  # (this end was refused: see ``refused``)
            self._socket.send(payload, zmq.NOBLOCK)

    def read(self) -> list[bytes] | None:
        """Return the frames of the next message; None if there is none."""
        self.unsure = True
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def refused(self) -> bool | None:
        """Return whether the connection has ended because the other end rejected the key; None if it has not ended."""
        for event, _ in self.monitored():
            if self._refused is None:  # the first event is the reason
                self._refused = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        return self._refused


class ZmqChannel:
    """A rank's end of its connection to the coordinator or to a relay.

    Args:
        codec: decodes the messages of the coordinator.
        address, port, server_key: the address of the coordinator or of a relay, and its public key (Z85).
        keys: this rank's (public, secret) CURVE keys (Z85).
        host: the host of the coordinator, for error messages.
        relay: the relay, for error messages; empty for a direct connection.
    """

    def __init__(
        self,
        codec: Codec,
        address: str,
        port: int,
        server_key: bytes,
        keys: tuple[bytes, bytes],
        host: str = "?",
        relay: str = "",
    ) -> None:
        ended = ENDED + (RELAY_ENDED.format(relay=relay) if relay else "")
        self._begin(codec, Uplink(address, port, server_key, keys), port, host, ended)

    def _begin(self, codec: Codec, uplink: Uplink | NearEnd, port: int, host: str, ended: str) -> None:
        self._codec, self._host, self._ended = codec, host, ended
        self._uplink = uplink
        self._sleeper = Sleeper(uplink)
        self.port: int | None = port
        self._gone: Gone | None = None
        self._ready: deque[Command | Gone] = deque()
        self._queued: list[msgspec.Raw] = []
        self._bytes = 0

    def send(self, event: Event) -> None:
        data = encode(event)
        if len(data) > LARGEST // 2:
            what = f"{type(event).__name__} of {len(data)} bytes"
            raise EngineError(f"a message is too long for the coordinator: {what}, at most {LARGEST // 2} are allowed")
        if self._bytes + len(data) > LARGEST // 2 or len(self._queued) == MOST_EVENTS:
            self.flush()
        self._queued.append(msgspec.Raw(data))
        self._bytes += len(data)

    def flush(self) -> None:
        if self._queued:
            self._uplink.send(packed(self._queued))
            self._queued, self._bytes = [], 0

    def receive(self, timeout: float | None) -> Command | Gone | None:
        self.flush()
        if not self._ready and self._gone is None:
            if not self._sleeper.wait(timeout):
                return None
            self._read()  # (first the commands that arrived before the connection ended)
            if not self._ready and (refused := self._uplink.refused()) is not None:
                self._gone = Gone(REFUSED if refused else self._ended, self._host)
        if not self._ready and self._gone is not None:
            self._read()
        return self._ready.popleft() if self._ready else self._gone

    def _read(self) -> None:
        frames = self._uplink.read()
        if frames is not None:
            try:
                self._ready.extend(self._codec.decode_commands(b"".join(frames)))
            except DecodeError as error:
                self._ready.append(Gone(f"sent a message that cannot be read ({error})", self._host))

    def wake(self) -> None:
        self._sleeper.wake()

    def close(self) -> None:
        if not self._uplink.closed:
            self.flush()
        self._uplink.close(None if self._gone is None else 0)  # (if it has ended, there is no peer to send to)
        self._sleeper.close()


class NearChannel(ZmqChannel):
    """End of rank 0 if the coordinator is a thread of the same process.

    Args:
        codec: decodes the messages of the coordinator.
        hub: the coordinator's end.
        host: the host of both, for error messages.
    """

    def __init__(self, codec: Codec, hub: ZmqHub, host: str) -> None:
        end = NearEnd()
        self._begin(codec, end, hub.port, host, ENDED)
        end.wake = self._sleeper.wake
        hub.connect(end)
