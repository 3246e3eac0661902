"""Messages between ranks, on the engine thread: queued, exchanged by one ``alltoall`` of all ranks, delivered."""

from __future__ import annotations

import operator
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_async.algorithms.gossip.messages import ExchangeDone, MessageComing, MessageQueued, NoMessage, StartExchange
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Handle, Rows, Vector

NAMES_IN_RING = 4
"""Exchanges that may be in flight at once; their names are used again, which Horovod's response cache needs."""
HEADER = struct.Struct("<qd")
"""The header of a message: its key, the sender's push-sum weight."""


class OutgoingMessage(NamedTuple):
    """A message to a rank (by its place): its bytes; and its push-sum weight, if it is not the sender's."""

    to: int
    data: Vector
    weight: float | None = None


@dataclass(frozen=True)
class MessageFormat:
    """A binding's format of messages, and the vector operations it needs.

    Attributes:
        encode: makes bytes (uint8, flat) of a vector; they may share its memory.
        decode: makes the vector of these bytes.
        as_bytes: as ``encode``, without compression.
        from_bytes: makes the vector of these bytes, behind which others may follow.
        pack: lays data of at most ``nbytes`` bytes and their headers out as ``rows`` rows of ``nbytes`` and a header.
        unpack: takes a row apart: data, header.
        nbytes: of an encoded vector.
        rows: number of rows that a rank submits to each exchange.
        lossless: whether ``decode(encode(x))`` is x.
        differences: whether messages are differences to the receiver's estimate (CHOCO-SGD).
        add: ``add(x, y, a)`` is x + a y; it may change x.
        times: ``times(x, a)`` is a x, a new vector.
        split: a vector in as many parts of one length as a host has ranks, the last filled up with zeros.
        concatenate: one flat array of several.
        join: takes ``split`` back.
        room: memory for the rows that an exchange brings at the most; None where the collective finds some.
        zeros: a vector of zeros; it is never changed, and may be the same one each time.
        scalar: a vector of one float64.
        process_set: the ranks that share the optimizer, as the binding's collectives know them; None for all.
        members: those ranks; empty for all.
        process_set_id: 0 for all ranks.
    """

    encode: Callable[[Vector], Vector]
    decode: Callable[[Vector], Vector]
    as_bytes: Callable[[Vector], Vector]
    from_bytes: Callable[[Vector], Vector]
    pack: Callable[[Sequence[tuple[Vector, bytes]]], Rows]
    unpack: Callable[[Any], tuple[Vector, bytes]]
    nbytes: int
    rows: int
    lossless: bool
    differences: bool
    add: Callable[[Vector, Vector, float], Vector]
    split: Callable[[Vector], list[Vector]]
    concatenate: Callable[[Sequence[Vector]], Vector]
    join: Callable[[Sequence[Vector]], Vector]
    zeros: Callable[[], Vector]
    scalar: Callable[[float], Vector]
    times: Callable[[Vector, float], Vector] = operator.mul
    room: Callable[[], Rows | None] = lambda: None
    process_set: Any = None
    members: tuple[int, ...] = ()
    process_set_id: int = 0


class _QueuedStep(NamedTuple):
    messages: list[OutgoingMessage]
    weight: float


