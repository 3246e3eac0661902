"""Driver of partial allreduce, whose rounds average gradients: registration, drains, checkpoints."""

from __future__ import annotations

import abc
import dataclasses
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvd_async.algorithms.eager.config import EagerConfig, EagerOptions
from hvd_async.algorithms.eager.gradient_format import SAMPLE_DIGITS, GradientFormat, PendingGradient, ReducedRound
from hvd_async.algorithms.eager.rank import Arrives, EagerWorker, Emptied, Remains
from hvd_async.errors import RankLostError, ReplicaStateError
from hvd_async.optimizers.driver import Driver, GradientCounts, Standing
from hvd_async.optimizers.replica import Replica
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.log import users_line, warn
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.runtime.protocol import Hyper
from hvd_async.stats import Stats


class GradientReplica(Replica):
    """Replica under partial allreduce: all ranks have the same weights after the same rounds.

    Attributes:
        scaled: whether the loss is multiplied by a scale that adapts to overflows.
        emptied, arrives: as in ``EagerWorker``. (They hold no parameters, since the worker may outlive the model.)
    """

    scaled = False
    emptied: Emptied = staticmethod(lambda wait: ())
    arrives: Arrives | None = None

    @property
    @abc.abstractmethod
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of each bucket's vector."""

    @abc.abstractmethod
    def gradient_format(self) -> GradientFormat:
        """Return the format of the present parameters' gradients, before a worker is made."""

    @abc.abstractmethod
    def fingerprint(self) -> tuple[list[str], list[int]]:
        """Return names and checksums of everything that must be the same on all ranks."""

    @abc.abstractmethod
    def hyperparameters(self) -> Hyper:
        """Return this rank's present hyperparameters, in the form in which rounds carry them."""

    @abc.abstractmethod
    def record_samples(self, samples: int) -> None:
        """Record the number of samples of the next gradient."""

    @abc.abstractmethod
    def apply(self, round_: ReducedRound) -> None:
        """Apply a round outside a step."""

    def stop_hooks(self) -> None:
        """Stop intercepting backward passes, since the optimizer is discarded."""

    @abc.abstractmethod
    def finish(self, worker: EagerWorker, flush: bool) -> None:
        """End a drain (``flush``) or a cut, after all rounds are applied. A collective if replicas are repaired."""


