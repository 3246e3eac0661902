"""The engine's half of following a leader: it takes part in pulls, and keeps what they bring for the training thread.

Whatever the training thread does, the engine gives a snapshot of the weights as they were after the last step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from hvd_async.algorithms.leader import equations
from hvd_async.algorithms.leader.counters import PullCounters
from hvd_async.algorithms.leader.equations import Strengths
from hvd_async.algorithms.leader.messages import LeaderConfig, PullDone, StartPull
from hvd_async.algorithms.leader.state_machine import ALL, CENTER, NO_LEADER
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.process_sets import RankGroup

Clip: TypeAlias = "Callable[[Vector, Vector, Vector], Vector]"
"""Of three vectors: the first, between the other two, element by element."""


@dataclass
class PullResults:
    """What pulls have brought, until the training thread takes it up. Vectors are never changed.

    Attributes:
        targets: towards which weights this rank is pulled, by group; not where it leads itself.
        fresh: groups whose target is new: the number of the pull, and who leads.
        force: EASGD: what has to be added to the weights.
        statistics: batch-norm statistics, averaged.
        sent: those of this rank that are in that average, as of ``PullExecutor.settle``.
    """

    targets: dict[int, Vector] = field(default_factory=dict)
    fresh: dict[int, tuple[int, int]] = field(default_factory=dict)
    force: Vector = None
    statistics: Vector = None
    sent: Vector = None

    def copy(self) -> PullResults:
        """Another with the same vectors."""
        return replace(self, targets=dict(self.targets), fresh=dict(self.fresh))


class PullExecutor:
    """Of one optimizer.

    Args:
        engine: this rank's.
        config: of all ranks.
        strengths: of the pulls; EASGD's count here.
        sharers: the ranks.
        group_set: the process set of this rank's group, as the binding's collectives know it.

    Attributes:
        group: of this rank.
        centre: EASGD's (engine thread).
        commanded: pulls so far, of other groups too.
        record: of pulls.
        log: where a test wants what happened to be recorded: ("taken", step, fresh) and ("shown", step) of a step,
            ("averaged", step), ("sent", pull), ("landed", pull), ("drained",).
    """

    def __init__(
        self, engine: Engine, config: LeaderConfig, strengths: Strengths, sharers: RankGroup, group_set: Any
    ) -> None:
        self._engine, self._config, self._strengths, self._sharers = engine, config, strengths, sharers
        self._group_set = group_set
        self.group = next(number for number, places in enumerate(config.groups) if sharers.index in places)
        self._lock = threading.Lock()
        """Held while what both threads share changes."""
        self._shown: Vector = None
        """The weights after the last step; never changed."""
        self._statistics: Vector = None
        """Batch-norm statistics after the last step, and 1 (all 0 if one is not finite); never changed. None on all
        ranks if they do not travel; that must not change, as ranks would wait for each other's."""
        self._come = PullResults()
        self.centre: Vector = None
        self.commanded = 0
        self._flying: set[int] = set()
        """Pulls that this rank takes part in and that are not over."""
        self._waiting: list[StartPull] = []
        """Pulls to submit, in order."""
        self._busy: set[int] = set()
        """Groups of which one is submitted and not over."""
        self._last: int | None = None
        """The last pull before a drain or cut that this rank has not ended yet; those after it wait."""
        self._restored = False
        self.record = PullCounters()
        self.log: list[Any] | None = None

    # -- training thread --------------------------------------------------------------------------------------

    def begin(self, weights: Vector, statistics: Vector) -> None:
        """As the worker's."""
        self._shown, self._statistics = weights, statistics
        if not self._restored:
            self.centre = weights

    def settle(self, own: Vector, step: int, clip: Clip) -> Vector | None:
        """As the worker's ``settle_statistics``, at a step."""
        if self._statistics is None:
            return None
        with self._lock:
            averaged, sent = self._come.statistics, self._come.sent
            self._come.statistics = self._come.sent = None
            self._statistics = own
            if averaged is None:
                return None
            mine = own[:-1]
            if own[-1] and sent[-1]:  # what this rank has learned since it sent its own is kept
                averaged = clip(averaged + (mine - sent[:-1]), mine, averaged)
            self._statistics = own + 0
            self._statistics[:-1], self._statistics[-1:] = averaged, 1.0
            self._note("averaged", step)
        return averaged

    def take(self, step: int) -> PullResults:
        """What has come, at a step."""
        with self._lock:
            come, self._shown = self._come.copy(), self._position()
            self._come.fresh, self._come.force = {}, None
            self._note("taken", step, come.fresh)
        return come

    def show(self, weights: Vector, step: int) -> None:
        """The weights after a step."""
        with self._lock:
            self._shown = weights
            self._note("shown", step)

    def tell(self, statistics: Vector) -> None:
        """Batch-norm statistics, outside of a step."""
        with self._lock:
            self._statistics = None if self._statistics is None else statistics

    def withhold_statistics(self) -> None:
        """Have no part in averages of batch-norm statistics any more: as one whose own are not finite."""
        with self._lock:
            self._statistics = None if self._statistics is None else self._statistics * 0

    def start_from(self, weights: Vector) -> None:
        """All ranks have these weights; what has come is of no more use."""
        with self._lock:
            self._shown, self._come, self.centre = weights, PullResults(), weights
            self._note("drained")

    @property
    def shown(self) -> Vector:
        """The weights after the last step."""
        return self._shown

    def come(self) -> PullResults:
        """What has come and was not taken, at a cut; EASGD's centre as a target of all."""
        with self._lock:
            come = self._come.copy()
        if self._config.algorithm == "easgd":
            come.targets = {ALL: self.centre}
        return come

    def restore(self, come: PullResults) -> None:
        """What ``come`` gave, in an earlier run."""
        self._come, self._restored = come.copy(), True
        if self._config.algorithm == "easgd":
            self.centre = self._come.targets.pop(ALL)

    def landed_all(self, last: int) -> bool:
        """Whether all pulls up to number ``last`` are over here."""
        with self._engine.changed:  # (the next ones may be coming)
            return not any(number <= last for number in self._flying)

    def _position(self) -> Vector:
        """The weights after the last step, and EASGD's force since: it counts at once, though the training thread may
        sleep, and the next pull starts from there."""
        return self._shown if self._come.force is None else self._shown + self._come.force

    def _note(self, *entry: Any) -> None:
        if self.log is not None:
            self.log.append(entry)

    # -- engine thread ----------------------------------------------------------------------------------------

    def pull(self, command: StartPull) -> None:
        """Take part in a pull, soon."""
        self.commanded += 1
        if command.leader != NO_LEADER and command.group in (ALL, self.group):
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
        """Submit what need not wait: for the end of this rank's drain or cut, or for the group's pull before it."""
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
        process_set = self._sharers.process_set if command.group == ALL else self._group_set
        collectives, own = self._engine.collectives, command.leader == self._engine.rank
        with self._lock:
            shown, statistics = self._position(), self._statistics
            self._note("sent", command.round)
        started, parts = self.record.clock(), 1 if statistics is None else 2

        def over(received: float) -> None:
            nonlocal parts
            parts -= 1
            self.record.bytes_received += int(received)
            if not parts:
                self._over(command, started)

        def averaged(total: Vector) -> None:
            with self._lock:
                if total[-1] > 0:
                    self._come.statistics, self._come.sent = total[:-1] / total[-1], statistics
            over(self._ring(command, total))

        def summed(total: Vector) -> None:
            self._move_centre(command, shown, total)
            over(self._ring(command, total))

        def landed(vector: Vector) -> None:
            self._keep(command, own, vector)
            over(0 if own else vector.nbytes)

        if statistics is not None:
            self._engine.submit(
                lambda: collectives.allreduce_sum(statistics + 0, f"{name}.statistics", process_set), averaged
            )
        if command.leader == CENTER:
            self._engine.submit(lambda: collectives.allreduce_sum(shown + 0, name, process_set), summed)
        else:
            vector = shown if own else collectives.empty_like(shown)
            self._engine.submit(lambda: collectives.broadcast(vector, command.leader, name, process_set), landed)

    def _ring(self, command: StartPull, total: Vector) -> float:
        """Bytes that a rank receives in a ring of the pull's ranks that adds up."""
        ranks = len(self._places(command))
        return float(2 * (ranks - 1) / ranks * total.nbytes)

    def _places(self, command: StartPull) -> Sequence[int]:
        """Of the pull's ranks, among the sharers."""
        return range(self._sharers.size) if command.group == ALL else self._config.groups[command.group]

    def _move_centre(self, command: StartPull, shown: Vector, total: Vector) -> None:
        """EASGD, by the weights ``shown`` that this rank had when the pull was submitted, and their ``total``."""
        apart = self.centre - shown
        self.record.distance(apart)
        force = apart * self._strengths.alpha
        mean = total * (1.0 / self._sharers.size)
        centre = equations.move_center(self.centre, mean, self._strengths.beta)
        with self._lock:
            self.centre = centre
            self._come.force = force if self._come.force is None else self._come.force + force
            self._fresh(command)

    def _keep(self, command: StartPull, own: bool, vector: Vector) -> None:
        """LSGD: a leader's weights."""
        with self._lock:
            if own:
                self._come.targets.pop(command.group, None)
            else:
                self._come.targets[command.group] = vector
            self._fresh(command)

    def _fresh(self, command: StartPull) -> None:
        self._come.fresh[command.group] = (command.round, command.leader)
        self._note("landed", command.round)

    def _over(self, command: StartPull, started: float) -> None:
        self._busy.discard(command.group)
        self.record.landed(command.group, command.leader, started)
        with self._engine.changed:
            self._flying.discard(command.round)
            self._engine.changed.notify_all()
        if self._engine.rank == self._sharers.ranks[self._places(command)[0]]:
            self._engine.send(PullDone(command.optimizer, command.round))
        self._advance()
