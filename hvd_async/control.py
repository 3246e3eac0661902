"""The control plane on ZeroMQ: one ROUTER at the coordinator, one DEALER a rank, encrypted and authenticated by CURVE.

Each rank makes a key pair; the public keys travel by a Horovod allgather, and only those are let in. A connection
that ends (a killed process closes it at once; a frozen host or a cut link is found by ZeroMQ's own heartbeats) shows
up as ``Gone``: ZeroMQ's I/O thread answers heartbeats by itself, so a rank that is merely slow, or holds Python's
interpreter lock for long, is never taken for dead.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import psutil
import zmq
import zmq.auth.thread
from zmq.utils.monitor import recv_monitor_message

from hvd_async.coordinator import Coordinator
from hvd_async.errors import EngineError, RankLostError
from hvd_async.events import Command, DecodeError, Event, Hello, Lost, Welcome, decode_command, decode_event, encode
from hvd_async.protocols import Channel, Collectives, Gone

HEARTBEAT_MS = 5_000
DEAD_AFTER_MS = 50_000
"""After a heartbeat that is not answered: with the interval before it, within 60 s."""
CONNECT_TIMEOUT = 60.0
LINGER_MS = 2_000


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
            while self.receiver.recv(4096):
                continue

    def close(self) -> None:
        self.receiver.close()
        self._sender.close()


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.linger = LINGER_MS
    made.sndhwm = made.rcvhwm = 0  # never drop: what is on its way is bounded by the protocol
    made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_AFTER_MS)
    return made


class _Endpoint:
    """What both ends share: a socket, the monitor that tells of lost connections, a waker, a poll over the three."""

    def __init__(self, kind: int, watched: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _socket(self._context, kind)
        self._monitor = self._socket.get_monitor_socket(watched)
        self._waker = _Waker()
        self._poller = zmq.Poller()
        for readable in (self._socket, self._monitor, self._waker.receiver):
            self._poller.register(readable, zmq.POLLIN)
        self._closed = False
        self.undecodable = 0
        """Messages that did not decode, and were dropped."""

    def wake(self) -> None:
        self._waker.wake()

    def _poll(self, timeout: float | None) -> bool:
        """Wait; returns whether the monitor has something to tell."""
        milliseconds = None if timeout is None else max(0, round(timeout * 1000 + 0.499))
        ready: set[object] = {each for each, _ in self._poller.poll(milliseconds)}
        if self._waker.receiver.fileno() in ready:
            self._waker.clear()
        return self._monitor in ready

    def _monitored(self) -> Iterator[tuple[int, int]]:
        """What the monitor has to tell: (event, value), none if nothing."""
        while self._monitor.poll(0):
            told = recv_monitor_message(self._monitor)
            yield told["event"], told["value"]

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close()
            self._waker.close()
            self._context.term()


@dataclass(eq=False)
class _Connection:
    """One TCP connection to the hub; whose it is shows when it has said something."""

    rank: int | None = None


class ZmqHub(_Endpoint):
    """The coordinator's end. ``allow`` names the keys once they are known; nobody is let in before.

    Attributes:
        public: the server's CURVE public key (Z85).
        port: the TCP port it listens on.
    """

    def __init__(self) -> None:
        super().__init__(zmq.ROUTER, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._allowed = threading.Event()
        self._ranks: dict[str, int] = {}
        self._identities: dict[int, bytes] = {}
        self._connections: dict[int, _Connection] = {}
        """Those that are open, by file descriptor; the numbers come back, so one that has ended must not stay."""
        self._ready: deque[tuple[int, Event | Gone]] = deque()
        self._encoded: tuple[Command | None, bytes] = (None, b"")
        self._guard = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback("*", credentials_provider=self)
        self.public, secret = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = self.public, secret
        self.port = self._socket.bind_to_random_port("tcp://*")

    def allow(self, keys: list[bytes]) -> None:
        """Let in exactly the ranks whose public keys (Z85) these are, in rank order."""
        self._ranks = {key.decode(): rank for rank, key in enumerate(keys)}
        self._allowed.set()

    def callback(self, domain: str, key: bytes) -> bool:
        """The authenticator asks, in its own thread: is this public key (Z85) one of ours?"""
        self._allowed.wait(CONNECT_TIMEOUT)  # a rank may be quicker to connect than rank 0 to read the keys
        return key.decode() in self._ranks

    def send(self, rank: int, command: Command) -> None:
        if rank in self._identities:
            if command is not self._encoded[0]:
                self._encoded = command, encode(command)  # most commands go to every rank
            self._socket.send_multipart([self._identities[rank], self._encoded[1]])

    def receive(self, timeout: float | None) -> tuple[int, Event | Gone] | None:
        if not self._ready:
            self._poll(timeout)
            self._hear()
        return self._ready.popleft() if self._ready else None

    def _hear(self) -> None:
        """Take in what the socket and its monitor have, until both are empty: each lags behind the other.

        A rank's probe of the port, or a stranger, may have had a descriptor just before the rank's own connection got
        it; so messages find their connection only when the monitor has told of every one opened and ended before.
        """
        heard: list[tuple[int, Event, int]] = []
        ended: dict[int, _Connection] = {}
        gone: list[_Connection] = []
        told = True
        while told:
            heard += self._read()
            told = False
            for kind, descriptor in self._monitored():
                told = True
                if kind == zmq.EVENT_ACCEPTED:
                    self._connections[descriptor] = _Connection()
                elif (connection := self._connections.pop(descriptor, None)) is not None:
                    ended[descriptor] = connection
                    gone.append(connection)
        for rank, event, descriptor in heard:  # what a rank said before its connection ended comes first
            connection = self._connections.get(descriptor) or ended.get(descriptor)
            if connection is not None:
                connection.rank = rank
            self._ready.append((rank, event))
        for connection in gone:
            if connection.rank is not None:
                reason = "died: its connection to the coordinator ended without a goodbye"
                self._ready.append((connection.rank, Gone(reason)))

    def _read(self) -> list[tuple[int, Event, int]]:
        """Every message that is there: sender, event, file descriptor."""
        heard: list[tuple[int, Event, int]] = []
        while True:
            try:
                identity, frame = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return heard
            except ValueError:  # not two frames
                self.undecodable += 1
                continue
            rank = self._ranks[str(frame.get("User-Id"))]  # the guard let nobody else in
            try:
                event = decode_event(frame.bytes)
            except DecodeError:
                self.undecodable += 1
                continue
            self._identities[rank] = identity.bytes
            heard.append((rank, event, int(frame.get(zmq.SRCFD))))

    def close(self) -> None:
        if not self._closed:
            self._allowed.set()  # the guard's thread may be waiting for the keys
            self._guard.stop()
        self._close()


class ZmqChannel(_Endpoint):
    """A rank's end.

    Args:
        address, port, server_key: where the coordinator listens, and its public key (Z85).
        keys: this rank's (public, secret) CURVE keys (Z85).
        host: the coordinator's, for messages.
    """

    def __init__(self, address: str, port: int, server_key: bytes, keys: tuple[bytes, bytes], host: str = "?") -> None:
        super().__init__(zmq.DEALER, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._host = host
        self._gone: Gone | None = None
        self._socket.curve_serverkey = server_key
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._socket.connect(f"tcp://{address}:{port}")

    def send(self, event: Event) -> None:
        self._socket.send(encode(event))

    def receive(self, timeout: float | None) -> Command | Gone | None:
        command = self._read()
        if command is None and self._gone is None:
            told = self._monitored() if self._poll(timeout) else iter(())
            for event, _ in told:
                refused = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                reason = "refused this rank's key" if refused else "died: the connection to the coordinator ended"
                self._gone = self._gone or Gone(reason, self._host)  # the first event is the reason
            command = self._read()  # what the coordinator said before the connection ended comes first
        return self._gone if command is None else command

    def _read(self) -> Command | None:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                return decode_command(data)
            except DecodeError:
                self.undecodable += 1

    def close(self) -> None:
        self._close()


# -- rendezvous -----------------------------------------------------------------------------------------------


class _Card(msgspec.Struct, frozen=True):
    """What each rank tells the others by the allgather; ``port`` and ``addresses`` only rank 0."""

    public: bytes
    host: str
    server: bytes
    port: int
    addresses: list[str]


def own_addresses() -> list[str]:
    """This host's IPv4 addresses, best guess first: HVD_ASYNC_ADDRESS, HOROVOD_GLOO_IFACE's, its name's, all others."""
    if os.environ.get("HVD_ASYNC_ADDRESS"):
        return [os.environ["HVD_ASYNC_ADDRESS"]]
    by_interface = {
        name: [a.address for a in found if a.family == socket.AF_INET] for name, found in psutil.net_if_addrs().items()
    }
    ordered = list(by_interface.get(os.environ.get("HOROVOD_GLOO_IFACE", ""), []))
    with contextlib.suppress(OSError):
        ordered.append(socket.gethostbyname(socket.gethostname()))
    ordered += [address for found in by_interface.values() for address in found]
    distinct = list(dict.fromkeys(ordered))
    return sorted(distinct, key=lambda address: address.startswith("127."))


