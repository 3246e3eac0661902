"""Rank of leader-pull, in any framework: it trains separately, and is periodically pulled to a leader or a center.

The training thread takes steps. Each step applies the results of the pulls that have completed, and waits for no rank.
The engine thread takes part in pulls whatever the training thread does: it sends a snapshot of the weights after the
last step, and keeps the results.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hvd_async.algorithms.leader.config import ALGORITHMS, LeaderConfig, PullDone, PullProgress, StartPull, StepTaken
from hvd_async.algorithms.leader.selection import ALL_RANKS, CENTER, NO_LEADER, LossWindow, Strengths
from hvd_async.algorithms.own_weights import Kept, WeightWorker
from hvd_async.runtime.carrier import Carrier, Collective
from hvd_async.runtime.interfaces import FiniteFlag, Handle, Program, RankRuntime, Vector
from hvd_async.runtime.process_sets import RankGroup, SingleRank
from hvd_async.runtime.protocol import OptimizerCommand
from hvd_async.stats import LeaderStats

# -- reports of steps --------------------------------------------------------------------------------------------------
# At most one report waits to be sent, however fast the rank takes steps.


class StepReports:
    """Reports of an optimizer's steps. A report covers all steps taken before the engine sends it.

    So a rank sends at most one report per wake-up of its engine, and fast ranks overload neither the engine's queue nor
    the coordinator.

    Args:
        engine: the engine of this rank.
    """

    def __init__(self, engine: RankRuntime) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._steps = 0
        """Number of unreported steps."""
        self._loss: float | None = None
        """Last mean loss of the unreported steps."""

    def add(self, optimizer: int, loss: float | None) -> None:
        """Report a step, and its mean loss if it is known (training thread).

        Raises:
            The error of the engine, if it has failed and would not send the report.
        """
        self._engine.check()
        with self._lock:
            self._steps += 1
            self._loss = self._loss if loss is None else loss
            first = self._steps == 1
        if first:
            self._engine.call_soon(lambda: self._send(optimizer))

    def _send(self, optimizer: int) -> None:
        """Send the report (engine thread)."""
        with self._lock:
            event = StepTaken(optimizer, self._loss, self._steps)
            self._steps, self._loss = 0, None
        self._engine.send(event)


# -- state ------------------------------------------------------------------------------------------------------------


REMEMBERED = 10_000
"""Maximum number of pulls in ``stats().history``; earlier pulls are only counted."""


@dataclass
class PullResults:
    """Results of pulls that no step has taken yet, as in a checkpoint after ``cut()``. Vectors never change.

    Attributes:
        targets: weights towards which this rank is pulled, by group, without groups that it leads. EASGD: the center.
        fresh: number of the pull and its leader, by group pulled since the last step.
        force: force of EASGD, to be added to the weights.
    """

    targets: dict[int, Vector] = field(default_factory=dict)
    fresh: dict[int, tuple[int, int]] = field(default_factory=dict)
    force: Vector = None


def group_of(config: LeaderConfig, rank_group: RankGroup) -> int:
    """Return the number of this rank's group."""
    return next(number for number, places in enumerate(config.groups) if rank_group.index in places)


# -- the rank ----------------------------------------------------------------------------------------------------------


CENTER_NAME = "center"


@dataclass(frozen=True)
class SavedState:
    """State of a rank in a checkpoint after ``cut()``, in addition to its weights.

    Attributes:
        results: results of pulls; EASGD's center is the target of all ranks.
        losses: losses that count.
        steps: number of steps of this rank since the start.
        progress: progress of all ranks.
    """

    results: PullResults
    losses: list[float]
    steps: int
    progress: PullProgress


