"""A job without threads: simulated ranks around the real state machine, moved in any order a seed can think of.

Everything that travels (events, commands, sums) waits in a first-in-first-out queue a rank, and each move takes one
thing from one queue; so every interleaving that a network and a scheduler can bring about can occur. The promises are
checked by a ledger of its own, not by the state machine's.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from hvd_async.algorithms.eager.config import (
    EagerConfig,
    GradientReady,
    SetHyperparameters,
    StartRound,
    StepEntered,
    VersionTaken,
)
from hvd_async.algorithms.eager.machine import EagerStateMachine, ReceivedRounds, RoundCommands
from hvd_async.algorithms.eager.quorum import AutoQuorum, Grace
from hvd_async.errors import ProtocolError
from hvd_async.runtime.protocol import Accepted, Command, Drained, Finished, Hyper, OptimizerEvent, Registered
from tests.unit.ledger import Ledger

Gradient = tuple[int, int, int]
"""(rank, its step since the start, version it was computed at)."""
MOVES = 5_000
"""More than any job takes: the largest that are drawn take some 2,000."""


@dataclass(frozen=True)
class Job:
    """What is simulated.

    Attributes:
        steps: for each drain, for each rank, how many steps it takes before it; in pace "rounds", how many rounds.
        speeds: of the ranks' training threads; a rank of speed 0 moves only when nobody else can.
        one_by_one: indices of ranks that take one round a step (``synchronize()``).
        cuts: (drain, index) of those that are a ``cut()``.
        ranks: their numbers; from 0 if empty.
        loaded: indices of ranks that bring a gradient of an earlier run.
        empty: how probable it is that a bucket is handed over empty.
    """

    config: EagerConfig
    steps: tuple[tuple[int, ...], ...]
    speeds: tuple[float, ...]
    one_by_one: frozenset[int] = frozenset()
    seed: int = 0
    cuts: frozenset[tuple[int, int]] = frozenset()
    ranks: tuple[int, ...] = ()
    loaded: frozenset[int] = frozenset()
    empty: float = 0.0

    @property
    def size(self) -> int:
        return len(self.speeds)

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.ranks or tuple(range(self.size))

    def flushes(self, segment: int) -> bool:
        """Whether at least one rank drains there."""
        return any((segment, index) not in self.cuts for index in range(self.size))


@dataclass
class Rank:
    """One simulated rank: its training thread is the generator ``moves``."""

    index: int
    number: int
    pending: list[list[Gradient]]
    outbox: deque[OptimizerEvent] = field(default_factory=deque)
    inbox: deque[Command] = field(default_factory=deque)
    knows: set[int] = field(default_factory=set)
    """Rounds whose hyperparameters have come."""
    told: Hyper | None = None
    """The hyperparameters it told last."""
    agreed: bool = False
    drained: Drained | None = None
    at_cut: list[list[Gradient]] = field(default_factory=list)
    """What was pending when ``drained`` came: ranks that go on at once may fire rounds, which take it."""
    ready: int = 0
    """Rounds that have all their buckets and hyperparameters here."""
    version: int = 0
    steps: int = 0
    base: int = 0
    waits: Callable[[], bool] | None = None
    """What its training thread waits for; None if it can go on."""
    opened: bool = False
    """Whether the coordinator has seen its Opened."""
    finished: bool = False


def snapshot(rounds: EagerStateMachine) -> dict[str, Any]:
    """The state machine's state, for comparison."""
    state, parts = copy.deepcopy(vars(rounds)), AutoQuorum | Grace | ReceivedRounds | RoundCommands
    return {key: vars(value) if isinstance(value, parts) else value for key, value in state.items()}


