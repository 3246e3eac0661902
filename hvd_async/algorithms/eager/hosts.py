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
    """Gradients that wait for those of their host's other ranks.

    Attributes:
        whole: by bucket, of each host: how many gradients all its ranks have handed over, since the last drain or cut.
        held: of ranks that have handed over one more, its buckets, as bits.
    """

    __slots__ = ("_buckets", "_lacking", "_steps", "held", "whole")

    def __init__(self, hosts: Hosts, buckets: int) -> None:
        self._buckets = buckets
        self.begin_anew(hosts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Gathering) and all(getattr(self, one) == getattr(other, one) for one in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def begin_anew(self, hosts: Hosts) -> None:
        """Count from 0, at the beginning and when all ranks have ended; nothing is held."""
        self.whole = [dict.fromkeys(hosts.first, 0) for _ in range(self._buckets)]
        self.held: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        """Steps that the ranks among ``held`` are in, by host."""
        self._lacking = {host: [hosts.active.get(host, 0)] * self._buckets for host in hosts.first}
        """Ranks that are not done and have not handed that one more over: how many, by host and bucket."""

    def step(self, host: int) -> int | None:
        """Return the step that a host's ranks have handed over that wait for others; None if none waits."""
        return self._steps.get(host)

    def holds(self, bucket: int) -> bool:
        """Whether a gradient of a bucket waits."""
        return any(bits >> bucket & 1 for bits in self.held.values())

    def hold(self, rank: int, host: int, step: int, buckets: Sequence[int], bits: int) -> list[int]:
        """A rank has handed over buckets of a step: return those in which its host lacks none now."""
        self.held[rank] = self.held.get(rank, 0) | bits
        self._steps[host] = step
        lacking = self._lacking[host]
        for bucket in buckets:
            lacking[bucket] -= 1
        return [bucket for bucket in buckets if not lacking[bucket]]

    def finish(self, rank: int, host: int, ranks: Sequence[int]) -> list[int]:
        """A rank is done, and waited for no more: return buckets that its host holds and lacks none of now."""
        lacking, bits, held = self._lacking[host], self.held.get(rank, 0), 0
        for each in ranks:
            held |= self.held.get(each, 0)
        for bucket in range(self._buckets):
            lacking[bucket] -= not bits >> bucket & 1
        return [bucket for bucket in range(self._buckets) if held >> bucket & 1 and not lacking[bucket]]

    def let_go(self, host: int, ranks: Sequence[int], active: Sequence[int], buckets: Sequence[int]) -> None:
        """A host's gradients of some buckets go; of its ranks some are ``active``."""
        bits = sum(1 << bucket for bucket in buckets)
        for rank in ranks:
            left = self.held.pop(rank, 0) & ~bits
            if left:
                self.held[rank] = left
        for bucket in buckets:
            self._lacking[host][bucket] += len(active)
            self.whole[bucket][host] += 1
        if not any(rank in self.held for rank in ranks):
            del self._steps[host]

    def let_all_go(self, hosts: Hosts) -> None:
        """All ranks are done: all gradients go."""
        for host in list(self._steps):
            bits = 0
            for rank in hosts.ranks(host):
                bits |= self.held.get(rank, 0)
            self.let_go(host, hosts.ranks(host), (), [bucket for bucket in range(self._buckets) if bits >> bucket & 1])

    def missing(self, late: Collection[int], hosts: Hosts, active: Collection[int], bucket: int) -> frozenset[int]:
        """Return the ``late`` ranks; in place of one that waits for others of its host in a bucket, these."""
        held = {rank for rank, bits in self.held.items() if bits >> bucket & 1}
        waited_for = hosts.among([rank for rank in late if rank in held])
        others = {rank for host in waited_for for rank in hosts.ranks(host) if rank in active}
        return frozenset({*late, *others} - held)

    def host_steps(self, bucket: int) -> HostSteps:
        """Return a bucket's ``whole`` as ranks are told it."""
        counts = self.whole[bucket].values()
        (most, _), *_ = Counter(counts).most_common(1)
        return HostSteps(most, {number: count for number, count in enumerate(counts) if count != most})
