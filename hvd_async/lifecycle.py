"""The life of a process's engine: started by the first optimizer that steps, drained and stopped at the process's end.

Ends are clean: a normal exit drains; an exception or a non-zero ``sys.exit`` tells the other ranks and is never taken
for done. (``raise SystemExit(n)`` cannot be told from a normal exit by any exit hook; use ``sys.exit(n)``.)
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hvd_async.control import rendezvous
from hvd_async.coordinator import Coordinator
from hvd_async.engine import Engine
from hvd_async.errors import NotInitializedError
from hvd_async.protocols import Channel, Collectives


class Drainable(Protocol):
    """A wrapped optimizer."""

    def _async_offer(self) -> None:
        """Tell the others that this rank's optimizer is there, without waiting for them."""

    def _async_drain_all(self) -> int:
        """Drain all optimizers of the process, of all process sets; returns the rank that was last to be done."""


class Lifecycle:
    """A binding's engine: none, or one that runs. ``local`` engines (a test's rank in a thread) take precedence.

    Args:
        make_collectives: makes the binding's data plane; Horovod is initialized when it is called.
        world: this rank and the number of ranks, None before ``hvd.init()``; does not communicate.
    """

    def __init__(
        self, make_collectives: Callable[[], Collectives], world: Callable[[], tuple[int, int] | None]
    ) -> None:
        self._make, self._world = make_collectives, world
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._coordinator: Coordinator | None = None
        self._wrapped: weakref.WeakValueDictionary[int, Drainable] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

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
        """The engine that runs, started if there is none (or only one that has failed or stopped)."""
        local = local_engine()
        if local is not None:
            return local
        with self._lock:
            if self._engine is None:
                self._start()
            assert self._engine is not None
            return self._engine

    def _start(self) -> None:
        collectives = self._make()

        def connect() -> Channel:
            channel, self._coordinator = rendezvous(collectives)
            return channel

        # Horovod registers its own exit hook at each init(); ours must be the newer one, which runs first.
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        _exit_status.watch()
        self._engine = Engine(collectives, connect)
        self._engine.start()

    def add(self, optimizer: Drainable) -> None:
        """Remember an optimizer that was wrapped, as long as it lives."""
        self._wrapped[next(self._numbers)] = optimizer

    def join(self) -> int | None:
        """Drain every optimizer of this process; None if it has none, and no engine.

        Returns:
            The last rank to join, of those that share this rank's optimizers.
        """
        optimizers = [optimizer for _, optimizer in sorted(self._wrapped.items())]
        for optimizer in optimizers:
            optimizer._async_offer()  # before the first waits: others may be waiting for this rank to open the second
        # One drain is for all. One each would not do: an optimizer that nobody holds any more may be gone on one rank
        # and wait for the garbage collector on another, which would then drain once more often.
        if optimizers:
            return optimizers[-1]._async_drain_all()
        engine = local_engine() or self._engine
        if engine is None:
            return None
        engine.drain()
        return max((participant.last_done for participant in engine.participants()), default=engine.rank)

    def shutdown(self) -> None:
        """Drain, then stop the engine; all ranks call it. Later optimizers start a new one."""
        engine = self._engine
        if engine is None:
            return
        try:
            if engine.failure is None:
                engine.drain()
                engine.leave()
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

    def _forget(self, engine: Engine) -> None:
        engine.stop()
        if self._coordinator is not None:
            self._coordinator.join(timeout=5.0)
            self._coordinator.stop()
        self._engine = self._coordinator = None

    def _at_exit(self) -> None:
        error = _exit_status.error()
        if error is not None:
            self.abandon(error)
        else:
            self.shutdown()


class _ExitStatus:
    """Knows at exit whether the process ends on an error. Exit hooks are not told, so ``sys.exit`` is watched."""

    def __init__(self) -> None:
        self._code: object = None
        self._watching = False

    def watch(self) -> None:
        if self._watching:
            return
        self._watching = True
        original = sys.exit

        def exit(status: Any = None, /) -> Any:
            if threading.current_thread() is threading.main_thread():  # elsewhere it ends the thread only
                self._code = status
            original(status)

        sys.exit = exit

    def error(self) -> str | None:
        """What the process ends on, None if it ends normally."""
        last = getattr(sys, "last_value", None)
        if last is not None:
            return f"{type(last).__name__}: {last}"
        if self._code not in (None, 0):
            return f"sys.exit({self._code!r})"
        return None


_exit_status = _ExitStatus()
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
