"""Relays of a large job: the tree of connections to the coordinator, and the wire format between its nodes. Pure.

In a large job, each host has a relay. It forwards the messages of its host's ranks, several in one, and fans commands
out. It is a process started by its owner, the first rank on the host, so that it is lost only with its host. If there
are more hosts than one process should have connections, some relays have others below them.

A message of a rank is a MessagePack array of events; a message to a rank is an array of commands. A relay decodes
neither. Relays run in ``control_process``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

# -- the tree -------------------------------------------------------------------------------------------------

FAN_OUT = 32
"""Limit of the connections of a relay, or of the coordinator, to other relays and ranks of other hosts."""


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


class Tree(NamedTuple):
    """Tree of connections.

    Attributes:
        root: the children of the coordinator.
        relays: the children of each relay, by its owner.
    """

    root: tuple[Child, ...]
    relays: dict[int, tuple[Child, ...]]

    def parent(self, rank: int) -> int | None:
        """Return the owner of the relay to which a rank connects; None if it connects to the coordinator."""
        return self._above(rank, relay=False)

    def above(self, owner: int) -> int | None:
        """Return the owner of the relay to which a relay connects; None if it connects to the coordinator."""
        return self._above(owner, relay=True)

    def _above(self, owner: int, relay: bool) -> int | None:
        found = [
            parent
            for parent, children in self.relays.items()
            if any(child.owner == owner and child.relay == relay for child in children)
        ]
        return found[0] if found else None


def direct_tree(size: int) -> Tree:
    """Return the tree in which all ranks connect to the coordinator."""
    return Tree(tuple(Child(rank, (rank,), False) for rank in range(size)), {})


def plan_tree(places: Sequence[str], fan_out: int = FAN_OUT) -> Tree:
    """Return a tree with a relay on each host that has several ranks, except the coordinator's host.

    Args:
        places: the machine of each rank, in order; the coordinator is on that of rank 0.
        fan_out: limit of the children of the coordinator, or of a relay, in addition to the ranks of its host; at least
            2.
    """
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place, []).append(rank)
    relays: dict[int, tuple[Child, ...]] = {}
    own, *others = (tuple(Child(rank, (rank,), False) for rank in ranks) for ranks in hosts.values())
    level = [_joined(children, relays) for children in others]
    while len(level) > fan_out:
        groups = -(-len(level) // fan_out)
        cuts = [len(level) * number // groups for number in range(groups + 1)]
        level = [_joined(tuple(level[low:high]), relays) for low, high in itertools.pairwise(cuts)]
    return Tree((*own, *level), relays)


def _joined(children: tuple[Child, ...], relays: dict[int, tuple[Child, ...]]) -> Child:
    """Add a relay of these children to ``relays`` and return it; return a single child as it is.

    A relay of relays is the first of them, which has the others below it.
    """
    if len(children) == 1:
        return children[0]
    first, *others = children
    behind = tuple(rank for child in children for rank in child.behind)
    relays[first.owner] = (*relays[first.owner], *others) if first.relay else children
    return Child(first.owner, behind, True)


# -- the wire format ------------------------------------------------------------------------------------------

DecodeError = msgspec.DecodeError


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


def merged(messages: Iterable[Upward]) -> list[Upward]:
    """Merge equal messages of several ranks into one; the messages of each rank stay in order."""
    found: list[Upward] = []
    same: dict[bytes, int] = {}
    last: dict[int, int] = {}
    for message in messages:
        place = same.get(message.data) if message.data and not message.gone else None
        if place is not None and all(last.get(rank, -1) < place for rank in message.ranks):
            found[place].ranks.extend(message.ranks)
        else:
            place = len(found)
            found.append(Upward(list(message.ranks), message.data, message.gone))
            same[message.data] = place
        last.update(dict.fromkeys(message.ranks, place))
    return found
