"""A rank of leader-pull, in any framework: it trains alone, and is pulled towards a leader or a center at times.

The training thread takes steps: each applies the results of the pulls that have come, and waits for nobody. The engine
thread takes part in pulls, whatever the training thread does: it gives a snapshot of the weights as they were after the
last step, and keeps the results.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from hvd_async.algorithms.kept import Kept
from hvd_async.algorithms.leader.config import ALGORITHMS, LeaderConfig, PullDone, PullProgress, StartPull, StepTaken
from hvd_async.algorithms.leader.selection import ALL_RANKS, CENTER, NO_LEADER, LossWindow, Strengths
from hvd_async.runtime.interfaces import Program, RankRuntime, Vector
from hvd_async.runtime.process_sets import RankGroup, SingleRank
from hvd_async.runtime.protocol import Drained, OptimizerCommand
from hvd_async.runtime.worker import Worker
from hvd_async.stats import LeaderStats

# -- the equations that a rank drives ----------------------------------------------------------------------------------


class Rule(Protocol):
    """An algorithm's equations over its immutable state, a ``NamedTuple``. Both threads of a rank call them; the worker
    and the ``PullExecutor`` have no arithmetic of their own."""

    def begin(self, weights: Vector) -> Any:
        """Return the state before the first pull, ``weights`` the same on all ranks."""
        ...

    def on_pull(self, state: Any, group: int, own: Vector, result: Vector) -> tuple[Any, tuple[Vector, ...]]:
        """Return a pull's result for ``merge``, and differences to the target whose lengths are counted.

        Only one pull after the other changes what this reads of the state; a step may run meanwhile.

        Args:
            state: before the pull.
            group: that was pulled; ``ALL_RANKS`` for all.
            own: this rank's weights when the pull was submitted, shape (n,).
            result: the leader's weights, None if this rank leads; with a center the sum of all ranks' weights.
        """
        ...

    def merge(self, state: Any, pulled: Any) -> Any:
        """Return the state of now with the result of ``on_pull``."""
        ...

    def on_step(self, state: Any, x: Vector, step: int, fresh: Collection[int]) -> tuple[Vector, tuple[Vector, ...]]:
        """Return the weights after a step, and differences whose lengths are counted.

        Args:
            state: when the step took the pulls' results.
            x: weights after the optimizer's update, shape (n,).
            step: this rank's, from 1.
            fresh: groups pulled since the step before.
        """
        ...

    def position(self, state: Any, x: Vector) -> Vector:
        """Return the weights from which a pull starts, ``x`` those after the last step."""
        ...

    def after_step(self, state: Any) -> Any:
        """Return the state of which a step has taken what it applies once."""
        ...

    def consensus(self, state: Any) -> Vector:
        """Return the weights that stand for all ranks; None if they are the leader's own."""
        ...

    def save(self, state: Any) -> tuple[dict[int, Vector], Vector]:
        """Return targets by group, and the force not applied yet or None, for a checkpoint."""
        ...

    def restore(self, targets: Mapping[int, Vector], force: Vector) -> Any:
        """Return the state that ``save`` gave."""
        ...


def make_rule(config: LeaderConfig, strengths: Strengths, group: int, size: int) -> Rule:
    """Return the rule of an optimizer's algorithm.

    Args:
        config: the same on all ranks.
        strengths: of the pulls.
        group: the group of this rank.
        size: ranks that share the optimizer.
    """
    rule: Rule = ALGORITHMS[config.algorithm].rule(config, strengths, group, size)
    return rule


# -- reports of steps --------------------------------------------------------------------------------------------------
# At most one report waits to be sent, however fast the rank steps.


