"""Requests of ranks, or hosts, to be averaged with a neighbour, and whom they get (law 3 of ``state_machine``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(init=False)
class PairRequests:
    """Those of one optimizer. A place is a rank's or, where hosts are averaged, a host's.

    Args:
        ranks: in order.
        neighbours: places of each place's neighbours; empty where there are no pairs.
        local_size: ranks of a place.

    Attributes:
        waiting: ranks that have requested a pair, in order, and when.
    """

    waiting: dict[int, float]
    _firsts: tuple[int, ...]
    """The first rank of each place."""
    _place: dict[int, int]
    _local_size: int
    _neighbours: list[frozenset[int]]
    _neighbour_of: list[list[int]]
    """Places that each place is a neighbour of."""
    _met: list[int]
    """The last exchange in which each place was averaged, x places, + its own: so no two are the same."""
    _present: list[int]
    """How many ranks of each place have not finished."""
    _active: set[int]
    """Places where some have not."""
    _left: list[int]
    """How many neighbours of each place are active."""
    _asking: list[int]
    """How many ranks of each place have requested a pair."""
    _served: int
    """Ranks that have requested one, and have an active neighbour."""

    def __init__(self, ranks: Sequence[int], neighbours: Sequence[Sequence[int]] = (), local_size: int = 1) -> None:
        self._place = {rank: place // local_size for place, rank in enumerate(ranks)}
        self._firsts, self._local_size = tuple(ranks[::local_size]), local_size
        self._neighbours = [frozenset(own) for own in neighbours]
        self._neighbour_of = [[] for _ in self._neighbours]
        for place, own in enumerate(self._neighbours):
            for other in own:
                self._neighbour_of[other].append(place)
        self._met = list(range(len(self._firsts)))
        self.restart()

    def restart(self) -> None:
        """Begin after an end: nobody has requested anything, all go on."""
        self.waiting = {}
        self._present = [self._local_size] * len(self._firsts)
        self._active = set(range(len(self._firsts)))
        self._left = list(map(len, self._neighbours))
        self._asking = [0] * len(self._firsts)
        self._served = 0

    def add(self, rank: int, now: float) -> bool:
        """Note a request; return whether there was none of this rank."""
        if rank in self.waiting:
            return False
        self.waiting[rank] = now
        self._count(rank, 1)
        return True

    def _count(self, rank: int, by: int) -> None:
        place = self._place[rank]
        self._asking[place] += by
        self._served += by if self._left[place] else 0

    def finish(self, rank: int) -> bool:
        """A rank has finished; return whether it had requested a pair, which it gets no more."""
        had = self.waiting.pop(rank, None) is not None
        if had:
            self._count(rank, -1)
        place = self._place[rank]
        self._present[place] -= 1
        if not self._present[place] and self._neighbours:
            self._active.discard(place)
            for other in self._neighbour_of[place]:
                self._left[other] -= 1
                if not self._left[other]:
                    self._served -= self._asking[other]
        return had

    @property
    def since(self) -> float:
        """When the rank that has waited longest has requested its pair; some rank must have."""
        return next(iter(self.waiting.values()))

    @property
    def can_pair(self) -> bool:
        """Whether anybody who has requested a pair has an active neighbour."""
        return self._served > 0

    def pair(self, exchange: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Return the pairs of an exchange, by their places' first ranks, and the ranks whose requests they meet.

        Those that have waited longest come first; of several neighbours each gets one that requests a pair too, if
        there is any, and of these the one whose last average is longest ago.
        """
        asking = dict.fromkeys([self._place[rank] for rank in self.waiting])
        unpaired, taken = set(asking), set[int]()
        pairs: list[tuple[int, int]] = []
        for wanting in (True, False):
            for place in asking:
                if place in taken:
                    continue
                own = self._neighbours[place]
                free = own & unpaired if wanting else (own & self._active).difference(asking, taken)
                if free:
                    partner = min(free, key=self._met.__getitem__)
                    both = (place, partner)
                    taken.update(both)
                    unpaired.difference_update(both)
                    pairs.append((self._firsts[place], self._firsts[partner]))
        for place in taken:
            self._met[place] = exchange * len(self._firsts) + place
        met = [rank for rank in self.waiting if self._place[rank] in taken]
        for rank in met:
            self._count(rank, -1)
        self.waiting = {rank: at for rank, at in self.waiting.items() if self._place[rank] not in taken}
        return pairs, met
