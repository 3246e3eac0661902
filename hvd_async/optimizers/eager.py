"""What the wrapped optimizers of both bindings have in common where gradients are averaged by partial allreduce."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from hvd_async.algorithms.eager.gradient_format import PendingGradient, ReducedRound
from hvd_async.algorithms.eager.messages import EagerConfig
from hvd_async.algorithms.eager.worker import EagerWorker
from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers.driver import Wrapped, WrapperState
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.log import warn
from hvd_async.runtime.messages import Hyper
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.stats import Stats


class EagerState(WrapperState):
    """As ``WrapperState``.

    Args:
        lifecycle: of the binding.
        sharers: the ranks that share the optimizer.
        config: as the user has it, of ``EagerConfig`` but for the number of buckets.
        late_cap_mb: MiB of rounds that may wait for a late rank.

    Attributes:
        restored: what an earlier run has left pending on this rank; None if nothing was loaded.
        config: of ``EagerConfig``, but for the number of buckets.
    """

    worker: EagerWorker | None
    config: dict[str, Any]

    def __init__(self, lifecycle: Lifecycle, sharers: RankGroup, config: dict[str, Any], late_cap_mb: float) -> None:
        super().__init__(lifecycle, sharers)
        self.config = config
        self.restored: list[PendingGradient] | None = None
        self._late_cap_mb, self._said = late_cap_mb, False

    def config_for(self, nbytes: Sequence[int]) -> EagerConfig:
        """What the ranks must have in common, given each bucket's bytes: ``max_staleness`` is no more than memory for
        late rounds allows."""
        config = EagerConfig(**self.config, buckets=len(nbytes))
        rounds = self._late_cap_mb * 2**20 / max(1, sum(nbytes))
        if config.quorum == "all" or config.max_staleness + 1 <= rounds:
            return config
        lowered = max(0, int(rounds) - 1)
        if self.index == 0 and not self._said and lowered < config.max_staleness:
            self._said = True
            warn(
                f"a round takes {sum(nbytes) / 2**20:,.0f} MiB here, and late_cap_mb={self._late_cap_mb:g} of them may "
                f"wait for a late rank: max_staleness is {lowered} in place of {config.max_staleness}"
            )
        return msgspec.structs.replace(config, max_staleness=lowered)

    @property
    def met(self) -> EagerWorker | None:
        """The worker, if gradients can be handed over to it now: the ranks have met and all is well."""
        worker = self.worker
        fine = worker is not None and worker.ready and not worker.engine.replaced
        fine = fine and self.broken is None and not self.discarded
        return worker if fine else None


class EagerWrapped(Wrapped):
    """Methods of every ``EagerOptimizer``. A binding supplies ``_async_new_worker``, ``_async_fingerprint``,
    ``_async_hyper``, ``_async_apply`` and ``_async_finish``."""

    def stats(self) -> Stats:
        """What this rank's optimizer has done so far."""
        worker: EagerWorker | None = self._async.worker
        return Stats() if worker is None else worker.stats()

    @property
    def settings(self) -> dict[str, Any]:
        """The algorithm in force, "eager", and its settings."""
        state = self._async
        given = {
            name: state.config[name] if state.worker is None else getattr(state.worker.config, name)
            for name in state.config
        }
        return {"algorithm": "eager", **given}

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

    def _async_apply(self, round_: ReducedRound) -> None:
        """Apply a round."""
        raise TypeError(f"{type(self).__name__} does not say how a round is applied")

    def _async_worker(self) -> EagerWorker:
        """As ``Wrapped``'s; raises as well, if a round was half applied here."""
        worker: EagerWorker = super()._async_worker()
        worker.whole.check()
        return worker

    def _async_make(self, engine: Any, finish: Callable[[bool], None]) -> EagerWorker:
        reference = weakref.ref(self)

        def apply(round_: ReducedRound) -> None:
            optimizer = reference()
            if optimizer is not None:  # else nobody holds its weights any more, but the other ranks still wait
                optimizer._async_apply(round_)

        return self._async_new_worker(engine, finish, apply)

    def _async_offer_to(self, worker: EagerWorker, number: int | None) -> None:
        if self._async.restored is not None:
            worker.restore(self._async.restored)
        worker.offer(*self._async_fingerprint(), self._async_hyper(), number)

    def _async_names(self) -> list[str]:
        return self._async_fingerprint()[0]

    def _async_check_replicas(self, worker: EagerWorker) -> None:
        """At the end of a drain. (Something may have been changed on one rank alone.) A collective.

        Raises:
            ReplicaMismatchError: replicas differ.
        """
        worker.compare(*self._async_fingerprint(), "drain()")

    def _async_met(self) -> None:
        self._async.restored = None

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _async_share(self, nbytes: Sequence[int]) -> dict[str, Any]:
        """This rank's share of a checkpoint, apart from the wrapped optimizer's own: what is pending here.

        Args:
            nbytes: of each bucket's vector.

        Raises:
            ReplicaStateError: gradients may be on their way, on some rank or other.
        """
        state, worker = self._async, self._async.worker
        held: list[PendingGradient] = state.restored or []
        if worker is not None:
            held = worker.pending()
            synchronous = worker.config.quorum == "all" or worker.config.max_staleness == 0
            if not worker.settled and not synchronous:
                raise ReplicaStateError(_would_be_lost(max((len(versions) for _, versions in held), default=0)))
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
        if share.get("cut"):
            raise ValueError(
                "this state of a GossipOptimizer after cut() goes with this rank's own weights, and the replicas of an "
                "EagerOptimizer are identical: save it after drain()"
            )
        lost = max((len(versions) for versions in share.get("versions", ())), default=0)
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
            state.restored = [PendingGradient(None if vector is None else vector + 0, list(at)) for vector, at in pairs]

    @staticmethod
    def _async_nothing_pending(worker: EagerWorker) -> bool:
        return not any(versions for _, versions in worker.pending())


def _would_be_lost(own: int) -> str:
    """Why a state is not saved while gradients are on their way, ``own`` of them this rank's."""
    whose = (
        f"{own} of this rank's would be lost by saving its state now, and other ranks' too"
        if own
        else "other ranks may have some, which would be lost by saving this rank's state now"
    )
    return (
        f"gradients are on their way: {whose}. Call drain() on every rank first and save rank 0's state, or call cut() "
        f"on every rank and save every rank's."
    )
