"""Ledger of the events and commands of leader-pull's coordinator, independent of it, checked against the laws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from hvd_async.algorithms.leader.config import LeaderConfig, PullDone, PullProgress, StartPull, StepTaken
from hvd_async.runtime.protocol import Accepted, Command, Drained, Finished, OptimizerEvent, Registered, Resumed

ALL, CENTRE, NO_RANK = -1, -1, -2


class PullLedger:
    """Checks every command as it comes.

    Attributes:
        taken: group -> the ranks whose steps count for its next pull, one entry a step.
        flights: group -> the pull that has not landed on its first rank.
        reported: rank -> the last mean that it has reported.
        pulls: that went, those without a leader included.
        leaderless: pulls that were due, and no rank could lead.
        ended: whether the last event was an end, or came after one without a step or a new end.
    """

    def __init__(self, config: LeaderConfig, ranks: Sequence[int]) -> None:
        self.config, self.ranks = config, tuple(ranks)
        self.members: dict[int, tuple[int, ...]] = {}
        if config.algorithm == "lsgd":
            for number, places in enumerate(config.groups):
                self.members[number] = tuple(ranks[place] for place in places)
        self.members[ALL] = self.ranks
        self.periods = dict.fromkeys(self.members, config.local_period) | {ALL: config.global_period}
        self.taken: dict[int, list[int]] = {group: [] for group in self.members}
        self.reported: dict[int, float] = {}
        if config.progress is not None:
            for group, count in zip(self.members, config.progress.steps, strict=True):
                self.taken[group] = [-1] * count
            self.reported = {rank: m for rank, m in zip(ranks, config.progress.means, strict=True) if m is not None}
        self.flights: dict[int, int] = {}
        self.done: set[int] = set()
        self.opened: set[int] = set()
        self.flush = self.agreed = False
        self.produced = dict.fromkeys(ranks, 0)
        self.pulls = self.leaderless = self.no_rank = 0
        self.led: list[tuple[int, int]] = []
        """Group and leader of each."""
        self._moved = False
        self.resumes, self.resuming = False, set[int]()
        """Whether ranks report that they have completed an end, and the ones that have yet to."""
        self._by_steps: list[Command] = []
        """Pulls that the steps of the last event have made due."""
        self.clock = Fraction(0)
        self.when = dict.fromkeys(self.reported, Fraction(0))
        self.counted = {group: len(members) for group, members in self.members.items()}

    def there(self, members: Sequence[int]) -> set[int]:
        """The ones that are not done; in a cut all."""
        return set(members) - (self.done if self.flush else set())

    def pulled(self, group: int) -> bool:
        """Whether a group is ever pulled: not one rank, nor all, which have their own."""
        if group == ALL:
            return self.config.whole
        return self.config.local and 1 < len(self.members[group]) < len(self.ranks)

    def recent(self, members: Sequence[int]) -> set[int]:
        """Those whose loss is not too old."""
        return {
            rank
            for rank in members
            if rank in self.when
            and self.when[rank] >= self.clock - max(self.config.loss_window, self.config.global_period)
        }

    def hear(self, rank: int, event: OptimizerEvent) -> None:
        """An event that is about to reach the state machine."""
        self._moved = True
        match event:
            case Registered():
                self.opened.add(rank)
            case StepTaken(_, loss, steps):
                for _ in range(steps):
                    self.clock += Fraction(1, len(self.ranks) - len(self.done))
                    if loss is not None:
                        self.reported[rank], self.when[rank] = loss, self.clock
                    for group, members in self.members.items():
                        self.taken[group] += [rank] if rank in members and self.pulled(group) else []
                    self._by_steps += self._due()
                self._moved = False
            case Resumed():
                self.resuming.discard(rank)
                self._moved = not self.resuming
            case PullDone(_, number):
                over = [group for group, flight in self.flights.items() if flight == number]
                self.flights = {group: flight for group, flight in self.flights.items() if group not in over}
                self._moved = bool(over)  # (or it is of no more interest, after an end)
            case Finished(_, (steps,), flush):
                self.done.add(rank)
                self.flush = self.flush or flush
                self.resumes = self.resumes or event.resumes
                self.produced[rank] = steps
                self._moved = False  # (an end makes no pull due)
                for group, members in self.members.items():
                    left = len(self.there(members))
                    if self.agreed and left < self.counted[group]:  # it takes its part along
                        self.taken[group] = self.taken[group][: len(self.taken[group]) * left // self.counted[group]]
                    self.counted[group] = left

    def check(self, commands: list[Command], rank: int) -> None:
        """The commands that came of it.

        Raises:
            AssertionError: one breaks a law, or one is missing.
        """
        expected = self._expected(rank)
        assert commands == expected, f"{commands}, and not {expected}"

    def _expected(self, rank: int) -> list[Command]:
        commands: list[Command] = []
        if not self.agreed:
            if self.opened != set(self.ranks):
                return []
            self.agreed = True
            commands.append(Accepted(0))
            self._moved = False
        if self.done == set(self.ranks):
            return [*commands, self._drained(rank)]
        by_steps, self._by_steps = self._by_steps, []
        return [*commands, *by_steps, *(self._due() if self._moved else [])]

    def _due(self) -> list[Command]:
        commands: list[Command] = []
        if self.resuming:
            return commands
        for group, members in self.members.items():
            needed = self.periods[group] * len(self.there(members))
            if group in self.flights or not needed or len(self.taken[group]) < needed or not self.pulled(group):
                continue
            while len(self.taken[group]) >= needed:
                del self.taken[group][:needed]
            commands += self._pull(group, members)
        return commands

    def _pull(self, group: int, members: tuple[int, ...]) -> list[Command]:
        reported = {rank: self.reported[rank] for rank in members if rank in self.reported}
        able = self.recent(members) & self.there(members)
        best = sorted((loss, rank) for rank, loss in reported.items() if math.isfinite(loss) and rank in able)
        if self.config.algorithm == "easgd":
            leader = CENTRE
        elif best:
            leader = best[0][1]
        elif reported:
            self.leaderless += 1
            return []
        else:
            leader = NO_RANK
            self.no_rank += 1
        self.pulls += 1
        if leader != NO_RANK:
            self.flights[group] = self.pulls
            self.led.append((group, leader))
        return [StartPull(0, self.pulls, group, leader)]

    def _drained(self, rank: int) -> Drained:
        finite = {rank: loss for rank, loss in self.reported.items() if math.isfinite(loss)}
        if self.flush:
            self.taken = {group: [] for group in self.members}
        able = {rank: loss for rank, loss in finite.items() if rank in self.recent(self.ranks)}
        if not able and finite:
            last = max(self.when[rank] for rank in finite)
            able = {rank: loss for rank, loss in finite.items() if self.when[rank] == last}
        leader = min((loss, rank) for rank, loss in able.items())[1] if able else self.ranks[0]
        known = self.recent(self.ranks) | {leader}
        standing = PullProgress(
            leader=leader,
            steps=[len(steps) for steps in self.taken.values()],
            means=[finite.get(rank) if rank in known else None for rank in self.ranks],
        )
        drained = Drained(0, self.pulls, [sum(self.produced.values())], rank, self.flush, standing)
        self.flights, self.flush = {}, False
        self.resuming = set(self.ranks) if self.resumes else set()
        self.done.clear()
        self.counted = {group: len(members) for group, members in self.members.items()}
        return drained
