"""A data plane in memory that matches collectives by their order, as process groups do, and not by their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hvd_async.runtime.interfaces import lane_of
from hvd_async.testing import Cluster, InjectedError, MemoryCollectives, Switchboard, _Meeting


class OrderedBoard(Switchboard):
    """Where a lane's collectives meet: the n-th of each rank with the n-th of the others.

    Attributes:
        order: the names that were submitted, by lane and ranks; the same on all ranks, or a submission raises.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._everyone = tuple(range(size))
        self._submitted: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        self.order: dict[tuple[str, tuple[int, ...]], list[str]] = {}

    def join(
        self,
        rank: int,
        name: str,
        part: Any,
        combine: Callable[[list[Any]], Any],
        members: Sequence[int] | None = None,
        tensor: bool = True,
    ) -> _Meeting:
        if not tensor:
            return super().join(rank, name, part, combine, members, tensor)
        lane = lane_of(name), self._everyone if members is None else tuple(members)
        with self._lock:
            place = self._submitted[(*lane, rank)]
            self._submitted[(*lane, rank)] += 1
            names = self.order.setdefault(lane, [])
            if place == len(names):
                names.append(name)
        if names[place] != name:
            raise InjectedError(f"rank {rank} submits {name} as number {place} of its lane, others {names[place]}")
        return super().join(rank, f"{lane}: {place}", part, combine, members, tensor)


def ordered_cluster(size: int, **options: Any) -> tuple[Cluster, OrderedBoard]:
    """Return ranks as threads on such a data plane; ``options`` as of ``Cluster``."""
    board = OrderedBoard(size)

    def wrap(collectives: MemoryCollectives) -> MemoryCollectives:
        collectives._board = board
        return collectives

    cluster = Cluster(size, wrap=wrap, **options)
    cluster.board = board
    return cluster, board
