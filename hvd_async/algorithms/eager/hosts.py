"""Hosts whose ranks take each step together. Pure: a gradient arrives when all of its host's have been handed over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hvd_async.algorithms.eager.messages import HostSteps
from hvd_async.algorithms.option import check_hosts


@dataclass
class Hosts:
    """Which ranks step together: those of a host, or each by itself. A host is known by its first rank.

    Attributes:
        first: the hosts, in order.
        of: each rank's host.
        number: of each host, from 0.
        size: ranks of a host.
        active: the hosts with ranks that are not done, and how many of these there are.
    """

    first: tuple[int, ...]
    of: dict[int, int]
    number: dict[int, int]
    size: int
    active: dict[int, int]
    _ranks: dict[int, tuple[int, ...]]

    def __init__(self, ranks: Sequence[int], size: int, done: Collection[int] = ()) -> None:
        """Part ranks, host by host, into hosts of ``size``; some are ``done``.

        Raises:
            ValueError: it leaves some over.
        """
        check_hosts(len(ranks), size)
        self.size = size
        self._ranks = {ranks[start]: tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)}
        self.first = tuple(self._ranks)
        self.of = {rank: first for first, own in self._ranks.items() for rank in own}
        self.number = {host: number for number, host in enumerate(self.first)}
        self.begin_anew()
        for rank in done:
            self.finish(rank)

    def ranks(self, host: int) -> tuple[int, ...]:
        """Return a host's ranks."""
        return self._ranks[host]

    def among(self, ranks: Collection[int]) -> list[int]:
        """Return the hosts of some ranks, in the ranks' order."""
        return list(ranks) if self.size == 1 else list(dict.fromkeys(self.of[rank] for rank in ranks))

    def finish(self, rank: int) -> None:
        """A rank is done."""
        host = self.of[rank]
        self.active[host] -= 1
        if not self.active[host]:
            del self.active[host]

    def begin_anew(self) -> None:
        """No rank is done."""
        self.active = dict.fromkeys(self.first, self.size)


class Gathering:
    """Gradients of one bucket that wait for those of their host's other ranks.

    Attributes:
        whole: of each host, how many gradients all its ranks have handed over, since the last drain or cut.
        held: ranks that have handed over one more, and the step that it is.
    """

    __slots__ = ("_lacking", "_steps", "held", "whole")

    def __init__(self, hosts: Hosts) -> None:
        self.begin_anew(hosts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Gathering) and all(getattr(self, one) == getattr(other, one) for one in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def fits(self, host: int, step: int) -> bool:
        """Whether the host's other ranks that wait have handed over the same step."""
        return self._steps.get(host, step) == step

    def hold(self, rank: int, host: int, step: int) -> None:
        """A rank has handed over a step."""
        self.held[rank] = step
        self._steps[host] = step
        self._lacking[host] -= 1

    def finish(self, rank: int, host: int) -> None:
        """A rank is done: it is waited for no more."""
        self._lacking[host] -= rank not in self.held

    def take(self, host: int, ranks: Sequence[int], active: Collection[int]) -> tuple[list[int], int] | None:
        """Let a host's gradients go if none is missing of those that are ``active``.

        Returns:
            Its active ranks among those whose gradients go, and the step that these are; None if some are missing, or
            there are none.
        """
        return None if self._lacking[host] or host not in self._steps else self._let_go(host, ranks, active)

    def take_all(self, hosts: Hosts) -> None:
        """Let all gradients go: all ranks are done."""
        for host in list(self._steps):
            self._let_go(host, hosts.ranks(host), ())

    def _let_go(self, host: int, ranks: Sequence[int], active: Collection[int]) -> tuple[list[int], int]:
        going = [rank for rank in ranks if self.held.pop(rank, None) is not None]
        there = [rank for rank in going if rank in active]
        self._lacking[host] += len(there)
        self.whole[host] += 1
        return there, self._steps.pop(host)

    def missing(self, late: Collection[int], hosts: Hosts, active: Collection[int]) -> frozenset[int]:
        """Return the ``late`` ranks; in place of one that waits for others of its host, these."""
        waited_for = hosts.among([rank for rank in late if rank in self.held])
        others = {rank for host in waited_for for rank in hosts.ranks(host) if rank in active}
        return frozenset({*late, *others} - self.held.keys())

    def host_steps(self, hosts: Hosts) -> HostSteps | None:
        """Return ``whole`` as ranks are told it; None where each is by itself."""
        if hosts.size == 1:
            return None
        counts = self.whole.values()
        (most, _), *_ = Counter(counts).most_common(1)
        return HostSteps(most, {number: count for number, count in enumerate(counts) if count != most})

    def begin_anew(self, hosts: Hosts) -> None:
        """Count from 0, at the beginning and when all ranks have ended; nothing is held."""
        self.whole = dict.fromkeys(hosts.first, 0)
        self.held: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        """Of hosts with ranks among ``held``, the step that theirs is."""
        self._lacking = {host: hosts.active.get(host, 0) for host in hosts.first}
        """Of each host, how many of its ranks that are not done have not handed over that one more."""