class StepReports:
    """Reports of one optimizer's steps: a report covers all steps taken before the engine sends it.

    So a rank sends no more reports than its engine wakes up, and ranks that step faster than that neither fill the
    engine's posts nor keep the coordinator from anything else.

    Args:
        engine: the engine of this rank.
    """

    def __init__(self, engine: RankRuntime) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._steps = 0
        """Steps that were not reported yet."""
        self._loss: float | None = None
        """The last mean loss of these."""

    def add(self, optimizer: int, loss: float | None) -> None:
        """Report a step, and its mean loss if it has one (training thread).

        Raises:
            the engine's failure, if it has failed: nobody would send the report.
        """
        self._engine.check()
        with self._lock:
            self._steps += 1
            self._loss = self._loss if loss is None else loss
            first = self._steps == 1
        if first:
            self._engine.call_soon(lambda: self._send(optimizer))

    def _send(self, optimizer: int) -> None:
        """(Engine thread.)"""
        with self._lock:
            event = StepTaken(optimizer, self._loss, self._steps)
            self._steps, self._loss = 0, None
        self._engine.send(event)


# -- pulls (engine thread) ---------------------------------------------------------------------------------------------


Clip: TypeAlias = "Callable[[Vector, Vector, Vector], Vector]"
"""A function of three vectors: the first, limited element by element to the range between the other two."""
Statistics: TypeAlias = "Vector | Callable[[], Vector]"
"""Batch-norm statistics, shape (2 m,), or a function that returns them, called only in the few steps that use it."""
REMEMBERED = 10_000
"""Pulls that ``stats().history`` lists; earlier ones are only counted."""


class PullCounters:
    """Counts of the pulls of one optimizer on this rank, kept by its engine thread.

    Args:
        clock: seconds from an arbitrary origin.

    Attributes:
        pulls: completed ones.
        bytes_received: by them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.pulls = self.bytes_received = 0
        self._led: Counter[tuple[bool, int]] = Counter()
        """Pulls by whether they are of all ranks, and by leader."""
        self._seconds = self._distance = 0.0
        self._distances = 0
        self._history: deque[tuple[float, int, int]] = deque(maxlen=REMEMBERED)

    def add_pull(self, group: int, leader: int, started: float) -> None:
        """Count a completed pull of a group, submitted at ``started``."""
        self.pulls += 1
        self._led[group == ALL_RANKS, leader] += 1
        self._seconds += self._clock() - started
        self._history.append((time.time(), group, leader))

    def add_distance(self, difference: Vector) -> None:
        """Count this rank's distance to a leader or the center: the length of this vector."""
        self._distance += float(difference @ difference) ** 0.5
        self._distances += 1

    def stats(self, steps: int, wait_s: float, mean_loss: float | None) -> LeaderStats:
        """Return a snapshot, with the worker's own counts."""
        led = sorted(self._led.copy().items())
        return LeaderStats(
            steps=steps,
            pulls=self.pulls,
            led={leader: times for (of_all, leader), times in led if of_all},
            led_group={leader: times for (of_all, leader), times in led if not of_all},
            distance=self._distance / self._distances if self._distances else 0.0,
            pull_s=self._seconds / self.pulls if self.pulls else 0.0,
            bytes_received=self.bytes_received,
            wait_s=wait_s,
            mean_loss=mean_loss,
            history=tuple(self._history.copy()),
            distances=self._distances,
        )


@dataclass
class PullResults:
    """Results of pulls that no step has taken yet, as a checkpoint after ``cut()`` holds them. Vectors never change.

    Attributes:
        targets: weights towards which this rank is pulled, by group; none where it leads itself. EASGD: the center.
        fresh: groups pulled since the last step: the number of the pull, and who leads.
        force: EASGD's, to be added to the weights.
        statistics: batch-norm statistics, averaged, shape (2 m,): m values, then for each 1, or 0 if no rank's was
            finite.
        sent: this rank's statistics that are in that average, as in ``LeaderWorker.settle_statistics``.
    """

    targets: dict[int, Vector] = field(default_factory=dict)
    fresh: dict[int, tuple[int, int]] = field(default_factory=dict)
    force: Vector = None
    statistics: Vector = None
    sent: Vector = None


class TakenResults(NamedTuple):
    """The rule's state that a step takes, and the groups pulled since the step before."""

    state: Any
    fresh: dict[int, tuple[int, int]]


