"""Rendezvous of the ranks: a Horovod allgather of keys and addresses, then a connection to the coordinator on rank 0.

In a large job (``relays``) a second allgather carries the addresses of the relays that some ranks have started, and
each rank connects to the relay of its host. In such a job, and if tensors are on a GPU, the coordinator runs in a
separate process: as a thread it would compete for rank 0's interpreter lock, which is needed to launch kernels.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import zmq

import hvd_async
from hvd_async.errors import EngineError, RankLostError, ranks_text
from hvd_async.runtime import time_limits
from hvd_async.runtime.addresses import machine, own_addresses, reachable
from hvd_async.runtime.coordinator import Coordinator
from hvd_async.runtime.descriptors import shortage
from hvd_async.runtime.engine import error_of
from hvd_async.runtime.interfaces import Channel, Collectives, Gone
from hvd_async.runtime.protocol import Codec, Family, Hello, JobFailed, RankLost, Welcome
from hvd_async.runtime.relays import Above, ControlProcess, Door, Setup, Tree, direct_tree, plan_tree
from hvd_async.runtime.transport import LOOPBACK, Child, NearChannel, ZmqChannel, ZmqHub

MARGIN = 10.0
"""Seconds by which a rank waits longer than the coordinator, which knows the missing rank."""


Control: TypeAlias = Coordinator | ControlProcess
"""Server that a rank runs for others: the coordinator or a relay."""


class Meeting(NamedTuple):
    """Result of a rendezvous on a rank.

    Attributes:
        channel: the connection to the coordinator.
        controls: the servers that this rank runs for others.
        hosts: the name of the host of each rank.
    """

    channel: Channel
    controls: tuple[Control, ...]
    hosts: tuple[str, ...]


class _Thread:
    """Coordinator as a thread of this process.

    Attributes:
        channel: this rank's connection, once the coordinator has begun.
    """

    channel: NearChannel

    def __init__(self, codec: Codec, families: Sequence[Family]) -> None:
        self._codec, self._hub, self._families = codec, ZmqHub(codec), families
        self.door = Door(self._hub.public, self._hub.port)

    def begin(self, setup: Setup) -> Control:
        self.channel = NearChannel(self._codec, self._hub, setup.hosts[0])
        if others := setup.children[1:]:
            self._hub.allow(setup.keys[1:], setup.local, others)
        limits = time_limits.warn_after(), time_limits.connect_timeout(), time_limits.dead_after()
        coordinator = Coordinator(self._hub, self._families, setup.hosts, *limits)
        coordinator.start()
        return coordinator

    def close(self) -> None:
        self._hub.close()


_Server: TypeAlias = _Thread | ControlProcess
"""Coordinator before it begins: a thread of this process, or a separate process."""


def rendezvous(collectives: Collectives, families: Sequence[Family]) -> Meeting:
    """Connect this rank to the coordinator, which rank 0 starts. Every rank calls it, and waits for all others.

    Args:
        collectives: the data plane, for the allgather of keys.
        families: the families of algorithms that ranks may run.

    Raises:
        EngineError: the ranks have different versions of this library; the coordinator could not be reached, or did not
            answer, within HVD_ASYNC_CONNECT_TIMEOUT seconds; or it cannot serve that number of ranks.
        RankLostError: a rank did not connect.
    """
    keys, codec, limit = zmq.curve_keypair(), Codec(families), time_limits.connect_timeout()
    with contextlib.ExitStack() as undo:
        server, problem, large = _start_server(collectives, families) if collectives.rank == 0 else (None, "", False)
        if server is not None:
            undo.callback(server.close)
        cards = _exchange_cards(collectives, keys[0], server, problem, large)
        large = cards[0].large
        places = [card.place or f"rank {rank}" for rank, card in enumerate(cards)]
        tree = plan_tree(places) if large else direct_tree(len(cards))
        controls: list[Control] = []
        relays: list[RelayCard] = []
        if large:
            relay, problem = _started("relay") if collectives.rank in tree.relays else (None, "")
            if relay is not None:
                undo.callback(relay.close)
            relays = _exchange_relays(collectives, relay, problem, tree)
            if relay is not None:
                controls.append(relay.begin(relay_setup_of(collectives.rank, tree, cards, relays, places)))
        if server is not None:
            controls.append(server.begin(setup_of(tree.root, cards, relays, places, places[0])))
        undo.pop_all()
        for control in controls:
            undo.callback(control.stop)
        deadline, way = time.monotonic() + limit + MARGIN, ""
        if isinstance(server, _Thread):
            channel: ZmqChannel = server.channel
        else:
            channel, way = _connected(collectives, codec, keys, tree, cards, relays, limit)
        undo.callback(channel.close)
        _handshake(channel, collectives, f"the coordinator on host {cards[0].host}{way}", deadline)
        undo.pop_all()
    return Meeting(channel, tuple(controls), tuple(card.host for card in cards))


def _start_server(collectives: Collectives, families: Sequence[Family]) -> tuple[_Server | None, str, bool]:
    """Start the coordinator's server on rank 0.

    Returns:
        The server, the error for all ranks if it could not be started, and whether the job has relays.
    """
    try:
        relays_from = time_limits.relays_from()
    except ValueError as error:
        return None, str(error), False
    if collectives.size >= relays_from:  # (the number of its connections is not known yet)
        return *_started("coordinator"), True
    if collectives.on_gpu and relays_from < math.inf:
        server, problem = _started("coordinator")
        return server, problem or shortage(collectives.size, here=False), False
    return _Thread(Codec(families), families), shortage(collectives.size), False


def _started(role: str) -> tuple[ControlProcess | None, str]:
    """Start a process; return it, or the error for all ranks if it could not be started."""
    try:
        return ControlProcess(role), ""
    except (EngineError, OSError, msgspec.DecodeError) as error:
        return None, f"the {role} could not be started: {error}"


def _connected(
    collectives: Collectives,
    codec: Codec,
    keys: tuple[bytes, bytes],
    tree: Tree,
    cards: Sequence[Card],
    relays: Sequence[RelayCard],
    limit: float,
) -> tuple[ZmqChannel, str]:
    """Connect this rank; return the connection, and its route to the coordinator for error messages."""
    above = above_of(tree.parent(collectives.rank), cards, relays, cards[collectives.rank].place)
    relay = ""
    if (owner := tree.parent(collectives.rank)) is not None:
        relay = f"rank {owner} on host {cards[owner].host}"
    whose = f"the relay of {relay}" if relay else "the coordinator on rank 0"
    try:
        address = reachable(above.addresses, above.port, limit, whose)
    except EngineError as error:
        if not time_limits.in_elastic_job():
            raise
        lost = owner or 0  # it took part in the allgather, so it is declared lost, and the others continue
        raise RankLostError(lost, cards[lost].host, f"died after the rendezvous: {error}") from error
    channel = ZmqChannel(codec, address, above.port, above.public, keys, cards[0].host, relay)
    return channel, f", reached through {whose}, {address}:{above.port}," if relay else f", {address}:{above.port},"


# -- cards ----------------------------------------------------------------------------------------------------


def _exchange_cards(
    collectives: Collectives, public: bytes, server: _Server | None, problem: str, large: bool
) -> list[Card]:
    door, addresses = (Door(b"", 0), []) if server is None else (server.door, own_addresses())
    place, version = machine(), hvd_async.__version__
    card = Card(public, collectives.host, door.public, door.port, addresses, place, version, problem, large)
    cards: list[Card] = []
    versions: dict[str, list[int]] = {}
    for rank, data in enumerate(collectives.allgather_bytes(msgspec.msgpack.encode(card), "hvd_async.rendezvous")):
        try:
            cards.append(msgspec.msgpack.decode(data, type=Card))
            versions.setdefault(cards[-1].version, []).append(rank)
        except msgspec.DecodeError:
            versions.setdefault("another", []).append(rank)
    if len(versions) > 1:
        found = ", ".join(f"{version} on {ranks_text(ranks)}" for version, ranks in sorted(versions.items()))
        raise EngineError(
            f"the ranks have different versions of hvd_async: {found}. Install the same one on every host."
        )
    _raise_problems((rank, card.host, card.problem) for rank, card in enumerate(cards))
    return cards


def _exchange_relays(
    collectives: Collectives, relay: ControlProcess | None, problem: str, tree: Tree
) -> list[RelayCard]:
    """Return the relay of each rank; rank 0 also reports whether the coordinator can serve its children."""
    rank = collectives.rank
    children = tree.root if rank == 0 else tree.relays.get(rank, ())
    addresses = [] if relay is None else own_addresses(configured=False)
    problem = problem or (shortage(len(children), here=False) if children else "")
    card = RelayCard(None if relay is None else relay.door, addresses, problem)
    found = collectives.allgather_bytes(msgspec.msgpack.encode(card), "hvd_async.relays")
    cards = [msgspec.msgpack.decode(data, type=RelayCard) for data in found]
    _raise_problems((number, "", one.problem) for number, one in enumerate(cards))
    return cards


def _raise_problems(problems: Iterator[tuple[int, str, str]]) -> None:
    """Raise the first problem that a rank reports, on all ranks.

    Raises:
        EngineError: a rank has a problem.
    """
    for rank, host, problem in problems:
        if problem:
            raise EngineError(f"rank {rank}{f' on host {host}' if host else ''}: {problem}")


def _handshake(channel: ZmqChannel, collectives: Collectives, coordinator: str, deadline: float) -> None:
    """Send ``Hello``, and wait until every rank has done so.

    Raises:
        RankLostError, CollectiveFailedError, EngineError: a rank is missing, or the coordinator does not answer.
    """
    channel.send(Hello(collectives.host, os.getpid()))
    began = time.monotonic()
    while (left := deadline - time.monotonic()) > 0:
        match channel.receive(left):
            case Welcome():
                return
            case RankLost() | JobFailed() | Gone() as message:
                raise error_of(message)
    raise EngineError(f"{coordinator} did not answer within {time.monotonic() - began:.0f} s")


# -- contents of the cards ------------------------------------------------------------------------------------


class Card(msgspec.Struct, frozen=True):
    """Contribution of a rank to the allgather.

    Attributes:
        public: its CURVE public key (Z85).
        host: the name of its host.
        server, port, addresses: on rank 0, the coordinator's public key, port and addresses.
        place: an identifier, equal for ranks that share 127.0.0.1; empty if it is unknown.
        version: the version of the library; the first version did not send it.
        problem: why this rank cannot continue; empty if it can.
        large: on rank 0, whether the job has relays.
    """

    public: bytes
    host: str
    server: bytes
    port: int
    addresses: list[str]
    place: str = ""
    version: str = "an early one"
    problem: str = ""
    large: bool = False


class RelayCard(msgspec.Struct, frozen=True):
    """Contribution of a rank to the allgather of relays.

    Attributes:
        door: the keys and port of its relay; None if it has none.
        addresses: the addresses of the relay.
        problem: why the relay could not be started, or the coordinator cannot serve its children; otherwise empty.
    """

    door: Door | None
    addresses: list[str]
    problem: str = ""


def above_of(owner: int | None, cards: Sequence[Card], relays: Sequence[RelayCard], place: str) -> Above:
    """Return the route from the machine ``place`` to the relay of rank ``owner``, or to the coordinator if None."""
    first = cards[0]
    if owner is None:
        near, door, addresses = cards[0].place, Door(first.server, first.port), first.addresses
    else:
        known = relays[owner].door
        assert known is not None
        near, door, addresses = cards[owner].place, known, relays[owner].addresses
    return Above([LOOPBACK] * bool(near and near == place) + addresses, door.port, door.public)


def setup_of(
    children: Sequence[Child],
    cards: Sequence[Card],
    relays: Sequence[RelayCard],
    places: Sequence[str],
    place: str,
) -> Setup:
    """Return the setup of the coordinator, or of a relay, on the machine ``place``, with these children."""
    keys = []
    for child in children:
        door = relays[child.owner].door if child.relay else None
        keys.append(cards[child.owner].public if door is None else door.upward)
    local = bool(cards[children[0].owner].place) and all(places[child.owner] == place for child in children)
    return Setup(list(children), keys, local, [card.host for card in cards])


def relay_setup_of(
    rank: int, tree: Tree, cards: Sequence[Card], relays: Sequence[RelayCard], places: Sequence[str]
) -> Setup:
    """Return the setup of the relay of a rank, with the upper end of its connection."""
    setup = setup_of(tree.relays[rank], cards, relays, places, places[rank])
    above = above_of(tree.above(rank), cards, relays, cards[rank].place)
    return msgspec.structs.replace(setup, hosts=[], above=above)
