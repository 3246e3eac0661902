"""One optimizer on one rank, whatever the algorithm: meeting the other ranks, ending, waiting.

What a rank does is free of threads, sockets and clocks: it sends events, submits collectives and reads the time through
a ``RankRuntime``, and a method that waits for other ranks is a program (``*_program``), a generator that yields what it
waits for. ``run`` runs a program on the training thread, with the engine; simulations and explorations run the same
programs on one thread, in an order of their own.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.runtime.collective_calls import CollectiveCalls, Combined
from hvd_async.runtime.inbox import Inbox
from hvd_async.runtime.interfaces import Program, RankRuntime, Vector, Wait
from hvd_async.runtime.protocol import (
    Accepted,
    Config,
    Drained,
    Finished,
    Hyper,
    OptimizerCommand,
    OptimizerDeleted,
    OptimizerEvent,
    Registered,
    Rejected,
    RunCollective,
)

T = TypeVar("T")


class Worker(abc.ABC):
    """Base of an algorithm's rank side. The training thread calls it, unless it is said otherwise.

    Args:
        engine: the engine of this rank, or another runtime in its place.
        config: the same on all ranks.
        members: the ranks that share the optimizer; empty for all.
        process_set: of these, as the binding's collectives know it; None for all.
        process_set_id: of these; 0 for all.
        finish: called at the end of each drain (True) or cut (False), when all that was in flight is received. If it
            returns a program, that is run.
        inbox: of its family, if that has its own.

    Attributes:
        last_done: the rank that was last to be done in the last drain, -1 before there was one.
        deleted: whether the optimizer was deleted, and only this rank's engine still serves the others.
        kind: what is wrapped, for people.
        shown: rounds since the last drain or cut that user code saw, and may have changed, before they were applied.
        in_consensus: whether the model holds the consensus of all ranks now, and no weights of this rank's.
    """

    def __init__(
        self,
        engine: RankRuntime,
        config: Config,
        members: tuple[int, ...],
        process_set: Any,
        process_set_id: int,
        finish: Callable[[bool], object],
        inbox: Inbox | None = None,
    ) -> None:
        self.engine, self.process_set_id = engine, process_set_id
        self._common, self._members, self._end = config, members, finish
        self._inbox = Inbox(engine.changed) if inbox is None else inbox
        self._number: int | None = None
        self._announced = False
        self._told: Hyper = []
        """The hyperparameters that the coordinator knows of."""
        self._restored = 0
        """Whether something of an earlier run was brought along; of gradients, how many."""
        self._records_timeline = False
        self._wait_s = 0.0
        self._calls = CollectiveCalls(engine, process_set)
        self.last_done = -1
        self.deleted = False
        self.kind = "optimizer"
        self.shown = 0
        self.in_consensus = False

    # -- meeting the other ranks ------------------------------------------------------------------------------

    @property
    def agreed(self) -> bool:
        """Whether the ranks have met over this optimizer and fit together."""
        return self._inbox.agreed

    def connect(self, names: list[str], checksums: list[int], hyper: Hyper | None = None) -> None:
        """Meet the other ranks: settings, names and checksums (parameters', and optimizer state's) must be the same.

        Raises:
            ReplicaMismatchError: they are not; the message says what mends it. This worker is of no more use then.
        """
        self.register(names, checksums, hyper)
        self.await_registration()

    def register(
        self, names: list[str], checksums: list[int], hyper: Hyper | None = None, number: int | None = None
    ) -> None:
        """The first half of ``connect``: tell the coordinator, do not wait for the others.

        Args:
            number: which the optimizer has on other ranks, where these asked for it.
        """
        if self._number is None:
            self._told = hyper or []
            self._number = self.engine.register(self, self.process_set_id, number)
            restored, members = int(self._restored), list(self._members)
            hyper, timeline = hyper or [], self._records_timeline
            self.send(Registered(self._number, self._common, names, checksums, members, restored, hyper, timeline))

    def await_registration(self) -> None:
        """The second half of ``connect``: wait until every rank has registered.

        Raises:
            ReplicaMismatchError: as ``connect``.
        """
        self.run(self.await_registration_program())

    def await_registration_program(self) -> Program[None]:
        """As ``await_registration``; this wait is not counted."""
        yield Wait(lambda: self._inbox.agreed or self._inbox.refused is not None)
        self._check_refused()

    def _check_refused(self) -> None:
        if self._inbox.refused is not None:
            self.engine.unregister(self._registered_number())
            raise ReplicaMismatchError(f"{self.label}: {self._inbox.refused}")

    @property
    def label(self) -> str:
        """Which optimizer it is, for people."""
        return self.kind if self._number is None else f"{self.kind} (optimizer {self._number})"

    @property
    def number(self) -> int:
        """Of the optimizer, the same on all its ranks."""
        return self._registered_number()

    def _registered_number(self) -> int:
        if self._number is None:
            raise ReplicaStateError("the optimizer was used before it was registered: a bug in the binding")
        return self._number

    # -- being done -------------------------------------------------------------------------------------------

    def check_outside_consensus(self, what: str) -> None:
        """Refuse a call inside ``consensus()``; nothing has changed then.

        Args:
            what: the call, for the message.

        Raises:
            ReplicaStateError: the model holds the consensus.
        """
        if self.in_consensus:
            raise ReplicaStateError(
                f"{self.label}: {what} inside consensus(), where the model holds the consensus of all ranks and not "
                f"this rank's weights. Leave the `with` block first."
            )

    def _check_drained(self) -> None:
        if self.in_consensus:
            self.check_outside_consensus("step()")
        if self._announced:
            raise ReplicaStateError(
                f"{self.label}: a drain() or cut() was broken off: call it again before the next step"
            )

    def check_finished(self, flush: bool) -> None:
        """Raise, if this optimizer cannot finish now.

        Args:
            flush: drain; else cut, which is harmless inside ``consensus()``: another optimizer's may begin with one.

        Raises:
            ReplicaStateError: a drain inside ``consensus()``.
        """
        if flush:
            self.check_outside_consensus("drain() or what begins with one")

    def announce_finished(self, flush: bool) -> None:
        """Say "done" to the coordinator, once, whatever ``check_finished`` thinks of it."""
        if not self._announced:
            self._announced = True
            self.send(Finished(self._registered_number(), self._counts(), flush, self.shown))

    def drain(self, flush: bool = True) -> None:
        """Drain or, without ``flush``, cut this optimizer; ``Engine.drain`` ends all of a process at once."""
        self.run(self.drain_program(flush))

    def drain_program(self, flush: bool = True) -> Program[None]:
        """As ``drain``."""
        self.check_finished(flush)
        self.announce_finished(flush)
        while not self.apply_available():
            yield from self._await(lambda: self.has_available)
        yield from self.complete_drain_program()

    def _take_drained(self) -> Drained[Any]:
        drained = self._inbox.take_drained()
        self._announced = False
        self.last_done = drained.last
        return drained

    @abc.abstractmethod
    def _counts(self) -> list[int]:
        """Return ``Finished.produced``."""

    @abc.abstractmethod
    def _is_complete(self) -> bool:
        """Return whether all ranks have finished, and this one has received (and applied) all before that."""

    @property
    def has_available(self) -> bool:
        """Whether ``apply_available`` would do something, or has done all."""
        return self._inbox.refused is not None or self._is_complete()

    def apply_available(self) -> bool:
        """Apply what was received, without waiting; return whether all ranks have finished and all is applied.

        Where ranks have weights of their own nothing is applied here: their next step, or ``gather``, does so.

        Raises:
            ReplicaMismatchError: the ranks did not fit together.
        """
        self._check_refused()
        return self._is_complete()

    def complete_drain(self) -> None:
        """End a drain or cut, after all ranks have finished and all was received."""
        self.run(self.complete_drain_program())

    @abc.abstractmethod
    def complete_drain_program(self) -> Program[None]:
        """As ``complete_drain``: let the binding end as was agreed, and start afresh."""

    def _finish(self, flush: bool) -> Program[None]:
        ending = self._end(flush)
        if isinstance(ending, Generator):
            yield from ending

    # -- collectives at ends ----------------------------------------------------------------------------------

    def sum(self, vector: Vector, what: str) -> Combined:
        """The sum of ``vector``, shape (n,), over the ranks that still have the optimizer. A collective of these.

        Args:
            vector: it is given away.
            what: the collective, for people; the same on all ranks.

        Raises:
            ReplicaStateError: other ranks are in another collective.
        """
        return self.run(self.sum_program(vector, what))

    def sum_program(self, vector: Vector, what: str) -> Program[Combined]:
        """As ``sum``."""
        return (yield from self._call("sum", what, vector))

    def broadcast(self, vector: Vector, root: int, what: str) -> Vector:
        """Rank ``root``'s ``vector``, or that of the lowest rank that still has the optimizer; as ``sum``."""
        return self.run(self.broadcast_program(vector, root, what))

    def broadcast_program(self, vector: Vector, root: int, what: str) -> Program[Vector]:
        """As ``broadcast``."""
        return (yield from self._call("broadcast", what, vector, root)).vector

    def compare(self, names: list[str], checksums: list[int], what: str) -> None:
        """Compare replicas over the ranks that still have the optimizer. A collective of these.

        Raises:
            ReplicaMismatchError: they differ; the message says where, and what mends it.
        """
        found = self.run(self._call("compare", what, names=names, checksums=checksums))
        if found.problem is not None:
            raise ReplicaMismatchError(f"{self.label}: {found.problem}")

    def _call(self, kind: str, what: str, vector: Vector = None, root: int = -1, **said: Any) -> Program[Combined]:
        """Take part in a collective; the arguments are those of ``CollectiveCalls.begin``."""
        self._calls.begin(self._registered_number(), kind, what, vector, root, **said)
        yield from self._await(self._calls.is_done)
        return self._calls.take(kind, what)

    # -- the optimizer's end ----------------------------------------------------------------------------------

    def delete(self) -> None:
        """The optimizer was deleted or discarded on this rank, or the process is leaving. Its engine serves on.

        Any thread may call it, a finalizer too.
        """
        if self._number is not None and not self.deleted:
            self.deleted = self._calls.cancelled = True
            self.engine.notify(self._tell_deleted)

    def _tell_deleted(self) -> None:
        """(Engine thread.)"""
        self.discard_results()
        self.engine.send(OptimizerDeleted(self._registered_number(), self._counts()))
        # Whoever waits in a drain, in which this one was, looks again. (An interrupt at the worst moment may have left
        # the lock held; they look each second anyway.)
        if self.engine.changed.acquire(timeout=1.0):
            self.engine.changed.notify_all()
            self.engine.changed.release()

    def discard_results(self) -> None:  # noqa: B027  some keep none
        """Nobody will take what comes from now on (engine thread)."""

    # -- the engine -------------------------------------------------------------------------------------------

    def send(self, event: OptimizerEvent) -> None:
        """Have the engine send an event, after all that was posted before."""
        self.engine.call_soon(lambda: self.engine.send(event))

    @property
    def wait_s(self) -> float:
        """Seconds that the training thread has waited so far, in steps and ends: what ``stats()`` says, at no cost."""
        return self._wait_s

    def _await(self, ready: Callable[[], bool], waiting_for: Callable[[], str] | None = None) -> Program[None]:
        """Wait until ``ready()``, counting the time."""
        started = self.engine.clock()
        try:
            yield Wait(ready, waiting_for)
        finally:
            self._wait_s += self.engine.clock() - started

    def run(self, program: Program[T]) -> T:
        """Run a program on this thread, which sleeps in its waits, and return its result.

        Raises:
            whatever ends a wait: ``Engine.wait`` lists it. The program sees it first.
        """
        try:
            wait = next(program)
            while True:
                try:
                    self.engine.wait(wait.ready, wait.waiting_for)
                except BaseException as error:  # noqa: BLE001  the program may have to note it, and raises it again
                    wait = program.throw(error)
                else:
                    wait = next(program)
        except StopIteration as end:
            result: T = end.value
            return result
        except BaseException:
            program.close()  # (an interrupt between two lines of this method has left it in its wait)
            raise

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command (engine thread)."""
        match command:
            case RunCollective():
                self._calls.run(command)
            case Accepted():
                self._inbox.tell(agreed=True)
            case Rejected(_, problem):
                self._inbox.tell(refused=problem)
            case Drained():
                self._inbox.tell(drained=command)
