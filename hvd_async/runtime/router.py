"""The upper end of connections: the coordinator's to ranks and relays, a relay's to those below it.

Only those whose keys are known are let in. What strangers can do is bounded: nobody is listened to before the keys are
known, or once all are in; those that knock between are few, for a limited time, and no message is longer than
``sockets.LARGEST``. One that is let in and sends what cannot be read is gone; one that sends without end is read in
turn with the others, and waits when too much of it is unread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import zmq
import zmq.auth.thread

from hvd_async.runtime.listener import ListeningSocket
from hvd_async.runtime.relay_tree import Child
from hvd_async.runtime.relayed import DecodeError, Upward, decode_upward, encode_ranks
from hvd_async.runtime.sockets import Endpoint

KNOCKING = 64
"""Connections that may be open at a time of which it is not known whose they are, beside three of each child (a rank
tries several addresses, each with a connection of its own)."""
PASS = 256
"""Messages that are read at a time before they are looked at, one of each connection in turn."""
DIED = "died: its connection to the coordinator ended without a goodbye"
RELAY_DIED = "died, or the relay beside it: the relay's connection to the coordinator ended without a goodbye"
CUT_OFF = "was cut off: the relay on its host has ended"


@dataclass(eq=False)
class _Connection:
    """One TCP connection; whose it is, a child's number, shows when something has been said on it."""

    child: int | None = None


class Router(Endpoint):
    """Connections from below. ``allow`` names the keys once they are known; nobody is listened to before.

    Attributes:
        public: its CURVE public key (Z85).
        port: the TCP port, reserved; it listens there once keys are allowed.
    """

    def __init__(self) -> None:
        super().__init__(zmq.ROUTER, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._children: tuple[Child, ...] = ()
        self._numbers: dict[str, int] = {}
        """Children by their public key."""
        self._reached_by: dict[int, int] = {}
        """Children by the ranks behind them."""
        self._identities: dict[int, bytes] = {}
        """ZeroMQ's names of the children that have said something."""
        self._connections: dict[int, _Connection] = {}
        """Those that are open, by file descriptor; the numbers come back, so one that has ended must not stay."""
        self._ended: dict[int, _Connection] = {}
        self._gone: list[_Connection] = []
        """Those that have ended and were not told, as something that was said on them may be unread."""
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
        """How many ranks are behind all children."""
        return len(self._reached_by)

    @property
    def owes(self) -> bool:
        """Whether a connection has ended that was not told yet."""
        return bool(self._gone)

    def allow(self, children: Sequence[Child], keys: Sequence[bytes], local: bool = False) -> None:
        """Let in exactly these, until all of them have spoken.

        Args:
            children: who they are.
            keys: their public keys (Z85), in the same order.
            local: whether all of them are on this machine.
        """
        self._children = tuple(children)
        self._numbers = {key.decode(): number for number, key in enumerate(keys)}
        self._reached_by = {rank: number for number, child in enumerate(children) for rank in child.behind}
        self._socket.setsockopt(zmq.USE_FD, self._door.open(local))
        self._socket.bind(f"tcp://*:{self.port}")

    def callback(self, domain: str, key: bytes) -> bool:
        """The authenticator asks, in its own thread: is this public key (Z85) one of ours?"""
        return key.decode() in self._numbers

    # -- downward ---------------------------------------------------------------------------------------------

    def deliver(self, ranks: Sequence[int] | None, payload: bytes) -> None:
        """Send commands on; never blocks. To one that has not spoken yet nothing can be sent.

        Args:
            ranks: that they are for; None: all.
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
        """Take in what the socket and its monitor have: all of it, or so much that it is time to look at it.

        Each lags behind the other. A child's probe of the port, or a stranger, may have had a descriptor just before
        the child's own connection got it; so messages find their connection only when the monitor has told of every one
        opened and ended before.
        """
        heard: list[tuple[int, Upward | list[Upward], int]] = []
        most = max(PASS, 2 * len(self._children))
        before = len(self._gone)
        told = True
        while told:
            heard += self._read(most - len(heard))
            told = False
            for kind, descriptor in self.monitored():
                told = True
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
        found += self._tell_gone(unread if len(heard) == most else set())
        self._open_or_shut()
        return found

    def _tell_gone(self, unread: Collection[int | None]) -> list[Upward]:
        """Tell whose connections have ended, after what they said before that.

        Args:
            unread: those of whom something may be unread. (Each in turn is read, so of one that was not heard in a
                whole pass there is nothing.)
        """
        found: list[Upward] = []
        for connection in self._gone:
            if connection.child is not None and connection.child not in unread:
                found += self._without(connection.child)
        self._gone = [connection for connection in self._gone if connection.child in unread]
        if not self._gone:
            self._ended.clear()
        return found

    def _without(self, number: int) -> list[Upward]:
        """Return what there is to say of the ranks behind a child whose connection has ended."""
        child = self._children[number]
        first, *others = child.behind
        return [
            Upward([first], b"", RELAY_DIED if child.relay else DIED),
            *([Upward(others, b"", CUT_OFF)] if others else []),
        ]

    def _open_or_shut(self) -> None:
        """Let nobody in once all have spoken, nor while many are there that have not said whose they are."""
        if not self._numbers:
            return
        if len(self._identities) == len(self._children):
            self._door.shut(True)
            return
        knocking = sum(connection.child is None for connection in self._connections.values())
        most = KNOCKING + 3 * len(self._children)
        if knocking >= most:
            self._door.shut(True)
        elif knocking <= most // 2:
            self._door.shut(False)

    def _read(self, most: int) -> list[tuple[int, Upward | list[Upward], int]]:
        """The messages that are there, so many at the most: child, content, file descriptor."""
        heard: list[tuple[int, Upward | list[Upward], int]] = []
        while len(heard) < most and self.has_message():
            identity = self._socket.recv(zmq.NOBLOCK)
            frames = [self._socket.recv(copy=False)]
            while frames[-1].more:
                frames.append(self._socket.recv(copy=False))
            number = self._numbers[str(frames[-1].get("User-Id"))]  # the guard let nobody else in
            self._identities[number] = identity
            heard.append((number, self._content(number, frames), int(frames[-1].get(zmq.SRCFD))))
        return heard

    def _content(self, number: int, frames: Sequence[zmq.Frame]) -> Upward | list[Upward]:
        """A child's message. (Dropping one would leave others to wait for what it said.)"""
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
