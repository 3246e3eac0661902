"""The engine's half of leader-pull: it takes part in pulls, and keeps their results for the training thread.

Whatever the training thread does, the engine gives a snapshot of the weights as they were after the last step.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from hvd_async.algorithms.leader.messages import ALL_RANKS, CENTER, NO_LEADER, LeaderConfig, PullDone, StartPull
from hvd_async.algorithms.leader.rule import Rule
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.stats import LeaderStats

Clip: TypeAlias = "Callable[[Vector, Vector, Vector], Vector]"
"""A function of three vectors: the first, limited element by element to the range between the other two."""
Statistics: TypeAlias = "Vector | Callable[[], Vector]"
"""Batch-norm statistics, shape (2 m,), or a function that returns them, called only in the few steps that use it."""
REMEMBERED = 10_000
"""Pulls that ``stats().history`` lists; earlier ones are only counted."""


class PullCounters:
    """Counts of one optimizer's pulls on this rank, kept by its engine thread.

    Attributes:
        pulls: completed ones.
        bytes_received: by them.
    """

    def __init__(self) -> None:
        self.pulls = self.bytes_received = 0
        self._led: Counter[tuple[bool, int]] = Counter()
        """Pulls by whether they are of all ranks, and by leader."""
        self._seconds = self._distance = 0.0
        self._distances = 0
        self._history: deque[tuple[float, int, int]] = deque(maxlen=REMEMBERED)

    @staticmethod
    def clock() -> float:
        """Return seconds, for ``add_pull``."""
        return time.perf_counter()

    def add_pull(self, group: int, leader: int, started: float) -> None:
        """Count a completed pull of a group, submitted at ``started``."""
        self.pulls += 1
        self._led[group == ALL_RANKS, leader] += 1
        self._seconds += self.clock() - started
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
        sent: this rank's statistics that are in that average, as of ``LeaderWorker.settle_statistics``.
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
    """One optimizer's pulls on this rank.

    Args:
        engine: this rank's.
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

    def __init__(self, engine: Engine, config: LeaderConfig, rule: Rule, rank_group: RankGroup, group_set: Any) -> None:
        self._engine, self._config, self._rule, self._rank_group = engine, config, rule, rank_group
        self._group_set, self._group = group_set, group_of(config, rank_group)
        self._lock = threading.Lock()
        """Held while state that both threads share changes."""
        self._snapshot: Vector = None
        """The weights after the last step; never changed."""
        self._statistics: Statistics | None = None
        """Batch-norm statistics after the last step, as of ``LeaderWorker.settle_statistics``; never changed. None on
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
        self.record = PullCounters()
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
        started, parts = self.record.clock(), 1 if statistics is None else 2

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
