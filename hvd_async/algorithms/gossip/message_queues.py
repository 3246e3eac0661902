"""Messages that ranks have queued and no exchange has taken: each rank's in order, the first ones by their step.

Which messages go together next is known without a look at every rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Group:
    """Ranks whose first messages go together.

    Attributes:
        key: the step that they are of; where messages of all steps go together, 0.
        since: when the first of these messages was queued.
        ranks: that have queued them.
    """

    key: int
    since: float
    ranks: set[int] = field(default_factory=set)


@dataclass(init=False)
class MessageQueues:
    """All ranks' queues.

    Args:
        ranks: in order.
        together: whether first messages go together whatever step they are of (hierarchical gossip).
    """

    _place: dict[int, int]
    _together: bool
    _queues: dict[int, dict[int, float]]
    """When each message was queued, by rank and step, in the order in which they were."""
    _groups: list[Group]
    """Of first messages, those of the earliest step first."""

    def __init__(self, ranks: Sequence[int], together: bool = False) -> None:
        self._place = {rank: place for place, rank in enumerate(ranks)}
        self._together = together
        self._queues = {rank: {} for rank in ranks}
        self._groups = []

    def has(self, rank: int) -> bool:
        """Return whether a rank has any message here."""
        return bool(self._queues[rank])

    def holds(self, rank: int, key: int) -> bool:
        """Return whether a rank's message of a step is here."""
        return key in self._queues[rank]

    def add(self, rank: int, key: int, now: float) -> None:
        """Queue a message."""
        queue = self._queues[rank]
        queue[key] = now
        if len(queue) == 1:
            self._lead(rank, key, now)

    def _lead(self, rank: int, key: int, at: float) -> None:
        """Enter a rank's message among the first ones."""
        key = 0 if self._together else key
        place = bisect_left(self._groups, key, key=lambda group: group.key)
        if place == len(self._groups) or self._groups[place].key != key:
            self._groups.insert(place, Group(key, at))
        group = self._groups[place]
        group.since = min(group.since, at)
        group.ranks.add(rank)

    @property
    def first(self) -> Group | None:
        """The messages that go next; None if there are none."""
        return self._groups[0] if self._groups else None

    def take(self) -> list[tuple[int, int]]:
        """Take the messages that go next: (rank, step), in the order of the ranks; some there must be."""
        taken = []
        for rank in sorted(self._groups.pop(0).ranks, key=self._place.__getitem__):
            queue = self._queues[rank]
            key = next(iter(queue))
            del queue[key]
            taken.append((rank, key))
        for rank, _ in taken:
            for key, at in self._queues[rank].items():
                self._lead(rank, key, at)
                break
        return taken