class EagerDriver(Driver):
    """Driver of an ``EagerOptimizer``.

    Args:
        lifecycle, rank_group, replica: as in ``Driver``.
        options: the user's options.
        local_size: number of ranks per host, as requested by ``options.hierarchical``.

    Attributes:
        options: the user's options.
        remains: this rank's gradients from before a membership change, until the ranks have registered; None if there
            are none.
    """

    worker: EagerWorker | None
    replica: GradientReplica
    alike = True

    def __init__(
        self,
        lifecycle: Lifecycle,
        rank_group: RankGroup,
        replica: GradientReplica,
        options: EagerOptions,
        local_size: int = 1,
    ) -> None:
        super().__init__(lifecycle, rank_group, replica, options.buffers, Stats())
        self.options = options
        self.restored: list[PendingGradient] | None = None
        self.remains: Remains | None = None
        self._gradients: GradientCounts | None = None
        """Counts from before a membership change, until the ranks have agreed."""
        self._parties = 1 if rank_group.size == 1 else rank_group.named // local_size
        self._local_size = local_size if rank_group.size == rank_group.named else 1  # (else: outside the process set)
        self._said = False
        self._skipped = 0
        """Steps of the worker that were not finite, at the last drain."""

    def config_for(self, nbytes: Sequence[int]) -> EagerConfig:
        """Return the configuration that the ranks must have in common.

        ``max_staleness`` is lowered to what ``late_cap_mb`` allows.

        Args:
            nbytes: bytes of each bucket.
        """
        options = self.options
        rounds = options.late_cap_mb * 2**20 / max(1, sum(nbytes))
        if options.quorum != "all" and options.max_staleness + 1 > rounds:
            lowered = max(0, int(rounds) - 1)
            if self.index == 0 and not self._said and lowered < options.max_staleness:
                self._said = True
                warn(
                    f"a round takes {sum(nbytes) / 2**20:,.0f} MiB here, and late_cap_mb={options.late_cap_mb:g} of "
                    f"them may wait for a late rank: max_staleness is {lowered} instead of {options.max_staleness}"
                )
            options = dataclasses.replace(options, max_staleness=lowered)
        return options.config(len(nbytes), self._parties, self._local_size)

    @property
    def met(self) -> EagerWorker | None:
        """The worker if it can accept gradients now; None if the ranks have not registered, or the rank is broken,
        discarded or inside ``consensus()``."""
        worker = self.worker
        if worker is None or not worker.ready or worker.engine.replaced or worker.in_consensus:
            return None
        return worker if self.broken is None and not self.discarded else None

    @property
    def settings(self) -> dict[str, Any]:
        """The algorithm in force, "eager", and its settings."""
        planned = self.options.config(0, self._parties, self._local_size)
        config = planned if self.worker is None else self.worker.config
        names = [name for name in config.__struct_fields__ if name not in ("buckets", "confirm", "agree")]
        return {"algorithm": "eager", **{name: getattr(config, name) for name in names}}

    @property
    def weighted(self) -> bool:
        """Whether rounds are weighted by samples."""
        return self.options.weighting == "samples"

    def check_weighting(self) -> None:
        """Raise ValueError if rounds are not weighted by samples."""
        if not self.weighted:
            raise ValueError(
                "record_samples() sets the weight of a gradient, and here all gradients have the same weight: pass "
                "weighting='samples' to EagerOptimizer, or leave the call out"
            )

    def record_samples(self, samples: Any) -> None:
        """Record the number of samples over which the next gradient is the mean.

        Raises:
            ValueError: as in ``samples_of``.
            ReplicaStateError: the gradient was handed over already.
        """
        self.replica.record_samples(self.samples_of(samples))

    def samples_of(self, samples: Any) -> int:
        """Return ``samples`` as an int.

        Raises:
            ValueError: it is not an integer from 0 to below 2**SAMPLE_DIGITS, or rounds are not weighted by samples.
        """
        self.check_weighting()
        hint = (
            f"record_samples() must get an integer from 0 (an empty batch) to below 2**{SAMPLE_DIGITS}, such as "
            f"len(batch), got {samples!r}"
        )
        try:
            count = operator.index(samples)
        except TypeError:
            raise ValueError(hint) from None
        if isinstance(samples, bool) or not 0 <= count < 2**SAMPLE_DIGITS:
            raise ValueError(hint)
        return count

    # -- registration, drains and cuts ------------------------------------------------------------------------------

    def fingerprint(self) -> tuple[list[str], list[int]]:
        return self.replica.fingerprint()

    def worker_now(self) -> EagerWorker:
        """Return the worker, as in ``Driver``. Also raises if a round was applied only in part on this rank."""
        worker: EagerWorker = super().worker_now()
        worker.whole.check()
        return worker

    def worker_to_step(self) -> EagerWorker:
        """Return ``worker_now()``, before a step.

        Raises:
            ReplicaStateError: as in ``worker_now``; or the call is inside ``consensus()``.
        """
        worker = self.worker_now()
        worker.check_outside_consensus("step()")
        return worker

    def make_worker(self, engine: Any, finish: Callable[[bool], None]) -> EagerWorker:
        reference = weakref.ref(self.replica.optimizer)

        def apply(round_: ReducedRound) -> None:
            optimizer = reference()
            if optimizer is not None:  # (else its weights are gone, and only the other ranks still need the round)
                optimizer._async.replica.apply(round_)

        wire, replica = self.replica.gradient_format(), self.replica
        config = self.config_for(wire.nbytes)
        return EagerWorker(engine, config, wire, finish, apply, replica.emptied, replica.arrives)

    def register_worker(self, worker: EagerWorker, number: int | None) -> None:
        if self.remains is not None:
            worker.take_over(self.remains.counted_from(-self.rounds_before, 0))
        elif self.restored is not None:
            worker.restore(self.restored)
        worker.register(*self.opening(), self.replica.hyperparameters(), number)

    def on_registered(self) -> None:
        """Drop the loaded or kept gradients, which the worker has taken over, with the counts of earlier ones."""
        if self.remains is not None:
            self.stats_before = dataclasses.replace(self.stats_before, gradients_produced=0, gradients_applied=0)
        self.restored = self.remains = None
        super().on_registered()

    def state_at_start(self) -> str | None:
        return f"{self.rounds} rounds" if self.rounds else None

    def finish(self, worker: EagerWorker, flush: bool) -> None:
        """End a drain (``flush``) or a cut. A collective.

        A drain also compares the replicas, since user code may have changed one of them, and warns of gradients since
        the last one that were not finite, unless an adaptive scale looks for these.

        Raises:
            ReplicaMismatchError: replicas differ.
        """
        self.replica.finish(worker, flush)
        if not flush:
            return
        before, self._skipped = self._skipped, worker.stats().gradients_skipped
        if self._skipped > before and not self.replica.scaled:
            warnings.warn(
                f"{self._skipped - before} step(s) of this rank since the last drain had NaN or infinity in a "
                f"gradient, which was left out of the average. Look for the cause in this rank's batches and losses; "
                f"nonfinite='raise' stops there",
                stacklevel=users_line(),
            )
        self.unify_buffers()
        worker.compare(*self.fingerprint(), "drain()")

    def discard(self) -> None:
        super().discard()
        self.replica.stop_hooks()

    # -- membership changes (elastic training) ----------------------------------------------------------------------

    def leave(self) -> None:
        worker = self.worker
        if worker is not None and worker.agreed and not self.discarded:
            self.remains = worker.remains().counted_from(self.rounds_before, self.steps_ended)
            orderly = worker.engine.failure is None  # (after a drain, ranks that are gone hold no gradients)
            self._gradients = None if orderly else self._counts(worker, self.remains)

    def _counts(self, worker: EagerWorker, remains: Remains) -> GradientCounts:
        failure = worker.engine.failure
        known = None if not isinstance(failure, RankLostError) else failure.handed_over
        return GradientCounts(
            place=self.index,
            size=self.size,
            applied=worker.applied[0],
            produced=worker.produced[0],
            in_rounds={number: len(gradients[0].versions) for number, gradients in remains.in_rounds.items()},
            pending=len(remains.pending[0].versions),
            handed_over=None if known is None else tuple(known.get(worker.number, ())) or None,
        )

    def standing(self) -> Standing:
        remains = self.remains or Remains(begun=self.steps_ended, ended=self.steps_ended)
        return Standing(
            self.rounds, remains.begun, remains.ended, remains.fit, gradients=self._gradients, seen=self.rounds
        )

    def continue_from(self, before: EagerDriver) -> None:
        super().continue_from(before)
        self.remains, self.restored, self._gradients = before.remains, before.restored, before._gradients
        self.stats_before = before.stats() + Stats(resets=1)

    def continue_at(self, rounds: int, ended: int, apart: bool) -> None:
        super().continue_at(rounds, ended, apart)
        self._gradients = None
        if self.remains is not None:
            after = self.remains.after(rounds, ended)
            again = after.counted and after.begun > ended
            self.stats_before = dataclasses.replace(self.stats_before, steps=self.stats_before.steps - again)
            self.remains = dataclasses.replace(after, counted=after.counted and not again)

    def count_lost(self, gradients: int) -> None:
        self.stats_before += Stats(gradients_lost=gradients)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def share(self) -> dict[str, Any]:
        """Return this rank's share of a checkpoint in addition to the wrapped optimizer's state: pending gradients.

        Raises:
            ReplicaStateError: gradients may be in flight, on this rank or another; or a round was applied that failed.
        """
        worker = self.worker
        if worker is not None and worker.engine.failure is not None and (round_ := worker.unsettled) is not None:
            raise ReplicaStateError(
                f"round {round_} was applied before it was complete, and it failed: these weights may be wrong, so "
                f"restart from a checkpoint. With HVD_ASYNC_CONFIRM=1 rounds are applied only once they are complete"
            )
        held: list[PendingGradient] = self.restored or []
        if worker is not None:
            held = worker.pending()
            if worker.may_lose:
                raise ReplicaStateError(_would_be_lost(max((len(versions) for _, versions in held), default=0)))
        version = 0 if worker is None else worker.version
        pending = {
            "vectors": [vector for vector, _ in held],
            "versions": [[v - version for v in versions] for _, versions in held],
        }
        return self.drained_share() | pending

    def drained_share(self) -> dict[str, Any]:
        nbytes = list(self.replica.nbytes)
        return {
            "size": self.size,
            "index": self.index,
            "rounds": self.rounds,
            "nbytes": nbytes,
            "vectors": [],
            "versions": [],
        }

    def take_share(self, share: Mapping[str, Any]) -> None:
        """Load what ``share`` returned, before the ranks register.

        Raises:
            ValueError: it holds gradients and belongs to another rank, another number of ranks or other buckets.
            ReplicaStateError: gradients of the present run are in flight.
        """
        if share.get("cut"):
            raise ValueError(
                "this state of a GossipOptimizer after cut() belongs to this rank's own weights, and the replicas of "
                "an EagerOptimizer are identical: save it after drain()"
            )
        lost = max((len(versions) for versions in share.get("versions", ())), default=0)
        if self.worker is not None and (not self.worker.settled or any(at for _, at in self.worker.pending())):
            raise ReplicaStateError("gradients of this run are on their way: call drain() before loading a state")
        if lost and (share["size"], share["index"]) != (self.size, self.index):
            raise ValueError(
                f"this state is of rank {share['index']} of {share['size']} after cut(), with {lost} gradient(s) "
                f"pending; on rank {self.index} of {self.size} they would be lost. Load each rank's own file at the "
                f"same size, or save after drain()."
            )
        if lost and list(share["nbytes"]) != list(self.replica.nbytes):
            raise ValueError(
                f"this state has {lost} gradient(s) pending in buckets of {share['nbytes']} bytes, and this optimizer "
                f"has buckets of {list(self.replica.nbytes)}: wrap it with the same bucket_cap_mb, groups, compression "
                f"and weighting"
            )
        if self.worker is not None and lost:
            raise ReplicaStateError("a state with pending gradients must be loaded before the first step")
        self.loads = True
        self.count_from(share["rounds"])
        if lost:
            pairs = zip(share["vectors"], share["versions"], strict=True)  # (copied: the worker adds to its vectors)
            self.restored = [PendingGradient(None if vector is None else vector + 0, list(at)) for vector, at in pairs]


def wire_label(compression: Any, dtypes: Iterable[str]) -> str:
    """Return how gradients travel, in which the ranks must agree: a collective of different dtypes fails.

    Args:
        compression: the user's.
        dtypes: names of the dtypes that are sent.
    """
    return f"{'/'.join(sorted(set(dtypes)))} by {getattr(compression, '__name__', type(compression).__name__)}"


def _would_be_lost(own: int) -> str:
    """Return the error message for a state saved while gradients are in flight, ``own`` of them this rank's."""
    whose = (
        f"{own} of this rank's would be lost by saving its state now, and other ranks' too"
        if own
        else "other ranks may have some, which would be lost by saving this rank's state now"
    )
    return (
        f"gradients are on their way: {whose}. Call drain() on every rank first and save rank 0's state, or call cut() "
        f"on every rank and save every rank's."
    )
