"""Lifecycle of a process's engine: started by the first optimizer that steps, drained and stopped at the process's end.

A normal exit drains, and then serves the other ranks until all have left. An exception or a non-zero
``sys.exit`` is reported to the other ranks, and never counts as finished (``exit_status``). A rank whose last drain
fails ends with status 1. A forked child has no engine, and its end does not affect the job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from hvd_async.errors import EngineError, NotInitializedError, RankLostError
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.exit_status import exit_status
from hvd_async.runtime.interfaces import Channel, Collectives
from hvd_async.runtime.protocol import Family, HostsChanged, RegisterOptimizer
from hvd_async.runtime.rendezvous import Control, rendezvous
from hvd_async.runtime.worker import Worker

LOST = "HorovodInternalError: ranks were lost"
"""Beginning of the error that is sent to the other ranks where training continues."""


class Driver(Protocol):
    """Interface of the lifecycle to the driver of a wrapped optimizer, which is its attribute ``_async``.

    Attributes:
        discarded: whether the optimizer was discarded on this rank.
    """

    discarded: bool

    def leave(self) -> None:
        """Keep the state of this rank except its weights: the engine has ended, and the membership will change."""

    def roll_back(self) -> None:
        """Discard what is in flight: an earlier state is about to be loaded."""

    def rejoin(self) -> Any:
        """Return a new driver for the current ranks, which continues from here."""

    def register(self, number: int | None = None) -> Worker:
        """Register the optimizer, without waiting for other ranks."""

    def is_asked_for(self, engine: Engine, asked: RegisterOptimizer) -> bool | None:
        """Return whether this is the optimizer that other ranks request; None if only its ranks are the same."""

    def drain_all(self) -> int:
        """Drain all optimizers of the process, of all process sets; return the rank that finished last."""


def live(held: weakref.WeakValueDictionary[int, Any]) -> list[Any]:
    """Return the live values, in the order in which they were added, also while another thread adds one."""
    return [value for reference in held.valuerefs() if (value := reference()) is not None]


class Lifecycle:
    """Engine of a binding, started on first use. The engine of ``use_engine`` takes precedence.

    Args:
        make_collectives: returns the binding's data plane; called after Horovod was initialized.
        families: the families of algorithms that ranks may run.
        world: returns this rank and the number of ranks; None before ``hvd.init()``. Does not communicate.
        horovod_hook: returns Horovod's own exit hook, None without Horovod. In a forked child the hook would change
            state that the child shares with its parent (Gloo's epoll set), and end the parent's connections.

    Attributes:
        elastic: whether training continues without lost ranks.
    """

    def __init__(
        self,
        make_collectives: Callable[[], Collectives],
        families: Sequence[Family],
        world: Callable[[], tuple[int, int] | None],
        horovod_hook: Callable[[], Callable[..., object] | None] = lambda: None,
    ) -> None:
        self._make, self._families = make_collectives, families
        self._world, self._horovod_hook = world, horovod_hook
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._controls: tuple[Control, ...] = ()
        self._wrapped: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._hooked = self._forked = False
        self.elastic = False

    def world(self) -> tuple[int, int]:
        """Return this rank and the number of ranks in the job; does not communicate.

        Raises:
            NotInitializedError: ``hvd.init()`` was not called.
        """
        local = local_engine()
        world = self._world() if local is None else (local.rank, local.size)
        if world is None:
            raise NotInitializedError()
        return world

    def size(self) -> int:
        """Return the number of ranks in the job; see ``world``."""
        return self.world()[1]

    def engine(self) -> Engine:
        """Return the engine; start it if there is none. A failed one stays, to raise its error, until ``shutdown``.

        Raises:
            EngineError: this process was forked from one that had an engine.
        """
        local = local_engine()
        if local is not None:
            return local
        if self._forked:
            raise EngineError("this process was forked from a rank after training had begun: train in the parent only")
        with self._lock:
            if self._engine is None:
                self._start()
            assert self._engine is not None
            return self._engine

    def _start(self) -> None:
        collectives = self._make()

        def connect() -> Channel:
            channel, self._controls, engine.hosts = rendezvous(collectives, self._families)
            return channel

        self._exit_before_horovod()
        exit_status.watch()
        if not self._hooked:
            self._hooked = True
            os.register_at_fork(after_in_child=self._after_fork)
        self._engine = engine = Engine(collectives, connect)
        engine.elastic = self.elastic
        engine.start()

    def check(self, within: float = 0.0) -> None:
        """Raise if the engine knows of a lost rank, for waits that are not its own.

        Args:
            within: seconds in which it may still learn of it.
        """
        engine = self._engine
        if engine is None:
            return
        if within:
            with engine.changed:
                engine.changed.wait_for(lambda: engine.failure is not None, within)
        if isinstance(engine.failure, RankLostError):
            engine.check()

    def initialized(self) -> None:
        """Record that Horovod was initialized, possibly again in a running job."""
        if self._engine is not None:
            self._exit_before_horovod()

    def _exit_before_horovod(self) -> None:
        # Horovod registers its exit hook at each init(). This one must be the newer one, so that it runs first.
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _after_fork(self) -> None:
        """Forget the engine in a forked child, which has no engine thread and is not a rank."""
        atexit.unregister(self._at_exit)
        if (hook := self._horovod_hook()) is not None:
            atexit.unregister(hook)
        engine, self._engine, self._controls = self._engine, None, ()
        if engine is not None:
            self._forked = True
            exit_status.skip_destructors()
            engine.forked()

    def find(self, engine: Engine, asked: RegisterOptimizer) -> Worker | None:
        """Register the optimizer that other ranks have registered and this one has not; None if there is none.

        It is the first one with the same parameters. Otherwise it is the first one that the same ranks share, so
        that the error says how it differs.
        """
        held = self.wrapped()  # (so that none is deleted meanwhile)
        fits = [(driver.is_asked_for(engine, asked), driver) for driver in drivers(held)]
        same = [driver for fit, driver in fits if fit] + [driver for fit, driver in fits if fit is None]
        return same[0].register(asked.optimizer) if same else None

    def add(self, optimizer: Any) -> None:
        """Record a wrapped optimizer, by a weak reference."""
        self._wrapped[id(optimizer)] = optimizer

    def wrapped(self) -> list[Any]:
        """Return the live wrapped optimizers of this process, in the order in which they were wrapped."""
        return live(self._wrapped)

    def join(self) -> int | None:
        """Drain every optimizer of this process.

        Returns:
            The last rank to join, of the ranks that share its optimizers; None without optimizers and engine.
        """
        held = self.wrapped()  # (so that none is deleted meanwhile)
        usable = [driver for driver in drivers(held) if not driver.discarded]
        for driver in usable:
            driver.register()  # (before the first waits: others may wait for this rank to register the second)
        # One drain serves all optimizers. One per optimizer would fail: an unreferenced optimizer may be deleted on one
        # rank and not yet be garbage-collected on another, which would then drain once more.
        if usable:
            return usable[-1].drain_all()
        engine = local_engine() or self._engine
        if engine is None:
            return None
        engine.drain()
        return max((participant.last_done for participant in engine.participants()), default=engine.rank)

    def settle(self) -> None:
        """Drain the registered optimizers, if any; all ranks call it."""
        engine = local_engine() or self._engine
        if engine is not None and engine.failure is None:
            engine.drain()

    def shutdown(self, leaving: bool = False) -> None:
        """Drain, then stop the engine. All ranks call it, or end. Later optimizers start a new engine.

        Args:
            leaving: see ``Engine.drain``.
        """
        engine = self._engine
        if engine is None:
            return
        try:
            if engine.failure is None:
                engine.drain(leaving=leaving)
                engine.leave()
            elif not engine.failure_was_raised:
                engine.check()  # (it failed after the last call, so the failure was not raised yet)
        except BaseException as error:
            engine.stop(f"{type(error).__name__}: {error}")  # (so that this rank is not declared lost)
            raise
        finally:
            self._forget(engine)

    def abandon(self, error: str) -> None:
        """Stop the engine at once, and report the error to the other ranks."""
        if self._engine is not None:
            self._engine.stop(error)
            self._forget(self._engine)

    def leave(self) -> None:
        """Stop the engine before a membership change; with a drain if no rank is lost."""
        engine = self._engine
        if engine is not None and engine.failure is None:
            with contextlib.suppress(engine.collectives.failure):
                self.shutdown()
        self.abandon(f"{LOST}, and training continues without them")

    def commit(self, hosts_changed: Callable[[], bool]) -> bool:
        """Count a commit of elastic training; return whether all ranks stop at it. Ranks do not wait for each other.

        Args:
            hosts_changed: returns whether hosts have come or gone, once per change; called when this can be reported.
        """
        engine = local_engine() or self._engine
        if engine is None:
            return False  # (no other rank has one either: they start it at the same place of their program)
        if hosts_changed():
            engine.call_soon(lambda: engine.send(HostsChanged()))
        return engine.commits.commit(engine)

    def roll_back(self) -> None:
        """If a rank is lost, stop the engine and discard what is in flight."""
        if self._engine is not None and self._engine.failure is not None:
            self.abandon(f"{LOST}, and training goes back to the last commit")
            for driver in drivers(self.wrapped()):
                driver.roll_back()

    def _forget(self, engine: Engine) -> None:
        engine.stop()
        for control in self._controls:
            control.join(timeout=5.0)
            control.stop()
        self._engine, self._controls = None, ()

    def _at_exit(self) -> None:
        error = exit_status.error()
        if error is not None:
            self.abandon(error)
            return
        try:
            self.shutdown(leaving=True)
        except BaseException:
            exit_status.fail()
            raise


def drivers(optimizers: Sequence[Any]) -> list[Driver]:
    """Return the drivers of wrapped optimizers."""
    return [optimizer._async for optimizer in optimizers]


_local = threading.local()


def local_engine() -> Engine | None:
    """Return the engine that ``use_engine`` has set for this thread; None if there is none."""
    engine: Engine | None = getattr(_local, "engine", None)
    return engine


@contextlib.contextmanager
def use_engine(engine: Engine) -> Iterator[None]:
    """Make optimizers of this thread use ``engine``, for tests with ranks as threads of a process."""
    _local.engine = engine
    try:
        yield
    finally:
        _local.engine = None
