"""Base class of drivers: the framework-neutral half of a wrapped optimizer, its attribute ``_async``.

References: the optimizer holds its driver, the driver holds its replica and its worker, and the engine holds the worker
for as long as other ranks need it. The worker and the replica reach the driver by a weak reference to the optimizer.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from hvd_async.errors import NotInitializedError, ReplicaMismatchError, ReplicaStateError
from hvd_async.optimizers.agreement import consensus_distance, unify_buffers
from hvd_async.optimizers.replica import Replica
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.lifecycle import Lifecycle, local_engine
from hvd_async.runtime.log import users_line, warn
from hvd_async.runtime.machine import STATE
from hvd_async.runtime.nested_calls import refuse_nested_drain
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.runtime.protocol import Hyper, RegisterOptimizer
from hvd_async.runtime.worker import Worker


class GradientCounts(NamedTuple):
    """Numbers of gradients since the last membership change, as one rank knows them.

    Attributes:
        place: position of this rank among the ``size`` ranks that shared the optimizer.
        size: number of these ranks.
        applied: gradients of all ranks in the rounds that this rank's weights have seen.
        produced: gradients that this rank produced.
        in_rounds: for each round that its weights have not seen, the gradients of ``produced`` in that round.
        pending: gradients of ``produced`` that are in no round.
        handed_over: gradients that each rank handed over, as far as the coordinator knew; None if the coordinator was
            lost itself.
    """

    place: int
    size: int
    applied: int
    produced: int
    in_rounds: Mapping[int, int]
    pending: int
    handed_over: tuple[int, ...] | None


class Standing(NamedTuple):
    """Progress of one rank's optimizer, which the ranks exchange after a membership change.

    Attributes:
        rounds: number of rounds that its weights, or the vectors that it shares with other ranks, have seen.
        begun: steps whose gradient has been handed over, or is in its weights.
        ended: steps of ``begun`` that have ended.
        fit: whether other ranks may continue from its weights.
        apart: whether the rank has weights of its own.
        shared: names of the vectors, in addition to the weights, that all ranks have.
        gradients: numbers of gradients, if gradients are averaged and the rank has trained since the last membership
            change; else None.
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


class Resumed(NamedTuple):
    """State with which a rank begins, as far as the other ranks must know it before one rank's state is sent to all.

    Attributes:
        trains: whether the ranks have met.
        loads: whether this rank has loaded a state of this library.
        cut: whether it was saved after ``cut()`` and holds what no other rank's state does.
    """

    trains: bool
    loads: bool
    cut: bool


