"""The coordinator's state machine for leaders: when which ranks are pulled towards whom.

The laws it keeps:

1. *Steps of all ranks count together.* A group's pull is due when its active ranks have taken ``local_period`` steps
   each on the average since its last, a pull of all when all active ranks have taken ``global_period``: fast ranks do
   more.
2. *The leader* is whoever has the lowest mean loss by what is known then; one whose loss is not finite never leads, and
   where nobody's is there is no pull. Where none of a group has told any, the ranks hear that. (EASGD has a centre and
   asks for no loss.) A group of one has nobody to follow.
3. *One pull of a group at a time*; what becomes due meanwhile is due when it has landed, once.
4. *Nobody is waited for*: engines take part for ranks that compute, sleep or are done.
5. *Illegal moves change nothing.* They raise ProtocolError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_async import leaders
from hvd_async.errors import ProtocolError
from hvd_async.events import Command, Iterated, Landed, LeaderConfig, OptimizerEvent, Pull, Standing
from hvd_async.machine import Machine

ALL = -1
"""In place of a group: all ranks."""
CENTRE = -1
"""In place of a leader: EASGD's centre."""
NOBODY = -2
"""In place of a leader: no rank of the group has told a loss."""


@dataclass
class _Group:
    """Ranks that are pulled together.

    Attributes:
        ranks: which.
        period: steps each, on the average, between two pulls.
        steps: since the last that became due.
        flight: the number of the pull that is on its way.
    """

    ranks: tuple[int, ...]
    period: int
    steps: int = 0
    flight: int | None = None


class Pulls(Machine[LeaderConfig]):
    """LSGD or EASGD of one optimizer."""

    def __init__(self, optimizer: int, ranks: Sequence[int]) -> None:
        super().__init__(optimizer, ranks)
        self._groups: dict[int, _Group] = {}
        self._means: dict[int, float] = {}
        self._round = 0
        self._leaderless = 0
        self._told = False

    def tick(self, now: float) -> list[Command]:
        """Nothing waits for time to pass."""
        return []

    def deadline(self) -> float | None:
        """As ``tick``."""
        return None

    def news(self) -> str | None:
        """Pulls that had no leader, once."""
        if not self._leaderless or self._told:
            return None
        self._told = True
        return (
            "no rank of a group, or of all, has a finite mean loss, so nobody leads it and nobody is pulled; look at "
            "what record_loss() is given"
        )

    def _waiting(self) -> tuple[str, frozenset[int]] | None:
        return None

    def _begin(self, config: Any) -> LeaderConfig:
        assert isinstance(config, LeaderConfig)
        if config.algorithm == "lsgd":
            for number, places in enumerate(config.groups):
                self._groups[number] = _Group(tuple(self.ranks[place] for place in places), config.local_period)
        self._groups[ALL] = _Group(self.ranks, config.global_period)
        if config.standing is not None:
            for group, steps in zip(self._groups.values(), config.standing.steps, strict=True):
                group.steps = steps
            self._means = {r: m for r, m in zip(self.ranks, config.standing.means, strict=True) if m is not None}
        return config

    def _hear(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        match event:
            case Iterated(_, loss):
                self._running(rank, event)
                if loss is not None:
                    self._means[rank] = loss
                for group in self._groups.values():
                    group.steps += rank in group.ranks
            case Landed(_, number):
                if not 1 <= number <= self._round:
                    raise ProtocolError(f"rank {rank} saw pull {number} land, of {self._round}")
                over = [group for group in self._groups.values() if group.flight == number]
                for group in over:
                    group.flight = None
                if not over:  # of before an end: nothing of it may start anything after a cut
                    return []
            case _:
                raise ProtocolError(f"rank {rank} sent {type(event).__name__} to follow a leader")
        return self._due()

    def _due(self) -> list[Command]:
        commands: list[Command] = []
        for number, group in self._groups.items():  # (local ones first)
            active = self._active() if self._flush else self.ranks  # (a cut is none of a rank's steps, nor its end)
            needed = group.period * len(set(active).intersection(group.ranks))
            if group.flight is not None or not 0 < needed <= group.steps:
                continue
            group.steps %= needed
            if number != ALL and len(group.ranks) == 1:
                continue
            leader = CENTRE if self._of_centre else leaders.leader(self._means, group.ranks)
            if leader is None and self._means.keys() & set(group.ranks):
                self._leaderless += 1
                continue
            self._round += 1
            if leader is not None:
                group.flight = self._round
            commands.append(Pull(self._optimizer, self._round, number, NOBODY if leader is None else leader))
        return commands

    @property
    def _of_centre(self) -> bool:
        return self._config is not None and self._config.algorithm == "easgd"

    # -- ends -------------------------------------------------------------------------------------------------

    def _retire(self, rank: int, now: float) -> list[Command]:
        return [] if self._config is None else self._due()

    def _conclude(self, rank: int, now: float) -> tuple[list[Command], int]:
        """What is not due yet never will be, after a drain."""
        for group in self._groups.values():
            group.steps, group.flight = 0 if self._flush else group.steps, None
        return [], self._round

    def _standing(self) -> Standing:
        leader = leaders.leader(self._means, self.ranks)
        means = [self._means.get(rank) for rank in self.ranks]
        return Standing(
            leader=self.ranks[0] if leader is None else leader,
            steps=[group.steps for group in self._groups.values()],
            means=[None if mean is None or not math.isfinite(mean) else mean for mean in means],
        )
