"""What the wrapped optimizers of both bindings have in common: meeting the other ranks, draining, statistics."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from hvd_async.eager import EagerWorker
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.events import Hyper
from hvd_async.lifecycle import Lifecycle, local_engine
from hvd_async.sharers import Sharers
from hvd_async.stats import Stats
from hvd_async.wire import Held, Round


class WrapperState:
    """What a wrapped optimizer keeps between calls, in one object of its own: it cannot clash with the framework's.

    Attributes:
        lifecycle: of the binding.
        engine: this thread's own, in tests with ranks as threads; None where the process has one.
        worker: None until the ranks have met.
        broken: why this rank's replica is none any more; None while it is.
        sharers: the ranks that share the optimizer; ``size`` of them, of which this one is number ``index``.
        restored: what an earlier run has left pending on this rank; None if nothing was loaded.
    """

    def __init__(self, lifecycle: Lifecycle, sharers: Sharers) -> None:
        self.lifecycle = lifecycle
        self.engine = local_engine()
        self.sharers, self.size, self.index = sharers, sharers.size, sharers.index
        self.worker: EagerWorker | None = None
        self.broken: str | None = None
        self.lock = threading.RLock()
        self.restored: list[Held] | None = None
        self.rounds_before = 0
        """Rounds of earlier workers and runs."""

    @property
    def met(self) -> EagerWorker | None:
        """The worker, if gradients can be handed over to it now: the ranks have met and all is well."""
        worker = self.worker
        fine = worker is not None and worker.ready and not worker.engine.replaced and self.broken is None
        return worker if fine else None

    @contextlib.contextmanager
    def applying(self, round_index: int) -> Iterator[None]:
        """Around the application of a round: if it fails, this rank's weights are no longer the others'."""
        try:
            yield
        except BaseException as error:
            self.broken = f"round {round_index} could not be applied: {type(error).__name__}: {error}"
            raise


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


class Wrapped:
    """Methods of every wrapped optimizer. Private ones begin with ``_eager_``: the class that is wrapped may have an
    ``_update`` or ``_apply`` of its own. A binding supplies ``_async_new_worker``, ``_async_fingerprint``,
    ``_async_hyper``, ``_async_apply`` and ``_async_finish``."""

    _async: Any

    def drain(self) -> int:
        """Say "I am done", apply what comes until every rank is done, and check that no gradient was lost.

        Afterwards every gradient is applied everywhere, the replicas are identical, and batch-norm statistics agree by
        the ``buffers=`` policy. All optimizers of this process that have begun to train with the same process set are
        drained together. A collective: every rank calls it equally often, also a rank that had no batch.

        Returns:
            The rank that was last to be done.

        Raises:
            GradientLossError: gradients produced and applied differ.
            ReplicaStateError: an earlier round could not be applied here.
        """
        worker = self._async_worker()
        worker.engine.drain(True, worker.process_set_id)
        return worker.last_done

    def cut(self) -> None:
        """Stop at a point where no round is on its way, without carrying what is pending; for a checkpoint a rank.

        Afterwards all ranks have the same weights, and each rank's state holds what it has pending: save every rank's,
        and load them into as many ranks. Quicker than ``drain()`` and without its last round; batch-norm statistics
        stay each rank's own. A collective, like ``drain()``, and like it for all of this process's optimizers.

        Raises:
            ReplicaStateError: an earlier round could not be applied here.
        """
        worker = self._async_worker()
        worker.engine.drain(False, worker.process_set_id)

    @property
    def rounds(self) -> int:
        """Rounds that this rank's weights have seen, those before a resumed checkpoint included."""
        worker: EagerWorker | None = self._async.worker
        before: int = self._async.rounds_before
        return before + (0 if worker is None else worker.version)

    def stats(self) -> Stats:
        """What this rank's optimizer has done so far."""
        worker: EagerWorker | None = self._async.worker
        return Stats() if worker is None else worker.stats()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """In it the model holds the network's average (here: all are equal after a ``drain()``). A collective."""
        self.drain()
        yield

    def _async_new_worker(self, engine: Any, finish: Any, apply: Any) -> EagerWorker:
        """A worker for this optimizer's parameters as they are."""
        raise TypeError(f"{type(self).__name__} does not say how its worker is made")

    def _async_fingerprint(self) -> tuple[list[str], list[int]]:
        """Names and checksums of everything that must be the same on all ranks."""
        raise TypeError(f"{type(self).__name__} does not say what its ranks have in common")

    def _async_hyper(self) -> Hyper:
        """This rank's hyperparameters now, as its rounds carry them."""
        raise TypeError(f"{type(self).__name__} does not say what its hyperparameters are")

    def _async_apply(self, round_: Round) -> None:
        """Apply a round."""
        raise TypeError(f"{type(self).__name__} does not say how a round is applied")

    def _async_finish(self, worker: EagerWorker, flush: bool) -> None:
        """End a drain (``flush``) or a cut: all rounds are applied."""
        raise TypeError(f"{type(self).__name__} does not say how it drains")

    def _async_drain_all(self) -> int:
        """Drain all optimizers of the process, of all process sets; returns the rank that was last to be done."""
        worker = self._async_worker()
        worker.engine.drain()
        return worker.last_done

    def _async_offer(self) -> None:
        """Tell the other ranks that this optimizer is there, without waiting for them."""
        state = self._async
        with state.lock:
            if state.worker is None or state.worker.engine.replaced:
                engine = state.engine or state.lifecycle.engine()
                state.rounds_before = self.rounds
                state.worker = self._async_attach(engine)
                if state.restored is not None:
                    state.worker.restore(state.restored)
                state.worker.offer(*self._async_fingerprint(), self._async_hyper())

    def _async_worker(self) -> EagerWorker:
        """This optimizer's worker; the first call, and the first after a shutdown(), meets the other ranks."""
        state = self._async
        with state.lock:
            if state.broken is not None:
                raise ReplicaStateError(
                    f"{state.broken}. This rank's weights are no longer the other ranks': restart from a checkpoint."
                )
            if state.worker is None or not state.worker.agreed or state.worker.engine.replaced:
                self._async_offer()
                try:
                    state.worker.meet()
                except ReplicaMismatchError:
                    state.worker = None  # once it is mended, the next call meets anew
                    raise
                state.restored = None
            worker: EagerWorker = state.worker
            return worker

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _async_share(self, nbytes: Sequence[int]) -> dict[str, Any]:
        """This rank's share of a checkpoint, apart from the wrapped optimizer's own: what is pending here.

        Args:
            nbytes: of each bucket's vector.

        Raises:
            ReplicaStateError: gradients may be on their way, on some rank or other.
        """
        state, worker = self._async, self._async.worker
        held: list[Held] = state.restored or []
        if worker is not None:
            held = worker.pending()
            synchronous = worker.config.quorum == "all" or worker.config.max_staleness == 0
            if not worker.settled and not synchronous:
                pending = max((len(versions) for _, versions in held), default=0)
                raise ReplicaStateError(
                    f"gradients are on their way: {pending} of this rank's would be lost by saving its state now, and "
                    f"other ranks' too. Call drain() on every rank first and save rank 0's state, or call cut() on "
                    f"every rank and save every rank's."
                )
        version = 0 if worker is None else worker.version
        return {
            "size": state.size,
            "index": state.index,
            "rounds": self.rounds,
            "nbytes": list(nbytes),
            "vectors": [vector for vector, _ in held],
            "versions": [[v - version for v in versions] for _, versions in held],
        }

    def _async_take_share(self, share: dict[str, Any], nbytes: Sequence[int]) -> None:
        """Take back what ``_async_share`` gave, before the ranks meet.

        Args:
            share: of this rank.
            nbytes: of each bucket's vector now.

        Raises:
            ValueError: it is of another rank, or of a job of another size or other buckets, and holds gradients.
            ReplicaStateError: gradients of the present run are on their way.
        """
        state = self._async
        lost = max((len(versions) for versions in share["versions"]), default=0)
        if state.worker is not None and not (state.worker.settled and self._async_nothing_pending(state.worker)):
            raise ReplicaStateError("gradients of this run are on their way: call drain() before loading a state")
        if lost and (share["size"], share["index"]) != (state.size, state.index):
            raise ValueError(
                f"this state is of rank {share['index']} of {share['size']} after cut(), with {lost} gradient(s) "
                f"pending; on rank {state.index} of {state.size} they would be lost. Load each rank's own file at the "
                f"same size, or save after drain()."
            )
        if lost and list(share["nbytes"]) != list(nbytes):
            raise ValueError(
                f"this state has {lost} gradient(s) pending in buckets of {share['nbytes']} bytes, and this optimizer "
                f"has buckets of {list(nbytes)}: wrap it with the same bucket_cap_mb, groups and compression"
            )
        if state.worker is not None and lost:
            raise ReplicaStateError("a state with pending gradients must be loaded before the first step")
        self._async_count_from(share["rounds"])
        if lost:
            pairs = zip(share["vectors"], share["versions"], strict=True)  # (copied: the worker adds to its vectors)
            state.restored = [Held(None if vector is None else vector + 0, list(at)) for vector, at in pairs]

    def _async_count_from(self, rounds: int) -> None:
        """So many rounds have been applied to this rank's weights so far."""
        state = self._async
        state.rounds_before = rounds - (0 if state.worker is None else state.worker.version)

    @staticmethod
    def _async_nothing_pending(worker: EagerWorker) -> bool:
        return not any(versions for _, versions in worker.pending())

    def _async_attach(self, engine: Any) -> EagerWorker:
        reference = weakref.ref(self)

        def apply(round_: Round) -> None:
            optimizer = reference()
            if optimizer is not None:  # else nobody holds its weights any more, but the other ranks still wait
                optimizer._async_worker()  # raises if this rank's replica is none any more
                optimizer._async_apply(round_)

        def finish(flush: bool) -> None:
            optimizer = reference()
            if optimizer is not None:
                optimizer._async_worker()
                optimizer._async_finish(worker, flush)

        worker = self._async_new_worker(engine, finish, apply)
        return worker
