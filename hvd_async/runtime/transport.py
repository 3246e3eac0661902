"""The control plane on ZeroMQ: the coordinator's end and a rank's.

Each rank makes a key pair; the public keys travel by a Horovod allgather (``rendezvous``), and only those are let in.
Rank 0, where the coordinator is a thread of its process, has no socket: the same messages go by memory.
Both ends queue what they send until they next listen: a rank sends one message for all events since it last slept, and
gets one with all commands that these, and others', have led to.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
import zmq

from hvd_async.errors import EngineError
from hvd_async.runtime.codec import Codec, DecodeError, encode, packed
from hvd_async.runtime.interfaces import Gone
from hvd_async.runtime.messages import Command, Event
from hvd_async.runtime.relay_tree import Child, direct
from hvd_async.runtime.relayed import Upward
from hvd_async.runtime.router import DIED, Router
from hvd_async.runtime.sockets import LARGEST, Endpoint, NearEnd, Sleeper

ENDED = "died: the connection to the coordinator ended, unless it was this rank that stood still or was cut off"
RELAY_ENDED = "; or it was the relay beside {relay}, by which this rank's messages go"
REFUSED = "refused this rank's key"
PATIENCE = 16
"""Commands wait while a sixteenth as many events are looked at as there are others to send them to: that takes much
less time than sending them does, and those that come of these events go along."""
MOST_EVENTS = 1024
"""In a message. A rank's messages are read in turn with others', so one of more would be out of turn."""


class ZmqHub:
    """The coordinator's end. ``allow`` names the keys once they are known; nobody is listened to before.

    Attributes:
        public: the server's CURVE public key (Z85).
        port: the TCP port, reserved; it listens there once keys are allowed.

    Args:
        codec: reads what ranks send.
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
        """Commands that were not sent yet, by the ranks they are for; those in a row for the same ranks together."""
        self._since = 0
        """Events that were looked at since then."""
        self._soon = 0
        """So many at the most."""

    def allow(self, keys: Sequence[bytes], local: bool = False, children: Sequence[Child] = ()) -> None:
        """Let in exactly these, until all of them have spoken.

        Args:
            keys: public keys (Z85): of the ranks, in their order, or of the ``children``.
            local: whether all of them are on this machine.
            children: ranks and relays; if there are none, all ranks. Rank 0 is not among them if it is ``connect``ed.
        """
        self._soon = len(keys) // PATIENCE
        self.router.allow(children or direct(len(keys)).root, keys, local)

    def connect(self, end: NearEnd) -> None:
        """Connect rank 0, of this process."""
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
            if self._near.is_connected and 0 in ranks:
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
        if not self._ready and (self._sleeper.wait(0.0 if self.router.owes else timeout) or self.router.owes):
            far = self.router.read() if self.router.unsure or self.router.owes else []
            for message in [*self._heard_near(), *far]:
                self._ready.extend((message.ranks, event) for event in self._events(message.data, message.gone))
        if not self._ready:
            return None
        ranks, event = self._ready.popleft()
        self._since += len(ranks) if self._queued else 0
        return ranks, event

    def _heard_near(self) -> Iterator[Upward]:
        """Yield what rank 0 has sent by memory."""
        ended = self._near.refused() is not None  # (before its last messages are taken)
        while (frames := self._near.read()) is not None:
            yield Upward([0], frames[0])
        if ended:
            yield Upward([0], b"", DIED)

    def _events(self, data: bytes, gone: str) -> Sequence[Event | Gone]:
        """A message's events. (Dropping one would leave others to wait for what it said.)"""
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
    """The lower end of a connection: a rank's, or a relay's, to the coordinator or to a relay above.

    Args:
        address, port, server_key: where the other end listens, and its public key (Z85).
        keys: this end's (public, secret) CURVE keys (Z85).
        context: as of ``Endpoint``.
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
        with contextlib.suppress(zmq.Again):  # this end was refused: ``ended`` tells
            self._socket.send(payload, zmq.NOBLOCK)

    def read(self) -> list[bytes] | None:
        """Return the frames of the next message; None if there is none."""
        self.unsure = True
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def refused(self) -> bool | None:
        """Whether the connection has ended as the other end did not know this one's key, or otherwise; None: it has
        not."""
        for event, _ in self.monitored():
            if self._refused is None:  # the first event is the reason
                self._refused = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        return self._refused


class ZmqChannel:
    """A rank's end.

    Args:
        codec: reads what the coordinator sends.
        address, port, server_key: where the coordinator, or a relay, listens, and its public key (Z85).
        keys: this rank's (public, secret) CURVE keys (Z85).
        host: the coordinator's, for messages.
        relay: which relay that is, for people; empty if it is the coordinator.
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
            raise EngineError(f"a message is too long for the coordinator: {what}, of {LARGEST // 2} at the most")
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
            self._read()  # what the coordinator said before the connection ended comes first
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
        self._uplink.close(None if self._gone is None else 0)  # (whom should it reach?)
        self._sleeper.close()


class NearChannel(ZmqChannel):
    """Rank 0's end where the coordinator is a thread of the same process.

    Args:
        codec: reads what the coordinator sends.
        hub: the coordinator's end.
        host: of both, for messages.
    """

    def __init__(self, codec: Codec, hub: ZmqHub, host: str) -> None:
        end = NearEnd()
        self._begin(codec, end, hub.port, host, ENDED)
        end.wake = self._sleeper.wake
        hub.connect(end)