class PullExecutor:
    """Pulls of one optimizer on this rank.

    Args:
        engine: the engine of this rank.
        config: the same on all ranks.
        rule: the algorithm's equations.
        rank_group: the ranks that share the optimizer.
        group_set: the process set of this rank's group, as the binding's collectives know it.

    Attributes:
        commanded: pulls so far.
        record: counts of pulls.
        log: events for a test, in order: ("taken", step, fresh) and ("shown", step) of a step, ("averaged", step),
            ("sent", pull), ("landed", pull), ("drained",). None: they are not recorded.
    """

    def __init__(
        self, engine: RankRuntime, config: LeaderConfig, rule: Rule, rank_group: RankGroup, group_set: Any
    ) -> None:
        self._engine, self._config, self._rule, self._rank_group = engine, config, rule, rank_group
        self._group_set, self._group = group_set, group_of(config, rank_group)
        self._lock = threading.Lock()
        """Held while state that both threads share changes."""
        self._snapshot: Vector = None
        """The weights after the last step; never changed."""
        self._statistics: Statistics | None = None
        """Batch-norm statistics after the last step, as in ``LeaderWorker.settle_statistics``; never changed. None on
        all ranks if they do not travel; that must not change, as ranks would wait for each other's."""
        self._state: Any = None
        """The rule's; replaced, never changed."""
        self._fresh: dict[int, tuple[int, int]] = {}
        """Groups pulled since the last step, as in ``PullResults``."""
        self._averaged: Vector = None
        """Averaged statistics that no step has taken, and this rank's that are in them."""
        self._averaged_own: Vector = None
        self.commanded = 0
        self._flying: set[int] = set()
        """Pulls that this rank takes part in and that have not completed."""
        self._waiting: list[StartPull] = []
        """Pulls to submit, in order."""
        self._busy: set[int] = set()
        """Groups with a pull in flight."""
        self._last: int | None = None
        """The last pull before a drain or cut that this rank has not completed yet; later pulls wait."""
        self._restored = False
        self.record = PullCounters(engine.clock)
        self.log: list[Any] | None = None

    # -- training thread --------------------------------------------------------------------------------------

    def begin(self, weights: Vector, statistics: Statistics | None) -> None:
        """Start from these weights and statistics: see ``LeaderWorker.begin``."""
        self._snapshot, self._statistics = weights, statistics
        if not self._restored:
            self._state = self._rule.begin(weights)

    def merge_statistics(self, own: Statistics, step: int, clip: Clip) -> Vector | None:
        """Publish a step's statistics and merge averaged ones in: see ``LeaderWorker.settle_statistics``."""
        if self._statistics is None:
            return None
        with self._lock:
            averaged, sent = self._averaged, self._averaged_own
            self._averaged = self._averaged_own = None
            self._statistics = own
            if averaged is None:
                return None
            read = vector_of(own)
            (mine, finite), (average, known), (base, counted) = (one.reshape(2, -1) for one in (read, averaged, sent))
            # This rank's change since it sent its own is kept, where both are finite: elsewhere they are 0.
            moved = clip(average + finite * counted * (mine - base), mine * finite + average * (1 - finite), average)
            merged = averaged + 0
            merged.reshape(2, -1)[0] = moved
            self._statistics = after = read + 0
            shown = after.reshape(2, -1)
            shown[0], shown[1] = known * moved + (1 - known) * mine, known + (1 - known) * finite
            self._note("averaged", step)
        return merged

    def take_results(self, step: int) -> TakenResults:
        """Return the results of pulls so far, which this step applies."""
        with self._lock:
            taken, self._snapshot = TakenResults(self._state, self._fresh), self._position()
            self._state, self._fresh = self._rule.after_step(self._state), {}
            self._note("taken", step, taken.fresh)
        return taken

    def publish_weights(self, weights: Vector, step: int) -> None:
        """Let pulls start from these weights, those after a step."""
        with self._lock:
            self._snapshot = weights
            self._note("shown", step)

    def publish_statistics(self, statistics: Statistics | None) -> None:
        """Let pulls average these batch-norm statistics, outside of a step."""
        with self._lock:
            self._statistics = None if self._statistics is None else statistics

    def withhold_statistics(self) -> None:
        """Take no part in averages of batch-norm statistics any more, as a rank whose own are not finite."""
        with self._lock:
            self._statistics = None if self._statistics is None else vector_of(self._statistics) * 0

    def start_from(self, weights: Vector) -> None:
        """Start again from weights that all ranks have; results so far are dropped."""
        with self._lock:
            self._snapshot, self._state, self._fresh = weights, self._rule.begin(weights), {}
            self._averaged = self._averaged_own = None
            self._note("drained")

    @property
    def snapshot(self) -> Vector:
        """The weights after the last step."""
        return self._snapshot

    @property
    def consensus(self) -> Vector:
        """EASGD's center, which stands for all ranks; None if a leader does."""
        return self._rule.consensus(self._state)

    def moved(self, weights: Vector) -> Vector:
        """Return these weights, those after the last step, moved by EASGD's pulls since."""
        return self._rule.position(self._state, weights)

    def pending_results(self) -> PullResults:
        """Return the results that no step has taken, and the rule's state, for a checkpoint."""
        with self._lock:
            targets, force = self._rule.save(self._state)
            return PullResults(targets, dict(self._fresh), force, self._averaged, self._averaged_own)

    def restore(self, results: PullResults) -> None:
        """Take back the ``pending_results`` of an earlier run, before ``begin``."""
        self._state, self._restored = self._rule.restore(results.targets, results.force), True
        self._fresh, self._averaged, self._averaged_own = dict(results.fresh), results.statistics, results.sent

    def has_completed(self, last: int) -> bool:
        """Whether all pulls up to number ``last`` have completed here."""
        with self._engine.changed:  # the engine may be adding later ones
            return not any(number <= last for number in self._flying)

    def _position(self) -> Vector:
        """Return the weights from which a pull starts."""
        return self._rule.position(self._state, self._snapshot)

    def _note(self, *entry: Any) -> None:
        if self.log is not None:
            self.log.append(entry)

    # -- engine thread ----------------------------------------------------------------------------------------

    def pull(self, command: StartPull) -> None:
        """Take part in a pull, as soon as it may start."""
        self.commanded += 1
        if command.leader != NO_LEADER:
            with self._engine.changed:
                self._flying.add(command.round)
            self._waiting.append(command)
            self._advance()

    def pause(self, last: int) -> None:
        """Submit nothing of the pulls after number ``last``, until ``resume``."""
        self._last = last

    def resume(self) -> None:
        """Go on after a pause."""
        self._last = None
        self._advance()

    def _advance(self) -> None:
        """Submit pulls, except those that wait for this rank's drain or cut, or for the group's last pull."""
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            late = self._last is not None and command.round > self._last
            if late or command.group in self._busy:
                self._waiting.append(command)
            else:
                self._busy.add(command.group)
                self._submit(command)

    def _submit(self, command: StartPull) -> None:
        name = f"hvd_async.pull.{command.optimizer}.{command.group}"
        process_set = self._rank_group.process_set if command.group == ALL_RANKS else self._group_set
        collectives, own = self._engine.collectives, command.leader == self._engine.rank
        with self._lock:
            statistics = self._statistics = vector_of(self._statistics)
            snapshot = self._position()
            self._note("sent", command.round)
        started, parts = self._engine.clock(), 1 if statistics is None else 2

        def part_done(received: float) -> None:
            nonlocal parts
            parts -= 1
            self.record.bytes_received += int(received)
            if not parts:
                self._complete(command, started)

        def on_statistics(total: Vector) -> None:
            with self._lock:
                average = total + 0
                sums, counts = average.reshape(2, -1)
                if counts.max() > 0:
                    sums /= counts.clip(1)  # (0 where no rank's is finite)
                    counts[:] = counts.clip(0, 1)
                    self._averaged, self._averaged_own = average, statistics
            part_done(self._ring_bytes(command, total))

        def on_sum(total: Vector) -> None:
            self._apply(command, snapshot, total)
            part_done(self._ring_bytes(command, total))

        def on_leaders_weights(vector: Vector) -> None:
            self._apply(command, snapshot, None if own else vector)
            part_done(0 if own else vector.nbytes)

        if statistics is not None:
            self._engine.submit(
                lambda: collectives.allreduce_sum(statistics + 0, f"{name}.statistics", process_set), on_statistics
            )
        if command.leader == CENTER:
            self._engine.submit(lambda: collectives.allreduce_sum(snapshot + 0, name, process_set), on_sum)
        else:
            vector = snapshot if own else collectives.empty_like(snapshot)
            self._engine.submit(
                lambda: collectives.broadcast(vector, command.leader, name, process_set), on_leaders_weights
            )

    def _ring_bytes(self, command: StartPull, total: Vector) -> float:
        """Return the bytes that a rank receives in a ring allreduce of the pull's ranks."""
        ranks = len(self._places(command))
        return float(2 * (ranks - 1) / ranks * total.nbytes)

    def _places(self, command: StartPull) -> Sequence[int]:
        """Return the positions of the pull's ranks in the rank group."""
        return range(self._rank_group.size) if command.group == ALL_RANKS else self._config.groups[command.group]

    def _apply(self, command: StartPull, snapshot: Vector, result: Vector) -> None:
        """Apply a pull's result to the rule's state; ``snapshot`` are this rank's weights when it was submitted."""
        pulled, differences = self._rule.on_pull(self._state, command.group, snapshot, result)
        for difference in differences:
            self.record.add_distance(difference)
        with self._lock:
            self._state = self._rule.merge(self._state, pulled)
            self._fresh[command.group] = (command.round, command.leader)
            self._note("landed", command.round)

    def _complete(self, command: StartPull, started: float) -> None:
        self._busy.discard(command.group)
        self.record.add_pull(command.group, command.leader, started)
        with self._engine.changed:
            self._flying.discard(command.round)
            self._engine.changed.notify_all()
        if self._engine.rank == self._rank_group.ranks[self._places(command)[0]]:
            self._engine.send(PullDone(command.optimizer, command.round))
        self._advance()