class MessageExchange:
    """The exchanges of one optimizer on this rank.

    Args:
        engine: this rank's.
        post: the format of messages.
        deliver: called with the sender's place, the key, its push-sum weight and the encoded vector of each message.
        snapshots: messages, with their keys, that this rank's weights of now make for an exchange (AD-PSGD).
        after: called when all messages of an exchange were delivered.
    """

    def __init__(
        self,
        engine: Engine,
        post: MessageFormat,
        deliver: Callable[[int, int, float, Vector], None],
        snapshots: Callable[[StartExchange], list[tuple[int, OutgoingMessage]]],
        after: Callable[[], None],
    ) -> None:
        self._engine, self._post = engine, post
        self._deliver, self._snapshots, self._after = deliver, snapshots, after
        self._ranks = post.members or tuple(range(engine.size))
        self._place = {rank: place for place, rank in enumerate(self._ranks)}
        self._outbox: dict[int, _QueuedStep] = {}
        self._coming: set[int] = set()
        """Steps whose messages were announced and not queued yet."""
        self._busy: set[str] = set()
        self._held: deque[StartExchange] = deque()
        self._last: int | None = None
        """The last exchange before a drain that this rank has not completed yet; later ones wait."""
        self.completed = self.own_sent = 0
        """Exchanges that have completed here; of these, how many carried messages of this rank."""
        self.sent = self.bytes_sent = 0
        self.seconds = 0.0
        """Duration of all exchanges here, summed."""

    def announce(self, optimizer: int, key: int) -> None:
        """Say that messages of a step will be queued, or that there are none, once those of earlier steps are here."""
        self._coming.add(key)
        self._engine.send(MessageComing(optimizer, key))

    def offer(self, optimizer: int, key: int, messages: list[OutgoingMessage], weight: float) -> None:
        """Queue a step's messages, one to a receiver, for an exchange; without any, announce that there are none."""
        if messages or key in self._coming:
            self._outbox[key] = _QueuedStep(messages, weight)
        self._coming.discard(key)
        if any(key in command.keys_of(self._engine.rank) for command in self._held):
            self._try_held()
        else:
            self._engine.send(MessageQueued(optimizer, key) if messages else NoMessage(optimizer, key))

    def pause(self, last: int) -> None:
        """Submit nothing of the exchanges after number ``last``, until ``resume``."""
        self._last = last

    def resume(self) -> None:
        """Go on after a ``pause``."""
        self._last = None
        self._try_held()

    def exchange(self, command: StartExchange) -> None:
        """Submit this rank's part of an exchange."""
        self._held.append(command)
        self._try_held()

    def _try_held(self) -> None:
        while self._held and self._name(self._held[0]) not in self._busy:
            if self._last is not None and self._held[0].round > self._last:
                return
            if any(key in self._coming for key in self._held[0].keys_of(self._engine.rank)):
                return
            if self._held[0].gathers and self._busy:
                return
            self._submit(self._held.popleft())

    def _pieces(self, data: Vector) -> list[Vector]:
        """Return a message as the data of its rows, which all have its header: it may be longer than one."""
        step = max(1, self._post.nbytes)
        return [data[start : start + step] for start in range(0, max(1, len(data)), step)]

    def _name(self, command: StartExchange) -> str:
        return f"hvd_async.gossip.{command.optimizer}.{command.round % NAMES_IN_RING}"

    def _submit(self, command: StartExchange) -> None:
        name, own, started = self._name(command), self._engine.rank, time.monotonic()
        self._busy.add(name)
        outgoing = [(key, message, 1.0) for key, message in self._snapshots(command)]
        queued = False
        for key in command.keys_of(own):
            messages, weight = self._outbox.pop(key)
            queued = bool(messages)
            outgoing += [(key, message, weight) for message in messages]
        self.sent += len(outgoing)
        rows: list[tuple[int, Vector, bytes]] = []
        for key, (to, data, own_weight), weight in outgoing:
            header = HEADER.pack(key, weight if own_weight is None else own_weight)
            rows += [(to, piece, header) for piece in self._pieces(data)]
        rows.sort(key=lambda row: row[0])
        splits = [0] * len(self._ranks)
        for to, _, _ in rows:
            splits[to] += 1
        packed = self._post.pack([(data, header) for _, data, header in rows])
        self.bytes_sent += len(rows) * (self._post.nbytes + HEADER.size)
        first = next((self._place[rank] for rank, *_ in [*command.senders, *command.pairs]), None)

        def on_complete(result: Any) -> None:
            received, counts = result
            self._busy.discard(name)
            self.seconds += time.monotonic() - started
            senders = [place for place, count in enumerate(counts) for _ in range(count)]
            messages: dict[tuple[int, bytes], list[Vector]] = {}
            for row, place in zip(received, senders, strict=True):
                data, header = self._post.unpack(row)
                messages.setdefault((place, header), []).append(data)
            for (place, header), pieces in messages.items():
                key, weight = HEADER.unpack(header)
                self._deliver(place, key, weight, pieces[0] if len(pieces) == 1 else self._post.concatenate(pieces))
            self.completed += 1
            self.own_sent += queued
            # The receiver reports completion: a sender's part may complete as soon as the kernel has buffered it, and
            # exchanges would seem to take no time. (Where the first has none after all, it says so itself.)
            if first in senders or (first == self._place[own] and command.senders and not queued):
                self._engine.send(ExchangeDone(command.optimizer, command.round))
            self._after()
            self._try_held()

        def start() -> Handle:
            return self._engine.collectives.alltoall(packed, splits, name, self._post.process_set, self._post.room())

        self._engine.submit(start, on_complete)
