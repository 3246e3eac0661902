"""A leader-pull job without threads, in virtual time: ranks around the coordinator's state machine.

Steps, messages and pulls take times that a seed draws; each rank's messages arrive in order. The laws are checked by a
ledger of its own (``pull_ledger``).
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from hvd_async.algorithms.eager.config import GradientReady, StepEntered
from hvd_async.algorithms.gossip.config import AverageEntered, MessageQueued, PairRequested
from hvd_async.algorithms.leader.config import LeaderConfig, PullDone, StartPull, StepTaken
from hvd_async.algorithms.leader.machine import LeaderStateMachine
from hvd_async.errors import ProtocolError
from hvd_async.runtime.protocol import Accepted, Command, Drained, Finished, OptimizerEvent, Registered
from tests.unit.pull_ledger import ALL, NOBODY, PullLedger
from tests.unit.simulation import snapshot

LOSSES = (0.5, 1.0, 1.0, 2.0, 3.0, math.nan, math.inf, -math.inf)
Waits = float | Callable[[], bool]


@dataclass(frozen=True)
class Job:
    """What is simulated.

    Attributes:
        steps: for each end, for each rank, how many steps it takes before it.
        slowness: of the ranks: mean seconds a step.
        latency, flight: mean seconds of a message, and of a pull.
        ranks: their numbers.
        cuts: (end, index) of those that are a ``cut()``.
        hasty: indices of ranks that are done with the first segment (of no steps) before they know of the others.
        silent: indices of ranks that tell no loss.
    """

    config: LeaderConfig
    steps: tuple[tuple[int, ...], ...]
    slowness: tuple[float, ...]
    ranks: tuple[int, ...]
    latency: float = 0.1
    flight: float = 0.1
    seed: int = 0
    cuts: frozenset[tuple[int, int]] = frozenset()
    hasty: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()


@dataclass(eq=False)
class Rank:
    """One simulated rank: its training thread is the generator ``_train``, the rest its engine."""

    index: int
    number: int
    agreed: bool = False
    drained: Drained | None = None
    last: int | None = None
    """It takes no part in pulls after this one, until its end has returned."""
    waiting: deque[StartPull] = field(default_factory=deque)
    busy: set[int] = field(default_factory=set)
    """Groups of pulls that it takes part in now."""
    flying: set[int] = field(default_factory=set)
    steps: int = 0
    heard: float = 0.0
    """When its last message to the coordinator arrives."""
    told: float = 0.0
    """When the coordinator's last one arrives here."""
    until: Callable[[], bool] | None = None
    finished: bool = False


