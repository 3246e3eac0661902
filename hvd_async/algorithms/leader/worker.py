"""LSGD and EASGD as one rank sees them: it trains by itself and is pulled towards a leader, or a centre, now and then.

What pulls have brought is taken up by the training thread's next step, which waits for nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from hvd_async.algorithms.leader import equations
from hvd_async.algorithms.leader.equations import LossWindow, Strengths
from hvd_async.algorithms.leader.messages import LeaderConfig, PullProgress, StartPull, StepTaken
from hvd_async.algorithms.leader.pulls import Clip, PullExecutor, PullResults
from hvd_async.algorithms.leader.state_machine import ALL
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.messages import Drained, OptimizerCommand
from hvd_async.runtime.process_sets import RankGroup, SingleRank
from hvd_async.runtime.worker import Worker
from hvd_async.stats import LeaderStats


@dataclass(frozen=True)
class SavedState:
    """What of a rank's following a checkpoint after ``cut()`` holds, beside its weights.

    Attributes:
        come: what pulls have brought; EASGD's centre is a target of all.
        losses: that count.
        steps: of this rank since the start.
        standing: between the ranks.
    """

    come: PullResults
    losses: list[float]
    steps: int
    standing: PullProgress


class LeaderWorker(Worker):
    """One optimizer of one rank that follows a leader (LSGD) or a centre (EASGD).

    Args:
        engine: this rank's.
        config: the same on all ranks.
        strengths: of the pulls.
        sharers: the ranks.
        group_set: the process set of this rank's group, as the binding's collectives know it.
        window: how many losses count.
        finish: as ``Worker``.
        kept: what an earlier run's cut has left.
        brought: steps of this rank in earlier runs, by which strengths go.
    """

    weight = 1.0
    """As of ``GossipWorker``: the optimizer works on the weights as they are."""
    wants_before = False

    def __init__(
        self,
        engine: Engine,
        config: LeaderConfig,
        strengths: Strengths,
        sharers: RankGroup,
        group_set: Any,
        window: int,
        finish: Callable[[bool], object],
        kept: SavedState | None = None,
        brought: int = 0,
    ) -> None:
        if kept is not None:
            config = msgspec.structs.replace(config, standing=kept.standing)
        super().__init__(engine, config, sharers.members, sharers.process_set, sharers.id, finish)
        self.config, self._strengths, self._sharers = config, strengths, sharers
        self.receiver = PullExecutor(engine, config, strengths, sharers, group_set)
        self._losses, self._window = LossWindow(window), window
        self._centre: Vector = None
        """EASGD's at the last drain or cut, before anybody went on."""
        self._leader = sharers.ranks[0]
        self._kept = kept
        """As it was at the last cut; None if all ranks had the same weights at the last end, or the start."""
        self._total = 0
        """Steps of all ranks until the last drain."""
        self._brought = brought if kept is None else kept.steps
        """Steps before this worker's first."""
        self._recorded = self._brought
        """Steps of this rank before its last loss."""
        self._step, self._before = 0, self._brought
        """Steps since the last drain or cut, and before it."""
        self._waited = 0.0
        """Seconds, in ends. (``Engine.drain`` waits for several at once, and counts for none.)"""
        self._done_at: float | None = None
        """When this rank was done, until all are."""
        self.keep: object = None
        if kept is not None:
            self._restored = True
            self.receiver.restore(kept.come)
            for loss in kept.losses:
                self._losses.record(loss)

    # -- a step -----------------------------------------------------------------------------------------------

    def begin(self, weights: Vector, statistics: Vector = None) -> None:
        """Before the ranks meet.

        Args:
            weights: the model's, shape (n,), the same on all ranks; they belong to the worker.
            statistics: as of ``settle_statistics``; None, on all ranks, if they do not travel.
        """
        self.receiver.begin(weights, statistics)
        self._centre = self.receiver.centre

    def record_loss(self, loss: float) -> None:
        """The training loss of this step."""
        self._losses.record(loss)
        self._recorded = self.steps

    def check_step(self) -> None:
        """Raise, if no step can be taken now; before one changes any weight.

        Raises:
            ValueError: a leader has to be chosen, and this rank has never said how large its loss is; or a strength is
                not in [0, 1).
        """
        self._opened_number()
        self._check_drained()
        if self.receiver.commanded:
            self._check_loss()
        self._strengths.now(self.steps + 1)

    def check_finished(self) -> None:
        """A leader is chosen at ends too."""
        self._check_loss()

    def announce_finished(self, flush: bool) -> None:
        """As the worker's; from now on this rank waits."""
        super().announce_finished(flush)
        if self._done_at is None:
            self._done_at = time.perf_counter()

    def _check_loss(self) -> None:
        if isinstance(self._sharers.process_set, SingleRank):
            return
        if self.config.algorithm == "lsgd" and self.steps > self._brought and self._losses.mean is None:
            raise ValueError(
                "a leader is to be chosen by training losses, and this rank has recorded none: call "
                "opt.record_loss(loss) before each opt.step(). (Keras' fit() does it by itself, but a "
                "LossScaleOptimizer must be inside: LeaderOptimizer(LossScaleOptimizer(optimizer)))"
            )

    def settle_statistics(self, own: Vector, clip: Clip) -> Vector | None:
        """Before ``mix``, where batch-norm statistics are averaged.

        Args:
            own: this rank's, shape (m + 1,), the last element 1; all 0 if one is not finite. It belongs to the worker.
            clip: of vectors.

        Returns:
            Those to go on with, shape (m,), after a pull: the average, and what this rank has learned since, but not
            beyond its own (a variance stays positive); None: its own.
        """
        return self.receiver.settle(own, self.steps + 1, clip)

    def mix(self, before: Vector, after: Vector) -> Vector:
        """End a step: pull the weights towards what has come, or a little towards what is known.

        Args:
            before: not looked at.
            after: the weights after the update, shape (n,); they belong to the worker from now on.

        Returns:
            The weights to go on with, shape (n,); they must not be changed.
        """
        self._step += 1
        step = self.steps
        come = self.receiver.take(step)
        x = after if come.force is None else after + come.force
        if self.config.algorithm == "lsgd":
            strengths = self._strengths.now(step)
            x = self._pulled(x, come, strengths) if come.fresh else self._near(x, come, strengths)
        self.receiver.show(x, step)
        old = step - self._recorded > self._window  # (what is not told again grows old at the coordinator)
        self.send(StepTaken(self._opened_number(), None if old else self._losses.mean))
        return x

    def _pulled(self, x: Vector, come: PullResults, strengths: dict[str, float]) -> Vector:
        """First towards the group's leader, then towards that of all."""
        for group, strength in ((self.receiver.group, strengths["local_pull"]), (ALL, strengths["global_pull"])):
            if group in come.fresh and group in come.targets:
                self.receiver.record.distance(come.targets[group] - x)
                x = equations.pull_towards(x, (come.targets[group], strength))
        return x

    def _near(self, x: Vector, come: PullResults, strengths: dict[str, float]) -> Vector:
        """Between pulls: towards both at once, by their part of a period."""
        local, whole = strengths["local_prox"], strengths["global_prox"]
        parts = {self.receiver.group: local / self.config.local_period, ALL: whole / self.config.global_period}
        pulls = [(come.targets[group], part) for group, part in parts.items() if part and group in come.targets]
        return equations.pull_towards(x, *pulls)

    # -- ends -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Pulls that this rank has seen land."""
        return self.receiver.record.pulls

    @property
    def steps(self) -> int:
        """Of this rank, those of earlier runs included."""
        return self._before + self._step

    @property
    def settled(self) -> bool:
        """Whether no step was taken since the last drain or cut."""
        return self._step == 0

    def _counts(self) -> list[int]:
        return [self.steps]

    def _whole(self) -> bool:
        """Whether all ranks are done, and all pulls before that have landed."""
        drained = self._inbox.drained
        return drained is not None and self.receiver.landed_all(drained.rounds)

    @property
    def has_available(self) -> bool:
        """Whether ``apply_available`` would do something, or has done all."""
        return self._inbox.refused is not None or self._whole()

    def apply_available(self) -> bool:
        """Nothing to do but wait: what pulls bring is taken up by the next step."""
        self._check_refused()
        return self._whole()

    def complete_drain(self) -> None:
        """All ranks are done: in a drain, let the binding put ``gather``'s weights into the model."""
        drained = self._take_drained()
        assert drained.details is not None
        assert self._done_at is not None
        self._waited, self._done_at = self._waited + time.perf_counter() - self._done_at, None
        self._leader, self._centre, total = drained.details.leader, self.receiver.centre, sum(drained.produced)
        self._before, self._step = self._before + self._step, 0
        moved = total != self._total or self._kept is not None  # (since all ranks had the same weights)
        if moved and drained.flushed:
            self._end(True)
            self._total, self.keep, self._kept = total, None, None
        elif moved:
            self._kept = SavedState(self.receiver.come(), self._losses.recorded, self._before, drained.details)
        self.engine.call_soon(self.receiver.resume)

    def gather(self, weights: Vector, flush: bool) -> Vector:
        """In a drain: the weights of the leader of all ranks, or the centre. A collective.

        Args:
            weights: this rank's, shape (n,); they belong to the worker from now on.
            flush: always.
        """
        x = self.consensus(weights)
        self.receiver.start_from(x)
        return x

    def consensus(self, weights: Vector) -> Vector:
        """What stands for all ranks: the weights of their leader, or the centre. A collective, right after an end.

        Args:
            weights: this rank's, shape (n,); they belong to the worker from now on.
        """
        if self.config.algorithm == "easgd":
            return self._centre
        return self.broadcast(weights, self._leader, "the leader's weights")

    def discard_results(self) -> None:
        """Pulls go on for the other ranks, and move nothing here."""
        self.keep = None
        self.receiver.withhold_statistics()
        self.receiver.resume()

    @property
    def leader(self) -> int:
        """The rank whose mean loss was the lowest at the last end."""
        return self._leader

    def kept(self) -> SavedState | None:
        """What a checkpoint needs beside the weights, after a cut; None after a drain: nothing."""
        return self._kept

    def stats(self) -> LeaderStats:
        """A snapshot."""
        return self.receiver.record.stats(self.steps - self._brought, self._waited, self._losses.mean)

    # -- engine thread ----------------------------------------------------------------------------------------

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command."""
        match command:
            case StartPull():
                self.receiver.pull(command)
            case Drained():
                if not self.deleted:
                    self.receiver.pause(command.rounds)
                super().on_command(command)
            case _:
                super().on_command(command)
