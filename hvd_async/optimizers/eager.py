"""The driver of partial allreduce, where gradients are averaged: rounds, checkpoints."""

from __future__ import annotations

import abc
import dataclasses
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hvd_async.algorithms.eager.config import EagerConfig
from hvd_async.algorithms.eager.gradient_format import SAMPLE_DIGITS, GradientFormat, PendingGradient, ReducedRound
from hvd_async.algorithms.eager.rank import EagerWorker, Remains
from hvd_async.errors import RankLostError, ReplicaStateError
from hvd_async.optimizers.agreement import consensus_distance, unify_buffers
from hvd_async.optimizers.driver import Driver, GradientCounts, Standing
from hvd_async.optimizers.replica import Replica
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.log import warn
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.runtime.protocol import Hyper
from hvd_async.stats import Stats


class GradientReplica(Replica):
    """The replica of a rank whose gradients travel: all ranks' weights are the same after the same rounds.

    Attributes:
        emptied: as of ``EagerWorker``. (It holds no parameters, since the worker may outlive the model.)
    """

    emptied: Callable[[], Sequence[int]] = tuple

    @abc.abstractmethod
    def gradient_format(self) -> GradientFormat:
        """Return the format of the gradients of the present parameters, before a worker is made."""

    def extrapolate(self, rounds: float) -> None:
        """Extrapolate updates by a number of rounds, from now on."""

    @abc.abstractmethod
    def fingerprint(self) -> tuple[list[str], list[int]]:
        """Return names and checksums of everything that must be the same on all ranks."""

    @abc.abstractmethod
    def hyperparameters(self) -> Hyper:
        """Return this rank's hyperparameters now, as its rounds carry them."""

    @abc.abstractmethod
    def record_samples(self, samples: int) -> None:
        """Note the samples of the next gradient."""

    @abc.abstractmethod
    def apply(self, round_: ReducedRound) -> None:
        """Apply a round outside of a step."""

    def stop_hooks(self) -> None:
        """Leave backward passes alone from now on: the optimizer is discarded."""

    @abc.abstractmethod
    def finish(self, worker: EagerWorker, flush: bool) -> None:
        """End a drain (``flush``) or a cut: all rounds are applied. A collective where replicas are mended."""


