"""Ranks that the next exchange waits for: those that go on, and have nothing for it yet but may have soon.

What changes is noted as it does, so that no event costs a look at every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from hvd_async.algorithms.gossip.levels import Levels


class Reason(Enum):
    """Why a rank is not waited for: it is in the next exchange, or has nothing for it before that has completed."""

    MESSAGE = "it has queued one"
    PAIR = "it has requested one"
    STARVING = "it waits for a message"
    AVERAGE = "it is in an average"


@dataclass
class _Host:
    """Counts of a host's ranks: waited for, with queued messages, with a pair requested."""

    open: int
    sending: int = 0
    asking: int = 0


@dataclass
class HostCounts:
    """Ranks that are waited for, where an exchange waits for some hosts only.

    Attributes:
        of_senders: those on hosts of which a rank has queued a message.
        of_others: those on hosts of which none has requested a pair.
    """

    hosts: list[_Host]
    of_senders: int
    of_others: int

    def change(self, host: int, opened: int = 0, sending: int = 0, asking: int = 0) -> None:
        """Add to a host's counts."""
        own = self.hosts[host]
        self.of_senders -= own.open if own.sending else 0
        self.of_others -= 0 if own.asking else own.open
        own.open, own.sending, own.asking = own.open + opened, own.sending + sending, own.asking + asking
        self.of_senders += own.open if own.sending else 0
        self.of_others += 0 if own.asking else own.open


@dataclass(init=False)
class Readiness:
    """All ranks between two ends.

    Args:
        ranks: in order.
        active: those that have not finished.
        local_size: ranks of a host; 1: hosts are nothing by themselves.
        by_host: whether an exchange waits for some hosts only (pairs of hosts).

    Attributes:
        active: as given, without those that have finished since.
    """

    active: set[int]
    _place: dict[int, int]
    _local_size: int
    _reasons: dict[int, int]
    """How many each rank has."""
    _told: dict[int, int]
    """The last step of which each rank has queued messages, or announced none."""
    _sent: dict[int, int]
    """The last step of which each rank's messages were sent, or there are none."""
    _told_by_active: Levels
    _sent_by_open: Levels
    _hosts: HostCounts | None

    def __init__(
        self, ranks: Sequence[int], active: Collection[int], local_size: int = 1, by_host: bool = False
    ) -> None:
        self.active = set(active)
        self._place, self._local_size = {rank: place for place, rank in enumerate(ranks)}, local_size
        self._reasons, self._told, self._sent = (dict.fromkeys(ranks, 0) for _ in range(3))
        self._told_by_active, self._sent_by_open = Levels(), Levels()
        if self.active:
            self._told_by_active.add(0, len(self.active))
            self._sent_by_open.add(0, len(self.active))
        self._hosts = None
        if by_host:
            self._hosts = HostCounts([_Host(0) for _ in range(len(ranks) // local_size)], 0, 0)
            for rank in self.active:
                self._hosts.change(self._place[rank] // local_size, opened=1)

    # -- what a rank has ----------------------------------------------------------------------------------------

    def add(self, rank: int, reason: Reason) -> None:
        """Note a reason not to wait for a rank; it may have one several times (averages)."""
        self._reasons[rank] += 1
        if self._reasons[rank] == 1 and rank in self.active:
            self._close(rank)
        self._count(rank, reason, 1)

    def drop(self, rank: int, reason: Reason) -> None:
        """Note that a reason is gone."""
        self._reasons[rank] -= 1
        if not self._reasons[rank] and rank in self.active:
            self._sent_by_open.add(self._sent[rank])
            if self._hosts is not None:
                self._hosts.change(self._place[rank] // self._local_size, opened=1)
        self._count(rank, reason, -1)

    def _close(self, rank: int) -> None:
        self._sent_by_open.remove(self._sent[rank])
        if self._hosts is not None:
            self._hosts.change(self._place[rank] // self._local_size, opened=-1)

    def _count(self, rank: int, reason: Reason, by: int) -> None:
        if self._hosts is not None:
            host = self._place[rank] // self._local_size
            if reason is Reason.MESSAGE:
                self._hosts.change(host, sending=by)
            elif reason is Reason.PAIR:
                self._hosts.change(host, asking=by)

    def finish(self, rank: int) -> None:
        """A rank has finished: it is waited for no more."""
        self.active.discard(rank)
        self._told_by_active.remove(self._told[rank])
        if not self._reasons[rank]:
            self._close(rank)

    # -- steps --------------------------------------------------------------------------------------------------

    def told(self, rank: int) -> int:
        """Return the last step of which a rank has queued messages, or announced none; 0 before it has."""
        return self._told[rank]

    def tell(self, rank: int, step: int) -> None:
        """Note that step."""
        if rank in self.active:
            self._told_by_active.remove(self._told[rank])
            self._told_by_active.add(step)
        self._told[rank] = step

    def send(self, rank: int, step: int) -> None:
        """Note the last step of which a rank's messages were sent, or there are none."""
        if rank in self.active and not self._reasons[rank]:
            self._sent_by_open.remove(self._sent[rank])
            self._sent_by_open.add(step)
        self._sent[rank] = step

    def sent(self, rank: int) -> int:
        """Return the last step of which a rank's messages were sent, or there are none."""
        return self._sent[rank]

    @property
    def slowest(self) -> int:
        """The least ``told`` of the active ranks."""
        return self._told_by_active.least

    # -- whom an exchange waits for -----------------------------------------------------------------------------

    def lacks(self, step: int | None) -> bool:
        """Return whether an active rank is waited for.

        Args:
            step: that the exchange's messages are of; None: it has none.
        """
        if self._hosts is not None:
            return bool(self._hosts.of_others if step is None else self._hosts.of_senders)
        if not len(self._sent_by_open):
            return False
        return step is None or self._local_size > 1 or self._sent_by_open.least < step
