"""State machine of leader-pull: when which group of ranks is pulled towards which leader, or the center.

The laws it keeps:

1. *Steps of all ranks count together.* When a group's active ranks have taken ``local_period`` steps each on the
   average since its last pull, the next is due; when all active ranks have taken ``global_period``, one of all is.
   Fast ranks do more. When a rank finishes, its part of the count is taken out: its end makes no pull due.
2. *The leader* is the active rank with the lowest mean loss of those sent in the last ``loss_window`` steps of a rank,
   on the average (``global_period``, if that is longer): not one that has finished, or hangs. When a rank's loss is not
   finite it never leads; when nobody's is there is no pull. When no rank of a group has ever sent a loss, the ranks are
   told so. With a center (EASGD) no loss is needed. When all have finished, the same holds of all ranks; and if no loss
   is recent, the last one sent leads. A group of one, and one of all ranks, has no leader of its own.
3. *One pull of a group at a time.* When another becomes due meanwhile, it starts once the first has completed, once.
4. *Nobody is waited for*: engines take part for ranks that compute, sleep or have finished.
5. *Illegal moves change nothing.* They raise ProtocolError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from hvd_async.algorithms.leader.messages import (
    ALL_RANKS,
    CENTER,
    NO_LEADER,
    LeaderConfig,
    PullDone,
    PullProgress,
    StartPull,
    StepTaken,
)
from hvd_async.algorithms.leader.options import ALGORITHMS
from hvd_async.algorithms.leader.selection import pick_leader
from hvd_async.errors import ProtocolError
from hvd_async.runtime.messages import Command, OptimizerEvent
from hvd_async.runtime.state_machine import StateMachine


@dataclass
class _Group:
    """Ranks that are pulled together.

    Attributes:
        ranks: its ranks.
        period: steps each, on the average, between two pulls.
        active: how many of its ranks count.
        steps: since the last pull that became due.
        flight: the number of the pull in flight.
    """

    ranks: tuple[int, ...]
    period: int
    active: int
    steps: int = 0
    flight: int | None = None


class LeaderStateMachine(StateMachine[LeaderConfig]):
    """Leader-pull of one optimizer."""

    def __init__(self, optimizer: int, ranks: Sequence[int]) -> None:
        super().__init__(optimizer, ranks)
        self._groups: dict[int, _Group] = {}
        self._means: dict[int, float] = {}
        self._clock = 0.0
        """Steps of an active rank, on the average."""
        self._heard: dict[int, float] = {}
        """When each rank has sent its mean loss, by this clock."""
        self._round = 0
        self._leaderless = 0
        self._told = False

    def tick(self, now: float) -> list[Command]:
        """Return nothing: no pull waits for time to pass."""
        return []

    def deadline(self) -> float | None:
        """Return None: as ``tick``."""
        return None

    def take_notice(self) -> str | None:
        """Return a warning of pulls that had no leader, once."""
        if not self._leaderless or self._told:
            return None
        self._told = True
        return (
            "no rank of a group, or of all, has a finite mean loss, so nobody leads it and nobody is pulled; look at "
            "what record_loss() is given (a loss of more than loss_window steps ago does not count)"
        )

    def _blocked_on(self) -> tuple[str, frozenset[int]] | None:
        return None

    def _on_all_registered(self, config: Any) -> LeaderConfig:
        assert isinstance(config, LeaderConfig)
        if config.algorithm not in ALGORITHMS:
            raise ProtocolError(f"optimizer {self._optimizer} follows {config.algorithm!r}, which is no algorithm")
        if not ALGORITHMS[config.algorithm].has_center:
            for number, places in enumerate(config.groups):
                ranks = tuple(self.ranks[place] for place in places)
                self._groups[number] = _Group(ranks, config.local_period, self._count(ranks))
        self._groups[ALL_RANKS] = _Group(self.ranks, config.global_period, self._count(self.ranks))
        if config.progress is not None:
            for group, steps in zip(self._groups.values(), config.progress.steps, strict=True):
                group.steps = steps
            self._means = {r: m for r, m in zip(self.ranks, config.progress.means, strict=True) if m is not None}
            self._heard = dict.fromkeys(self._means, 0.0)
        return config

    def _on_event(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        match event:
            case StepTaken(_, loss):
                self._running(rank, event)
                self._clock += 1 / len(self._active())
                if loss is not None:
                    self._means[rank], self._heard[rank] = loss, self._clock
                for number, group in self._groups.items():
                    group.steps += rank in group.ranks and self._is_pulled(number)
            case PullDone(_, number):
                if not 1 <= number <= self._round:
                    raise ProtocolError(f"rank {rank} saw pull {number} land, of {self._round}")
                over = [group for group in self._groups.values() if group.flight == number]
                for group in over:
                    group.flight = None
                if not over:  # a pull from before an end: it may start nothing after a cut
                    return []
            case _:
                raise ProtocolError(f"rank {rank} sent {type(event).__name__} to follow a leader")
        return self._due()

    def _due(self) -> list[Command]:
        commands: list[Command] = []
        for number, group in self._groups.items():  # local ones first
            needed = group.period * group.active
            if group.flight is not None or not 0 < needed <= group.steps or not self._is_pulled(number):
                continue
            group.steps %= needed
            leader = CENTER if self._has_center else pick_leader(self._means, self._recent(group.ranks))
            if leader is None and self._means.keys() & set(group.ranks):
                self._leaderless += 1
                continue
            self._round += 1
            if leader is not None:
                group.flight = self._round
            commands.append(StartPull(self._optimizer, self._round, number, NO_LEADER if leader is None else leader))
        return commands

    def _is_pulled(self, number: int) -> bool:
        """Whether a group is ever pulled."""
        assert self._config is not None
        if number == ALL_RANKS:
            return self._config.whole
        return self._config.local and 1 < len(self._groups[number].ranks) < len(self.ranks)

    def _counting(self) -> AbstractSet[int]:
        """Return the ranks whose steps count: active ones, in a cut finished ones too. Deleted ones never do."""
        return self._active() if self._flush else self.present

    def _count(self, ranks: Sequence[int]) -> int:
        return len(self._counting() & set(ranks))

    def _recent(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks of these that may lead now: also finished ones, if all have."""
        assert self._config is not None
        oldest = self._clock - max(self._config.loss_window, self._config.global_period)
        there = self._counting() or self.present
        return [rank for rank in ranks if rank in there and self._heard.get(rank, -math.inf) >= oldest]

    @property
    def _has_center(self) -> bool:
        return self._config is not None and ALGORITHMS[self._config.algorithm].has_center

    # -- ends -------------------------------------------------------------------------------------------------

    def _on_event_of_absent(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        """Handle an event of a rank whose optimizer is gone: its engine still takes part in pulls."""
        return self._on_event(rank, event, now) if isinstance(event, PullDone) else []

    def _on_rank_finished(self, rank: int, now: float) -> list[Command]:
        for group in self._groups.values():
            left = self._count(group.ranks)
            group.steps, group.active = group.steps * left // max(1, group.active), left
        return []

    def _on_all_finished(self, rank: int, now: float) -> tuple[list[Command], int]:
        """Reset the groups; after a drain, steps that made no pull due are forgotten."""
        for group in self._groups.values():
            group.steps, group.active, group.flight = 0 if self._flush else group.steps, len(group.ranks), None
        return [], self._round

    def _details(self) -> PullProgress:
        present = [rank for rank in self.ranks if rank in self.present]
        leader = pick_leader(self._means, self._recent(present))
        if leader is None:
            heard = {rank: at for rank, at in self._heard.items() if rank in self.present}
            latest = max((at for rank, at in heard.items() if math.isfinite(self._means[rank])), default=None)
            leader = pick_leader(self._means, [rank for rank, at in heard.items() if at == latest])
        known = {leader, *self._recent(self.ranks)}  # a loss too old to lead by stays so in another job
        means = [self._means.get(rank) if rank in known else None for rank in self.ranks]
        return PullProgress(
            leader=present[0] if leader is None else leader,
            steps=[group.steps for group in self._groups.values()],
            means=[None if mean is None or not math.isfinite(mean) else mean for mean in means],
        )
