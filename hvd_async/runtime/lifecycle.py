"""The life of a process's engine: started by the first optimizer that steps, drained and stopped at the process's end.

Ends are clean: a normal exit drains, and then serves the ranks that go on until all have left; an exception or a
non-zero ``sys.exit`` tells the other ranks and is never taken for done (``exit_status``). A rank whose last drain fails
ends with status 1. A forked child has no engine, and its end is nobody's business.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from hvd_async.errors import EngineError, NotInitializedError
from hvd_async.runtime.engine import Engine, Participant
from hvd_async.runtime.exit_status import exit_status
from hvd_async.runtime.interfaces import Channel, Collectives
from hvd_async.runtime.protocol import Family, HostsChanged, RegisterOptimizer
from hvd_async.runtime.rendezvous import Control, rendezvous

LOST = "HorovodInternalError: ranks were lost"
"""The beginning of what the others are told where training goes on."""


class Drainable(Protocol):
    """The driver of a wrapped optimizer.

    Attributes:
        discarded: whether the optimizer was given up on this rank.
    """

    discarded: bool

    def leave(self) -> None:
        """Keep what this rank has beside its weights: the engine has ended, and the ranks will be others."""

    def roll_back(self) -> None:
        """Forget what is on its way: an earlier state is about to be loaded."""

    def rejoin(self) -> Any:
        """Have a new driver, for the ranks that there are now, go on from here; returns it."""

    def register(self, number: int | None = None) -> Participant:
        """Tell the others that this rank's optimizer is there, without waiting for them."""

    def is_asked_for(self, engine: Engine, asked: RegisterOptimizer) -> bool | None:
        """Tell whether it is the optimizer that other ranks ask for; None if it may be, by its ranks alone."""

    def drain_all(self) -> int:
        """Drain all optimizers of the process, of all process sets; returns the rank that was last to be done."""


class Driven(Protocol):
    """A wrapped optimizer, which holds its driver."""

    _async: Any