def _reachable(addresses: list[str], port: int, timeout: float = 3.0) -> str:
    """The first address on which ``port`` takes a TCP connection.

    Raises:
        EngineError: none does.
    """
    for address in addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout):
            return address
    raise EngineError(
        f"the coordinator on rank 0 cannot be reached at port {port} of any of {', '.join(addresses)}. Name the right "
        f"address of rank 0's host in its environment: HVD_ASYNC_ADDRESS=10.0.0.1, or HOROVOD_GLOO_IFACE=eth0."
    )


def rendezvous(collectives: Collectives) -> tuple[Channel, Coordinator | None]:
    """Connect this rank to the coordinator, which rank 0 starts; every rank calls it. Blocks until all are there.

    Args:
        collectives: for the allgather of keys.

    Raises:
        EngineError: the coordinator could not be reached or did not answer within 60 s.
    """
    keys = zmq.curve_keypair()
    hub = ZmqHub() if collectives.rank == 0 else None
    with contextlib.ExitStack() as undo:
        if hub is not None:
            undo.callback(hub.close)
        cards = _exchange_cards(collectives, keys[0], hub)
        coordinator = None
        if hub is not None:
            hub.allow([c.public for c in cards])
            warn_after = float(os.environ.get("HVD_ASYNC_WARN_AFTER", "60"))
            coordinator = Coordinator(hub, [c.host for c in cards], warn_after)
            coordinator.start()
            undo.pop_all()  # the coordinator closes the hub
            undo.callback(coordinator.stop)
        first = cards[0]
        address = _reachable((["127.0.0.1"] if first.host == collectives.host else []) + first.addresses, first.port)
        channel = ZmqChannel(address, first.port, first.server, keys, first.host)
        undo.callback(channel.close)
        _handshake(channel, collectives, f"the coordinator on host {first.host}, {address}:{first.port},")
        undo.pop_all()
    return channel, coordinator


def _exchange_cards(collectives: Collectives, public: bytes, hub: ZmqHub | None) -> list[_Card]:
    card = _Card(public, collectives.host, b"", 0, [])
    if hub is not None:
        card = _Card(public, collectives.host, hub.public, hub.port, own_addresses())
    gathered = collectives.gather_bytes(msgspec.msgpack.encode(card), "hvd_async.rendezvous")
    return [msgspec.msgpack.decode(data, type=_Card) for data in gathered]


def _handshake(channel: ZmqChannel, collectives: Collectives, coordinator: str) -> None:
    """Say hello, and wait until every rank has.

    Raises:
        RankLostError, EngineError: it did not come to that.
    """
    channel.send(Hello(collectives.host, os.getpid()))
    deadline = time.monotonic() + CONNECT_TIMEOUT
    while (left := deadline - time.monotonic()) > 0:
        match channel.receive(left):
            case Welcome():
                return
            case Lost(rank, host, reason, context):
                raise RankLostError(rank, host, reason, context)
            case Gone(reason):
                raise EngineError(f"{coordinator} {reason}")
    raise EngineError(f"{coordinator} did not answer within {CONNECT_TIMEOUT:.0f} s")
