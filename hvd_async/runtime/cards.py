"""Cards by which ranks tell each other how to connect, and what a coordinator or a relay has to know of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hvd_async.runtime.control_process import Above, Door, Setup
from hvd_async.runtime.listener import LOOPBACK
from hvd_async.runtime.relay_tree import Child, Tree


class Card(msgspec.Struct, frozen=True):
    """A rank's part of the allgather; ``server``, ``port`` and ``addresses`` only rank 0.

    ``place`` is the same where 127.0.0.1 is the same; empty if that is not known. ``version`` is the library's, which
    the first one did not tell. ``problem``: why this rank cannot go on. ``large``: whether there are relays, as rank 0
    has decided.
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
    """How a rank's relay can be reached; ``door`` is None where it has none. ``problem``: why it could not be started,
    or the coordinator cannot serve so many."""

    door: Door | None
    addresses: list[str]
    problem: str = ""


def above_of(owner: int | None, cards: Sequence[Card], relays: Sequence[RelayCard], place: str) -> Above:
    """How a rank's relay, or the coordinator if the rank is None, can be reached from a machine."""
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
    """Return the setup of the coordinator, or of a relay, on a machine: who may connect to it."""
    keys = []
    for child in children:
        door = relays[child.owner].door if child.relay else None
        keys.append(cards[child.owner].public if door is None else door.upward)
    local = bool(cards[children[0].owner].place) and all(places[child.owner] == place for child in children)
    return Setup(list(children), keys, local, [card.host for card in cards])


def relay_setup_of(
    rank: int, tree: Tree, cards: Sequence[Card], relays: Sequence[RelayCard], places: Sequence[str]
) -> Setup:
    """Return the setup of a rank's relay: who may connect to it, and whom it connects to."""
    setup = setup_of(tree.relays[rank], cards, relays, places, places[rank])
    above = above_of(tree.above(rank), cards, relays, cards[rank].place)
    return msgspec.structs.replace(setup, hosts=[], above=above)
