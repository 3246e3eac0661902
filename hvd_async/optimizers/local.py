"""The driver of ranks with weights of their own: a step's two halves, consensus, ends, checkpoints."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from hvd_async.algorithms.kept import Kept
from hvd_async.algorithms.leader.rank import Statistics
from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers.agreement import consensus_distance, unify_buffers
from hvd_async.optimizers.driver import Driver, Standing
from hvd_async.optimizers.replica import WeightReplica
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.process_sets import RankGroup


class WeightWorker(Protocol):
    """The worker of an algorithm whose ranks have weights of their own, beside what every ``Worker`` has.

    Attributes:
        keep: what must live until the next drain.
        defers_sends: whether constraints or post-step hooks may change the weights that ``mix`` returns.
    """

    keep: object
    defers_sends: bool

    @property
    def weight(self) -> float:
        """The factor by which the model's weights are multiplied while the wrapped optimizer updates them: the push-sum
        weight, else 1."""

    @property
    def wants_before(self) -> bool:
        """Whether ``mix`` wants the weights as they were before the update: D-PSGD."""

    @property
    def settled(self) -> bool:
        """Whether no step was taken since the last drain or cut."""

    def check_step(self) -> None:
        """Raise, if no step can be taken now; before one changes any weight."""

    def mix(self, before: Vector, after: Vector) -> Vector:
        """Mix other ranks' weights into this rank's, and return the model's weights."""

    def publish(self, weights: Vector) -> None:
        """Send what later steps of other ranks mix in; ``weights`` are the model's at the end of the step."""

    def consensus(self, weights: Vector) -> Vector:
        """Return what stands for all ranks. A collective."""

    def gather(self, weights: Vector, flush: bool) -> Vector:
        """Return the weights to go on with after a drain (``flush``) or a cut."""

    def saved_state(self) -> Any:
        """Return what a checkpoint needs beside the weights, after a cut; None: nothing."""

    def stats(self) -> Any:
        """Return a snapshot."""

    def leave(self, weights: Vector) -> Kept:
        """Return what this rank keeps, whose model has these weights, now that the ranks will be others."""


class StepStart(NamedTuple):
    """Terms that a step begins with.

    Attributes:
        scale: the factor of the weights while the wrapped optimizer's own update runs, and at no other time.
        needs_pre_update: whether ``end_step`` needs the weights from before the update too.
        updates: whether the wrapped optimizer is to step; else the update of this step is in the weights already, since
            before other ranks were lost.
    """

    scale: float
    needs_pre_update: bool
    updates: bool = True


class StepEnd(NamedTuple):
    """Results that a step ends with.

    Attributes:
        weights: the mixed weights, shape (n,); not to be changed in place.
        statistics: batch norm's, as of ``WeightReplica.statistics``; None, or 0 in the second half: this rank's own.
        correction: what is to be added to the wrapped optimizer's momentum, shape (n,); None: nothing.
    """

    weights: Vector
    statistics: Vector | None
    correction: Vector | None = None


