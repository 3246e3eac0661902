"""What the wrapped optimizers of both bindings have in common: meeting the other ranks, draining, statistics."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from hvd_async.eager import EagerWorker, Stats
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.lifecycle import Lifecycle, local_engine


class WrapperState:
    """What a wrapped optimizer keeps between calls, in one object of its own: it cannot clash with the framework's.

    Attributes:
        lifecycle: of the binding.
        engine: this thread's own, in tests with ranks as threads; None where the process has one.
        worker: None until the ranks have met.
        broken: why this rank's replica is none any more; None while it is.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.engine = local_engine()
        self.size = lifecycle.size()
        self.worker: EagerWorker | None = None
        self.broken: str | None = None
        self.lock = threading.RLock()

    @contextlib.contextmanager
    def applying(self, round_index: int) -> Iterator[None]:
        """Around the application of a round: if it fails, this rank's weights are no longer the others'."""
        try:
            yield
        except BaseException as error:
            self.broken = f"round {round_index} could not be applied: {type(error).__name__}: {error}"
            raise


class Wrapped:
    """Methods of every wrapped optimizer. A binding supplies ``_new_worker``, ``_fingerprint`` and ``_finish``."""

    _eager: Any

    def drain(self) -> int:
        """Say "I am done", apply what comes until every rank is done, and check that no gradient was lost.

        Afterwards every gradient is applied everywhere, the replicas are identical, and batch-norm statistics agree by
        the ``buffers=`` policy. All of this process's optimizers that have begun to train are drained together. A
        collective: every rank calls it equally often, also a rank that had no batch.

        Returns:
            The rank that was last to be done.

        Raises:
            GradientLossError: gradients produced and applied differ.
            ReplicaStateError: an earlier round could not be applied here.
        """
        worker = self._worker()
        worker.engine.drain()
        return worker.last_done

    def stats(self) -> Stats:
        """What this rank's optimizer has done so far."""
        worker: EagerWorker | None = self._eager.worker
        return Stats() if worker is None else worker.stats()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """In it the model holds the network's average (here: all are equal after a ``drain()``). A collective."""
        self.drain()
        yield

    def _new_worker(self, engine: Any, finish: Any) -> EagerWorker:
        """A worker for this optimizer's parameters as they are."""
        raise TypeError(f"{type(self).__name__} does not say how its worker is made")

    def _fingerprint(self) -> tuple[list[str], list[int]]:
        """Names and checksums of everything that must be the same on all ranks."""
        raise TypeError(f"{type(self).__name__} does not say what its ranks have in common")

    def _finish(self, worker: EagerWorker) -> None:
        """Drain this optimizer alone."""
        raise TypeError(f"{type(self).__name__} does not say how it drains")

    def _offer(self) -> None:
        """Tell the other ranks that this optimizer is there, without waiting for them."""
        state = self._eager
        with state.lock:
            if state.worker is None or state.worker.engine.replaced:
                engine = state.engine or state.lifecycle.engine()
                state.worker = self._attach(engine)
                state.worker.offer(*self._fingerprint())

    def _worker(self) -> EagerWorker:
        """This optimizer's worker; the first call, and the first after a shutdown(), meets the other ranks."""
        state = self._eager
        with state.lock:
            if state.broken is not None:
                raise ReplicaStateError(
                    f"{state.broken}. This rank's weights are no longer the other ranks': restart from a checkpoint."
                )
            if state.worker is None or not state.worker.agreed or state.worker.engine.replaced:
                self._offer()
                try:
                    state.worker.meet()
                except ReplicaMismatchError:
                    state.worker = None  # once it is mended, the next call meets anew
                    raise
            worker: EagerWorker = state.worker
            return worker

    def _attach(self, engine: Any) -> EagerWorker:
        reference = weakref.ref(self)

        def finish() -> None:
            optimizer = reference()
            if optimizer is not None:
                optimizer._worker()
                optimizer._finish(worker)
            else:
                worker.drain(lambda _: None)  # nobody holds its weights any more, but the others still wait

        worker = self._new_worker(engine, finish)
        return worker
