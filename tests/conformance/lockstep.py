"""Ranks as threads in lockstep: a run in which every count of a step is the same each time.

One training thread runs at a time, until its step ends or it waits for another rank. Engines and coordinator finish all
work that is possible before the training thread continues, as if they were infinitely fast.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from hvd_async import testing
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Channel, Gone
from hvd_async.runtime.protocol import Command, Event

PATIENCE = 60.0
"""Seconds to wait for other threads before the test fails."""


class _Pending:
    """The number of unprocessed items in all mailboxes."""

    def __init__(self) -> None:
        self._changed, self._count = threading.Condition(), 0

    def add(self, count: int) -> None:
        with self._changed:
            self._count += count
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until engines and coordinator have processed all items and sleep."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._count == 0, PATIENCE):
                raise TimeoutError("engines and coordinator do not come to rest")


class _Items(queue.Queue[Any]):
    """A mailbox's queue that counts the items taken."""

    taken = 0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        self.taken += 1
        return item


class _Mailbox(testing._Mailbox):
    """A mailbox that counts items as processed when its reader returns for more."""

    def __init__(self, pending: _Pending) -> None:
        super().__init__(0.0, "")
        self._pending, self._items = pending, _Items()

    def put(self, item: Any) -> None:
        self._pending.add(1)
        super().put(item)

    def get(self, timeout: float | None) -> Any:
        taken, self._items.taken = self._items.taken, 0
        self._pending.add(-taken)
        return super().get(timeout)


class _Channel(testing.MemoryChannel):
    """A rank's end of the control plane.

    Attributes:
        sent: number of messages to the coordinator.
        wakes: number of times the engine woke up.
    """

    def __init__(self, cluster: LockstepCluster, rank: int) -> None:
        self.sent = self.wakes = 0
        self._cluster = cluster
        super().__init__(cluster._hub._inbox, cluster._hub._outboxes[rank], rank)

    def send(self, event: Event) -> None:
        self.sent += 1
        super().send(event)

    def receive(self, timeout: float | None) -> Command | Gone | None:
        received = super().receive(timeout)
        self.wakes += 1
        return received

    def wake(self) -> None:
        super().wake()
        if not threading.current_thread().name.startswith("hvd_async") and self._rank in self._cluster.turns:
            self._cluster.pending.settle()


class LockstepCluster(testing.Cluster):
    """``size`` ranks as threads, one of which runs at a time between ``begin`` and ``end``.

    Attributes:
        turns: ranks that are in lockstep.
    """

    hidden = frozenset({_Channel.wake.__code__})
    """Code that is not the library's, for ``Calls``."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.pending = _Pending()
        self._hub._inbox = _Mailbox(self.pending)
        self._hub._outboxes = [_Mailbox(self.pending) for _ in range(size)]
        self.channels: dict[int, _Channel] = {}
        self.turns: list[int] = []
        self._passed, self._together = threading.Condition(), threading.Barrier(size)
        for engine in self.engines:
            engine.unhurried = 0.0  # (nothing depends on time)
            engine.wait = self._waiting(engine, engine.wait)  # type: ignore[method-assign]

    def _connector(self, rank: int) -> Callable[[], Channel]:
        def connect() -> Channel:
            self.channels[rank] = _Channel(self, rank)
            return self.channels[rank]

        return connect

    def begin(self, rank: int) -> None:
        """Meet the other ranks, and continue when it is this rank's turn; the lowest rank begins."""
        if self._together.wait(PATIENCE) == 0:
            self.pending.settle()
            with self._passed:
                self.turns += range(self.size)
                self._passed.notify_all()
        self._await_turn(rank)

    def pass_on(self, rank: int) -> None:
        """Let each of the other ranks run until it waits or ends a step."""
        with self._passed:
            self.turns.append(self.turns.pop(0))
            self._passed.notify_all()
        self._await_turn(rank)

    def end(self, rank: int) -> None:
        """Leave lockstep; every rank must call this."""
        with self._passed:
            self.turns.remove(rank)
            self._passed.notify_all()
        self._together.wait(PATIENCE)

    def _await_turn(self, rank: int) -> None:
        with self._passed:
            if not self._passed.wait_for(lambda: self.turns[:1] == [rank], PATIENCE):
                raise TimeoutError(f"rank {rank} had no turn")

    def _until(self, engine: Engine, ready: Callable[[], bool]) -> None:
        """Let other ranks run until this one can continue."""
        for _ in range(1000):
            self.pending.settle()
            with engine.changed:
                if ready():
                    return
            self.pass_on(engine.rank)
        raise TimeoutError(f"rank {engine.rank} waits for what does not come")

    def _waiting(self, engine: Engine, wait: Callable[..., None]) -> Callable[..., None]:
        def lockstep_wait(ready: Callable[[], bool], waiting_for: Callable[[], str] | None = None) -> None:
            if engine.rank in self.turns:
                self._until(engine, ready)
            wait(ready, waiting_for)

        self.wrappers = frozenset({lockstep_wait.__code__})
        self.hidden |= {LockstepCluster._until.__code__}
        return lockstep_wait
