"""Base of the algorithms' rank side: registration, ends, collectives at ends, waits, and sections that must finish.

The code of a rank uses no threads, sockets or clocks: it sends events, submits collectives and reads the time through a
``RankRuntime``. A method that waits for other ranks is a program (``*_program``): a generator that yields its waits.
``run`` runs a program on the training thread, with the engine. Simulations and tests run the same programs on a single
thread, in an order that they choose.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from hvd_async.errors import ReplicaMismatchError, ReplicaStateError, ranks_text
from hvd_async.runtime.carrier import Carrier, Collective
from hvd_async.runtime.interfaces import Handle, Program, RankRuntime, Vector, Wait
from hvd_async.runtime.protocol import (
    Accepted,
    CollectiveReady,
    Config,
    Drained,
    Finished,
    Hyper,
    OptimizerCommand,
    OptimizerDeleted,
    OptimizerEvent,
    Registered,
    Rejected,
    Resumed,
    RunCollective,
)

T = TypeVar("T")


# -- sections that must finish ----------------------------------------------------------------------------------------
# An interrupt may arrive between any two lines.


class Uninterrupted:
    """Critical sections of one optimizer on one rank, which poison its replica if they do not finish.

    A gradient that is half handed over, or a round that is half applied, can be neither undone nor repeated.

    Args:
        raise_cause: raises the error that explains why a section did not finish, if there is one.

    Attributes:
        broken: the section that did not finish, and why; None if all have finished.
    """

    def __init__(self, raise_cause: Callable[[], None] = lambda: None) -> None:
        self._raise_cause = raise_cause
        self.broken: str | None = None
        self._begun: str | None = None

    @property
    def fine(self) -> bool:
        """Whether ``check`` would not raise."""
        return self.broken is None and self._begun is None

    def __call__(self, what: str) -> Uninterrupted:
        """Begin a section that must finish, and return its context, or end it by ``end``.

        Args:
            what: description of the problem if it does not finish.
        """
        if not (self.broken is None and self._begun is None):
            self.check()
        self._begun = what
        return self

    def __enter__(self) -> None:
        """Do nothing: the section has begun in ``__call__``."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._begun = None
        else:
            self.fail(error)

    def end(self) -> None:
        """Mark a section as finished that is not a ``with`` block."""
        self._begun = None

    def fail(self, error: BaseException) -> None:
        """Mark the section as broken."""
        self.broken = f"{self._begun}: {type(error).__name__}: {error}"

    def check(self) -> None:
        """Raise if a section has not finished.

        Raises:
            ReplicaStateError: the replica is poisoned: restart from a checkpoint.
        """
        if self.broken is None and self._begun is not None:
            self.broken = f"{self._begun}: it was interrupted"
        if self.broken is not None:
            self._raise_cause()
            raise ReplicaStateError(
                f"{self.broken}. This rank's weights are no longer what the other ranks take them for: restart from a "
                f"checkpoint."
            )


# -- collectives at ends ----------------------------------------------------------------------------------------------
# Ranks wait, and the coordinator decides when the collective runs, and over which ranks.
#
# If each call were submitted to Horovod directly, it would wait forever for a rank that no longer has the optimizer.
# Instead, each rank reports its call to the coordinator. On the coordinator's command every rank's engine submits the
# collective: with this rank's vector, or with zeros on a rank that no longer has the optimizer.


class Combined(NamedTuple):
    """Result of a collective.

    Attributes:
        vector: the sum, or the vector of the root.
        ranks: the ranks that contributed a vector of their own, in order.
        problem: the difference that a comparison has found; None if there is none, and for other kinds.
    """

    vector: Vector
    ranks: list[int]
    problem: str | None = None


def _is_collective(command: RunCollective) -> bool:
    """Return whether ranks exchange vectors; else the coordinator has already answered the call."""
    return command.problem is None and command.kind != "compare"