class EagerDriver(Driver):
    """The driver of an ``EagerOptimizer``.

    Args:
        lifecycle, rank_group, replica: as ``Driver``.
        buffers: how batch-norm statistics agree: "average", "local", or "root".
        config: as the user has it, of ``EagerConfig`` but for the number of buckets.
        late_cap_mb: MiB of rounds that may wait for a late rank.
        auto_extrapolation: whether to extrapolate updates only where gradients may be late.

    Attributes:
        restored: what an earlier run has left pending on this rank; None if nothing was loaded.
        stats_before: among other ranks, before.
        remains: this rank's gradients since before a reset, until the ranks have met; None if there are none.
        config: of ``EagerConfig``, but for the number of buckets.
    """

    worker: EagerWorker | None
    replica: GradientReplica

    def __init__(
        self,
        lifecycle: Lifecycle,
        rank_group: RankGroup,
        replica: GradientReplica,
        buffers: str,
        config: dict[str, Any],
        late_cap_mb: float,
        auto_extrapolation: bool = False,
    ) -> None:
        super().__init__(lifecycle, rank_group, replica)
        self.buffers, self.config = buffers, config
        self.restored: list[PendingGradient] | None = None
        self.remains: Remains | None = None
        self.stats_before = Stats()
        self._gradients: GradientCounts | None = None
        """Of before a reset, until the ranks have agreed."""
        self._late_cap_mb, self._said = late_cap_mb, False
        self._auto_extrapolation = auto_extrapolation

    def config_for(self, nbytes: Sequence[int]) -> EagerConfig:
        """Return what the ranks must have in common, given each bucket's bytes: ``max_staleness`` is no more than
        memory for late rounds allows."""
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
        ahead = 0.0 if lowered == 0 and self._auto_extrapolation else config.weight_prediction
        return msgspec.structs.replace(config, max_staleness=lowered, weight_prediction=ahead)

    @property
    def met(self) -> EagerWorker | None:
        """The worker, if gradients can be handed over to it now: the ranks have met and all is well."""
        worker = self.worker
        if worker is None or not worker.ready or worker.engine.replaced or worker.in_consensus:
            return None
        return worker if self.broken is None and not self.discarded else None

    @property
    def settings(self) -> dict[str, Any]:
        """The algorithm in force, "eager", and its settings."""
        given = {
            name: self.config[name] if self.worker is None else getattr(self.worker.config, name)
            for name in self.config
        }
        return {"algorithm": "eager", **given}

    def stats(self) -> Stats:
        """Return what this rank's optimizer has done so far."""
        return self.stats_before if self.worker is None else self.stats_before + self.worker.stats()

    def consensus_distance(self) -> float:
        """Return the root mean square distance of the ranks' weights from their mean. A collective."""
        return consensus_distance(self.worker_now(), self.replica.read_double())

    @property
    def weighted(self) -> bool:
        """Whether rounds are weighted by samples."""
        return bool(self.config["weighting"] == "samples")

    def check_weighting(self) -> None:
        """Raise ValueError, if no round asks for samples."""
        if not self.weighted:
            raise ValueError(
                "record_samples() says how much a gradient counts, and here all count alike: pass weighting='samples' "
                "to EagerOptimizer, or leave the call out"
            )

    def record_samples(self, samples: Any) -> None:
        """Note of how many samples the next gradient is the mean.

        Raises:
            ValueError: as ``samples_of``.
            ReplicaStateError: the gradient has left.
        """
        self.replica.record_samples(self.samples_of(samples))

    def samples_of(self, samples: Any) -> int:
        """Return what was given as a number of samples.

        Raises:
            ValueError: no whole number from 0, or rounds are not weighted by it.
        """
        self.check_weighting()
        hint = (
            f"record_samples({samples!r}): give a whole number of samples from 0 (an empty batch) to below "
            f"2**{SAMPLE_DIGITS}, such as len(batch)"
        )
        try:
            count = operator.index(samples)
        except TypeError:
            raise ValueError(hint) from None
        if isinstance(samples, bool) or not 0 <= count < 2**SAMPLE_DIGITS:
            raise ValueError(hint)
        return count

    # -- the ranks' meeting and ends --------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return names of what its ranks have in common."""
        return self.replica.fingerprint()[0]

    def worker_now(self) -> EagerWorker:
        """Raise as ``Driver``'s does, and if a round was half applied here."""
        worker: EagerWorker = super().worker_now()
        worker.whole.check()
        return worker

    def worker_to_step(self) -> EagerWorker:
        """Return ``worker_now()``, before a step.

        Raises:
            ReplicaStateError: as ``worker_now``; or it is inside ``consensus()``.
        """
        worker = self.worker_now()
        worker.check_outside_consensus("step()")
        return worker

    def make_worker(self, engine: Any, finish: Callable[[bool], None]) -> EagerWorker:
        """Return a worker for the optimizer's parameters as they are."""
        reference = weakref.ref(self.replica.optimizer)

        def apply(round_: ReducedRound) -> None:
            optimizer = reference()
            if optimizer is not None:  # else nobody holds its weights any more, but the other ranks still wait
                optimizer._async.replica.apply(round_)

        wire = self.replica.gradient_format()
        config = self.config_for(wire.nbytes)
        self.replica.extrapolate(config.weight_prediction)
        return EagerWorker(engine, config, wire, finish, apply, self.replica.emptied)

    def register_worker(self, worker: EagerWorker, number: int | None) -> None:
        """Tell the others of this optimizer, by a new worker."""
        if self.remains is not None:
            worker.take_over(self.remains.counted_from(-self.rounds_before, 0))
        elif self.restored is not None:
            worker.restore(self.restored)
        worker.register(*self.replica.fingerprint(), self.replica.hyperparameters(), number)

    def on_registered(self) -> None:
        """Forget what was loaded or kept: the worker has it."""
        self.restored = self.remains = None

    def finish(self, worker: EagerWorker, flush: bool) -> None:
        """End a drain (``flush``) or a cut; after a drain replicas are compared, since something may have been changed
        on one rank alone. A collective.

        Raises:
            ReplicaMismatchError: replicas differ.
        """
        self.replica.finish(worker, flush)
        if flush:
            if self.buffers != "local":
                unify_buffers(worker, self.replica.buffers(), self.buffers, self.rank_group.ranks[0])
            worker.compare(*self.replica.fingerprint(), "drain()")

    def discard(self) -> None:
        super().discard()
        self.replica.stop_hooks()

    # -- other ranks in the same process (elastic training) ---------------------------------------------------------

    def leave(self) -> None:
        worker = self.worker
        if worker is not None and worker.agreed and not self.discarded:
            self.remains = worker.remains().counted_from(self.rounds_before, self.steps_ended)
            orderly = worker.engine.failure is None  # (drained: whoever is gone holds nothing)
            self._gradients = None if orderly else self._counts(worker, self.remains)

    def _counts(self, worker: EagerWorker, remains: Remains) -> GradientCounts:
        failure = worker.engine.failure
        known = None if not isinstance(failure, RankLostError) else failure.handed_over
        return GradientCounts(
            place=self.index,
            size=self.size,
            applied=worker.ledger.applied[0],
            produced=worker.ledger.produced[0],
            in_rounds={number: len(gradients[0].versions) for number, gradients in remains.in_rounds.items()},
            pending=len(remains.pending[0].versions),
            handed_over=None if known is None else tuple(known.get(worker.number, ())) or None,
        )

    def standing(self) -> Standing:
        remains = self.remains or Remains(begun=self.steps_ended, ended=self.steps_ended)
        return Standing(
            self.rounds, remains.begun, remains.ended, remains.fit, gradients=self._gradients, seen=self.rounds
        )

    def go_on_from(self, before: EagerDriver) -> None:
        super().go_on_from(before)
        self.remains, self.restored, self._gradients = before.remains, before.restored, before._gradients
        self.stats_before = before.stats() + Stats(resets=1)

    def go_on(self, rounds: int, ended: int, apart: bool) -> None:
        super().go_on(rounds, ended, apart)
        self._gradients = None
        if self.remains is not None:
            self.remains = self.remains.after(rounds, ended)
            again = self.remains.begun > ended, max(len(one.versions) for one in self.remains.pending)
            steps, produced = self.stats_before.steps - again[0], self.stats_before.gradients_produced - again[1]
            self.stats_before = dataclasses.replace(self.stats_before, steps=steps, gradients_produced=produced)

    def count_lost(self, gradients: int) -> None:
        self.stats_before += Stats(gradients_lost=gradients)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def share(self, nbytes: Sequence[int]) -> dict[str, Any]:
        """This rank's share of a checkpoint, apart from the wrapped optimizer's own: what is pending here.

        Args:
            nbytes: of each bucket's vector.

        Raises:
            ReplicaStateError: gradients may be on their way, on some rank or other.
        """
        worker = self.worker
        held: list[PendingGradient] = self.restored or []
        if worker is not None:
            held = worker.pending()
            synchronous = worker.config.quorum == "all" or worker.config.max_staleness == 0
            if not worker.settled and not synchronous:
                raise ReplicaStateError(_would_be_lost(max((len(versions) for _, versions in held), default=0)))
        version = 0 if worker is None else worker.version
        return {
            "size": self.size,
            "index": self.index,
            "rounds": self.rounds,
            "nbytes": list(nbytes),
            "vectors": [vector for vector, _ in held],
            "versions": [[v - version for v in versions] for _, versions in held],
        }

    def take_share(self, share: dict[str, Any], nbytes: Sequence[int]) -> None:
        """Take back what ``share`` gave, before the ranks meet.

        Args:
            share: of this rank.
            nbytes: of each bucket's vector now.

        Raises:
            ValueError: it is of another rank, or of a job of another size or other buckets, and holds gradients.
            ReplicaStateError: gradients of the present run are on their way.
        """
        if share.get("cut"):
            raise ValueError(
                "this state of a GossipOptimizer after cut() goes with this rank's own weights, and the replicas of an "
                "EagerOptimizer are identical: save it after drain()"
            )
        lost = max((len(versions) for versions in share.get("versions", ())), default=0)
        if self.worker is not None and not (self.worker.settled and self._nothing_pending(self.worker)):
            raise ReplicaStateError("gradients of this run are on their way: call drain() before loading a state")
        if lost and (share["size"], share["index"]) != (self.size, self.index):
            raise ValueError(
                f"this state is of rank {share['index']} of {share['size']} after cut(), with {lost} gradient(s) "
                f"pending; on rank {self.index} of {self.size} they would be lost. Load each rank's own file at the "
                f"same size, or save after drain()."
            )
        if lost and list(share["nbytes"]) != list(nbytes):
            raise ValueError(
                f"this state has {lost} gradient(s) pending in buckets of {share['nbytes']} bytes, and this optimizer "
                f"has buckets of {list(nbytes)}: wrap it with the same bucket_cap_mb, groups, compression "
                f"and weighting"
            )
        if self.worker is not None and lost:
            raise ReplicaStateError("a state with pending gradients must be loaded before the first step")
        self.count_from(share["rounds"])
        if lost:
            pairs = zip(share["vectors"], share["versions"], strict=True)  # (copied: the worker adds to its vectors)
            self.restored = [PendingGradient(None if vector is None else vector + 0, list(at)) for vector, at in pairs]

    @staticmethod
    def _nothing_pending(worker: EagerWorker) -> bool:
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
