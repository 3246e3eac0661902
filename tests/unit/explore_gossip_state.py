"""Gossip for ``explore``: the state of the model ranks, and what the laws are checked by."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvd_async.algorithms.gossip.config import StartExchange
from tests.unit.explore_world import Book, Rank

Message = tuple[int, int, int]
"""Which end it comes before, the sender's place, the sender's step since the last end."""


@dataclass
class GossipRank(Rank):
    """A model rank; its attributes are as of ``gossip_simulation.Rank``, unless it is said otherwise.

    Attributes:
        letters: receivers of what it has offered and no exchange has taken, by key.
        coming: steps that it has announced, and offered nothing of yet.
        flying: exchanges that it has submitted and that have not landed here: number, messages, pairs.
        submitted: the last exchange that it has submitted.
        ends: drains and cuts that have returned.
    """

    letters: dict[int, list[int]] = field(default_factory=dict)
    coming: set[int] = field(default_factory=set)
    held: list[StartExchange] = field(default_factory=list)
    flying: list[StartExchange] = field(default_factory=list)
    submitted: int = 0
    last: int | None = None
    retired: dict[int, int] = field(default_factory=dict)
    come: set[tuple[int, int]] = field(default_factory=set)
    average: int = 0
    landed: int = 0
    gone: int = 0
    offered: int = 0
    step: int = 0
    local: int = 0
    asked: bool = False
    ends: int = 0
    deaf: bool = False


@dataclass
class GossipBook(Book):
    """Offers and requests that no exchange has taken."""

    offers: dict[int, list[int]] = field(default_factory=dict)
    wants: list[int] = field(default_factory=list)
    inside: dict[int, dict[int, float]] = field(default_factory=dict)
    """Weights of the ranks that are in an average that has not started, by its number."""
    exchanges: int = 0
    average: int = 0
    flights: set[int] = field(default_factory=set)
    coming: dict[int, int] = field(default_factory=dict)
    early: dict[int, int] = field(default_factory=dict)
    """The last step of each rank that went before it was offered."""
    announced: set[int] = field(default_factory=set)
    sent: set[tuple[Message, int]] = field(default_factory=set)
    """Messages that have not come, and to whom (by place) they go."""
    carried: dict[int, list[tuple[int, int, list[int]]]] = field(default_factory=dict)
    """Sender, its step and receivers, by exchange that has not landed everywhere."""
    bases: dict[int, int] = field(default_factory=dict)
