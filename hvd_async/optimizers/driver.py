"""What the wrapped optimizers of both bindings and of all algorithms have in common: meeting the other ranks, ends."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from hvd_async.errors import NotInitializedError, ReplicaMismatchError, ReplicaStateError
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.lifecycle import Lifecycle, local_engine
from hvd_async.runtime.messages import RegisterOptimizer
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.runtime.worker import Worker


class WrapperState:
    """What a wrapped optimizer keeps between calls, in one object of its own: it cannot clash with the framework's.

    Attributes:
        lifecycle: of the binding.
        engine: this thread's own, in tests with ranks as threads; None where the process has one.
        worker: None until the ranks have met.
        broken: why this rank can train no further; None while it can.
        discarded: whether ``discard()`` was called.
        sharers: the ranks that share the optimizer; ``size`` of them, of which this one is number ``index``.
    """

    worker: Any

    def __init__(self, lifecycle: Lifecycle, sharers: RankGroup) -> None:
        self.lifecycle = lifecycle
        self.engine = local_engine()
        self.sharers, self.size, self.index = sharers, sharers.size, sharers.index
        self.worker = None
        self.broken: str | None = None
        self.discarded = False
        self.lock = threading.RLock()
        self.rounds_before = 0
        """Rounds of earlier workers and runs."""


def derived(optimizer: Any, mixin: type) -> Any:
    """An optimizer with the same content, of a class that has ``mixin`` before the optimizer's own."""
    wrapped_class = type(optimizer)
    # Saved models name the optimizer by module and class: they must load where this package is unknown.
    made: Any = type(
        wrapped_class.__name__,
        (mixin, wrapped_class),
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


class Wrapped:
    """Methods of every wrapped optimizer. Private ones begin with ``_async_``: the class that is wrapped may have an
    ``_update`` or ``_apply`` of its own. ``eager_wrapping`` and ``gossip_wrapping`` have what their algorithms need."""

    _async: Any

    def drain(self) -> int:
        """Say "I am done", and wait until every rank is and all that was on its way has come.

        Afterwards the replicas are identical, which is checked, and batch-norm statistics agree by the ``buffers=``
        policy. (Of gossip nothing changes where no rank has stepped since the last drain: statistics computed anew
        agree in ``consensus()``.) All optimizers of this process that have begun to train with the same process set,
        here or on another rank, are drained together. A collective: every rank calls it equally often, also a rank that
        had no batch; a rank that has left, or has the optimizer no more, is waited for no longer. Where one rank drains
        and another cuts, all drain.

        Returns:
            The rank that was last to be done.

        Raises:
            GradientLossError: something was lost on its way, or counted twice.
            ReplicaMismatchError: replicas differ: weights or state were changed on some ranks alone.
            ReplicaStateError: an earlier step was broken off here.
        """
        return self._async_end(True)

    def cut(self) -> None:
        """Stop at a point where nothing is on its way between ranks, and go on from there; for a checkpoint a rank.

        Afterwards each rank's state holds its own share: save every rank's, and load them into as many ranks. A
        collective, like ``drain()``, and like it for all of this process's optimizers.

        Raises:
            ReplicaStateError: an earlier step was broken off here.
        """
        self._async_end(False)

    def _async_end(self, flush: bool) -> int:
        worker: Worker = self._async_worker()
        worker.engine.drain(flush, worker.process_set_id)
        return worker.last_done

    def discard(self) -> None:
        """Forget this optimizer on this rank, at once: no collective. It can be used no more.

        The other ranks go on without this one. Gradients that were handed over go with their next round; of gossip and
        leaders, what this rank has learned since the last drain is lost. Deleting the optimizer does the same, whenever
        Python gets to it (gossip's and leaders' is kept until it is drained, since others count on its weights).
        """
        state = self._async
        with state.lock:
            if not state.discarded:
                with contextlib.suppress(NotInitializedError):  # (else nobody can be waiting for this rank)
                    self._async_offer().delete()
                state.discarded = True

    @property
    def rounds(self) -> int:
        """Rounds (of gossip: exchanges) that this rank has seen, those before a resumed checkpoint included."""
        worker = self._async.worker
        before: int = self._async.rounds_before
        return before + (0 if worker is None else int(worker.version))

    @property
    def _async_open(self) -> bool:
        """Whether the coordinator knows of it."""
        worker = self._async.worker
        return worker is not None and not worker.engine.replaced

    def _async_is(self, engine: Engine, asked: RegisterOptimizer) -> bool | None:
        """Whether it is the optimizer that other ranks ask for; None if it may be, by its ranks alone."""
        state = self._async
        other = self._async_open or state.discarded or state.engine not in (None, engine)
        if other or list(state.sharers.members) != asked.members:
            return False
        return self._async_names() == asked.names or None

    def _async_names(self) -> list[str]:
        """Names of what its ranks have in common."""
        raise TypeError(f"{type(self).__name__} does not say what its ranks have in common")

    def _async_make(self, engine: Any, finish: Callable[[bool], None]) -> Any:
        """A worker for this optimizer's parameters as they are."""
        raise TypeError(f"{type(self).__name__} does not say how its worker is made")

    def _async_offer_to(self, worker: Any, number: int | None) -> None:
        """Have a new worker tell the others of this optimizer, by its number there if these have asked for it; it does
        not wait for them."""
        raise TypeError(f"{type(self).__name__} does not say what its ranks have in common")

    def _async_finish(self, worker: Any, flush: bool) -> None:
        """End a drain (``flush``) or a cut: all that was on its way has come."""
        raise TypeError(f"{type(self).__name__} does not say how it drains")

    def _async_met(self) -> None:
        """The ranks have met."""

    def _async_drain_all(self, flush: bool = True) -> int:
        """Drain or cut all optimizers of the process, of all process sets; returns the rank that was done last."""
        self._async_check_usable()
        worker: Worker = self._async_offer()
        worker.engine.drain(flush)  # (not before the ranks have met over this one: they may wait for another first)
        self._async_met()
        return worker.last_done

    def _async_check_usable(self) -> None:
        """Raise ReplicaStateError, if this rank can train no further with it."""
        state = self._async
        if state.discarded:
            raise ReplicaStateError("discard() was called on this optimizer: wrap a new one")
        if state.broken is not None:
            raise ReplicaStateError(
                f"{state.broken}. This rank's weights are no longer what the other ranks take them for: restart "
                f"from a checkpoint."
            )

    def _async_offer(self, number: int | None = None) -> Any:
        """Tell the other ranks that this optimizer is there, without waiting for them; returns its worker."""
        state = self._async
        with state.lock:
            if not self._async_open:
                engine = state.engine or state.lifecycle.engine()
                engine.find = functools.partial(state.lifecycle.find, engine)
                state.rounds_before = self.rounds
                state.worker = self._async_attach(engine)
                self._async_offer_to(state.worker, number)
            return state.worker

    def _async_worker(self) -> Any:
        """This optimizer's worker; the first call, and the first after a shutdown(), meets the other ranks."""
        state = self._async
        with state.lock:
            self._async_check_usable()
            if state.worker is None or not state.worker.agreed or state.worker.engine.replaced:
                self._async_offer()
                try:
                    state.worker.meet()
                except ReplicaMismatchError:
                    state.worker = None  # once it is mended, the next call meets anew
                    raise
                self._async_met()
            return state.worker

    def _async_attach(self, engine: Any) -> Any:
        reference = weakref.ref(self)

        def finish(flush: bool) -> None:
            optimizer = reference()
            if optimizer is not None:  # (else the others are told, and wait for this rank no more)
                optimizer._async_worker()  # raises if this rank can go no further
                optimizer._async_finish(worker, flush)

        worker = self._async_make(engine, finish)
        worker.kind = type(self).__name__
        delete = weakref.WeakMethod(worker.delete)  # (the engine holds it as long as other ranks need it)
        weakref.finalize(self, _call, delete).atexit = False
        return worker

    def _async_count_from(self, rounds: int) -> None:
        """So many rounds have been applied to this rank's weights so far."""
        state = self._async
        state.rounds_before = rounds - (0 if state.worker is None else state.worker.version)
