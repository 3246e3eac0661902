"""Leader-pull for ``explore``: model ranks that step, tell their losses, and take part in pulls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_async.algorithms.leader.config import LeaderConfig, PullDone, StartPull, StepTaken
from hvd_async.algorithms.leader.selection import ALL_RANKS, CENTER, NO_LEADER
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command, Drained, OptimizerEvent
from tests.unit.explore_world import Book, Program, Rank, World

Losses = tuple[tuple[float | None, ...], ...]


@dataclass
class LeaderRank(Rank):
    """A model rank; its attributes are as of ``pull_simulation.Rank``."""

    waiting: list[StartPull] = field(default_factory=list)
    flying: set[int] = field(default_factory=set)
    busy: dict[int, int] = field(default_factory=dict)
    """The pull of a group that it has submitted and that has not landed here."""
    joined: dict[int, int] = field(default_factory=dict)
    """The last pull of each group that it has submitted."""
    last: int | None = None


@dataclass
class LeaderBook(Book):
    """What counts for the next pulls."""

    steps: dict[int, int] = field(default_factory=dict)
    """Of a group, since its last."""
    counted: dict[int, int] = field(default_factory=dict)
    """Its ranks that were not done when last looked at."""
    flights: dict[int, int] = field(default_factory=dict)
    pulls: int = 0
    losses: dict[int, float] = field(default_factory=dict)


class LeaderWorld(World):
    """``losses`` of each rank, one a step, over and over."""

    rank_type, book_type = LeaderRank, LeaderBook
    config: LeaderConfig
    ranks: list[LeaderRank]

    def __init__(
        self,
        machine: type[StateMachine[Any]],
        config: LeaderConfig,
        programs: Sequence[Program],
        losses: Losses,
        opening: bool = False,
    ) -> None:
        self.losses = losses
        self.members = {ALL_RANKS: tuple(range(len(programs)))}
        if config.algorithm == "lsgd":
            self.members = {number: tuple(ranks) for number, ranks in enumerate(config.groups)} | self.members
        super().__init__(machine, config, programs, opening)

    def begin(self) -> None:
        self.book.steps = dict.fromkeys(self.members, 0)
        self.book.counted = {group: len(members) for group, members in self.members.items()}

    # -- training threads ---------------------------------------------------------------------------------------

    def can_step(self, rank: LeaderRank) -> bool:
        return True

    def step(self, rank: LeaderRank) -> None:
        own = self.losses[rank.place]
        loss = own[rank.produced[0] % len(own)]
        rank.produced[0] += 1
        rank.outbox.append(StepTaken(0, loss))
        rank.at += 1

    def has_all(self, rank: LeaderRank) -> bool:
        assert rank.drained is not None
        return not any(number <= rank.drained.rounds for number in rank.flying)

    def after_end(self, rank: LeaderRank) -> None:
        rank.last = None
        self._advance(rank)

    def left(self, rank: LeaderRank) -> None:
        self.after_end(rank)

    # -- engines ------------------------------------------------------------------------------------------------

    def on_command(self, rank: LeaderRank, command: Any) -> None:
        if isinstance(command, StartPull):
            if command.leader != NO_LEADER and rank.number in self.members[command.group]:
                rank.flying.add(command.round)
                rank.waiting.append(command)
                self._advance(rank)
            return
        super().on_command(rank, command)
        if isinstance(command, Drained) and rank.drained is not None:
            rank.last = command.rounds

    def _advance(self, rank: LeaderRank) -> None:
        for pull in list(rank.waiting):
            if pull.group not in rank.busy and (rank.last is None or pull.round <= rank.last):
                rank.waiting.remove(pull)
                rank.busy[pull.group] = rank.joined[pull.group] = pull.round

    def landing(self, rank: LeaderRank) -> list[int]:
        return [
            group
            for group, number in sorted(rank.busy.items())
            if all(self.ranks[place].joined.get(group, 0) >= number for place in self.members[group])
        ]

    def land(self, rank: LeaderRank, what: int) -> None:
        number = rank.busy.pop(what)
        rank.flying.remove(number)
        if rank.place == self.members[what][0]:
            rank.outbox.append(PullDone(0, number))
        self._advance(rank)

    def obeys_surely(self, rank: LeaderRank) -> bool:
        """Training threads look at ends alone, and stand in one when that comes."""
        return isinstance(rank.inbox[0], StartPull | Drained) or self.in_end(rank) or not rank.agreed

    def lands_surely(self, rank: LeaderRank) -> bool:
        """It says nothing (whose order with what the thread says would matter)."""
        return not self._speaks(rank)

    def goes_on_surely(self, rank: LeaderRank) -> bool:
        return not self._speaks(rank) or (self.token(rank) not in ENDS_OF_THREADS and not rank.flying)

    def _speaks(self, rank: LeaderRank) -> bool:
        return any(rank.place == members[0] for members in self.members.values())

    # -- laws ---------------------------------------------------------------------------------------------------

    def hear(self, rank: LeaderRank, event: OptimizerEvent) -> None:
        book = self.book
        match event:
            case StepTaken(_, loss):
                if loss is not None:
                    book.losses[rank.number] = loss
                for group in self._pulled():
                    book.steps[group] += rank.number in self.members[group]
            case PullDone(_, number):
                book.flights = {group: flight for group, flight in book.flights.items() if flight != number}
        for group in self.members:  # a rank that is done takes its part of what was counted along
            left = len(self._counting(group))
            if left < book.counted[group]:
                book.steps[group] = book.steps[group] * left // book.counted[group]
            book.counted[group] = left

    def _pulled(self) -> list[int]:
        """The groups that are ever pulled: none of one rank, nor of all."""
        size = len(self.numbers)
        return [group for group, members in self.members.items() if group == ALL_RANKS or 1 < len(members) < size]

    def _counting(self, group: int) -> set[int]:
        """Its ranks that are not done; a cut is no end of what counts."""
        book = self.book
        drains = any(book.done.values()) or book.forced
        return set(self.members[group]) - (book.done.keys() if drains else book.gone)

    def check(self, command: Command, ending: bool) -> None:
        assert isinstance(command, StartPull), f"{command} to follow a leader"
        assert not ending, "an end makes a pull due"
        book, group, leader = self.book, command.group, command.leader
        book.pulls += 1
        assert command.round == book.pulls
        assert group in self._pulled(), "a group of one, or of all, is pulled"
        assert group not in book.flights, "two pulls of a group at once"
        period = self.config.global_period if group == ALL_RANKS else self.config.local_period
        needed = period * len(self._counting(group))
        assert book.steps[group] >= needed > 0, "too early"
        book.steps[group] %= needed
        if leader != NO_LEADER:
            book.flights[group] = command.round
        self._check_leader(group, leader)

    def _check_leader(self, group: int, leader: int) -> None:
        if self.config.algorithm == "easgd":
            assert leader == CENTER
            return
        told = {rank: loss for rank, loss in self.book.losses.items() if rank in self.members[group]}
        able = {rank: loss for rank, loss in told.items() if math.isfinite(loss)}
        active = self._counting(group)
        if leader == NO_LEADER:
            assert not told, "a loss was told, and nobody leads"
            return
        assert leader in active, "a rank that is done leads"
        assert leader in able, "a rank without a finite loss leads"
        best = min((loss, rank) for rank, loss in able.items() if rank in active)
        assert (able[leader], leader) == best, "not the one that does best"

    def check_due(self, event: OptimizerEvent) -> None:
        book = self.book
        if not isinstance(event, StepTaken):
            return
        for group in self._pulled():
            period = self.config.global_period if group == ALL_RANKS else self.config.local_period
            needed = period * len(self._counting(group))
            if group in book.flights or not 0 < needed <= book.steps[group]:
                continue
            told = {rank: loss for rank, loss in book.losses.items() if rank in self.members[group]}
            led = any(math.isfinite(told.get(rank, math.nan)) for rank in self._counting(group))
            leaderless = bool(told) and not led and self.config.algorithm == "lsgd"
            assert leaderless, "a pull is due, and does not go"
            book.steps[group] %= needed

    def check_end(self, drained: Drained[Any]) -> None:
        book = self.book
        assert drained.rounds == book.pulls
        assert drained.details is not None
        there = set(self.numbers) - book.gone
        able = {rank for rank, loss in book.losses.items() if math.isfinite(loss)} & there
        assert drained.details.leader in (able or {min(there)}), "a rank that is gone, or without a loss, leads"
        if drained.flushed:
            book.steps = dict.fromkeys(self.members, 0)
        assert drained.details.steps == list(book.steps.values())
        book.flights = {}
        left = {group: len(set(members) & there) for group, members in self.members.items()}
        for group, members in self.members.items():
            book.steps[group] = book.steps[group] * left[group] // len(members)
        book.counted = left

    def check_over(self) -> None:
        super().check_over()
        machine: Any = self.machine
        for number, group in machine._groups.items():
            whole = group.period * group.active
            assert group.flight is not None or not whole or group.steps < whole or number not in self._pulled()


ENDS_OF_THREADS = ("drain", "cut", "leave")
