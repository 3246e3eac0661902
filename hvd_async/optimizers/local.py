"""Driver of ranks with weights of their own: the two halves of a step, consensus, drains, checkpoints."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from hvd_async.algorithms.gossip.rank import GossipWorker
from hvd_async.algorithms.leader.rank import LeaderWorker
from hvd_async.algorithms.own_weights import Kept
from hvd_async.errors import ReplicaStateError, ranks_text
from hvd_async.optimizers.agreement import kept_buffers
from hvd_async.optimizers.driver import Driver, Standing
from hvd_async.optimizers.replica import WeightReplica
from hvd_async.runtime.interfaces import FiniteFlag, Vector
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.runtime.process_sets import RankGroup

WeightWorker: TypeAlias = GossipWorker | LeaderWorker
UNKNOWN = 2
"""Steps after which it is known at the latest whether weights are finite, if a step does not wait for that. A host may
be more than one step ahead of its device, by as many kernels as its queue holds."""


class StepStart(NamedTuple):
    """Values with which a step begins.

    Attributes:
        scale: factor of the weights during the wrapped optimizer's own update only.
        needs_pre_update: whether ``end_step`` also needs the weights from before the update.
        updates: whether the wrapped optimizer must step; False if the weights already contain this step's update, made
            before other ranks were lost.
    """

    scale: float
    needs_pre_update: bool
    updates: bool = True


class StepEnd(NamedTuple):
    """Results with which a step ends.

    Attributes:
        weights: the mixed weights, shape (n,); must not be changed in place.
        correction: vector to add to the wrapped optimizer's momentum, shape (n,); None if there is none.
    """

    weights: Vector
    correction: Vector | None = None


class LocalDriver(Driver):
    """Driver of an optimizer whose ranks have weights of their own.

    A binding's step is: ``begin_step``, the wrapped optimizer's update, ``end_step``, constraints or post-step hooks on
    the mixed weights, ``publish``.

    Args:
        lifecycle, rank_group, replica, buffers, nothing: as in ``Driver``.

    Attributes:
        lr_factor: factor of this rank's learning rate within a step.
        corrects_momentum: whether any of its steps may end with a correction of the momentum.
        begun: whether settings were chosen by the epoch, or switched, since the start or since a state was loaded.
    """

    replica: WeightReplica
    alike = False
    lr_factor = 1.0
    corrects_momentum = False

    def __init__(
        self, lifecycle: Lifecycle, rank_group: RankGroup, replica: WeightReplica, buffers: str, nothing: Any
    ) -> None:
        super().__init__(lifecycle, rank_group, replica, buffers, nothing)
        self.begun = False
        self._in_step = False
        """Whether a step has begun whose weights were not mixed yet."""
        self._set_aside: Vector | None = None
        """This rank's weights, while the model holds the consensus."""
        self._begun = self._ended = 0
        """Steps whose update is in the weights, and those of them whose weights were mixed."""
        self._own_steps = 0
        """Steps of this rank that have ended."""
        self._flags: deque[tuple[int, FiniteFlag]] = deque()
        """Steps of which it was not known yet whether they have made a weight NaN or infinite."""
        self.kept: Kept | None = None
        """State from before a membership change, until the ranks have registered."""
        self._shared_before = 0
        """``Kept.version`` at the last membership change."""
        self._drained = False
        """Whether no step has begun since the last drain."""
        self._start: int | None = None
        """Checksum of the weights with which the first step since then began; None before the first drain."""

    # -- what an algorithm supplies -----------------------------------------------------------------------------

    @abc.abstractmethod
    def begin_worker(self, worker: Any) -> None:
        """Pass the present weights to a new worker."""

    @abc.abstractmethod
    def pack(self, kept: Any) -> dict[str, Any]:
        """Return the state that a worker has ``kept``, in the form of a checkpoint."""

    @abc.abstractmethod
    def unpack(self, share: Mapping[str, Any]) -> Any:
        """Return the state that ``pack`` was called with."""

    # -- a step -------------------------------------------------------------------------------------------------

    def begin_step(self, loss: Any = None, changes_weights: bool = False) -> StepStart:
        """Begin a step; the first one waits for the other ranks to register.

        Args:
            loss: loss of this step, if the binding knows it.
            changes_weights: whether constraints or post-step hooks may change the mixed weights.
        """
        worker: WeightWorker = self.worker_now()
        self.on_step(worker, loss)
        worker.check_step()
        worker.defers_sends = changes_weights
        self.replica.check()
        if self._drained:
            self.start()
        self._in_step = True
        updates = self._begun == self._ended
        self._begun += updates
        return StepStart(worker.weight, worker.wants_before, updates)

    def start(self) -> int | None:
        """Return the checksum of the weights with which this rank continued after the last drain; None before one."""
        if self._drained:
            self._drained, self._start = False, zlib.crc32(repr(self.replica.fingerprint(False)).encode())
        return self._start

    def on_step(self, worker: Any, loss: Any) -> None:
        """Process the loss of the step that begins; arguments as for ``begin_step``."""

    def end_step(self, before: Vector | None, after: Vector) -> StepEnd:
        """Mix other ranks' weights into this rank's, inside ``updating()``.

        Args:
            before: the model's weights before the update, shape (n,), if the step needs them.
            after: the model's weights after the update, shape (n,). The driver takes over the ownership of both.

        Raises:
            FloatingPointError: a weight is NaN or infinite, on a GPU perhaps since an earlier step; it was not sent.
        """
        worker: WeightWorker = self.worker
        self._check_finite(after)
        weight = worker.weight
        if weight != 1.0:
            after *= weight
            if before is not None:
                before *= weight
        return StepEnd(worker.mix(after if before is None else before, after))

    def publish(self, weights: Vector) -> None:
        """End the step, inside ``updating()``: send what later steps of other ranks mix in, after constraints and
        post-step hooks.

        Args:
            weights: the model's weights at the end of the step, shape (n,); must not be changed afterwards.

        Raises:
            FloatingPointError: constraints or hooks have made a weight NaN or infinite.
        """
        if self.worker.defers_sends:
            self._check_finite(weights)
        self.worker.publish(weights)
        self._in_step, self._ended = False, self._begun
        self._own_steps += 1

    def _check_finite(self, weights: Vector) -> None:
        """Check the weights of this step, at once or, where that would wait for a device, as soon as it is known."""
        worker: WeightWorker = self.worker
        worker.flag = self.replica.finite_flag(weights) if worker.flags_late else None
        if worker.flag is not None:
            self._flags.append((self._own_steps + 1, worker.flag))
            self._raise_nonfinite(self._own_steps + 1 - UNKNOWN)
        elif not self.replica.is_finite(weights):
            raise FloatingPointError(self.replica.describe_nonfinite())

    def _raise_nonfinite(self, due: int) -> None:
        """Raise FloatingPointError if a step is known to have made a weight NaN or infinite; wait until this is known
        of steps up to ``due``."""
        while self._flags and (self._flags[0][0] <= due or self._flags[0][1].is_known()):
            step, flag = self._flags.popleft()
            if not flag.is_finite():
                self._flags.clear()
                raise FloatingPointError(self.replica.describe_nonfinite(f"step {step}"))

    def check_weights(self) -> None:
        """Raise FloatingPointError if a step so far has made a weight NaN or infinite; wait until this is known."""
        if self._flags:
            with self.updating():
                self._raise_nonfinite(self._own_steps + 1)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Return a context for a step or a part of one. An exception in it marks the rank as broken, since its weights
        are no longer the ones that other ranks assume."""
        self.pin()
        try:
            yield
        except BaseException as error:
            self.broken, self._in_step = f"a step was broken off: {type(error).__name__}: {error}", False
            raise

    def check_usable(self) -> None:
        """Raise ReplicaStateError if this rank cannot continue to train with the optimizer."""
        if self._in_step:  # (a step in a graph is not inside a ``with`` statement)
            self._in_step = False
            self.broken = self.broken or "a step was broken off: an op of the training step's graph failed"
        super().check_usable()

    def pin(self) -> None:
        """Keep the optimizer, and with it the weights, alive until the worker releases it at the end of a drain: other
        ranks need the weights even if user code has deleted the optimizer."""
        if self.worker is not None:
            self.worker.keep = self.replica.optimizer

    # -- consensus ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Return a context in which the model holds the consensus; on exit it gets its weights back. A collective."""
        self.end(False)
        with self.consensus_after_cut():
            yield

    @contextlib.contextmanager
    def consensus_after_cut(self) -> Iterator[None]:
        """Return the context of ``consensus``, after a cut. A collective."""
        worker: WeightWorker = self.worker_now()
        own, put_back = self.replica.read(), kept_buffers(self.replica.buffers)
        forgotten = False
        try:
            self.replica.write(self.replica.constrained(worker.consensus(own * worker.weight)))
            self.unify_buffers()
            self._set_aside = own
            with self.marked_consensus():
                yield
        except GeneratorExit:  # (the context was never exited and is garbage-collected: the model may have changed)
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
        return super().consensus_distance()

    def united(self, vector: Vector, what: str) -> Vector:
        """Return the consensus of all ranks' vectors after a drain: their mean. A collective."""
        total, ranks, _ = self.worker.sum(vector, what)
        return total / len(ranks)

    def on_weights_replaced(self) -> None:
        """Continue from replaced weights, equal on all ranks, directly after a drain. A collective."""
        self.begin_worker(self.worker)

    # -- registration, drains and cuts ----------------------------------------------------------------------------

    def fingerprint(self) -> tuple[list[str], list[int]]:
        return self.replica.fingerprint(self.restored is not None)

    def state_at_start(self) -> str | None:
        own = self.restored is not None  # (after a cut each rank has its own)
        return "loaded" if not own and (self.loads or self.replica.has_state()) else None

    def make_worker(self, engine: Any, finish: Callable[[bool], None]) -> Any:
        self.replica.prepare()
        worker = self.make_local_worker(engine, finish)
        worker.start = self.start
        worker.check_weights, worker.flags_late = self.check_weights, worker.can_be_late and self.replica.flags_late
        return worker

    @abc.abstractmethod
    def make_local_worker(self, engine: Any, finish: Callable[[bool], None]) -> Any:
        """Return a worker; the replica is prepared."""

    def register_worker(self, worker: Any, number: int | None) -> None:
        self.pin()
        self.begin_worker(worker)
        worker.register(*self.opening(), self.replica.hyperparameters(), number)

    def on_registered(self) -> None:
        """Drop the loaded or kept state, which the worker has taken over."""
        self.restored = self.kept = None
        super().on_registered()

    def finish_whole(self, worker: Any, flush: bool) -> None:
        """Call ``finish``; an exception in it marks the rank as broken: it still counts its steps as before."""
        try:
            self.finish(worker, flush)
        except BaseException as error:
            self.broken = f"a drain or cut was broken off: {type(error).__name__}: {error}"
            raise

    def finish(self, worker: Any, flush: bool) -> None:
        if self._set_aside is not None:  # (in a cut at the start of another optimizer's consensus())
            self._set_aside = worker.gather(self._set_aside, flush)
            return
        if flush:
            self.replica.warn_before_drain()
        weights = worker.gather(self.replica.read(), flush)
        constrained = self.replica.constrained(weights)
        self.replica.write(constrained)
        if flush and constrained is not weights:
            # (Broadcast one rank's result, since norms may be rounded differently on different ranks.)
            first = worker.broadcast(self.replica.read(), self.rank_group.ranks[0], "the constrained weights")
            self.replica.write(first)
            self.begin_worker(worker)
        if flush:
            self.unify_buffers()
            averages = self.replica.moving_averages()
            if averages is not None:
                self.replica.write_moving_averages(self.united(averages, "the moving averages of weights"))
            self._drained = averages is None  # (eval() and train() of a schedule-free optimizer round a rank's weights)

    def replace_worker(self) -> None:
        """Delete the worker after a drain, and keep its statistics.

        Raises:
            ReplicaStateError: a rank no longer has the optimizer, for which the ranks that register the next worker
                would wait.
        """
        if self.worker is not None and self.worker.gone_at_end:
            raise ReplicaStateError(
                f"this optimizer is gone on {ranks_text(self.worker.gone_at_end)} (the script ended, or called "
                f"discard()), and all ranks must change settings or load a state together: do so before"
            )
        if self.worker is not None:
            self.stats_before, self.rounds_before = self.stats(), self.rounds
            self.worker.delete()
            self.worker = None

    # -- membership changes (elastic training) --------------------------------------------------------------------

    def leave(self) -> None:
        worker: WeightWorker | None = self.worker
        if worker is not None and self.worker.agreed and not self.discarded:
            kept = worker.leave(self.replica.read())
            self.replica.write(kept.weights)
            self.kept = kept._replace(version=kept.version + self._shared_before)
        elif not self.discarded and (shared := self.loaded()) is not None:
            self.kept = Kept(None, shared=shared, version=self._shared_before)

    @abc.abstractmethod
    def loaded(self) -> Mapping[str, Vector] | None:
        """Return the vectors that all ranks share, of a state that no worker has taken over yet: loaded, or of a worker
        that was replaced. None if there is no such state."""

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

    def continue_from(self, before: Any) -> None:
        super().continue_from(before)
        self.kept, self.begun, self._shared_before = before.kept, before.begun, before._shared_before
        self._begun, self._ended, self._own_steps = before._begun, before._ended, before._own_steps
        stats = before.stats()
        self.stats_before = dataclasses.replace(stats, steps=before._own_steps, resets=stats.resets + 1)

    def share_vectors(self, shared: Mapping[str, Vector], version: int) -> None:
        """Take over vectors that all ranks share, and catch up on this rank's weights.

        Args:
            shared: the vectors by name, shape (n,).
            version: number of averages or pulls that they include.
        """
        kept = self.kept
        if kept is not None and kept.catch_up is not None:
            self.replica.write(kept.catch_up(shared, version - self._shared_before))
        self.kept = (kept or Kept(None))._replace(shared=dict(shared), version=version, catch_up=None)

    def continue_at(self, rounds: int, ended: int, apart: bool) -> None:
        self.steps_ended, self._shared_before, self._has_met = ended, rounds, True
        self._begun, self._ended = max(self._begun, ended), ended
        if apart:
            self.restored = self.restart(self.kept or Kept(None))

    @abc.abstractmethod
    def restart(self, kept: Kept) -> Any:
        """Return the state with which workers begin if ranks have weights of their own."""

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def share(self) -> dict[str, Any]:
        """Return this rank's share of a checkpoint, without weights and the wrapped optimizer's own state.

        Raises:
            ReplicaStateError: a step was taken since the last drain or cut.
        """
        worker: WeightWorker | None = self.worker
        if worker is not None and not worker.settled:
            raise ReplicaStateError(
                "messages between ranks are on their way, and this rank's state would be incomplete without them. "
                "Call drain() on every rank first and save rank 0's state, or call cut() on every rank and save every "
                "rank's."
            )
        return self._share_of(self.restored if worker is None else worker.saved_state())

    def drained_share(self) -> dict[str, Any]:
        return self._share_of(None)

    def _share_of(self, kept: Any) -> dict[str, Any]:
        common = {"size": self.size, "index": self.index, "rounds": self.rounds, "cut": kept is not None}
        return common | self.pack(kept)

    def take_share(self, share: Mapping[str, Any]) -> None:
        """Load what ``share`` returned.

        Raises:
            ValueError: it was saved after a cut on another rank or with another number of ranks, or by an
                ``EagerOptimizer`` with pending gradients.
            ReplicaStateError: messages of this run are in flight.
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
        self.rounds_before, self.begun, self.restored, self.loads = share["rounds"], False, restored, True
