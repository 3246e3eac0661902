"""Hosts whose ranks take each step together. Pure: a gradient arrives when all of its host's have been handed over."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hvd_async.algorithms.option import check_hosts


@dataclass
class Hosts:
    """Which ranks step together: those of a host, or each by itself. A host is known by its first rank.

    Attributes:
        first: the hosts, in order.
        of: each rank's host.
        size: ranks of a host.
    """

    first: tuple[int, ...]
    of: dict[int, int]
    size: int
    _ranks: dict[int, tuple[int, ...]]

    def __init__(self, ranks: Sequence[int], size: int) -> None:
        """Part ranks, host by host, into hosts of ``size``.

        Raises:
            ValueError: it leaves some over.
        """
        check_hosts(len(ranks), size)
        self.size = size
        self._ranks = {ranks[start]: tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)}
        self.first = tuple(self._ranks)
        self.of = {rank: first for first, own in self._ranks.items() for rank in own}

    def ranks(self, host: int) -> tuple[int, ...]:
        """Return a host's ranks."""
        return self._ranks[host]

    def among(self, ranks: Collection[int]) -> list[int]:
        """Return the hosts of some ranks, in the ranks' order."""
        return list(ranks) if self.size == 1 else list(dict.fromkeys(self.of[rank] for rank in ranks))


@dataclass
class Gathering:
    """Gradients of one bucket that wait for those of their host's other ranks.

    Attributes:
        whole: of each host, how many gradients all its ranks have handed over, since the last drain or cut.
        held: ranks that have handed over one more, and the step that it is.
    """

    whole: dict[int, int]
    held: dict[int, int] = field(default_factory=dict)

    def gather(self, host: int, ranks: Sequence[int], done: Collection[int]) -> dict[int, int]:
        """Let a host's gradients go if none is missing: those of ranks that are ``done`` are not waited for.

        Returns:
            The steps that its ranks' gradients are, by rank; empty if some are missing, or there are none.
        """
        for rank in ranks:
            if rank not in self.held and rank not in done:
                return {}
        steps = {rank: self.held.pop(rank) for rank in ranks if rank in self.held}
        self.whole[host] += bool(steps)
        return steps

    def missing(self, late: Collection[int], hosts: Hosts, active: Collection[int]) -> frozenset[int]:
        """Return the ``late`` ranks; in place of one that waits for others of its host, these."""
        waited_for = hosts.among([rank for rank in late if rank in self.held])
        others = {rank for host in waited_for for rank in hosts.ranks(host) if rank in active}
        return frozenset({*late, *others} - self.held.keys())

    def begin_anew(self) -> None:
        """Count from 0: all ranks have ended."""
        self.held.clear()
        self.whole = dict.fromkeys(self.whole, 0)
