"""What wrapped optimizers have in common whose ranks have weights of their own: gossip, followers of a leader."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers.driver import Wrapped, WrapperState
from hvd_async.runtime.interfaces import Vector


class LocalState(WrapperState):
    """As ``WrapperState``.

    Attributes:
        stats_before: of workers before this one.
        restored: what was loaded of an earlier run's cut.
        begun: whether settings were chosen by the epoch, or switched, since the start or a state was loaded.
    """

    stats_before: Any
    restored: Any = None
    begun: bool = False


class LocalWrapped(Wrapped):
    """Methods of every optimizer whose ranks have weights of their own. A binding supplies those below that raise
    TypeError."""

    _async: LocalState

    # -- what a binding supplies ------------------------------------------------------------------------------

    def _async_read(self) -> Vector:
        """The model's weights as one new vector."""
        raise TypeError(f"{type(self).__name__} does not say how its weights are read")

    def _async_write(self, weights: Vector) -> None:
        """Make these the model's weights."""
        raise TypeError(f"{type(self).__name__} does not say how its weights are written")

    def _async_fingerprint(self, resumed: bool) -> tuple[list[str], list[int]]:
        """Names and checksums of what must be the same on all ranks; of weights that were ``resumed``, names only."""
        raise TypeError(f"{type(self).__name__} does not say what its ranks have in common")

    def _async_unify(self) -> None:
        """Make batch-norm statistics agree by the policy. A collective."""
        raise TypeError(f"{type(self).__name__} does not say how its statistics agree")

    def _async_agree(self) -> None:
        """Make batch-norm statistics fit the weights that stand for all ranks. A collective."""
        self._async_unify()

    def _async_keep_buffers(self) -> Callable[[], None]:
        """What puts the batch-norm statistics of now back."""
        raise TypeError(f"{type(self).__name__} does not say how its statistics are kept")

    def _async_distance(self) -> float:
        """Root mean square distance of the ranks' weights from their mean. A collective."""
        raise TypeError(f"{type(self).__name__} does not say how far its ranks are apart")

    def _async_pack(self, kept: Any) -> dict[str, Any]:
        """What a worker has ``kept``, for a checkpoint."""
        raise TypeError(f"{type(self).__name__} does not say what its checkpoints hold")

    def _async_unpack(self, share: Mapping[str, Any]) -> Any:
        """That again."""
        raise TypeError(f"{type(self).__name__} does not say what its checkpoints hold")

    # -- for users --------------------------------------------------------------------------------------------

    def stats(self) -> Any:
        """What this rank's optimizer has done so far."""
        worker = self._async.worker
        before = self._async.stats_before
        return before if worker is None else before + worker.stats()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """In it the model holds what stands for all ranks, for evaluation and export; afterwards its own weights again.

        That is the average of all ranks' weights; of ranks that follow a leader, the weights of the one with the lowest
        mean loss (LSGD), or the centre (EASGD).

        Batch-norm statistics agree in it by the ``buffers=`` policy. A collective, with a ``cut()`` at its start.

        Raises:
            ReplicaStateError: an earlier step was broken off here.
        """
        self.cut()
        with self._async_consensus():
            yield

    @contextlib.contextmanager
    def _async_consensus(self) -> Iterator[None]:
        """As ``consensus``, after a cut. A collective."""
        worker = self._async_worker()
        own, put_back = self._async_read(), self._async_keep_buffers()
        forgotten = False
        try:
            self._async_write(worker.consensus(own * worker.weight))
            self._async_agree()
            yield
        except GeneratorExit:  # it was never left, and is cleared away: who knows what the model holds by now
            forgotten = True
            raise
        finally:
            if not forgotten:
                self._async_write(own)
                put_back()

    def consensus_distance(self) -> float:
        """sqrt(mean over ranks of |x_i - mean x|^2), x_i rank i's weights. A collective, with a ``cut()`` at its start;
        no rank gets all weights."""
        self.cut()
        return self._async_distance()

    # -- the ranks' meeting and ends --------------------------------------------------------------------------

    def _async_forget(self) -> None:
        """Let the worker go, after a drain; what it has counted is kept."""
        state, worker = self._async, self._async.worker
        if worker is not None:
            state.stats_before, state.rounds_before = self.stats(), self.rounds
            worker.delete()
            state.worker = None

    def _async_offer_to(self, worker: Any, number: int | None) -> None:
        worker.keep = self
        worker.begin(self._async_read())
        worker.offer(*self._async_fingerprint(self._async.restored is not None), number=number)

    def _async_names(self) -> list[str]:
        return self._async_fingerprint(self._async.restored is not None)[0]

    def _async_met(self) -> None:
        self._async.restored = None

    def _async_finish(self, worker: Any, flush: bool) -> None:
        self._async_write(worker.gather(self._async_read(), flush))
        if flush:
            self._async_agree()

    @contextlib.contextmanager
    def _async_updating(self) -> Iterator[None]:
        """Around a step: if it is broken off, this rank's weights are not what the others take them for."""
        if self._async.worker is not None:
            self._async.worker.keep = self
        try:
            yield
        except BaseException as error:
            self._async.broken = f"a step was broken off: {type(error).__name__}: {error}"
            raise

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _async_share(self) -> dict[str, Any]:
        """This rank's share of a checkpoint, apart from weights and the wrapped optimizer's own state.

        Raises:
            ReplicaStateError: a step was taken since the last drain or cut.
        """
        state, worker = self._async, self._async.worker
        if worker is not None and not worker.settled:
            raise ReplicaStateError(
                "messages between ranks are on their way, and this rank's state without them is not the whole of it. "
                "Call drain() on every rank first and save rank 0's state, or call cut() on every rank and save every "
                "rank's."
            )
        kept = state.restored if worker is None else worker.kept()
        return {
            "size": state.size,
            "index": state.index,
            "rounds": self.rounds,
            "cut": kept is not None,
        } | self._async_pack(kept)

    def _async_take_share(self, share: Mapping[str, Any]) -> None:
        """Take back what ``_async_share`` gave.

        Raises:
            ValueError: it is another rank's, after a cut, or of a job of another size, or an ``EagerOptimizer``'s with
                gradients pending.
            ReplicaStateError: messages of this run are on their way.
        """
        state = self._async
        if state.worker is not None and not state.worker.settled:
            raise ReplicaStateError("messages of this run are on their way: call drain() before loading a state")
        if any(share.get("versions", ())):
            raise ValueError(
                "this state of an EagerOptimizer after cut() has gradients pending, which would be lost: save it after "
                "drain()"
            )
        cut = share.get("cut", False)
        if cut and (share["size"], share["index"]) != (state.size, state.index):
            raise ValueError(
                f"this state is of rank {share['index']} of {share['size']} after cut(): its weights are that rank's "
                f"own, and this is rank {state.index} of {state.size}. Load each rank's own file at the same size, or "
                f"save after drain()."
            )
        try:
            restored = self._async_unpack(share) if cut else None
        except KeyError as error:
            raise ValueError(
                f"this state after cut() is of another kind of optimizer (it has no {error}): save it after drain()"
            ) from None
        self._async_forget()
        state.rounds_before, state.begun, state.restored = share["rounds"], False, restored
