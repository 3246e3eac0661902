"""One optimizer as one rank sees it, whatever the algorithm: meeting the other ranks, being done, waiting."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable

from hvd_async.engine import Engine
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.events import (
    Agreed,
    Command,
    Done,
    Drained,
    EagerConfig,
    GossipConfig,
    Hyper,
    LeaderConfig,
    Opened,
    OptimizerEvent,
    Refused,
)
from hvd_async.inbox import Inbox


class Worker(abc.ABC):
    """What ``EagerWorker`` and ``GossipWorker`` share. The training thread calls it, unless it is said otherwise.

    Args:
        engine: this rank's.
        config: the same on all ranks.
        members: the ranks that share the optimizer; empty for all.
        process_set_id: of these; 0 for all.
        finish: called at the end of each drain (True) or cut (False), when all that was on its way has come.

    Attributes:
        last_done: the rank that was last to be done in the last drain, -1 before there was one.
    """

    def __init__(
        self,
        engine: Engine,
        config: EagerConfig | GossipConfig | LeaderConfig,
        members: tuple[int, ...],
        process_set_id: int,
        finish: Callable[[bool], object],
    ) -> None:
        self.engine, self.process_set_id = engine, process_set_id
        self._common, self._members, self._end = config, members, finish
        self._inbox = Inbox(engine.changed)
        self._number: int | None = None
        self._announced = False
        self._restored = False
        """Whether something of an earlier run was brought along."""
        self._wait_s = 0.0
        self.last_done = -1

    # -- meeting the other ranks ------------------------------------------------------------------------------

    @property
    def agreed(self) -> bool:
        """Whether the ranks have met over this optimizer and fit together."""
        return self._inbox.agreed

    def open(self, names: list[str], checksums: list[int], hyper: Hyper | None = None) -> None:
        """Meet the other ranks: settings, names and checksums (parameters', and optimizer state's) must be the same.

        Raises:
            ReplicaMismatchError: they are not; the message says what mends it. This worker is of no more use then.
        """
        self.offer(names, checksums, hyper)
        self.meet()

    def offer(self, names: list[str], checksums: list[int], hyper: Hyper | None = None) -> None:
        """The first half of ``open``: tell the coordinator, do not wait for the others."""
        if self._number is None:
            self._number = self.engine.register(self, self.process_set_id)
            opened = Opened(
                self._number, self._common, names, checksums, list(self._members), self._restored, hyper or []
            )
            self.send(opened)

    def meet(self) -> None:
        """The second half of ``open``: wait until every rank has offered.

        Raises:
            ReplicaMismatchError: as ``open``.
        """
        self.engine.wait(lambda: self._inbox.agreed or self._inbox.refused is not None)
        self._check_refused()

    def _check_refused(self) -> None:
        if self._inbox.refused is not None:
            self.engine.unregister(self._opened_number())
            raise ReplicaMismatchError(self._inbox.refused)

    def _opened_number(self) -> int:
        if self._number is None:
            raise ReplicaStateError("the optimizer was used before it was opened: a bug in the binding")
        return self._number

    # -- being done -------------------------------------------------------------------------------------------

    def _check_drained(self) -> None:
        if self._announced:
            raise ReplicaStateError("a drain() or cut() was broken off: call it again before the next step")

    def check_done(self) -> None:  # noqa: B027  most have nothing to check
        """Raise, if this rank cannot be done now."""

    def announce(self, flush: bool) -> None:
        """Say "done" to the coordinator, once; raises as ``check_done``."""
        self.check_done()
        if not self._announced:
            self._announced = True
            self.send(Done(self._opened_number(), self._counts(), flush))

    def wind_up(self, flush: bool) -> None:
        """Say "done", serve until all ranks are, and conclude. (Of a process with several optimizers, ``Engine.drain``
        ends all at once.)"""
        self.announce(flush)
        while not self.serve():
            self._await(lambda: self.served)
        self.conclude(flush)

    def _take_drained(self) -> Drained:
        drained = self._inbox.take_drained()
        self._announced = False
        self.last_done = drained.last
        return drained

    @abc.abstractmethod
    def _counts(self) -> list[int]:
        """What ``Done.produced`` says."""

    @property
    @abc.abstractmethod
    def served(self) -> bool:
        """Whether ``serve`` would do something, or has done all."""

    @abc.abstractmethod
    def serve(self) -> bool:
        """Apply what has come, without waiting; whether all ranks are done and all of it is applied.

        Raises:
            ReplicaMismatchError: the ranks did not fit together.
        """

    @abc.abstractmethod
    def conclude(self, flush: bool) -> None:
        """All ranks are done, and all has come: start afresh, and let the binding end it."""

    def orphaned(self) -> None:  # noqa: B027  to some that is no matter
        """The optimizer that this worker is of is gone, at the end of a drain or cut."""

    # -- the engine -------------------------------------------------------------------------------------------

    def send(self, event: OptimizerEvent) -> None:
        """Have the engine send an event, after all that was posted before."""
        self.engine.post(lambda: self.engine.send(event))

    def _await(self, ready: Callable[[], bool], waiting_for: Callable[[], str] | None = None) -> None:
        started = time.perf_counter()
        try:
            self.engine.wait(ready, waiting_for)
        finally:
            self._wait_s += time.perf_counter() - started

    def obey(self, command: Command) -> None:
        """Carry out a command (engine thread)."""
        match command:
            case Agreed():
                self._inbox.tell(agreed=True)
            case Refused(_, problem):
                self._inbox.tell(refused=problem)
            case Drained():
                self._inbox.tell(drained=command)
