"""A driver: the framework-neutral half of a wrapped optimizer, behind its ``_async``. This one knows no algorithm.

Who holds whom: the optimizer its driver, the driver its replica and its worker, the engine the worker for as long as
other ranks need it; the worker knows its driver by a weak reference to the optimizer, and so does the replica.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hvd_async.errors import NotInitializedError, ReplicaMismatchError, ReplicaStateError
from hvd_async.optimizers.replica import Replica
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.lifecycle import Lifecycle, local_engine
from hvd_async.runtime.nested_calls import refuse_nested_drain
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.runtime.protocol import RegisterOptimizer
from hvd_async.runtime.worker import Worker


class GradientCounts(NamedTuple):
    """One rank's counts of gradients since the ranks were last others.

    Attributes:
        place: of the rank among those that shared the optimizer, ``size`` of them.
        applied: of all ranks, in the rounds that this one's weights have seen.
        produced: by this rank.
        in_rounds: of these, by round, those in rounds that its weights have not seen.
        pending: those in no round.
        handed_over: by each rank, as far as the coordinator knew; None where it was lost itself.
    """

    place: int
    size: int
    applied: int
    produced: int
    in_rounds: Mapping[int, int]
    pending: int
    handed_over: tuple[int, ...] | None


class Standing(NamedTuple):
    """How far one rank's optimizer is.

    Attributes:
        rounds: that its weights have seen, or the vectors that it shares with others.
        begun: steps whose gradient has been handed over, or is in its weights.
        ended: of these.
        fit: whether others may go on from its weights.
        apart: whether its weights are its own.
        shared: names of vectors that all ranks have, beside the weights.
        gradients: where they are averaged, and the rank has trained since the ranks were last others.
        seen: rounds that its weights have seen, as ``optimizer.rounds`` counts them.
    """

    rounds: int
    begun: int
    ended: int
    fit: bool = True
    apart: bool = False
    shared: tuple[str, ...] = ()
    gradients: GradientCounts | None = None
    seen: int = 0


class Driver(abc.ABC):
    """Registers one optimizer of a rank with the others', replaces its worker, drains and ends it.

    Args:
        lifecycle: of the binding.
        rank_group: the ranks that share the optimizer; ``size`` of them, of which this one is number ``index``.
        replica: the binding's.

    Attributes:
        engine: this thread's own, in tests with ranks as threads; None where the process has one.
        worker: None until the ranks have met.
        broken: why this rank can train no further; None while it can.
        discarded: whether ``discard()`` was called.
        rounds_before: rounds of earlier workers and runs.
        steps_ended: steps of the rank that was furthest when the ranks were last others.
        make: makes a driver by the same arguments for the ranks that there are then, for the same optimizer.
    """

    worker: Any
    make: Callable[[], Any]

    def __init__(self, lifecycle: Lifecycle, rank_group: RankGroup, replica: Replica) -> None:
        self.lifecycle, self.replica = lifecycle, replica
        self.engine = local_engine()
        self.rank_group, self.size, self.index = rank_group, rank_group.size, rank_group.index
        self.worker = None
        self.broken: str | None = None
        self.discarded = False
        self.rounds_before = self.steps_ended = 0
        self._lock = threading.RLock()

    def attach(self, optimizer: Any) -> Any:
        """Drive a wrapped optimizer from now on; returns it."""
        vars(optimizer)["_async"] = self
        self.replica.attach(optimizer)
        self.lifecycle.add(optimizer)
        return optimizer

    # -- other ranks in the same process (elastic training) ---------------------------------------------------------

    def leave(self) -> None:  # noqa: B027  some have nothing to keep
        """Keep what this rank has beside its weights: the engine has ended, and the ranks will be others."""

    def roll_back(self) -> None:
        """Forget what is on its way: an earlier state is about to be loaded."""
        self.rounds_before, self.worker, self.broken = self.rounds, None, None

    def rejoin(self) -> Any:
        """Have a new driver, for the ranks that there are now, go on from here in this one's place; returns it."""
        optimizer, made = self.replica.optimizer, self.make()
        made.make = self.make
        self.replica.detach()
        vars(optimizer)["_async"] = made
        made.replica.attach(optimizer)
        made.go_on_from(self)
        return made

    def go_on_from(self, before: Any) -> None:
        """Take over what the driver of this optimizer among other ranks has kept."""
        self.rounds_before, self.steps_ended = before.rounds, before.steps_ended
        self.discarded = before.discarded
        self.replica.continue_from(before.replica)

    def settings_in_force(self) -> dict[str, Any]:
        """Return settings that calls have changed since the optimizer was wrapped, and that all ranks have in common.

        A rank that joins takes them: its script wraps the optimizer as it was wrapped at first. They can be pickled.
        """
        return self.replica.settings_in_force()

    def take_settings(self, settings: dict[str, Any]) -> None:
        """Take what ``settings_in_force`` has returned on another rank, before the ranks meet."""
        self.replica.take_settings(settings)

    def check_commit(self) -> None:
        """Refuse a commit of elastic training at which something of this rank would be lost.

        Raises:
            ReplicaStateError: it is between two backward passes of a step.
        """
        passed = self.replica.open_passes
        if passed:
            raise ReplicaStateError(
                f"commit() after {passed} backward pass(es) of a step that has not ended: if the ranks changed here, "
                f"their gradients would be lost. Call it after step()."
            )

    def count_lost(self, gradients: int) -> None:  # noqa: B027  most have none
        """Count so many gradients of ranks that are gone as lost."""

    @abc.abstractmethod
    def standing(self) -> Standing:
        """Return how far this rank is."""

    def go_on(self, rounds: int, ended: int, apart: bool) -> None:
        """Go on with the ranks that there are now, before they meet.

        Args:
            rounds: as of ``Standing``, where they are most.
            ended: steps that the rank which is furthest has ended; the next of all ranks is the one after.
            apart: whether any rank has weights of its own.
        """
        self.rounds_before, self.steps_ended = rounds, ended

    # -- what an algorithm supplies -----------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """The algorithm in force and its settings."""

    @abc.abstractmethod
    def stats(self) -> Any:
        """Return what this rank's optimizer has done so far."""

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Return names of what its ranks have in common."""

    @abc.abstractmethod
    def make_worker(self, engine: Any, finish: Callable[[bool], None]) -> Any:
        """Return a worker for the optimizer's parameters as they are."""

    @abc.abstractmethod
    def register_worker(self, worker: Any, number: int | None) -> None:
        """Have a new worker tell the others of this optimizer, by its number there if these have asked for it; it does
        not wait for them."""

    @abc.abstractmethod
    def finish(self, worker: Any, flush: bool) -> None:
        """End a drain (``flush``) or a cut: all that was on its way has come."""

    def on_registered(self) -> None:  # noqa: B027  some have nothing to do
        """Go on from here: all ranks have registered, and fit together."""

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """In it the model holds what stands for all ranks: all have the same after a drain. A collective."""
        self.end(True)
        with self.marked_consensus():
            yield

    @contextlib.contextmanager
    def marked_consensus(self) -> Iterator[None]:
        """In it steps and ends are refused: the model holds the consensus."""
        worker: Worker = self.worker
        worker.in_consensus = True
        try:
            yield
        finally:
            worker.in_consensus = False

    def check_outside_consensus(self, what: str) -> None:
        """Raise ReplicaStateError if the model holds the consensus now; ``what`` names the call."""
        if self.worker is not None:
            self.worker.check_outside_consensus(what)

    @abc.abstractmethod
    def consensus_distance(self) -> float:
        """Return the root mean square distance of the ranks' weights from their mean. A collective."""

    # -- the worker of now --------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Rounds that this rank's weights have seen, those before a resumed checkpoint included."""
        worker = self.worker
        return self.rounds_before + (0 if worker is None else int(worker.version))

    @property
    def is_registered(self) -> bool:
        """Whether the coordinator knows of it."""
        return self.worker is not None and not self.worker.engine.replaced

    def check_usable(self) -> None:
        """Raise ReplicaStateError, if this rank can train no further with it."""
        self.replica.check_attached()
        if self.discarded:
            raise ReplicaStateError("discard() was called on this optimizer: wrap a new one")
        if self.broken is not None:
            raise ReplicaStateError(
                f"{self.broken}. This rank's weights are no longer what the other ranks take them for: restart "
                f"from a checkpoint."
            )

    def register(self, number: int | None = None) -> Any:
        """Tell the other ranks that this optimizer is there, without waiting for them; returns its worker."""
        with self._lock:
            if not self.is_registered:
                engine = self.engine or self.lifecycle.engine()
                engine.find = functools.partial(self.lifecycle.find, engine)
                self.rounds_before = self.rounds
                self.worker = self._new_worker(engine)
                self.register_worker(self.worker, number)
            return self.worker

    def worker_now(self) -> Any:
        """Return the worker; the first call, and the first after a shutdown(), meets the other ranks."""
        with self._lock:
            self.check_usable()
            if self.worker is None or not self.worker.agreed or self.worker.engine.replaced:
                self.register()
                try:
                    self.worker.await_registration()
                except ReplicaMismatchError:
                    self.worker = None  # once it is mended, the next call meets anew
                    raise
                self.on_registered()
            self.replica.bind(self.worker.engine)
            return self.worker

    def is_asked_for(self, engine: Engine, asked: RegisterOptimizer) -> bool | None:
        """Tell whether it is the optimizer that other ranks ask for; None if it may be, by its ranks alone."""
        other = self.is_registered or self.discarded or self.engine not in (None, engine)
        if other or list(self.rank_group.members) != asked.members:
            return False
        return self.names() == asked.names or None

    def count_from(self, rounds: int) -> None:
        """Take it that so many rounds have been applied to this rank's weights so far."""
        self.rounds_before = rounds - (0 if self.worker is None else self.worker.version)

    def _new_worker(self, engine: Any) -> Any:
        optimizer = self.replica.optimizer
        reference = weakref.ref(optimizer)

        def finish(flush: bool) -> None:
            held = reference()
            if held is not None:  # (else the others are told, and wait for this rank no more)
                driver = held._async
                driver.worker_now()  # raises if this rank can go no further
                driver.finish(worker, flush)

        self.replica.bind(engine)
        worker = self.make_worker(engine, finish)
        worker.kind = type(optimizer).__name__
        delete = weakref.WeakMethod(worker.delete)  # (the engine holds it as long as other ranks need it)
        weakref.finalize(optimizer, _call, delete).atexit = False
        return worker

    # -- ends ---------------------------------------------------------------------------------------------------

    def end(self, flush: bool) -> int:
        """Drain (``flush``) or cut, with all optimizers of the process set; returns the rank that was done last."""
        refuse_nested_drain()
        self.check_outside_consensus("drain(), cut() or what begins with one")
        worker: Worker = self.worker_now()
        worker.engine.drain(flush, worker.process_set_id)
        return worker.last_done

    def drain_all(self, flush: bool = True) -> int:
        """Drain or cut all optimizers of the process, of all process sets; returns the rank that was done last."""
        refuse_nested_drain()
        self.check_outside_consensus("drain() or what begins with one")
        self.check_usable()
        worker: Worker = self.register()
        worker.engine.drain(flush)  # (not before the ranks have met over this one: they may wait for another first)
        self.on_registered()
        return worker.last_done

    def discard(self) -> None:
        """Forget the optimizer on this rank, at once: no collective."""
        with self._lock:
            if not self.discarded:
                with contextlib.suppress(NotInitializedError):  # (else nobody can be waiting for this rank)
                    self.register().delete()
                self.discarded = True


def made_by(make: Callable[[], Any]) -> Any:
    """Return the driver that ``make`` makes, and would make again for other ranks."""
    driver = make()
    driver.make = make
    return driver


def derived(optimizer: Any, methods: type) -> Any:
    """Return an optimizer with the same content, of a class that has ``methods`` before the optimizer's own."""
    wrapped_class = type(optimizer)
    # Saved models name the optimizer by module and class: they must load where this package is unknown.
    made: Any = type(
        wrapped_class.__name__,
        (methods, wrapped_class),
        {"_wrapped_class": wrapped_class, "__module__": wrapped_class.__module__},
    )
    wrapped: Any = object.__new__(made)
    vars(wrapped).update(vars(optimizer))
    return wrapped


def _call(reference: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call a method whose object still lives."""
    method = reference()
    if method is not None:
        method()