class CollectiveCalls:
    """Collectives of one optimizer on one rank, one at a time.

    Args:
        engine: the engine of this rank.
        process_set: the ranks that share the optimizer, as the binding's collectives know them; None for all.
    """

    def __init__(self, engine: RankRuntime, process_set: Any) -> None:
        self._engine, self._process_set = engine, process_set
        self._index = 0
        self._own: Vector = None
        """This rank's vector, until it is submitted (engine thread)."""
        self._result: Combined | None = None
        self._carrier = Carrier(engine)
        self.cancelled = False
        """Whether no result will arrive, because the optimizer was discarded."""
        self.on_result: Callable[[RunCollective, Vector], None] = lambda command, result: None
        """Called with each result, even if this rank does not wait for it (engine thread)."""

    def begin(self, number: int, kind: str, what: str, vector: Vector = None, root: int = -1, **said: Any) -> None:
        """Join a collective (training thread). Call ``take`` once ``is_done`` returns True.

        Args:
            number: number of the optimizer.
            kind, what, root: see ``CollectiveReady``.
            vector: shape (n,); takes ownership. None if only ``said`` is compared.
        """
        self._index += 1
        length, dtype = (0, "") if vector is None else self._engine.collectives.describe(vector)
        event = CollectiveReady(number, self._index, kind, what, length, dtype, root, **said)

        def send() -> None:
            self._own = vector
            self._engine.send(event)

        self._result = None
        self._engine.call_soon(send)

    def is_done(self) -> bool:
        """Return whether ``take`` would return or raise at once."""
        return self._result is not None or self.cancelled

    def take(self, kind: str, what: str) -> Combined:
        """Return the result of the collective that ``begin`` joined.

        Raises:
            ReplicaStateError: other ranks are in another collective, or the optimizer was discarded.
        """
        result, self._result = self._result, None
        if result is None:
            raise ReplicaStateError(f"the optimizer was discarded while this rank waited in {what}")
        if result.problem is not None and kind != "compare":
            raise ReplicaStateError(result.problem)
        return result

    # -- engine thread ----------------------------------------------------------------------------------------

    def run(self, command: RunCollective) -> None:
        """Submit a collective that the coordinator has commanded, after all earlier ones."""
        if not _is_collective(command):
            self._over(command, None)  # (a rank that has called it waits for no other collective)
            return
        name = f"hvd_async.end.{command.optimizer}.{command.kind}.{command.dtype}"
        self._carrier.carry("", 0, name, lambda: self._prepare(command, name))

    def _prepare(self, command: RunCollective, name: str) -> Collective:
        """Return the collective of a command, with this rank's vector if it has called it."""
        collectives, own, self._own = self._engine.collectives, self._own, None
        called = self._engine.rank in command.ranks
        vector = own if called else collectives.zeros(command.length, command.dtype)

        def start() -> Handle:
            if command.kind == "sum":
                return collectives.allreduce_sum(vector, name, self._process_set)
            return collectives.broadcast(vector, command.root, name, self._process_set)

        def settled(result: Vector) -> None:
            self.on_result(command, result)
            self._over(command, result)

        return Collective(start, settled)

    def _over(self, command: RunCollective, result: Vector) -> None:
        if self._engine.rank not in command.ranks:
            return
        with self._engine.changed:
            self._result = Combined(result, command.ranks, command.problem)
            self._engine.changed.notify_all()


# -- the worker -------------------------------------------------------------------------------------------------------