class Simulation:
    """Runs a job to its end.

    Attributes:
        landed: by how many ranks each pull has been seen to land.
        ends: what all were told at each end.
        log: all commands.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.config, self.random = job, job.config, random.Random(job.seed)
        self.machine = LeaderStateMachine(0, job.ranks)
        self.ledger = PullLedger(job.config, job.ranks)
        self.ranks = [Rank(index, number) for index, number in enumerate(job.ranks)]
        self.threads = [self._train(rank) for rank in self.ranks]
        self.now, self._number = 0.0, itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.parts: dict[int, set[int]] = {}
        self.landed: dict[int, int] = {}
        self.ends: list[Drained] = []
        self.log: list[Command] = []
        self.illegal_tried = 0

    def run(self) -> Simulation:
        """Until every rank has finished, and nothing is on its way.

        Raises:
            AssertionError: a promise is broken, or nobody can move (a deadlock).
        """
        for rank in self.ranks:
            self._go_on(rank)
        while self._agenda:
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        waiting = [rank.number for rank in self.ranks if not rank.finished]
        assert not waiting, f"deadlock: ranks {waiting} wait for {self.machine.blocked_on()}"
        assert not any(rank.flying or rank.waiting for rank in self.ranks)
        return self

    def _in(self, mean: float, action: Callable[[], None], earliest: float = 0.0) -> float:
        """Do it in about so many seconds; returns when."""
        when = max(earliest, self.now + self.random.expovariate(1.0 / mean) if mean else self.now)
        heapq.heappush(self._agenda, (when, next(self._number), action))
        return when

    # -- training threads -------------------------------------------------------------------------------------

    def _train(self, rank: Rank) -> Iterator[Waits]:
        self._send(rank, Registered(0, self.config, ["w"], [1]))
        if rank.index not in self.job.hasty:
            yield lambda: rank.agreed
        for end, counts in enumerate(self.job.steps):
            for _ in range(counts[rank.index]):
                yield self.job.slowness[rank.index]
                rank.steps += 1
                loss = None if rank.index in self.job.silent else self.random.choice(LOSSES)
                self._send(rank, StepTaken(0, loss))
            self._send(rank, Finished(0, [rank.steps], (end, rank.index) not in self.job.cuts))
            yield lambda: rank.drained is not None and not any(n <= rank.drained.rounds for n in rank.flying)
            assert rank.drained is not None
            assert rank.drained.flushed == any((end, index) not in self.job.cuts for index in range(len(self.ranks)))
            self.ends += [rank.drained] if rank.index == 0 else []
            rank.drained = rank.last = None
            self._advance(rank)
        rank.finished = True

    def _go_on(self, rank: Rank) -> None:
        rank.until = None
        wait = next(self.threads[rank.index], None)
        if isinstance(wait, float):
            self._in(wait, lambda: self._go_on(rank))
        elif wait is not None:
            rank.until = wait
            self._look(rank)

    def _look(self, rank: Rank) -> None:
        if rank.until is not None and rank.until():
            self._go_on(rank)

    # -- engines ----------------------------------------------------------------------------------------------

    def _send(self, rank: Rank, event: OptimizerEvent) -> None:
        rank.heard = self._in(self.job.latency, lambda: self._deliver(rank, event), rank.heard)

    def _on_command(self, rank: Rank, command: Command) -> None:
        match command:
            case Accepted():
                rank.agreed = True
            case StartPull(_, number, group, leader):
                if leader != NOBODY and rank.number in self.ledger.members[group]:
                    rank.flying.add(number)
                    rank.waiting.append(command)
                    self._advance(rank)
            case Drained():
                assert rank.drained is None
                rank.drained, rank.last = command, command.rounds
        self._look(rank)

    def _advance(self, rank: Rank) -> None:
        for pull in list(rank.waiting):
            if pull.group not in rank.busy and (rank.last is None or pull.round <= rank.last):
                rank.waiting.remove(pull)
                rank.busy.add(pull.group)
                self._submit(rank, pull)

    def _submit(self, rank: Rank, pull: StartPull) -> None:
        there = self.parts.setdefault(pull.round, set())
        there.add(rank.number)
        members = self.ledger.members[pull.group]
        if there == set(members):
            for each in self.ranks:
                if each.number in members:
                    self._in(self.job.flight, lambda each=each: self._land(each, pull))  # type: ignore[misc]

    def _land(self, rank: Rank, pull: StartPull) -> None:
        self.landed[pull.round] = self.landed.get(pull.round, 0) + 1
        rank.busy.remove(pull.group)
        rank.flying.remove(pull.round)
        if rank.number == self.ledger.members[pull.group][0]:
            self._send(rank, PullDone(0, pull.round))
        self._advance(rank)
        self._look(rank)

    # -- the coordinator --------------------------------------------------------------------------------------

    def _deliver(self, rank: Rank, event: OptimizerEvent) -> None:
        self._probe()
        self.ledger.hear(rank.number, event)
        commands = self.machine.handle(rank.number, event, self.now)
        self.ledger.check(commands, rank.number)
        assert self.machine.deadline() is None
        self.log += commands
        for each in self.ranks:
            for command in commands:
                each.told = self._in(self.job.latency, lambda c=command, e=each: self._on_command(e, c), each.told)  # type: ignore[misc]

    # -- illegal moves ----------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Sometimes try a move that is not allowed now: it must raise and change nothing."""
        if self.random.random() > 0.2:
            return
        rank = self.random.choice(self.ranks)
        event = self.random.choice(self._illegal(rank))
        before = snapshot(self.machine)
        with pytest.raises(ProtocolError, match=f"rank {rank.number}"):
            self.machine.handle(rank.number, event, self.now)
        assert snapshot(self.machine) == before
        self.illegal_tried += 1

    def _illegal(self, rank: Rank) -> list[OptimizerEvent]:
        ledger, number = self.ledger, rank.number
        if number not in ledger.opened:
            return [StepTaken(0, 1.0), PullDone(0, 1), Finished(0, [0])]
        moves: list[OptimizerEvent] = [
            *(Registered(0, self.config, ["w"], [1]), StepEntered(0, 1, []), GradientReady(0, [0], 1)),
            *(MessageQueued(0, 1), PairRequested(0), AverageEntered(0, 1, [1.0])),
            *(PullDone(0, 0), PullDone(0, ledger.pulls + 1), Finished(0, []), Finished(0, [10**6, 10**6])),
            Finished(0, [ledger.produced[number] - 1]),
        ]
        if number in ledger.done or not ledger.agreed:
            moves.append(StepTaken(0, 1.0))
        if number in ledger.done:
            moves.append(Finished(0, [10**6]))
        return moves


__all__ = ["ALL", "Job", "Simulation"]
