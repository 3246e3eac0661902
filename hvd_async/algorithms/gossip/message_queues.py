"""Messages that ranks have queued and no exchange has taken: each rank's in order, the first ones by their step.

Which messages go together next is known without a look at every rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class _Group:
    """Ranks whose first messages are of one step.

    Attributes:
        step: it.
        since: when the first of these messages was queued.
        ranks: that have queued them.
    """

    step: int
    since: float
    ranks: set[int] = field(default_factory=set)


@dataclass(init=False)
class MessageQueues:
    """All ranks' queues.

    Args:
        ranks: in order.
        stages: messages of a step are of so many, and have keys of their own; then first messages go together whatever
            step they are of (hierarchical gossip). 1: a message's key is its step, and only those of one step go.
    """

    _place: dict[int, int]
    _stages: int
    _queues: dict[int, dict[int, float]]
    """When each message was queued, by rank and key, in the order in which they were."""
    _groups: list[_Group]
    """The order of first messages: that of the earliest step is first."""

    def __init__(self, ranks: Sequence[int], stages: int = 1) -> None:
        self._place, self._stages = {rank: place for place, rank in enumerate(ranks)}, stages
        self._queues = {rank: {} for rank in ranks}
        self._groups = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    def has(self, rank: int) -> bool:
        """Return whether a rank has any message here."""
        return bool(self._queues[rank])

    def holds(self, rank: int, key: int) -> bool:
        """Return whether a rank's message of this key is here."""
        return key in self._queues[rank]

    def add(self, rank: int, key: int, now: float) -> None:
        """Queue a message."""
        queue = self._queues[rank]
        queue[key] = now
        if len(queue) == 1:
            self._lead(rank, key, now)

    def _lead(self, rank: int, key: int, at: float) -> None:
        """Enter a rank's message among the first ones."""
        step = key // self._stages
        place = bisect_left(self._groups, step, key=lambda group: group.step)
        if place == len(self._groups) or self._groups[place].step != step:
            self._groups.insert(place, _Group(step, at))
        group = self._groups[place]
        group.since = min(group.since, at)
        group.ranks.add(rank)

    @property
    def earliest(self) -> int:
        """The earliest step of which there are messages; there must be some."""
        return self._groups[0].step

    def since(self, until: float) -> float | None:
        """Return when the first of the messages that go next was queued; None if there are none.

        Args:
            until: the last step of which messages may go.
        """
        if self._stages == 1:  # (it is asked after each event)
            return self._groups[0].since if self._groups and self._groups[0].step <= until else None
        return min((group.since for group in self._next(until)), default=None)

    def _next(self, until: float) -> list[_Group]:
        """Return the groups that go next."""
        groups = self._groups if self._stages > 1 else self._groups[:1]
        return [group for group in groups if group.step <= until]

    def take(self, until: float) -> list[tuple[int, int]]:
        """Take the messages that go next: (rank, key), in the order of the ranks; ``until`` as of ``since``."""
        groups = self._next(until)
        del self._groups[: len(groups)]
        taken = []
        for rank in sorted({rank for group in groups for rank in group.ranks}, key=self._place.__getitem__):
            queue = self._queues[rank]
            key = next(iter(queue))
            del queue[key]
            taken.append((rank, key))
        for rank, _ in taken:
            for key, at in self._queues[rank].items():
                self._lead(rank, key, at)
                break
        return taken
