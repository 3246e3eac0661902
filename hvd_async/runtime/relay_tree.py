"""The tree of connections to the coordinator: where a job is large, each host has a relay. Pure.

A relay passes the messages of its host's ranks on, those of many in one, and fans commands out. It is a process beside
the host's first rank, its owner, so that it is lost only with its host. Where there are more hosts than a process
should have connections, some relays have others below them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

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


def direct(size: int) -> Tree:
    """Return the tree in which all ranks connect to the coordinator."""
    return Tree(tuple(Child(rank, (rank,), False) for rank in range(size)), {})


def plan(places: Sequence[str], fan_out: int = FAN_OUT) -> Tree:
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
