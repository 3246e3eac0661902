"""The training thread's half of leader-pull: a rank trains alone and is pulled towards a leader or a center at times.

The next step applies the results of pulls, and waits for nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from hvd_async.algorithms.kept import Kept
from hvd_async.algorithms.leader.messages import LeaderConfig, PullProgress, StartPull
from hvd_async.algorithms.leader.options import ALGORITHMS
from hvd_async.algorithms.leader.pulls import Clip, PullExecutor, PullResults, Statistics, group_of
from hvd_async.algorithms.leader.rule import Rule, make_rule
from hvd_async.algorithms.leader.selection import LossWindow, Strengths
from hvd_async.algorithms.leader.step_reports import StepReports
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.messages import Drained, OptimizerCommand
from hvd_async.runtime.process_sets import RankGroup, SingleRank
from hvd_async.runtime.worker import Worker
from hvd_async.stats import LeaderStats

CENTER_NAME = "center"


@dataclass(frozen=True)
class SavedState:
    """A rank's state in a checkpoint after ``cut()``, beside its weights.

    Attributes:
        results: results of pulls; EASGD's center is a target of all.
        losses: those that count.
        steps: of this rank since the start.
        progress: progress of the ranks together.
    """

    results: PullResults
    losses: list[float]
    steps: int
    progress: PullProgress


class LeaderWorker(Worker):
    """One optimizer of one rank that is pulled towards leaders or a center, by its algorithm's rule.

    Args:
        engine: this rank's.
        config: the same on all ranks.
        strengths: of the pulls.
        rank_group: the ranks that share the optimizer.
        group_set: the process set of this rank's group, as the binding's collectives know it.
        window: how many losses count.
        finish: as ``Worker``.
        kept: the state that an earlier run's cut saved.
        brought: steps of this rank in earlier runs: strengths go by steps.

    Attributes:
        defers_sends: as of gossip's workers; a rank that follows a leader sends everything by ``publish``.
        weight: the push-sum weight of gossip's workers; here the optimizer works on the weights as they are.
        wants_before: whether ``mix`` needs the weights from before the update.
        keep: the optimizer, which must live until the next drain: other ranks count on this one's weights.
    """

    defers_sends = False
    weight = 1.0
    wants_before = False

    def __init__(
        self,
        engine: Engine,
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
        self._rule: Rule = make_rule(config, strengths, group_of(config, rank_group), rank_group.size)
        self.executor = PullExecutor(engine, config, self._rule, rank_group, group_set)
        self._losses, self._window = LossWindow(window), window
        self._reports = StepReports(engine)
        self._consensus: Vector = None
        """EASGD's center at the last drain or cut, before any rank went on; None if a leader stands for all."""
        self._leader = rank_group.ranks[0]
        self._saved = kept
        """The state at the last cut; None if all ranks had the same weights at the last end, or the start."""
        self._total = 0
        """Steps of all ranks until the last drain."""
        self._brought = brought if kept is None else kept.steps
        """Steps before this worker's first."""
        self._recorded = self._brought
        """Steps of this rank before its last loss."""
        self._step, self._before = 0, self._brought
        """Steps since the last drain or cut, and before it."""
        self._waited = 0.0
        """Seconds in ends. ``Engine.drain`` waits for several optimizers at once, so the engine cannot count them."""
        self._done_at: float | None = None
        """When this rank finished, until all have."""
        self.keep: object = None
        if kept is not None:
            self._restored = True
            self.executor.restore(kept.results)
            for loss in kept.losses:
                self._losses.record(loss)

    # -- a step -----------------------------------------------------------------------------------------------

    def begin(self, weights: Vector, statistics: Statistics | None = None) -> None:
        """Start from these weights, before the ranks register.

        Args:
            weights: the model's, shape (n,), the same on all ranks; they belong to the worker.
            statistics: as of ``settle_statistics``; None, on all ranks, if they do not travel.
        """
        self.executor.begin(weights, statistics)
        self._consensus = self.executor.consensus

    def record_loss(self, loss: float) -> None:
        """Record the training loss of this step."""
        self._losses.record(loss)
        self._recorded = self.steps

    def check_step(self) -> None:
        """Raise, if no step can be taken now; before one changes any weight.

        Raises:
            ValueError: a leader has to be chosen, and this rank has never recorded a loss; or a strength is not in
                [0, 1).
        """
        self._registered_number()
        self._check_drained()
        if self.executor.commanded:
            self._check_loss()
        self._strengths.at(self.steps + 1)

    def check_finished(self, flush: bool) -> None:
        """Raise, if this rank cannot finish now: a leader is chosen at ends too."""
        super().check_finished(flush)
        self._check_loss()

    def announce_finished(self, flush: bool) -> None:
        """Announce that this rank has finished; from now on it waits."""
        super().announce_finished(flush)
        if self._done_at is None:
            self._done_at = time.perf_counter()

    def _check_loss(self) -> None:
        if isinstance(self._rank_group.process_set, SingleRank):
            return
        if not self._has_center and self.steps > self._brought and self._losses.mean is None:
            raise ValueError(
                "a leader is to be chosen by training losses, and this rank has recorded none: call "
                "opt.record_loss(loss) before each opt.step(). (Keras' fit() does it by itself, but a "
                "LossScaleOptimizer must be inside: LeaderOptimizer(LossScaleOptimizer(optimizer)))"
            )

    def settle_statistics(self, own: Statistics, clip: Clip) -> Vector | None:
        """Publish this step's batch-norm statistics and merge averaged ones in, before ``mix``.

        Args:
            own: this rank's, shape (2 m,), as of ``WeightReplica.statistics``. It belongs to the worker.
            clip: of vectors.

        Returns:
            The statistics to go on with, shape (2 m,), after a pull: the average and this rank's change since it sent
            its own, but not beyond its own, so that a variance stays positive; where the second half has a 0, no rank's
            is known. None: its own.
        """
        return self.executor.merge_statistics(own, self.steps + 1, clip)

    def mix(self, before: Vector, after: Vector) -> Vector:
        """Apply the results of pulls to the weights, at the end of a step.

        Args:
            before: not looked at.
            after: the weights after the update, shape (n,); they belong to the worker from now on.

        Returns:
            The weights to go on with, shape (n,).
        """
        self._step += 1
        step = self.steps
        taken = self.executor.take_results(step)
        x, differences = self._rule.on_step(taken.state, after, step, taken.fresh)
        for difference in differences:
            self.executor.record.add_distance(difference)
        return x

    def publish(self, weights: Vector) -> None:
        """Let pulls start from these weights, the model's after constraints and post-step hooks, shape (n,)."""
        step = self.steps
        self.executor.publish_weights(weights, step)
        old = step - self._recorded > self._window  # a loss that is not sent again grows old at the coordinator
        self._reports.add(self._registered_number(), None if old else self._losses.mean)

    # -- ends -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Pulls that have completed on this rank."""
        return self.executor.record.pulls

    @property
    def steps(self) -> int:
        """Steps of this rank, those of earlier runs included."""
        return self._before + self._step

    @property
    def settled(self) -> bool:
        """Whether no step was taken since the last drain or cut."""
        return self._step == 0

    def _counts(self) -> list[int]:
        return [self.steps]

    def _is_complete(self) -> bool:
        drained = self._inbox.drained
        return drained is not None and self.executor.has_completed(drained.rounds)

    def complete_drain(self) -> None:
        """Complete a drain or cut; in a drain, let the binding put ``gather``'s weights into the model."""
        drained = self._take_drained()
        assert drained.details is not None
        assert self._done_at is not None
        self._waited, self._done_at = self._waited + time.perf_counter() - self._done_at, None
        self._leader, self._consensus, total = drained.details.leader, self.executor.consensus, sum(drained.produced)
        self._before, self._step = self._before + self._step, 0
        moved = total != self._total or self._saved is not None  # since all ranks had the same weights
        if moved and drained.flushed:
            self._end(True)
            self._total, self.keep, self._saved = total, None, None
        elif moved:
            self._saved = SavedState(
                self.executor.pending_results(), self._losses.recorded, self._before, drained.details
            )
        self.engine.call_soon(self.executor.resume)

    def gather(self, weights: Vector, flush: bool) -> Vector:
        """Return a drain's weights: those of the leader of all ranks, or the center. A collective.

        Args:
            weights: this rank's, shape (n,); they belong to the worker from now on.
            flush: always.
        """
        x = self.consensus(weights)
        self.executor.start_from(x)
        return x

    def consensus(self, weights: Vector) -> Vector:
        """Return the weights that stand for all ranks: their leader's, or the center. A collective, right after an end.

        Args:
            weights: this rank's, shape (n,); they belong to the worker from now on.
        """
        if self._has_center:
            return self._consensus
        return self.broadcast(weights, self._leader, "the leader's weights")

    def leave(self, weights: Vector) -> Kept:
        """Return what this rank keeps, whose model has these weights, now that the ranks will be others."""
        center = self.executor.consensus
        shared = {} if center is None else {CENTER_NAME: center}
        return Kept(self.executor.moved(weights), {"losses": self._losses.recorded}, shared, self.version)

    def discard_results(self) -> None:
        """Go on with pulls for the other ranks; they move nothing here."""
        self.keep = None
        self.executor.withhold_statistics()
        self.executor.resume()

    @property
    def leader(self) -> int:
        """The rank whose mean loss was the lowest at the last end."""
        return self._leader

    def saved_state(self) -> SavedState | None:
        """Return the state that a checkpoint needs beside the weights after a cut; None after a drain."""
        return self._saved

    def stats(self) -> LeaderStats:
        """Return a snapshot of the counts."""
        return self.executor.record.stats(self.steps - self._brought, self._waited, self._losses.mean)

    # -- engine thread ----------------------------------------------------------------------------------------

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command."""
        match command:
            case StartPull():
                self.executor.pull(command)
            case Drained():
                if not self.deleted:
                    self.executor.pause(command.rounds)
                super().on_command(command)
            case _:
                super().on_command(command)
