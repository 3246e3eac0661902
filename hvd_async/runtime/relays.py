"""Relays of a large job: the tree of connections to the coordinator, and the wire format between its nodes. Pure.

Where a job is large, each host has a relay. It forwards the messages of its host's ranks, several in one, and fans
commands out. It is a process beside the host's first rank, its owner, so that it is lost only with its host. Where
there are more hosts than a process should have connections, some relays have others below them.

A rank's own message is a MessagePack array of events; what comes down to it is an array of commands. A relay decodes
neither. ``control_process`` runs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

# -- the tree -------------------------------------------------------------------------------------------------

FAN_OUT = 32
"""Connections of one relay, or of the coordinator, to other relays and ranks of other hosts, at the most."""


class Child(NamedTuple):
    """Who is at the other end of a connection from above.

    Attributes:
        owner: a rank; of a relay, the one that it runs beside.
        behind: the ranks that are reached by it: the owner first.
        relay: whether it is a relay, and not that rank itself.
    """

    owner: int
    behind: tuple[int, ...]
    relay: bool


class Tree(NamedTuple):
    """Who connects to whom.

    Attributes:
        root: the coordinator's children.
        relays: each relay's, by its owner.
    """

    root: tuple[Child, ...]
    relays: dict[int, tuple[Child, ...]]

    def parent(self, rank: int) -> int | None:
        """Return the owner of the relay that a rank connects to; None: the coordinator itself."""
        return self._above(rank, relay=False)

    def above(self, owner: int) -> int | None:
        """Return the owner of the relay that a relay connects to; None: the coordinator itself."""
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
    """Return a tree with a relay on each host that has several ranks, but for the coordinator's.

    Args:
        places: the machine of each rank, in order; the coordinator is on that of rank 0.
        fan_out: the most children that the coordinator, or a relay, has beside the ranks of its host; 2 at the least.
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
    """Return the relay, added to ``relays``, of these children; if there is one alone, that.

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
    """A message that ranks have sent.

    Attributes:
        ranks: that have all sent the same, after what they sent before.
        data: as each sent it; empty if it sent nothing and its connection has ended.
        gone: why that was; empty while it goes on.
    """

    ranks: list[int]
    data: bytes
    gone: str = ""


_encoder = msgspec.msgpack.Encoder()
_upward = msgspec.msgpack.Decoder(list[Upward])
_ranks = msgspec.msgpack.Decoder(list[int])


def encode_upward(messages: Sequence[Upward]) -> bytes:
    """Return the wire form of what ranks have sent."""
    return _encoder.encode(messages)


def decode_upward(data: bytes) -> list[Upward]:
    """Return what ranks have sent.

    Raises:
        DecodeError: it is nothing of the kind.
    """
    return _upward.decode(data)


def encode_ranks(ranks: Sequence[int] | None) -> bytes:
    """Return the wire form of the ranks that a command is for; empty: all."""
    return b"" if ranks is None else _encoder.encode(list(ranks))


def decode_ranks(data: bytes) -> list[int] | None:
    """Return the ranks that a command is for; None: all.

    Raises:
        DecodeError: it is nothing of the kind.
    """
    return _ranks.decode(data) if data else None


def merged(messages: Iterable[Upward]) -> list[Upward]:
    """Return the messages with those of several ranks in one that say the same; each rank's stay in their order."""
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