class Driver(abc.ABC):
    """Driver of one optimizer on one rank: registers it with the other ranks, replaces its worker, drains and ends it.

    Args:
        lifecycle: the binding's lifecycle.
        rank_group: the ``size`` ranks that share the optimizer; this rank's position among them is ``index``.
        replica: the binding's replica.
        buffers: how batch-norm statistics agree: "average", "local", or "root".
        nothing: statistics without any step, the initial value of ``stats()``.

    Attributes:
        engine: this thread's engine, in tests with ranks as threads; None if the process has a single engine.
        worker: None until the ranks have registered the optimizer.
        broken: the reason why this rank cannot continue to train; None while it can.
        discarded: whether ``discard()`` was called.
        rounds_before: rounds of earlier workers and runs.
        stats_before: statistics of earlier workers.
        loads: whether a state of this library was loaded.
        restored: state that an earlier run has left on this rank, until the ranks have registered; None if there is
            none.
        steps_ended: steps of the most advanced rank at the last membership change.
        make: function that makes a driver for the same optimizer and arguments among the present ranks.
    """

    make: Callable[[], Any]
    alike: ClassVar[bool]
    """Whether all ranks have the same weights and optimizer state."""

    def __init__(
        self, lifecycle: Lifecycle, rank_group: RankGroup, replica: Replica, buffers: str, nothing: Any
    ) -> None:
        self.lifecycle, self.replica, self.buffers, self.stats_before = lifecycle, replica, buffers, nothing
        self.engine = local_engine()
        self.rank_group, self.size, self.index = rank_group, rank_group.size, rank_group.index
        self.worker: Any = None
        self.restored: Any = None
        self.broken: str | None = None
        self.discarded = self.loads = False
        self.rounds_before = self.steps_ended = 0
        self._has_met = False
        """Whether the ranks have met, perhaps without this one."""
        self._taken_over: Any = None
        """The last worker that all ranks were found to have registered alike."""
        self._lock = threading.RLock()

    def attach(self, optimizer: Any) -> Any:
        """Become the driver of a wrapped optimizer, and return that optimizer."""
        vars(optimizer)["_async"] = self
        self.replica.attach(optimizer)
        self.lifecycle.add(optimizer)
        return optimizer

    # -- membership changes (elastic training) ----------------------------------------------------------------------

    def leave(self) -> None:  # noqa: B027  some have nothing to keep
        """Keep this rank's state other than its weights, after the engine has ended and before a membership change."""

    def roll_back(self) -> None:
        """Drop everything in flight, before an earlier state is loaded."""
        self.rounds_before, self.worker, self.broken = self.rounds, None, None

    def rejoin(self) -> Any:
        """Replace this driver by a new one for the present ranks, which continues from here, and return the new one."""
        optimizer, made = self.replica.optimizer, self.make()
        made.make = self.make
        self.replica.detach()
        vars(optimizer)["_async"] = made
        made.replica.attach(optimizer)
        made.continue_from(self)
        return made

    def continue_from(self, before: Any) -> None:
        """Take over the state of this optimizer's driver from before the membership change."""
        self.rounds_before, self.steps_ended = before.rounds, before.steps_ended
        self.discarded = before.discarded
        self.replica.continue_from(before.replica)

    def settings_in_force(self) -> dict[str, Any]:
        """Return the settings, equal on all ranks, that calls have changed since the optimizer was wrapped.

        They can be pickled. A rank that joins takes them, since its script wraps the optimizer with the first settings.
        """
        return self.replica.settings_in_force()

    def take_settings(self, settings: dict[str, Any]) -> None:
        """Take the settings that ``settings_in_force`` returned on another rank, before the ranks register."""
        self.replica.take_settings(settings)

    def check_commit(self) -> None:
        """Refuse a commit of elastic training at which gradients of this rank could be lost.

        Raises:
            ReplicaStateError: the call is between two backward passes of a step.
        """
        passed = self.replica.open_passes
        if passed:
            raise ReplicaStateError(
                f"commit() after {passed} backward pass(es) of a step that has not ended: if the ranks changed here, "
                f"their gradients would be lost. Call it after step()."
            )

    def count_lost(self, gradients: int) -> None:  # noqa: B027  most have none
        """Add ``gradients``, a number of gradients of lost ranks, to those counted as lost."""

    @abc.abstractmethod
    def standing(self) -> Standing:
        """Return this rank's progress."""

    def continue_at(self, rounds: int, ended: int, apart: bool) -> None:
        """Continue with the present ranks, before they register.

        Args:
            rounds: ``Standing.rounds`` of the rank with most rounds.
            ended: steps that the most advanced rank has ended; every rank continues with the step after these.
            apart: whether any rank has weights of its own.
        """
        self.rounds_before, self.steps_ended, self._has_met = rounds, ended, True

    # -- what an algorithm supplies -----------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """The algorithm in force and its settings."""

    @abc.abstractmethod
    def fingerprint(self) -> tuple[list[str], list[int]]:
        """Return names and checksums of everything that must be the same on all ranks, of parameters and settings."""

    @abc.abstractmethod
    def make_worker(self, engine: Any, finish: Callable[[bool], None]) -> Any:
        """Return a worker for the optimizer's present parameters."""

    @abc.abstractmethod
    def register_worker(self, worker: Any, number: int | None) -> None:
        """Announce this optimizer to the other ranks by a new worker, without waiting for them.

        Args:
            worker: the new worker.
            number: the optimizer's number on the other ranks, if they have requested it; else None.
        """

    @abc.abstractmethod
    def finish(self, worker: Any, flush: bool) -> None:
        """End a drain (``flush``) or a cut, after everything in flight has arrived."""

    def finish_whole(self, worker: Any, flush: bool) -> None:
        """Call ``finish``, and deal with an exception in it."""
        self.finish(worker, flush)

    @abc.abstractmethod
    def state_at_start(self) -> str | None:
        """Return what a rank has loaded that the others must have too when they first meet; None if it has nothing."""

    def opening(self) -> tuple[list[str], list[int]]:
        """Return ``fingerprint``, and what must be the same only when the ranks first meet."""
        names, checksums = self.fingerprint()
        if self._has_met:
            return names, checksums
        state, outside = self.state_at_start(), self.replica.outside()
        said = [*outside, *([] if state is None else [(f"{STATE}{state}", 0)])]
        return [*names, *(name for name, _ in said)], [*checksums, *(value for _, value in said)]

    def on_registered(self) -> None:
        """Continue after all ranks have registered and were found to match."""
        self._has_met = True

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Return a context in which the model holds the consensus: after a drain all ranks' weights. A collective."""
        self.end(True)
        with self.marked_consensus():
            yield

    @contextlib.contextmanager
    def marked_consensus(self) -> Iterator[None]:
        """Return a context in which steps and drains are refused, because the model holds the consensus."""
        worker: Worker = self.worker
        worker.in_consensus = True
        try:
            yield
        finally:
            worker.in_consensus = False

    def check_outside_consensus(self, what: str) -> None:
        """Raise ReplicaStateError if the model holds the consensus at present; ``what`` names the call."""
        if self.worker is not None:
            self.worker.check_outside_consensus(what)

    def consensus_distance(self) -> float:
        """Return the root mean square distance of the ranks' weights from their mean. A collective."""
        return consensus_distance(self.worker_now(), self.replica.read_double())

    def unify_buffers(self) -> None:
        """Make batch-norm statistics agree by the policy. A collective."""
        if self.buffers != "local":
            unify_buffers(self.worker_now(), self.replica.buffers(), self.buffers, self.rank_group.ranks[0])

    # -- the present worker -------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Number of rounds that this rank's weights have seen, including those before a resumed checkpoint."""
        worker = self.worker
        return self.rounds_before + (0 if worker is None else int(worker.version))

    def stats(self) -> Any:
        """Return what this rank's optimizer has done so far."""
        return self.stats_before if self.worker is None else self.stats_before + self.worker.stats()

    @property
    def is_registered(self) -> bool:
        """Whether the coordinator knows the optimizer."""
        return self.worker is not None and not self.worker.engine.replaced

    def check_usable(self) -> None:
        """Raise ReplicaStateError if this rank cannot continue to train with the optimizer."""
        self.replica.check_attached()
        if self.discarded:
            raise ReplicaStateError("discard() was called on this optimizer: wrap a new one")
        if self.broken is not None:
            raise ReplicaStateError(
                f"{self.broken}. This rank's weights are no longer what the other ranks take them for: restart "
                f"from a checkpoint."
            )

    def register(self, number: int | None = None) -> Any:
        """Announce this optimizer to the other ranks, without waiting for them, and return its worker."""
        with self._lock:
            if not self.is_registered:
                engine = self.engine or self.lifecycle.engine()
                engine.find = functools.partial(self.lifecycle.find, engine)
                rounds, stats = self.rounds, self.stats()  # (of a worker whose engine was shut down)
                self.worker = self._new_worker(engine)
                self.rounds_before, self.stats_before = rounds, stats
                self.register_worker(self.worker, number)
            return self.worker

    def worker_now(self) -> Any:
        """Return the worker. The first call, and the first after a shutdown(), waits for the other ranks."""
        with self._lock:
            self.check_usable()
            if self.worker is None or not self.worker.agreed or self.worker.engine.replaced:
                for other in () if self.is_registered else (self.engine or self.lifecycle.engine()).participants():
                    other.check_may_be_joined()
                self.register()
                try:
                    self.worker.await_registration()
                except ReplicaMismatchError:
                    self.worker = None  # once the cause is fixed, the next call registers again
                    raise
            if self._taken_over is not self.worker:  # (a drain of another optimizer may have registered it)
                self._taken_over = self.worker
                self.on_registered()
            self.replica.bind(self.worker.engine)
            return self.worker

    def is_asked_for(self, engine: Engine, asked: RegisterOptimizer) -> bool | None:
        """Return whether this is the optimizer that other ranks request; None if only its ranks match."""
        other = self.is_registered or self.discarded or self.engine not in (None, engine)
        if other or list(self.rank_group.members) != asked.members:
            return False
        self.replica.prepare()
        names = self.opening()[0]
        return asked.names[-len(names) :] == names or None  # (before these, some algorithms say what they resume)

    def count_from(self, rounds: int) -> None:
        """Set the number of rounds that have been applied to this rank's weights so far."""
        self.rounds_before = rounds - (0 if self.worker is None else self.worker.version)

    def _new_worker(self, engine: Any) -> Any:
        optimizer = self.replica.optimizer
        reference = weakref.ref(optimizer)

        def finish(flush: bool) -> None:
            held = reference()
            if held is not None:  # (else the other ranks are notified and no longer wait for this one)
                driver = held._async
                driver.worker_now()  # raises if this rank cannot continue
                driver.finish_whole(worker, flush)

        self.replica.bind(engine)
        worker = self.make_worker(engine, finish)
        worker.kind = type(optimizer).__name__
        worker.hyperparameters = functools.partial(_hyperparameters_of, reference)
        alive, size = weakref.ref(worker), self.size  # (the engine holds it as long as other ranks need it)

        def forget() -> None:
            made = alive()
            if made is None:
                return
            if made.may_lose and size > 1 and not made.deleted and engine.failure is None:
                text = (
                    f"rank {engine.rank}: {made.label} was deleted after steps and without drain(), so gradients that "
                    f"are late may be lost. Keep it and call drain() on every rank, or discard() to give it up"
                )
                engine.notify(functools.partial(warn, text))  # (a finalizer must not wait for stderr)
            made.delete()

        weakref.finalize(optimizer, forget).atexit = False
        return worker

    # -- checkpoints --------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def share(self) -> dict[str, Any]:
        """Return this rank's share of a checkpoint, in addition to the model's weights and the wrapped optimizer's
        state.

        Raises:
            ReplicaStateError: something is in flight.
        """

    @abc.abstractmethod
    def drained_share(self) -> dict[str, Any]:
        """Return what ``share`` would return after a drain, without what is in flight."""

    def warn_of_no_share(self) -> None:  # noqa: B027  most lack nothing
        """Warn about what is lost with a loaded state that has no share of this library."""

    def share_for_file(self) -> dict[str, Any]:
        """Return the share for a file that Keras writes, in the middle of training too: with a warning."""
        if self.worker is not None and self.worker.in_consensus:
            return self.drained_share()
        try:
            return self.share()
        except ReplicaStateError as error:
            warnings.warn(f"the file that is saved is incomplete: {error}", stacklevel=users_line())
            return self.drained_share()

    @property
    def resumed(self) -> Resumed:
        """The state that this rank has loaded."""
        return Resumed(self.worker is not None, self.loads, self.restored is not None)

    def sends_share(self, everyones: Sequence[Resumed]) -> bool:
        """Return whether a broadcast of one rank's state includes its share, given what all ranks have loaded.

        Raises:
            ValueError: a rank's own state would be lost.
        """
        if not any(one.cut for one in everyones):
            return not any(one.trains for one in everyones)
        if self.alike and all(one.loads for one in everyones):
            return False  # (every rank keeps its pending gradients)
        rank = next(place for place, one in enumerate(everyones) if one.cut)
        raise ValueError(
            f"rank {rank} has loaded a state that was saved after cut(), which is its own, and one rank's state is "
            f"about to be sent to all. Load each rank's own file on every rank, without the broadcast; or save after "
            f"drain()"
        )

    # -- ends ---------------------------------------------------------------------------------------------------

    def end(self, flush: bool) -> int:
        """Drain (``flush``) or cut all optimizers of the process set, and return the rank that was done last."""
        refuse_nested_drain()
        self.check_outside_consensus("drain(), cut() or what begins with one")
        self._check_groups()
        worker: Worker = self.worker_now()
        worker.engine.drain(flush, worker.process_set_id, worker)
        return worker.last_done

    def _check_groups(self) -> None:
        if self.worker is not None:
            self.replica.check_groups()

    def drain_all(self, flush: bool = True) -> int:
        """Drain or cut all optimizers of the process, in all process sets, and return the rank that was done last."""
        refuse_nested_drain()
        self.check_outside_consensus("drain() or what begins with one")
        self._check_groups()
        self.check_usable()
        worker: Worker = self.register()
        worker.engine.drain(flush)  # (without awaiting this registration: ranks may wait for another optimizer first)
        return worker.last_done

    def discard(self) -> None:
        """Forget the optimizer on this rank immediately. Not a collective."""
        with self._lock:
            if not self.discarded:
                with contextlib.suppress(NotInitializedError):  # (then no rank can be waiting for this one)
                    self.register().delete()
                self.discarded = True


def _hyperparameters_of(reference: weakref.ref[Any]) -> Hyper:
    """Return the present hyperparameters of a wrapped optimizer; empty if it was deleted."""
    optimizer = reference()
    return [] if optimizer is None else optimizer._async.replica.hyperparameters()


def made_by(make: Callable[[], Any]) -> Any:
    """Return a driver made by ``make``, which also makes its successors after membership changes."""
    driver = make()
    driver.make = make
    return driver


def derived(optimizer: Any, methods: type) -> Any:
    """Return an optimizer with the same attributes, of a class that puts ``methods`` before the optimizer's own."""
    wrapped_class = type(optimizer)
    # Saved models name the optimizer by module and class, and must load where this package is not installed.
    made: Any = type(
        wrapped_class.__name__,
        (methods, wrapped_class),
        {"_wrapped_class": wrapped_class, "__module__": wrapped_class.__module__},
    )
    wrapped: Any = object.__new__(made)
    vars(wrapped).update(vars(optimizer))
    return wrapped