class Simulation:
    """Runs a job to its end and keeps what happened.

    Attributes:
        carried: (bucket, round) -> the gradients it carried.
        produced: by bucket, gradients in the order in which they were handed over.
        staleness: of every gradient in every bucket.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config
        self.random = random.Random(job.seed)
        self.rounds = EagerStateMachine(0, job.numbers)
        self.now = 0.0
        buckets = range(self.config.buckets)
        self.ranks = [Rank(i, number, [[] for _ in buckets]) for i, number in enumerate(job.numbers)]
        self.threads = [self._train(rank) for rank in self.ranks]
        self.carried: dict[tuple[int, int], list[Gradient]] = {}
        self.joined: dict[tuple[int, int], int] = {}
        self.staleness: list[int] = []
        self.log: list[Command] = []
        self.produced: list[list[Gradient]] = [[] for _ in buckets]
        self.illegal_tried = 0
        self.ledger = Ledger(job.config, job.numbers)
        for rank in self.ranks:
            if rank.index in job.loaded:
                older = (rank.number, 0, -self.random.randint(0, self.config.max_staleness))
                for bucket in buckets:
                    rank.pending[bucket].append(older)
                    self.produced[bucket].append(older)

    # -- ranks ------------------------------------------------------------------------------------------------

    def hyper(self, rank: int, step: int) -> Hyper:
        """What ``rank`` reports at its round number ``step``; it changes at every second one."""
        return [{"lr": rank + step // 2 / 1024, "momentum": 0.5}]

    def _train(self, rank: Rank) -> Iterator[None]:
        """The training thread: yields wherever others may come between; ``rank.waits`` says that it cannot go on."""
        members, loaded = list(self.job.ranks), rank.index in self.job.loaded
        rank.told = self.hyper(rank.number, 0)
        rank.outbox.append(Registered(0, self.config, ["w"], [1], members, loaded, rank.told, rank.index == 0))
        yield from self._until(rank, lambda: rank.agreed)
        for number, segment in enumerate(self.job.steps):
            count, start = segment[rank.index], rank.version
            while count > (rank.version - start if self.config.pace == "rounds" else 0):
                yield from self._step(rank)
                count -= self.config.pace == "steps"
            flush = (number, rank.index) not in self.job.cuts
            rank.outbox.append(Finished(0, self._produced_by(rank), flush))
            while True:
                yield from self._until(
                    rank,
                    lambda: (
                        rank.ready > rank.version or (rank.drained is not None and rank.version >= rank.drained.rounds)
                    ),
                )
                # The first to come out of drain() may have fired rounds since: they are for the next step.
                rank.version = rank.ready if rank.drained is None else min(rank.ready, rank.drained.rounds)
                if rank.drained is not None and rank.version >= rank.drained.rounds:
                    break
            self._check_drained(rank, number)
        rank.finished = True

    def _produced_by(self, rank: Rank) -> list[int]:
        return [sum(gradient[0] == rank.number for gradient in produced) for produced in self.produced]

    def _until(self, rank: Rank, ready: Callable[[], bool]) -> Iterator[None]:
        rank.waits = ready
        yield  # resumed only when ``ready``
        rank.waits = None

    def _step(self, rank: Rank) -> Iterator[None]:
        rank.steps += 1
        step, version = rank.steps + rank.base, rank.version
        gradient = (rank.number, rank.steps, version)
        yield  # backward; buckets become ready in any order, before or after step() is reached
        order: list[int | None] = [*range(self.config.buckets), None]
        self.random.shuffle(order)
        ready: list[int] = []
        for at, bucket in enumerate(order, 1):
            if bucket is not None:
                ready.append(bucket)
            goes = bool(ready) and (at == len(order) or self.random.random() < 0.5)  # (else it has not looked yet)
            if goes:
                for each in ready:
                    if self.random.random() >= self.job.empty:
                        self.produced[each].append(gradient)
                        rank.pending[each].append(gradient)
            if bucket is None:
                hyper = self.hyper(rank.number, step)
                told = None if hyper == rank.told else hyper
                rank.outbox.append(StepEntered(0, step, told, ready if goes else []))
                rank.told = hyper
            elif goes:
                rank.outbox.append(GradientReady(0, ready, step))
            ready = [] if goes else ready
            yield
        yield from self._until(rank, lambda: rank.ready >= step)
        most = 1 if rank.index in self.job.one_by_one else rank.ready
        rank.version = min(rank.ready, rank.version + most)
        if self.config.pace == "rounds":
            rank.base = rank.version - rank.steps
            rank.outbox.append(VersionTaken(0, rank.version))

    def _check_drained(self, rank: Rank, segment: int) -> None:
        """What must hold when ``drain()`` or ``cut()`` returns on a rank."""
        drained = rank.drained
        assert drained is not None
        assert rank.version == drained.rounds
        assert drained.flushed == self.job.flushes(segment)
        for bucket in range(self.config.buckets):
            carried = [g for t in range(1, drained.rounds + 1) for g in self.carried[bucket, t]]
            if drained.flushed:
                assert not rank.pending[bucket], "a gradient stayed behind"
                assert sorted(carried) == sorted(self.produced[bucket][: drained.produced[bucket]]), "lost or twice"
            held = [] if drained.flushed else rank.at_cut[bucket]
            own = [g for g in self.produced[bucket] if g[0] == rank.number]
            mine = [*(g for g in carried if g[0] == rank.number), *held]
            assert sorted(mine) == sorted(own), "lost or twice"
        rank.drained = None
        rank.base = drained.rounds - rank.steps

    # -- moves ------------------------------------------------------------------------------------------------

    def run(self) -> Simulation:
        """Until every rank has finished.

        Raises:
            AssertionError: a promise is broken, nobody can move (a deadlock), or all move without end.
        """
        moves = itertools.count()
        while not all(rank.finished for rank in self.ranks):
            waiting = [r.number for r in self.ranks if not r.finished]
            assert self._move(), f"deadlock: ranks {waiting} wait for {self.rounds.blocked_on()}"
            assert next(moves) < MOVES, f"no end: ranks {waiting} wait for {self.rounds.blocked_on()}"
        assert all(not rank.outbox and not rank.inbox for rank in self.ranks)
        return self

    def given(self) -> Counter[int]:
        """How many gradients of bucket 0 each rank has handed over."""
        return Counter(gradient[0] for gradient in self.produced[0])

    def _move(self) -> bool:
        """One move of anybody who can; False if nobody can."""
        self._probe()
        kinds = ("deliver", "on_command", "land")
        moves = [(rank, kind) for rank in self.ranks for kind in kinds if self._can(rank, kind)]
        trains = [r for r in self.ranks if not r.finished and (r.waits is None or r.waits())]
        weights = [self.job.speeds[rank.index] for rank in trains]
        share = sum(weights)
        if moves and self.random.random() * (len(moves) + share) >= share:
            rank, kind = self.random.choice(moves)
            getattr(self, f"_{kind}")(rank)
            return True
        if share:
            self._resume(self.random.choices(trains, weights)[0])
            return True
        deadline = self.rounds.deadline()
        if deadline is not None:
            self.now = max(self.now, deadline)
            self._advance(self.rounds.tick(self.now), None)
            return True
        if trains:  # speed 0: only when nothing else can happen
            self._resume(self.random.choice(trains))
            return True
        return False

    def _resume(self, rank: Rank) -> None:
        next(self.threads[rank.index], None)

    def _can(self, rank: Rank, kind: str) -> bool:
        if kind == "deliver":
            return bool(rank.outbox)
        if kind == "on_command":
            return bool(rank.inbox)
        return rank.ready + 1 in rank.knows and self._complete(rank.ready + 1)

    def _complete(self, round_: int) -> bool:
        """Whether every rank has submitted every bucket of the round."""
        return all(self.joined.get((b, round_), 0) == self.job.size for b in range(self.config.buckets))

    def _land(self, rank: Rank) -> None:
        rank.ready += 1

    def _on_command(self, rank: Rank) -> None:
        command = rank.inbox.popleft()
        match command:
            case Accepted():
                rank.agreed = True
            case StartRound(_, buckets, round_):
                for bucket in buckets:
                    self._submit(rank, bucket, round_)
                if command.settled:
                    rank.knows.add(round_)
            case SetHyperparameters(_, round_, _):
                rank.knows.add(round_)
            case Drained():
                assert rank.drained is None
                rank.drained = command
                rank.at_cut = [list(pending) for pending in rank.pending]

    def _submit(self, rank: Rank, bucket: int, round_: int) -> None:
        taken, rank.pending[bucket] = rank.pending[bucket], []
        for gradient in taken:
            stale = round_ - 1 - gradient[2]
            assert 0 <= stale <= self.config.max_staleness, f"{gradient} is {stale} stale in round {round_}"
            self.staleness.append(stale)
        self.carried.setdefault((bucket, round_), []).extend(taken)
        self.joined[bucket, round_] = self.joined.get((bucket, round_), 0) + 1

    # -- the coordinator --------------------------------------------------------------------------------------

    def _deliver(self, rank: Rank) -> None:
        event = rank.outbox.popleft()
        deadline = self.rounds.deadline()
        later = self.now + self.random.random() * (self.config.grace or 0.1)
        self.now = later if deadline is None else min(later, deadline)
        rank.opened = rank.opened or isinstance(event, Registered)
        self.ledger.hear(rank.number, event, self.now)
        self._advance(self.rounds.handle(rank.number, event, self.now), rank.number)

    def _advance(self, commands: list[Command], rank: int | None) -> None:
        self.ledger.check(commands, rank, self.now)
        for command in commands:
            if isinstance(command, Drained):
                assert command.produced == [len(produced) for produced in self.produced]
        self.log += commands
        for each in self.ranks:
            each.inbox.extend(commands)

    # -- illegal moves ----------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Sometimes try a move that is not allowed now: it must raise and change nothing."""
        if self.random.random() > 0.1:
            return
        rank = self.random.choice(self.ranks)
        event = self.random.choice(self._illegal(rank))
        before = snapshot(self.rounds)
        with pytest.raises(ProtocolError, match=f"rank {rank.number}"):
            self.rounds.handle(rank.number, event, self.now + 1e6)
        assert snapshot(self.rounds) == before
        self.illegal_tried += 1

    def _illegal(self, rank: Rank) -> list[OptimizerEvent]:
        r, buckets = rank.number, self.config.buckets
        many = [10**6] * buckets
        if not rank.opened:
            return [StepEntered(0, 1, []), GradientReady(0, [0], 1), VersionTaken(0, 0), Finished(0, [0] * buckets)]
        if not any(isinstance(c, Accepted) for c in self.log):
            return [
                Registered(0, self.config, ["w"], [1]),
                StepEntered(0, 1, []),
                GradientReady(0, [0], 1),
                VersionTaken(0, 0),
            ]
        bucket = self.random.randrange(buckets)
        ledger = self.ledger
        position, fired = ledger.position[bucket][r], ledger.fired[bucket]
        moves: list[OptimizerEvent] = [
            Registered(0, self.config, ["w"], [1]),
            GradientReady(0, [-1], position + 1),
            GradientReady(0, [buckets], position + 1),
            GradientReady(0, [bucket, buckets], position + 1),
            GradientReady(0, [bucket, bucket], position + 1),
            GradientReady(0, [bucket], position),
            GradientReady(0, [bucket], position + 2),
            GradientReady(0, [bucket], fired + 2),
            VersionTaken(0, fired + 1),
            VersionTaken(0, position - 1),
            Finished(0, many[1:]),
        ]
        if self.config.pace == "steps":
            moves.append(VersionTaken(0, position))
        if r in ledger.done:
            moves += [
                GradientReady(0, [bucket], position + 1),
                StepEntered(0, 10**6, []),
                VersionTaken(0, fired),
                Finished(0, many),
            ]
        if any(r in ledger.arrivals.get((b, ledger.fired[b] + 1), {}) for b in range(buckets)):
            moves.append(Finished(0, many))
        return moves