class LocalDriver(Driver):
    """The driver of an optimizer whose ranks have weights of their own.

    A binding's step is: ``begin_step``, the wrapped optimizer's update, ``end_step``, constraints or post-step hooks on
    the mixed weights, ``publish``.

    Args:
        lifecycle, rank_group, replica: as ``Driver``.
        buffers: how batch-norm statistics agree: "average", "local", or "root".
        nothing: of ``stats``.

    Attributes:
        lr_factor: by what this rank's learning rate is multiplied within a step.
        corrects_momentum: whether any of its steps may end with a correction of the momentum.
        stats_before: of workers before this one.
        restored: what was loaded of an earlier run's cut.
        begun: whether settings were chosen by the epoch, or switched, since the start or a state was loaded.
    """

    replica: WeightReplica
    lr_factor = 1.0
    corrects_momentum = False

    def __init__(
        self, lifecycle: Lifecycle, rank_group: RankGroup, replica: WeightReplica, buffers: str, nothing: Any
    ) -> None:
        super().__init__(lifecycle, rank_group, replica)
        self.buffers, self.stats_before = buffers, nothing
        self.restored: Any = None
        self.begun = False
        self._in_step = False
        self._set_aside: Vector | None = None
        """This rank's weights, while the model holds the consensus."""
        """Whether a step has begun and its weights were not mixed yet."""
        self._begun = self._ended = 0
        """Steps whose update is in the weights, and those that were mixed."""
        self._own_steps = 0
        """Steps of this rank that have ended."""
        self.kept: Kept | None = None
        """State of before a reset, until the ranks have met."""
        self._shared_before = 0
        """``Kept.version`` when the ranks were last others."""

    # -- what an algorithm supplies -----------------------------------------------------------------------------

    @abc.abstractmethod
    def begin_worker(self, worker: Any) -> None:
        """Give a new worker the weights as they are."""

    @abc.abstractmethod
    def pack(self, kept: Any) -> dict[str, Any]:
        """Return what a worker has ``kept``, for a checkpoint."""

    @abc.abstractmethod
    def unpack(self, share: Mapping[str, Any]) -> Any:
        """Return what ``pack`` was given."""

    # -- a step -------------------------------------------------------------------------------------------------

    def begin_step(self, loss: Any = None, changes_weights: bool = False) -> StepStart:
        """Begin a step; the first meets the other ranks.

        Args:
            loss: of this step, if the binding knows it.
            changes_weights: whether constraints or post-step hooks may change the mixed weights.
        """
        worker: WeightWorker = self.worker_now()
        self.on_step(worker, loss)
        worker.check_step()
        worker.defers_sends = changes_weights
        self.replica.check()
        self._in_step = True
        updates = self._begun == self._ended
        self._begun += updates
        return StepStart(worker.weight, worker.wants_before, updates)

    def on_step(self, worker: Any, loss: Any) -> None:
        """Process the loss of the step that begins; arguments as for ``begin_step``."""

    def end_step(self, before: Vector | None, after: Vector, statistics: Statistics | None = None) -> StepEnd:
        """Mix other ranks' weights into this rank's.

        Args:
            before: the model's weights before the update, shape (n,), if the step needs them.
            after: the model's weights after the update. Both belong to the driver from now on.
            statistics: as of ``WeightReplica.statistics``.

        Raises:
            FloatingPointError: a weight is NaN or infinite; it was not sent.
        """
        worker: WeightWorker = self.worker
        with self.updating():
            if not self.replica.is_finite(after):
                raise FloatingPointError(self.replica.describe_nonfinite())
            merged = self.merged_statistics(statistics)
            weight = worker.weight
            if weight != 1.0:
                after *= weight
                if before is not None:
                    before *= weight
            mixed = worker.mix(after if before is None else before, after)
        return StepEnd(mixed, merged)

    def publish(self, weights: Vector) -> None:
        """Send what later steps of other ranks mix in, after constraints and post-step hooks. The step ends with it.

        Args:
            weights: the model's at the end of the step, shape (n,); not to be changed any more.
        """
        with self.updating():
            if self.worker.defers_sends and not self.replica.is_finite(weights):
                raise FloatingPointError(self.replica.describe_nonfinite())
            self.worker.publish(weights)
        self._in_step, self._ended = False, self._begun
        self._own_steps += 1

    def merged_statistics(self, own: Statistics | None) -> Vector | None:
        """Return the batch-norm statistics to go on with; None: this rank's own."""
        return None

    def updating(self) -> _Updating:
        """Return a context for a step or a part of one, which marks the rank as broken if it fails."""
        return _Updating(self)

    def break_off(self, error: BaseException) -> None:
        """Note that a step was broken off: this rank's weights are not what the others take them for."""
        self.broken, self._in_step = f"a step was broken off: {type(error).__name__}: {error}", False

    def check_usable(self) -> None:
        """Raise ReplicaStateError, if this rank can train no further with it."""
        if self._in_step:  # (in a graph no ``with`` statement is around a step)
            self._in_step = False
            self.broken = self.broken or "a step was broken off: an op of the training step's graph failed"
        super().check_usable()

    def pin(self) -> None:
        """Keep the optimizer, and so its weights, until the worker lets go of it at the end of a drain: other ranks
        count on them, also where user code has deleted the optimizer."""
        if self.worker is not None:
            self.worker.keep = self.replica.optimizer

    # -- what stands for all ranks --------------------------------------------------------------------------------

    def stats(self) -> Any:
        """Return what this rank's optimizer has done so far."""
        return self.stats_before if self.worker is None else self.stats_before + self.worker.stats()

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """In it the model holds what stands for all ranks; afterwards its own weights again. A collective."""
        self.end(False)
        with self.consensus_after_cut():
            yield

    @contextlib.contextmanager
    def consensus_after_cut(self) -> Iterator[None]:
        """``consensus`` after a cut. A collective."""
        worker: WeightWorker = self.worker_now()
        own, put_back = self.replica.read(), self.replica.keep_buffers()
        forgotten = False
        try:
            self.replica.write(self.replica.constrained(worker.consensus(own * worker.weight)))
            self.unify_buffers()
            self._set_aside = own
            with self.marked_consensus():
                yield
        except GeneratorExit:  # it was never left, and is cleared away: who knows what the model holds by now
            forgotten = True
            raise
        finally:
            own, self._set_aside = own if self._set_aside is None else self._set_aside, None
            if not forgotten:
                self.replica.write(own)
                put_back()

    def consensus_distance(self) -> float:
        """Return the root mean square distance of the ranks' weights from their mean. A collective, with a cut."""
        self.end(False)
        return consensus_distance(self.worker_now(), self.replica.read_double())

    def unify_buffers(self) -> None:
        """Make batch-norm statistics fit the weights that stand for all ranks, by the policy. A collective."""
        if self.buffers != "local":
            unify_buffers(self.worker_now(), self.replica.buffers(), self.buffers, self.rank_group.ranks[0])

    def united(self, vector: Vector, what: str) -> Vector:
        """Return what stands for all ranks' vectors after a drain: their mean. A collective."""
        total, ranks, _ = self.worker.sum(vector, what)
        return total / len(ranks)

    def on_weights_replaced(self) -> None:
        """Go on from other weights, which all ranks have, right after a drain. A collective."""
        self.begin_worker(self.worker)

    # -- the ranks' meeting and ends ------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return names of what its ranks have in common."""
        return self.replica.fingerprint(self.restored is not None)[0]

    def make_worker(self, engine: Any, finish: Callable[[bool], None]) -> Any:
        """Return a worker for the optimizer's parameters as they are."""
        self.replica.prepare()
        if self.worker is not None:  # of an engine that was shut down, and drained before
            self.stats_before = self.stats()
        return self.make_local_worker(engine, finish)

    @abc.abstractmethod
    def make_local_worker(self, engine: Any, finish: Callable[[bool], None]) -> Any:
        """Return a worker, after all is prepared."""

    def register_worker(self, worker: Any, number: int | None) -> None:
        """Tell the others of this optimizer, by a new worker."""
        self.pin()
        self.begin_worker(worker)
        worker.register(*self.replica.fingerprint(self.restored is not None), number=number)

    def on_registered(self) -> None:
        """Forget what was loaded or kept: the worker has it."""
        self.restored = self.kept = None

    def finish(self, worker: Any, flush: bool) -> None:
        """End a drain (``flush``) or a cut."""
        if self._set_aside is not None:  # (a cut with which another optimizer's consensus() begins)
            self._set_aside = worker.gather(self._set_aside, flush)
            return
        if flush:
            self.replica.warn_before_drain()
        weights = worker.gather(self.replica.read(), flush)
        constrained = self.replica.constrained(weights)
        self.replica.write(constrained)
        if flush and constrained is not weights:
            # (one rank's, to the bit: a norm may be rounded otherwise on another)
            first = worker.broadcast(self.replica.read(), self.rank_group.ranks[0], "the constrained weights")
            self.replica.write(first)
            self.begin_worker(worker)
        if flush:
            self.unify_buffers()
            averages = self.replica.moving_averages()
            if averages is not None:
                self.replica.write_moving_averages(self.united(averages, "the moving averages of weights"))

    def replace_worker(self) -> None:
        """Let the worker go, after a drain; what it has counted is kept."""
        if self.worker is not None:
            self.stats_before, self.rounds_before = self.stats(), self.rounds
            self.worker.delete()
            self.worker = None

    # -- other ranks in the same process (elastic training) -------------------------------------------------------

    def leave(self) -> None:
        worker: WeightWorker | None = self.worker
        if worker is not None and self.worker.agreed and not self.discarded:
            kept = worker.leave(self.replica.read())
            self.replica.write(kept.weights)
            self.kept = kept._replace(version=kept.version + self._shared_before)

    def roll_back(self) -> None:
        self.stats_before = self.stats()
        super().roll_back()
        self._in_step, self._begun = False, self._ended

    def standing(self) -> Standing:
        kept = self.kept
        if kept is None:
            return Standing(self._shared_before, self._begun, self._ended, seen=self.rounds)
        shared = tuple(sorted(kept.shared))
        return Standing(kept.version, self._begun, self._ended, apart=True, shared=shared, seen=self.rounds)

    def go_on_from(self, before: Any) -> None:
        super().go_on_from(before)
        self.kept, self.begun, self._shared_before = before.kept, before.begun, before._shared_before
        self._begun, self._ended, self._own_steps = before._begun, before._ended, before._own_steps
        stats = before.stats()
        self.stats_before = dataclasses.replace(stats, steps=before._own_steps, resets=stats.resets + 1)

    def share_vectors(self, shared: Mapping[str, Vector], version: int) -> None:
        """Take vectors that all ranks are to have after so many averages or pulls, and what follows from them."""
        kept = self.kept
        if kept is not None and kept.catch_up is not None:
            self.replica.write(kept.catch_up(shared, version - self._shared_before))
        self.kept = (kept or Kept(None))._replace(shared=dict(shared), version=version, catch_up=None)

    def go_on(self, rounds: int, ended: int, apart: bool) -> None:
        self.steps_ended, self._shared_before = ended, rounds
        self._begun, self._ended = max(self._begun, ended), ended
        if apart:
            self.restored = self.restart(self.kept or Kept(None))

    @abc.abstractmethod
    def restart(self, kept: Kept) -> Any:
        """Return the state with which a worker begins, on all ranks, from weights of their own."""

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def share(self) -> dict[str, Any]:
        """Return this rank's share of a checkpoint, apart from weights and the wrapped optimizer's own state.

        Raises:
            ReplicaStateError: a step was taken since the last drain or cut.
        """
        worker: WeightWorker | None = self.worker
        if worker is not None and not worker.settled:
            raise ReplicaStateError(
                "messages between ranks are on their way, and this rank's state without them is not the whole of it. "
                "Call drain() on every rank first and save rank 0's state, or call cut() on every rank and save every "
                "rank's."
            )
        kept = self.restored if worker is None else worker.saved_state()
        common = {"size": self.size, "index": self.index, "rounds": self.rounds, "cut": kept is not None}
        return common | self.pack(kept)

    def take_share(self, share: Mapping[str, Any]) -> None:
        """Take back what ``share`` gave.

        Raises:
            ValueError: it is another rank's, after a cut, or of a job of another size, or an ``EagerOptimizer``'s with
                gradients pending.
            ReplicaStateError: messages of this run are on their way.
        """
        if self.worker is not None and not self.worker.settled:
            raise ReplicaStateError("messages of this run are on their way: call drain() before loading a state")
        if any(share.get("versions", ())):
            raise ValueError(
                "this state of an EagerOptimizer after cut() has gradients pending, which would be lost: save it after "
                "drain()"
            )
        cut = share.get("cut", False)
        if cut and (share["size"], share["index"]) != (self.size, self.index):
            raise ValueError(
                f"this state is of rank {share['index']} of {share['size']} after cut(): its weights are that rank's "
                f"own, and this is rank {self.index} of {self.size}. Load each rank's own file at the same size, or "
                f"save after drain()."
            )
        try:
            restored = self.unpack(share) if cut else None
        except KeyError as error:
            raise ValueError(
                f"this state after cut() is of another kind of optimizer (it has no {error}): save it after drain()"
            ) from None
        self.replace_worker()
        self.rounds_before, self.begun, self.restored = share["rounds"], False, restored


class _Updating:
    """The context of a step. (A class, since a step enters three, and a generator makes three times as many calls.)"""

    def __init__(self, driver: LocalDriver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        self._driver.pin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._driver.break_off(error)