class Lifecycle:
    """A binding's engine: none, or one that runs. ``local`` engines (a test's rank in a thread) take precedence.

    Args:
        make_collectives: makes the binding's data plane; Horovod is initialized when it is called.
        families: of the algorithms that ranks may run.
        world: this rank and the number of ranks, None before ``hvd.init()``; does not communicate.
        horovod_hook: Horovod's own exit hook. In a forked child it would take apart what the child shares with its
            parent: Gloo's epoll set, and then the parent's connections are dead.

    Attributes:
        elastic: whether training goes on without ranks that are lost.
    """

    def __init__(
        self,
        make_collectives: Callable[[], Collectives],
        families: Sequence[Family],
        world: Callable[[], tuple[int, int] | None],
        horovod_hook: Callable[[], object] = lambda: None,
    ) -> None:
        self._make, self._families = make_collectives, families
        self._world, self._horovod_hook = world, horovod_hook
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._controls: tuple[Control, ...] = ()
        self._wrapped: weakref.WeakValueDictionary[int, Driven] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._hooked = self._forked = False
        self.elastic = False

    def world(self) -> tuple[int, int]:
        """This rank, and the number of ranks in the job; does not communicate.

        Raises:
            NotInitializedError: ``hvd.init()`` was not called.
        """
        local = local_engine()
        world = self._world() if local is None else (local.rank, local.size)
        if world is None:
            raise NotInitializedError()
        return world

    def size(self) -> int:
        """The number of ranks in the job; as ``world``."""
        return self.world()[1]

    def engine(self) -> Engine:
        """The engine, started if there is none. One that has failed stays, and says why, until ``shutdown``.

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

    def initialized(self) -> None:
        """Horovod was initialized, perhaps once more in a job that is under way."""
        if self._engine is not None:
            self._exit_before_horovod()

    def _exit_before_horovod(self) -> None:
        # Horovod registers its own exit hook at each init(); ours must be the newer one, which runs first.
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _after_fork(self) -> None:
        """(In a forked child.) No thread of the engine's is here, and the other ranks are the parent's business."""
        atexit.unregister(self._at_exit)
        atexit.unregister(self._horovod_hook)
        engine, self._engine, self._controls = self._engine, None, ()
        if engine is not None:
            self._forked = True
            exit_status.in_child()
            engine.forked()

    def find(self, engine: Engine, asked: RegisterOptimizer) -> Participant | None:
        """Open the optimizer that other ranks have opened and ``engine``'s has not; None if there is none.

        The first one made with the same parameters, or else the first that the same ranks share: these are told then
        how it differs.
        """
        held = self.wrapped()  # (so that none goes meanwhile)
        fits = [(driver.is_asked_for(engine, asked), driver) for driver in drivers(held)]
        same = [driver for fit, driver in fits if fit] + [driver for fit, driver in fits if fit is None]
        return same[0].register(asked.optimizer) if same else None

    def add(self, optimizer: Driven) -> None:
        """Remember an optimizer that was wrapped, as long as it lives."""
        self._wrapped[next(self._numbers)] = optimizer

    def wrapped(self) -> list[Driven]:
        """The optimizers of this process that are alive, in the order in which they were wrapped."""
        return [optimizer for _, optimizer in sorted(self._wrapped.items())]

    def join(self) -> int | None:
        """Drain every optimizer of this process; None if it has none, and no engine.

        Returns:
            The last rank to join, of those that share this rank's optimizers.
        """
        held = self.wrapped()  # (so that none goes meanwhile)
        usable = [driver for driver in drivers(held) if not driver.discarded]
        for driver in usable:
            driver.register()  # before the first waits: others may be waiting for this rank to open the second
        # One drain is for all. One each would not do: an optimizer that nobody holds any more may be gone on one rank
        # and wait for the garbage collector on another, which would then drain once more often.
        if usable:
            return usable[-1].drain_all()
        engine = local_engine() or self._engine
        if engine is None:
            return None
        engine.drain()
        return max((participant.last_done for participant in engine.participants()), default=engine.rank)

    def settle(self) -> None:
        """Drain the optimizers that have begun to train, if there are any; all ranks call it."""
        engine = local_engine() or self._engine
        if engine is not None and engine.failure is None:
            engine.drain()

    def shutdown(self, leaving: bool = False) -> None:
        """Drain, then stop the engine; all ranks call it, or end. Later optimizers start a new one.

        Args:
            leaving: as of ``Engine.drain``.
        """
        engine = self._engine
        if engine is None:
            return
        try:
            if engine.failure is None:
                engine.drain(leaving=leaving)
                engine.leave()
            elif not engine.told:
                engine.check()  # it failed after the last call, so nobody has heard of it yet
        except BaseException as error:
            engine.stop(f"{type(error).__name__}: {error}")  # the others must not take this rank for dead
            raise
        finally:
            self._forget(engine)

    def abandon(self, error: str) -> None:
        """Stop the engine at once and tell the other ranks why."""
        if self._engine is not None:
            self._engine.stop(error)
            self._forget(self._engine)

    def leave(self) -> None:
        """Stop the engine, in order if no rank is lost: the ranks will be others."""
        engine = self._engine
        if engine is not None and engine.failure is None:
            with contextlib.suppress(engine.collectives.failure):
                self.shutdown()
        self.abandon(f"{LOST}, and training goes on without them")

    def commit(self, hosts_changed: Callable[[], bool]) -> bool:
        """Count a commit of elastic training; returns whether all ranks stop at it. Not a meeting of the ranks.

        Args:
            hosts_changed: tells, once, whether hosts have come or gone; asked for when the others can be told.
        """
        engine = local_engine() or self._engine
        if engine is None:
            return False  # (nor has any other rank one: they start it at the same place of their program)
        if hosts_changed():
            engine.call_soon(lambda: engine.send(HostsChanged()))
        return engine.commits.commit(engine)

    def roll_back(self) -> None:
        """If a rank is lost, stop the engine and forget what is on its way."""
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


def drivers(optimizers: Sequence[Driven]) -> list[Drainable]:
    """Return the drivers of wrapped optimizers."""
    return [optimizer._async for optimizer in optimizers]


_local = threading.local()


def local_engine() -> Engine | None:
    """The engine that ``use_engine`` set for this thread."""
    engine: Engine | None = getattr(_local, "engine", None)
    return engine


@contextlib.contextmanager
def use_engine(engine: Engine) -> Iterator[None]:
    """Make ``engine`` the one that optimizers of this thread use: ranks as threads in one process, for tests."""
    _local.engine = engine
    try:
        yield
    finally:
        _local.engine = None