def vector_of(statistics: Statistics | None) -> Vector:
    """Return the vector of batch-norm statistics; None if they do not travel."""
    return statistics() if callable(statistics) else statistics


def group_of(config: LeaderConfig, rank_group: RankGroup) -> int:
    """Return the number of this rank's group."""
    return next(number for number, places in enumerate(config.groups) if rank_group.index in places)


# -- the rank ----------------------------------------------------------------------------------------------------------


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
        engine: the engine of this rank.
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
            statistics: as in ``settle_statistics``; None, on all ranks, if they do not travel.
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
            self._done_at = self.engine.clock()

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
            own: this rank's, shape (2 m,), as in ``WeightReplica.statistics``. It belongs to the worker.
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

    def complete_drain_program(self) -> Program[None]:
        """Complete a drain or cut; in a drain, let the binding put ``gather``'s weights into the model."""
        drained = self._take_drained()
        assert drained.details is not None
        assert self._done_at is not None
        self._waited, self._done_at = self._waited + self.engine.clock() - self._done_at, None
        self._leader, self._consensus, total = drained.details.leader, self.executor.consensus, sum(drained.produced)
        self._before, self._step = self._before + self._step, 0
        moved = total != self._total or self._saved is not None  # since all ranks had the same weights
        if moved and drained.flushed:
            yield from self._finish(True)
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
        return self.run(self.gather_program(weights, flush))

    def gather_program(self, weights: Vector, flush: bool) -> Program[Vector]:
        """As ``gather``."""
        x = yield from self.consensus_program(weights)
        self.executor.start_from(x)
        return x

    def consensus(self, weights: Vector) -> Vector:
        """Return the weights that stand for all ranks: their leader's, or the center. A collective, right after an end.

        Args:
            weights: this rank's, shape (n,); they belong to the worker from now on.
        """
        return self.run(self.consensus_program(weights))

    def consensus_program(self, weights: Vector) -> Program[Vector]:
        """As ``consensus``."""
        if self._has_center:
            return self._consensus
        return (yield from self.broadcast_program(weights, self._leader, "the leader's weights"))

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