class LeaderWorker(WeightWorker):
    """Optimizer of a rank in leader-pull, which is pulled by the rule of its algorithm.

    Args:
        engine: the engine of this rank.
        config: configuration, the same on all ranks.
        strengths: strengths of the pulls.
        rank_group: the ranks that share the optimizer.
        group_set: the process set of this rank's group, as the binding's collectives know it.
        window: number of losses that count.
        finish: as in ``Worker``.
        kept: state that an earlier run's cut saved.
        brought: number of steps of this rank in earlier runs, on which strengths may depend.

    Attributes:
        weight: as in gossip's workers, the push-sum weight; here always 1.
        wants_before: whether ``mix`` needs the weights before the update.
        commanded: number of commanded pulls.
        log: in order: ("taken", step, fresh) and ("shown", step) of a step, ("sent", pull), ("landed", pull),
            ("drained",).
    """

    weight = 1.0
    wants_before = False

    def __init__(
        self,
        engine: RankRuntime,
        config: LeaderConfig,
        strengths: Strengths,
        rank_group: RankGroup,
        group_set: Any,
        window: int,
        finish: Callable[[bool], object],
        kept: SavedState | None = None,
        brought: int = 0,
    ) -> None:
        if kept is not None:
            config = msgspec.structs.replace(config, progress=kept.progress)
        super().__init__(engine, config, rank_group.members, rank_group.process_set, rank_group.id, finish)
        self.config, self._strengths, self._rank_group = config, strengths, rank_group
        self._has_center = ALGORITHMS[config.algorithm].has_center
        self._rule = ALGORITHMS[config.algorithm].rule(config, strengths, group_of(config, rank_group), rank_group.size)
        self._group_set, self._carrier = group_set, Carrier(engine)
        self._lock = threading.Lock()
        """Lock of the state that both threads share: the rule's, which is replaced, never changed; and the next three.
        """
        self._state: Any = None
        self._fresh: dict[int, tuple[int, int]] = {}
        """Groups pulled since the last step, as in ``PullResults``."""
        self._snapshot: Vector = None
        """The weights after the last step; never changed."""
        self._snapshot_flag: FiniteFlag | None = None
        """Whether they are finite; None: they are."""
        self._good: Vector = None
        """Finite weights that pulls start from if the last step's are not, while this is not known yet; None if it
        always is."""
        self.commanded = 0
        # Statistics, counted by the engine thread:
        self._bytes_received = 0
        self._led: Counter[tuple[bool, int]] = Counter()
        """Number of pulls, by whether they are of all ranks, and by leader."""
        self._distance: Any = 0.0
        self._distances = 0
        self._history: deque[tuple[float, int, int]] = deque(maxlen=REMEMBERED)
        self._losses, self._window = LossWindow(window), window
        self._unread: list[Any] = []
        """Losses that the window does not contain yet: reading those of the present step would wait for a device."""
        self._recorded_before = 0
        """Number of them at the last ``publish``."""
        self._reports = StepReports(engine)
        self._consensus: Vector = None
        """EASGD's center at the last drain or cut, before any rank continued; None if there is no center."""
        self._leader = rank_group.ranks[0]
        self._saved = kept
        """State at the last cut; None if all ranks had equal weights after the last drain, or at the start."""
        self._total = 0
        """Number of steps of all ranks until the last drain."""
        self._brought = brought if kept is None else kept.steps
        """Number of steps before this worker's first."""
        self._recorded = self._brought
        """Number of steps of this rank before its last loss."""
        self._before = self._brought
        self._waited = 0.0
        """Seconds in drains and cuts. (``Engine.drain`` waits for several optimizers at once, so it cannot count.)"""
        self._done_at: float | None = None
        """Time when this rank finished, until all have."""
        self.can_be_late = not engine.elastic
        if kept is not None:
            self._restored, results = True, kept.results
            self._state, self._fresh = self._rule.restore(results.targets, results.force), dict(results.fresh)
            for loss in kept.losses:
                self._losses.record(loss)

    # -- a step -----------------------------------------------------------------------------------------------

    def begin(self, weights: Vector) -> None:
        """Start from these weights, before the ranks register.

        Args:
            weights: weights of the model, shape (n,), equal on all ranks; the worker takes ownership.
        """
        self._snapshot = weights
        if not self._restored:
            self._state = self._rule.begin(weights)
        self._good = weights if self.flags_late else None
        self._consensus = self.center

    def record_loss(self, loss: Any) -> None:
        """Record the training loss of this step, an object that ``float()`` makes a number. The choice of a leader sees
        it in the next step."""
        self._unread.append(loss)

    def _count_losses(self, due: int | None = None) -> None:
        """Let the first ``due`` of the unread losses count; None: all."""
        for loss in self._unread[:due]:
            self._losses.record(loss)
            self._recorded = self.steps
        del self._unread[:due]
        self._recorded_before = 0

    def check_step(self) -> None:
        """Raise if no step can be taken now, before the step changes any weight.

        Raises:
            ValueError: a leader must be chosen and this rank has never recorded a loss; or a strength is not in
                [0, 1).
        """
        self._check_drained()
        if self.commanded:
            self._check_loss()
        self._strengths.at(self.steps + 1)

    def check_finished(self, flush: bool) -> None:
        """Raise if this rank cannot finish now: drains and cuts choose a leader too."""
        super().check_finished(flush)
        self._count_losses()
        self._check_loss()

    def announce_finished(self, flush: bool) -> None:
        """Announce that this rank has finished, and start counting the time that it waits."""
        super().announce_finished(flush)
        if self._done_at is None:
            self._done_at = self.engine.clock()

    def _check_loss(self) -> None:
        if isinstance(self._rank_group.process_set, SingleRank):
            return
        if not self._has_center and self.steps > self._brought and self._losses.mean is None and not self._unread:
            raise ValueError(
                "a leader is to be chosen by training losses, and this rank has recorded none: call "
                "opt.record_loss(loss) before each opt.step(). (Keras' fit() does it automatically, but a "
                "LossScaleOptimizer must be inside: LeaderOptimizer(LossScaleOptimizer(optimizer)))"
            )

    def mix(self, before: Vector, after: Vector) -> Vector:
        """Apply the results of pulls to the weights, at the end of a step.

        Args:
            before: unused.
            after: weights after the update, shape (n,); the worker takes ownership.

        Returns:
            The weights to continue with, shape (n,).
        """
        self._step += 1
        step = self.steps
        with self._lock:
            state, fresh, self._snapshot = self._state, self._fresh, self._position(self._snapshot)
            self._state, self._fresh = self._rule.after_step(state), {}
            self._note("taken", step, fresh)
        moved, differences = self._rule.on_step(state, after, step, fresh)
        self._add_distances(differences)
        return moved

    def _position(self, weights: Vector) -> Vector:
        """Return weights after the last step, moved by EASGD's pulls since then."""
        return self._rule.position(self._state, weights)

    def _add_distances(self, differences: Sequence[Vector]) -> None:
        """Count this rank's distances to a leader or the center: the lengths of these vectors (either thread)."""
        for difference in differences:
            length = (difference @ difference) ** 0.5
            self._distance += float(length) if self._good is None else length  # (which stays on the device)
            self._distances += 1

    def publish(self, weights: Vector) -> None:
        """Let pulls start from these weights, shape (n,): the model's after constraints and post-step hooks."""
        step = self.steps
        with self._lock:
            self._snapshot, self._snapshot_flag = weights, self.flag
            self._note("shown", step)
        self._count_losses(self._recorded_before if self._losses.recorded else None)  # (the first one is waited for)
        self._recorded_before = len(self._unread)
        old = step - self._recorded > self._window  # a loss that is not sent again ages at the coordinator
        self._reports.add(self.number, None if old else self._losses.mean)

    # -- drains and cuts --------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Number of pulls that have completed on this rank."""
        return self._carrier.completed

    @property
    def steps(self) -> int:
        """Number of steps of this rank, including earlier runs."""
        return self._before + self._step

    def _is_complete(self) -> bool:
        drained = self._drained
        return drained is not None and self._carrier.has_completed(drained.rounds)

    def complete_drain_program(self) -> Program[None]:
        """Complete a drain or cut; in a drain, let the binding put ``gather``'s weights into the model."""
        drained = self._take_drained()
        assert drained.details is not None
        assert self._done_at is not None
        self._waited, self._done_at = self._waited + self.engine.clock() - self._done_at, None
        self._leader, self._consensus, total = drained.details.leader, self.center, sum(drained.produced)
        moved = total != self._total or self._saved is not None  # since all ranks had equal weights
        if moved and drained.flushed:
            yield from self._finish(True)
            self._total, self._saved = total, None
        elif moved:
            self._saved = SavedState(self.pending_results(), self._losses.recorded, self.steps, drained.details)
        self._continue()

    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        """Return the weights after a drain: those of the leader of all ranks, or the center."""
        x = yield from self.consensus_program(weights)
        self.start_from(x)
        return x

    def start_from(self, weights: Vector) -> None:
        """Restart from weights that are equal on all ranks; results so far are dropped."""
        with self._lock:
            self._snapshot, self._state, self._fresh = weights, self._rule.begin(weights), {}
            self._snapshot_flag = None
            self._note("drained")

    @property
    def center(self) -> Vector:
        """EASGD's center; None if the consensus is a leader's weights."""
        return self._rule.consensus(self._state)

    def pending_results(self) -> PullResults:
        """Return the results that no step has taken, and the rule's state, for a checkpoint."""
        with self._lock:
            targets, force = self._rule.save(self._state)
            return PullResults(targets, dict(self._fresh), force)

    def consensus_program(self, weights: Vector) -> Program[Vector]:
        """Return the leader's weights, or the center."""
        if self._has_center:
            return self._consensus
        return (yield from self.broadcast_program(weights, self._leader, "the leader's weights"))

    def leave(self, weights: Vector) -> Kept:
        """Return the state that this rank, whose model has these weights, keeps across a membership change."""
        self._count_losses()
        shared = {} if self.center is None else {CENTER_NAME: self.center}
        return Kept(self._position(weights), {"losses": self._losses.recorded}, shared, self.version)

    @property
    def leader(self) -> int:
        """The rank with the lowest mean loss at the last drain or cut."""
        return self._leader

    def saved_state(self) -> SavedState | None:
        """Return the state that a checkpoint after a cut needs in addition to the weights; None after a drain."""
        return self._saved

    def stats(self) -> LeaderStats:
        """Return a snapshot of the statistics, with all losses so far."""
        losses = LossWindow(self._window)
        for loss in [*self._losses.recorded, *self._unread]:
            losses.record(loss)
        led = sorted(self._led.copy().items())
        return LeaderStats(
            steps=self.steps - self._brought,
            pulls=self._carrier.completed,
            led={leader: times for (of_all, leader), times in led if of_all},
            led_group={leader: times for (of_all, leader), times in led if not of_all},
            distance=float(self._distance) / self._distances if self._distances else 0.0,
            pull_s=self._carrier.mean_seconds,
            bytes_received=self._bytes_received,
            wait_s=self._waited,
            mean_loss=losses.mean,
            history=tuple(self._history.copy()),
            distances=self._distances,
        )

    # -- engine thread ----------------------------------------------------------------------------------------

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command."""
        if isinstance(command, StartPull):
            self._pull(command)
        else:
            super().on_command(command)

    def _pull(self, command: StartPull) -> None:
        """Take part in a pull, as soon as it may start."""
        self.commanded += 1
        if command.leader == NO_LEADER:
            return
        name = f"hvd_async.pull.{command.optimizer}.{command.group}"
        process_set = self._rank_group.process_set if command.group == ALL_RANKS else self._group_set
        self._carrier.carry(command.group, command.round, name, lambda: self._prepare(command, name, process_set))

    def _prepare(self, command: StartPull, name: str, process_set: Any) -> Collective:
        """Take a snapshot of this rank's weights for a pull, and return it."""
        collectives, leads = self.engine.collectives, command.leader == self.engine.rank
        with self._lock:
            snapshot, flag = self._position(self._snapshot), self._snapshot_flag
            with contextlib.nullcontext() if flag is None else flag.apart(snapshot, self._good):
                if flag is not None:
                    snapshot = self._good = flag.choose(snapshot, self._good)
                sends = leads or command.leader == CENTER
                vector = snapshot if sends else collectives.empty_like(snapshot)
            self._note("sent", command.round)

        def start() -> Handle:
            if command.leader == CENTER:
                return collectives.allreduce_sum(snapshot + 0, name, process_set)
            return collectives.broadcast(vector, command.leader, name, process_set)

        return Collective(start, lambda result: self._complete(command, snapshot, None if leads else result))

    def _places(self, command: StartPull) -> Sequence[int]:
        """Return the positions of the pull's ranks in the rank group."""
        return range(self._rank_group.size) if command.group == ALL_RANKS else self.config.groups[command.group]

    def _complete(self, command: StartPull, snapshot: Vector, result: Vector) -> None:
        """Apply a pull's result to the rule's state; ``snapshot`` are this rank's weights when it was submitted."""
        places = self._places(command)
        if result is not None:
            in_ring = 2 * (len(places) - 1) / len(places) if command.leader == CENTER else 1
            self._bytes_received += int(in_ring * result.nbytes)
        pulled, differences = self._rule.on_pull(self._state, command.group, snapshot, result)
        self._add_distances(differences)
        with self._lock:
            self._state = self._rule.merge(self._state, pulled)
            self._fresh[command.group] = (command.round, command.leader)
            self._note("landed", command.round)
        self._led[command.group == ALL_RANKS, command.leader] += 1
        self._history.append((time.time(), command.group, command.leader))
        if self.engine.rank == self._rank_group.ranks[places[0]]:
            self.engine.send(PullDone(command.optimizer, command.round))
