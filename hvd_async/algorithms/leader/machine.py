"""State machine of leader-pull: decides when a group of ranks is pulled, and towards which leader or the center.

Its laws:

1. *Steps of all ranks count together.* A pull of a group is due when its active ranks have taken ``local_period`` steps
   each, on average, since its last pull; a pull of all ranks when all active ranks have taken ``global_period``. Fast
   ranks do more. When a rank finishes, its share is subtracted from the count, so that its end makes no pull due.
2. *The leader* is the active rank with the lowest recent mean loss: sent within the last ``loss_window`` steps per
   rank, on average (``global_period``, if that is longer). So a rank that has finished or hangs never leads, nor does a
   rank whose loss is not finite; if no loss is finite, there is no pull. If no rank of a group has ever sent a loss,
   the ranks are notified. With a center (EASGD) no loss is needed. When all ranks have finished, the leader is chosen
   among all of them; if no loss is recent, the rank that sent the last one leads. A group of one rank, or of all ranks,
   has no leader of its own.
3. *One pull of a group at a time.* If another becomes due meanwhile, it starts, once, after the first has completed.
4. *No rank is waited for*: engines take part for ranks that compute, sleep or have finished.
5. *Steps may be reported together*: an event of n steps has the effect of n events of one step each with its loss.
6. *Illegal moves change nothing.* They raise ProtocolError.

An event is checked only for the groups that it changes: its rank's group and that of all ranks. The choice of a leader
reads all ranks of a group, but these have taken as many steps since the last choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_async.algorithms.leader.config import ALGORITHMS, LeaderConfig, PullDone, PullProgress, StartPull, StepTaken
from hvd_async.algorithms.leader.selection import ALL_RANKS, CENTER, NO_LEADER, pick_leader
from hvd_async.errors import ProtocolError
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command, OptimizerEvent

ROUNDING = 1e-6
"""Steps by which a sum of fractions of steps may be off: a loss that is just as old as is allowed still counts."""


@dataclass
class _Group:
    """Ranks that are pulled together.

    Attributes:
        ranks: ranks of the group.
        period: average number of steps per rank between two pulls.
        active: number of its ranks whose steps count.
        steps: number of steps since the last due pull.
        flight: number of the pull in flight; None if there is none.
    """

    ranks: tuple[int, ...]
    period: int
    active: int
    steps: int = 0
    flight: int | None = None

    @property
    def needed(self) -> int:
        """Number of steps after which a pull is due."""
        return self.period * self.active

    @property
    def is_due(self) -> bool:
        """Whether a pull is due and none is in flight."""
        return self.flight is None and 0 < self.needed <= self.steps


@dataclass
class StepClock:
    """Average number of steps per active rank, the same to the bit however many steps are counted at once."""

    _before: float = 0.0
    """Steps per rank until the number of active ranks last changed; since then, ``_steps`` of all ``_ranks``."""
    _steps: int = 0
    _ranks: int = 1

    def count(self, steps: int, ranks: int) -> None:
        """Count steps of a rank, with ``ranks`` active ranks."""
        if ranks != self._ranks:
            self._before, self._steps, self._ranks = self.now, 0, ranks
        self._steps += steps

    @property
    def now(self) -> float:
        """Time on this clock, steps per rank."""
        return self._before + self._steps / self._ranks


class LeaderStateMachine(StateMachine[LeaderConfig]):
    """State machine for the pulls of an optimizer."""

    def __init__(self, optimizer: int, ranks: Sequence[int]) -> None:
        super().__init__(optimizer, ranks)
        self._groups: dict[int, _Group] = {}
        """The groups of ranks, in order; the group of all ranks is last."""
        self._groups_of: dict[int, list[int]] = {}
        """The numbers of each rank's groups, in that order."""
        self._touched: set[int] = set()
        """Groups that have changed, so that a pull may be due."""
        self._pulls: dict[int, int] = {}
        """The group of each pull in flight."""
        self._means: dict[int, float] = {}
        self._clock = StepClock()
        self._heard: dict[int, float] = {}
        """Time on ``_clock`` at which each rank last sent its mean loss."""
        self._uncounted: set[int] = set()
        """Ranks whose steps do not count until the next drain or cut ends."""
        self._leaving: list[int] = []
        """Ranks whose optimizer was deleted, but whose steps still count."""
        self._drains = False
        """Whether this was known to be a drain when a rank last finished."""
        self._round = 0
        self._leaderless = 0
        self._warned = False

    def tick(self, now: float) -> list[Command]:
        """Return nothing: no pull waits for time to pass."""
        return []

    def deadline(self) -> float | None:
        """Return None: no pull waits for time to pass."""
        return None

    def take_notice(self) -> str | None:
        """Return a notice as the base does, or a warning, once, if a pull had no leader."""
        if not self._leaderless or self._warned:
            return super().take_notice()
        self._warned = True
        return (
            "no rank of a group, or of all, has a finite mean loss, so it has no leader and is not pulled; check what "
            "record_loss() is given (a loss of more than loss_window steps ago does not count)"
        )

    def recipients(self, command: Command) -> Sequence[int]:
        """Return the ranks that a command is sent to: a pull is sent to its group only."""
        if isinstance(command, StartPull):
            return self._groups[command.group].ranks
        return super().recipients(command)

    def _blocked_on(self) -> tuple[str, frozenset[int]] | None:
        return None

    def _on_all_registered(self, config: Any) -> LeaderConfig:
        assert isinstance(config, LeaderConfig)
        if config.algorithm not in ALGORITHMS:
            raise ProtocolError(f"optimizer {self._optimizer} has an unknown algorithm, {config.algorithm!r}")
        self._uncounted, self._drains = set(self._done if self._flush else self._absent), self._flush
        self._leaving.clear()
        if not ALGORITHMS[config.algorithm].has_center:
            for number, places in enumerate(config.groups):
                self._add_group(number, tuple(self.ranks[place] for place in places), config.local_period)
        self._add_group(ALL_RANKS, self.ranks, config.global_period)
        if config.progress is not None:
            for group, steps in zip(self._groups.values(), config.progress.steps, strict=True):
                group.steps = steps
            self._means = {r: m for r, m in zip(self.ranks, config.progress.means, strict=True) if m is not None}
            self._heard = dict.fromkeys(self._means, 0.0)
        self._touched = set(self._groups)
        return config

    def _add_group(self, number: int, ranks: tuple[int, ...], period: int) -> None:
        self._groups[number] = _Group(ranks, period, sum(rank not in self._uncounted for rank in ranks))
        for rank in ranks:
            self._groups_of.setdefault(rank, []).append(number)

    def _on_event(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        match event:
            case StepTaken(_, loss, steps):
                self._running(rank, event)
                if steps < 1:
                    raise ProtocolError(f"rank {rank} reported {steps} steps")
                return self._step(rank, loss, steps)
            case PullDone(_, number):
                if not 1 <= number <= self._round:
                    raise ProtocolError(f"rank {rank} reported pull {number} as completed, of {self._round} started")
                group = self._pulls.pop(number, None)
                if group is None:  # a pull from before a drain or cut: it must start nothing afterwards
                    return []
                self._groups[group].flight = None
                self._touched.add(group)
            case _:
                raise ProtocolError(f"rank {rank} sent {type(event).__name__}, which is no event of leader-pull")
        return self._due()

    def _step(self, rank: int, loss: float | None, steps: int) -> list[Command]:
        """Count steps of a rank, in portions of which only the last step can make a pull due."""
        assert self._config is not None
        commands: list[Command] = []
        changed = [number for number in self._groups_of[rank] if self._is_pulled(number)]
        groups = [self._groups[number] for number in changed]
        while steps:
            left = [max(1, group.needed - group.steps) for group in groups if group.flight is None and group.active]
            some = 1 if self._touched else min([steps, *left])
            steps -= some
            self._clock.count(some, len(self.ranks) - len(self._done))
            if loss is not None:
                self._means[rank], self._heard[rank] = loss, self._clock.now
            for group in groups:
                group.steps += some
            self._touched.update(changed)
            commands += self._due(stepped=True)
        return commands

    def _start_due(self, now: float) -> list[Command]:
        return self._due()

    def _due(self, stepped: bool = False) -> list[Command]:
        """Return the pulls that are due.

        Args:
            stepped: whether a step has made them so, whose rank has just sent its loss. Otherwise the ranks that may
                lead may have taken no step for a while: the others were ahead and have finished.
        """
        commands: list[Command] = []
        if self._resuming:
            return commands
        for number in sorted(self._touched, key=lambda number: (number == ALL_RANKS, number)):  # all ranks last
            group = self._groups[number]
            if not group.is_due or not self._is_pulled(number):
                continue
            group.steps %= group.needed
            leader = CENTER if self._has_center else pick_leader(self._means, self._recent(group.ranks))
            if leader is None and self._means.keys() & set(group.ranks):
                self._leaderless += stepped
                continue
            self._round += 1
            if leader is not None:
                group.flight = self._round
                self._pulls[self._round] = number
            commands.append(StartPull(self._optimizer, self._round, number, NO_LEADER if leader is None else leader))
        self._touched.clear()
        return commands

    def _is_pulled(self, number: int) -> bool:
        """Return whether a group is ever pulled."""
        assert self._config is not None
        if number == ALL_RANKS:
            return self._config.whole
        return self._config.local and 1 < len(self._groups[number].ranks) < len(self.ranks)

    def _recent(self, ranks: Sequence[int]) -> list[int]:
        """Return which ranks may lead now: ranks whose steps count, or after all have finished, finished ranks too."""
        assert self._config is not None
        oldest = self._clock.now - max(self._config.loss_window, self._config.global_period) - ROUNDING
        counting = self._flush and len(self._done) < len(self.ranks)
        out = self._done.keys() if counting else self._absent
        return [rank for rank in ranks if rank not in out and self._heard.get(rank, -math.inf) >= oldest]

    @property
    def _has_center(self) -> bool:
        return self._config is not None and ALGORITHMS[self._config.algorithm].has_center

    # -- drains and cuts --------------------------------------------------------------------------------------

    def _on_event_of_absent(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        """Handle an event of a rank whose optimizer is deleted: its engine still takes part in pulls."""
        return self._on_event(rank, event, now) if isinstance(event, PullDone) else []

    def _forget(self, rank: int) -> None:
        self._leaving.append(rank)

    def _on_rank_finished(self, rank: int, now: float) -> list[Command]:
        """Stop counting steps of deleted ranks, and in a drain of finished ranks; in a cut these still count."""
        if self._config is None:
            return []  # ranks are counted when all have registered
        out = {*self._leaving}
        if self._flush:  # once this is known to be a drain, ranks that had finished earlier are out too
            out |= {rank} if self._drains else self._done.keys()
        left: dict[int, int] = {}
        for gone in out - self._uncounted:
            for number in self._groups_of[gone]:
                left[number] = left.get(number, self._groups[number].active) - 1
        self._uncounted |= out
        self._drains = self._flush
        self._leaving.clear()
        for number, active in left.items():
            group = self._groups[number]
            group.steps, group.active = group.steps * active // max(1, group.active), active
            self._touched.add(number)
        return []

    def _on_all_finished(self, rank: int, now: float) -> tuple[list[Command], int]:
        """Reset the groups; a drain also resets their numbers of steps."""
        for group in self._groups.values():
            group.steps, group.active, group.flight = 0 if self._flush else group.steps, len(group.ranks), None
        self._pulls.clear()
        self._uncounted.clear()
        self._leaving, self._drains = sorted(self._absent), False
        self._touched = set(self._groups)
        return [], self._round

    def _details(self) -> PullProgress:
        there = self.present
        present = [rank for rank in self.ranks if rank in there]
        leader = pick_leader(self._means, self._recent(present))
        if leader is None:
            heard = {rank: at for rank, at in self._heard.items() if rank in there}
            latest = max((at for rank, at in heard.items() if math.isfinite(self._means[rank])), default=None)
            leader = pick_leader(self._means, [rank for rank, at in heard.items() if at == latest])
        known = {leader, *self._recent(self.ranks)}  # a loss that is too old to count stays so in the next job
        means = [self._means.get(rank) if rank in known else None for rank in self.ranks]
        return PullProgress(
            leader=present[0] if leader is None else leader,
            steps=[group.steps for group in self._groups.values()],
            means=[None if mean is None or not math.isfinite(mean) else mean for mean in means],
        )
