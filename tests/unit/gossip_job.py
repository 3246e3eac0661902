"""A gossiping job to simulate, and the state of its simulated ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hvd_async.algorithms.gossip.config import StartExchange
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.runtime.protocol import Command, Drained, OptimizerEvent


@dataclass(frozen=True)
class Job:
    """Job that is simulated.

    Attributes:
        steps: for each end, for each rank, how many steps it takes before it.
        speeds: of the ranks' training threads; a rank of speed 0 moves only when nobody else can.
        ranks: their numbers.
        cuts: (end, index) of those that are a ``cut()``.
        hasty: indices of ranks that are done with the first segment (of no steps) before they know of the others.
    """

    plan: GossipPlan
    steps: tuple[tuple[int, ...], ...]
    speeds: tuple[float, ...]
    ranks: tuple[int, ...]
    seed: int = 0
    cuts: frozenset[tuple[int, int]] = frozenset()
    hasty: frozenset[int] = frozenset()

    def flushes(self, end: int) -> bool:
        """Whether at least one rank drains there."""
        return any((end, index) not in self.cuts for index in range(len(self.ranks)))


@dataclass
class Rank:
    """One simulated rank: its training thread is the generator ``_train``, the rest its engine."""

    index: int
    number: int
    outbox: deque[OptimizerEvent] = field(default_factory=deque)
    inbox: deque[Command] = field(default_factory=deque)
    agreed: bool = False
    opened: bool = False
    """Whether the coordinator has seen its Opened."""
    drained: Drained | None = None
    last: int | None = None
    """It takes no part in exchanges after this one, until its drain has returned."""
    held: deque[StartExchange] = field(default_factory=deque)
    flying: list[StartExchange] = field(default_factory=list)
    letters: dict[int, list[int]] = field(default_factory=dict)
    """Receivers of what it has offered, by key."""
    coming: set[int] = field(default_factory=set)
    """Steps that it has announced, and offered nothing of yet."""
    retired: dict[int, int] = field(default_factory=dict)
    come: list[tuple[int, int]] = field(default_factory=list)
    """Messages that are here: (sender, key)."""
    owed: list[tuple[int, int]] = field(default_factory=list)
    """Messages that its training thread waits for."""
    averages: set[int] = field(default_factory=set)
    landed: int = 0
    gone: int = 0
    offered: int = 0
    steps: int = 0
    """Since it began."""
    local: int = 0
    asked: bool = False
    averagings: int = 0
    waits: Callable[[], bool] | None = None
    finished: bool = False