class Worker(abc.ABC):
    """Base of an algorithm's rank side. The training thread calls it, unless stated otherwise.

    Args:
        engine: the engine of this rank, or another runtime.
        config: the settings, the same on all ranks.
        members: the ranks that share the optimizer; empty for all.
        process_set: their process set, as the binding's collectives take it; None for all.
        process_set_id: the id of their process set; 0 for all.
        finish: called at the end of each drain (True) or cut (False), when all that was in flight is received. If it
            returns a program, the program is run.

    Attributes:
        gone_at_end: ranks that no longer had the optimizer at the last drain or cut.
        last_done: the rank that finished last in the last drain; -1 before the first one.
        deleted: whether the optimizer was deleted, so that this rank's engine only serves the other ranks.
        kind: human-readable name of the wrapped object.
        shown: number of rounds since the last drain or cut that user code saw, and may have changed, before they were
            applied.
        in_consensus: whether the model now holds the consensus of all ranks instead of this rank's weights.
        hyperparameters: returns the present hyperparameters; empty if they are not known.
        start: returns ``Finished.start``.
    """

    holds_after_end = False
    """Whether a rank that is in a drain or cut must hold what later steps of other ranks start."""

    def __init__(
        self,
        engine: RankRuntime,
        config: Config,
        members: tuple[int, ...],
        process_set: Any,
        process_set_id: int,
        finish: Callable[[bool], object],
    ) -> None:
        self.engine, self.process_set_id = engine, process_set_id
        self._common, self._members, self._end = config, members, finish
        # The coordinator's replies, set by the engine thread:
        self._agreed = False
        self._refused: str | None = None
        """How the ranks' optimizers differ; None if they match, or before this is known."""
        self._drained: Drained[Any] | None = None
        """The command that ended a drain or cut, until the training thread has consumed it."""
        self._number: int | None = None
        self._announced = False
        self._hyper_sent: Hyper = []
        """The hyperparameters that were last sent to the coordinator."""
        self._restored = 0
        """Number of pending gradients restored from an earlier run; in other families, whether state was restored."""
        self._records_timeline = False
        self._wait_s = 0.0
        self._calls = CollectiveCalls(engine, process_set)
        self.last_done = -1
        self.gone_at_end: list[int] = []
        self._counts_at_end: list[int] | None = None
        """``_counts()`` at the last drain or cut."""
        self.deleted = False
        self.kind = "optimizer"
        self.shown = 0
        self.in_consensus = False
        self.hyperparameters: Callable[[], Hyper] = list
        self.start: Callable[[], int | None] = lambda: None

    # -- registration -----------------------------------------------------------------------------------------

    @property
    def agreed(self) -> bool:
        """Whether all ranks have registered this optimizer, and match."""
        return self._agreed

    def connect(self, names: list[str], checksums: list[int], hyper: Hyper | None = None) -> None:
        """Register and wait for the other ranks, whose settings, names and checksums must be the same.

        Args:
            names, checksums: of the parameters and of the optimizer's state.
            hyper: the hyperparameters of each parameter group.

        Raises:
            ReplicaMismatchError: they differ; the message says how to fix it. This worker is unusable then.
        """
        self.register(names, checksums, hyper)
        self.await_registration()

    def register(
        self, names: list[str], checksums: list[int], hyper: Hyper | None = None, number: int | None = None
    ) -> None:
        """Register with the coordinator without waiting for other ranks: the first half of ``connect``.

        Args:
            names, checksums, hyper: see ``connect``.
            number: the number of the optimizer on the ranks that have requested it; None to assign one.
        """
        if self._number is None:
            self._hyper_sent = hyper or []
            self._number = self.engine.register(self, self.process_set_id, number)
            restored, members = int(self._restored), list(self._members)
            hyper, timeline = hyper or [], self._records_timeline
            self.send(Registered(self._number, self._common, names, checksums, members, restored, hyper, timeline))

    def check_may_be_joined(self) -> None:  # noqa: B027  only some hold the turns of other optimizers
        """Raise ReplicaStateError if no other optimizer can take its first step now."""

    def await_registration(self) -> None:
        """Wait until every rank has registered: the second half of ``connect``.

        Raises:
            ReplicaMismatchError: see ``connect``.
        """
        self.run(self.await_registration_program())

    def await_registration_program(self) -> Program[None]:
        """Like ``await_registration``; this wait is not part of ``wait_s``."""
        yield Wait(lambda: self._agreed or self._refused is not None, counts=False)
        self._check_refused()

    def _check_refused(self) -> None:
        if self._refused is not None:
            self.engine.unregister(self.number)
            raise ReplicaMismatchError(f"{self.label}: {self._refused}")

    @property
    def label(self) -> str:
        """Human-readable name of the optimizer."""
        return self.kind if self._number is None else f"{self.kind} (optimizer {self._number})"

    @property
    def number(self) -> int:
        """Number of the optimizer, the same on all its ranks.

        Raises:
            ReplicaStateError: it is not registered yet.
        """
        if self._number is None:
            raise ReplicaStateError("the optimizer was used before it was registered: a bug in the binding")
        return self._number

    # -- drains and cuts --------------------------------------------------------------------------------------

    def check_outside_consensus(self, what: str) -> None:
        """Raise if called inside ``consensus()``, before anything is changed.

        Args:
            what: name of the call, for the message.

        Raises:
            ReplicaStateError: the model holds the consensus.
        """
        if self.in_consensus:
            raise ReplicaStateError(
                f"{self.label}: {what} inside consensus(), where the model holds the consensus of all ranks and not "
                f"this rank's weights. Leave the `with` block first."
            )

    def _check_drained(self) -> int:
        """Return the optimizer's number; raise if no step can be taken now."""
        number = self.number
        if self.in_consensus:
            self.check_outside_consensus("step()")
        if self._announced:
            raise ReplicaStateError(
                f"{self.label}: a drain() or cut() was interrupted: call it again before the next step"
            )
        return number

    def check_finished(self, flush: bool) -> None:
        """Raise if this optimizer cannot finish now.

        Args:
            flush: True for a drain; False for a cut, which is allowed inside ``consensus()``, since the consensus of
                another optimizer may begin with one.

        Raises:
            ReplicaStateError: a drain inside ``consensus()``.
        """
        if flush:
            self.check_outside_consensus("drain() or a call that drains")

    def announce_finished(self, flush: bool) -> None:
        """Report to the coordinator, once, that this rank has finished; without ``check_finished``."""
        if not self._announced:
            self._announced = True
            resumes = self.holds_after_end and self.engine.collectives.in_order
            hyper = self.hyperparameters()
            self.send(Finished(self.number, self._counts(), flush, self.shown, resumes, hyper, self.start()))

    def announce_resumed(self) -> None:
        """Report to the coordinator that this rank has completed a drain or cut, if it waits for that."""
        if self.holds_after_end and self.engine.collectives.in_order:
            self.send(Resumed(self.number))

    def drain(self, flush: bool = True) -> None:
        """Drain or, without ``flush``, cut this optimizer; ``Engine.drain`` ends all of a process at once."""
        self.run(self.drain_program(flush))

    def drain_program(self, flush: bool = True) -> Program[None]:
        """Program of ``drain``."""
        self.check_finished(flush)
        self.announce_finished(flush)
        while not self.apply_available():
            yield Wait(lambda: self.has_available)
        yield from self.complete_drain_program()

    def _take_drained(self) -> Drained[Any]:
        """Return and clear the command that ended the drain or cut."""
        with self.engine.changed:
            drained, self._drained = self._drained, None
        assert drained is not None
        self._announced = False
        self.last_done, self.gone_at_end = drained.last, drained.gone
        return drained

    @abc.abstractmethod
    def _counts(self) -> list[int]:
        """Return ``Finished.produced``."""

    @abc.abstractmethod
    def _is_complete(self) -> bool:
        """Return whether all ranks have finished, and this one has received (and applied) everything before that."""

    @property
    def has_available(self) -> bool:
        """Whether ``apply_available`` would apply something, or return True."""
        return self._refused is not None or self._is_complete()

    def apply_available(self) -> bool:
        """Apply what was received, without waiting; return whether all ranks have finished and all is applied.

        If each rank has its own weights, nothing is applied here: the next step, or ``gather``, does so.

        Raises:
            ReplicaMismatchError: the ranks do not match.
        """
        self._check_refused()
        return self._is_complete()

    def complete_drain(self) -> None:
        """End a drain or cut, after all ranks have finished and all was received."""
        self.run(self.complete_drain_program())
        self._counts_at_end = self._counts()

    def check_drain_after(self, other: Worker) -> None:
        """Refuse a drain or cut, the first after one that was called on another optimizer, for which ranks would wait
        forever: ranks that lack one of the two have counted that end as one of the other optimizer.

        Raises:
            ReplicaStateError: other ranks have it, and this rank has not stepped since.
        """
        if other is not self and other.gone_at_end != self.gone_at_end and self._counts_at_end == self._counts():
            missing = ranks_text({*other.gone_at_end} ^ {*self.gone_at_end})
            raise ReplicaStateError(
                f"{self.label}: this rank has called drain() or cut() on another optimizer just before, and a call "
                f"ends all optimizers of the process; {missing} lacks one of the two, calls it once less, and would be "
                f"waited for forever. Call it once, on an optimizer that all ranks have."
            )

    @abc.abstractmethod
    def complete_drain_program(self) -> Program[None]:
        """Program of ``complete_drain``: end as commanded, in the binding too, and reset."""

    def _finish(self, flush: bool) -> Program[None]:
        ending = self._end(flush)
        if isinstance(ending, Generator):
            yield from ending

    # -- collectives at ends ----------------------------------------------------------------------------------

    def sum(self, vector: Vector, what: str) -> Combined:
        """Return the sum of ``vector`` over the ranks that still have the optimizer. A collective of these ranks.

        Args:
            vector: shape (n,); takes ownership.
            what: human-readable name of the collective, the same on all ranks.

        Raises:
            ReplicaStateError: other ranks are in another collective.
        """
        return self.run(self.sum_program(vector, what))

    def sum_program(self, vector: Vector, what: str) -> Program[Combined]:
        """Program of ``sum``."""
        return (yield from self._call("sum", what, vector))

    def broadcast(self, vector: Vector, root: int, what: str) -> Vector:
        """Return the ``vector`` of rank ``root``; if it no longer has the optimizer, of the lowest rank that has it.

        Args and errors are those of ``sum``.
        """
        return self.run(self.broadcast_program(vector, root, what))

    def broadcast_program(self, vector: Vector, root: int, what: str) -> Program[Vector]:
        """Program of ``broadcast``."""
        return (yield from self._call("broadcast", what, vector, root)).vector

    def compare(self, names: list[str], checksums: list[int], what: str) -> None:
        """Compare the replicas of the ranks that still have the optimizer. A collective of these ranks.

        Raises:
            ReplicaMismatchError: they differ; the message says where, and how to fix it.
        """
        found = self.run(self._call("compare", what, names=names, checksums=checksums))
        if found.problem is not None:
            raise ReplicaMismatchError(f"{self.label}: {found.problem}")

    def _call(self, kind: str, what: str, vector: Vector = None, root: int = -1, **said: Any) -> Program[Combined]:
        """Take part in a collective; the arguments are those of ``CollectiveCalls.begin``."""
        self._calls.begin(self.number, kind, what, vector, root, **said)
        yield Wait(self._calls.is_done)
        return self._calls.take(kind, what)

    # -- the optimizer's end ----------------------------------------------------------------------------------

    @property
    def may_lose(self) -> bool:
        """Whether gradients of this rank may be lost if the optimizer is deleted now."""
        return False

    def delete(self) -> None:
        """Report that this rank no longer has the optimizer. Its engine continues to serve the other ranks.

        Any thread may call it, also in a finalizer.
        """
        if self._number is not None and not self.deleted:
            self.deleted = self._calls.cancelled = True
            self.engine.notify(self._report_deleted)

    def _report_deleted(self) -> None:
        """Report the deletion to the coordinator (engine thread)."""
        self.discard_results()
        self.engine.send(OptimizerDeleted(self.number, self._counts()))
        # Threads that wait in a drain of this optimizer check again. (An interrupt may have left the lock held; they
        # check every second anyway.)
        if self.engine.changed.acquire(timeout=1.0):
            self.engine.changed.notify_all()
            self.engine.changed.release()

    def discard_results(self) -> None:  # noqa: B027  some families keep none
        """Discard the results that arrive from now on (engine thread)."""

    # -- the engine -------------------------------------------------------------------------------------------

    def send(self, event: OptimizerEvent) -> None:
        """Send an event from the engine thread, after all actions posted before."""
        self.engine.call_soon(lambda: self.engine.send(event))

    @property
    def wait_s(self) -> float:
        """Seconds for which the training thread has waited so far, in steps and ends; as in ``stats()``, at no cost."""
        return self._wait_s

    def run(self, program: Program[T]) -> T:
        """Run a program on this thread, which sleeps in its waits, and return its result.

        Raises:
            the error that ends a wait, see ``Engine.wait``. It is raised in the program first.
        """
        try:
            wait = next(program)
            while True:
                started = self.engine.clock()
                try:
                    try:
                        self.engine.wait(wait.ready, wait.waiting_for)
                    finally:
                        self._wait_s += self.engine.clock() - started if wait.counts else 0.0
                except BaseException as error:  # noqa: BLE001  the program may record it, and raises it again
                    wait = program.throw(error)
                else:
                    wait = next(program)
        except StopIteration as end:
            result: T = end.value
            return result
        except BaseException:
            program.close()  # (an interrupt between two lines of this method has left it suspended in its wait)
            raise

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command (engine thread)."""
        if isinstance(command, RunCollective):
            self._calls.run(command)
            return
        with self.engine.changed:
            match command:
                case Accepted():
                    self._agreed = True
                case Rejected(_, problem):
                    self._refused = problem
                case Drained():
                    self._drained = command
            self.engine.changed.notify_all()
