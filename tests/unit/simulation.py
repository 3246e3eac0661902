"""A job without threads: simulated ranks around the real state machine, moved in any order a seed can think of.

Everything that travels (events, commands, sums) waits in a first-in-first-out queue a rank, and each move takes one
thing from one queue; so every interleaving that a network and a scheduler can bring about can occur. The promises are
checked by a ledger of its own, not by the state machine's.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from hvd_async.errors import ProtocolError
from hvd_async.events import (
    Agreed,
    Arrived,
    Command,
    Done,
    Drained,
    EagerConfig,
    Go,
    Hyper,
    Opened,
    Settle,
    Stepped,
)
from hvd_async.rounds import EagerEvent, Rounds
from tests.unit.ledger import Ledger

Gradient = tuple[int, int, int]
"""(rank, its step since the start, version it was computed at)."""


@dataclass(frozen=True)
class Job:
    """What is simulated.

    Attributes:
        steps: for each drain, for each rank, how many steps it takes before it.
        speeds: of the ranks' training threads; a rank of speed 0 moves only when nobody else can.
        one_by_one: ranks that take one round a step (``synchronize()``).
    """

    config: EagerConfig
    steps: tuple[tuple[int, ...], ...]
    speeds: tuple[float, ...]
    one_by_one: frozenset[int] = frozenset()
    seed: int = 0

    @property
    def size(self) -> int:
        return len(self.speeds)


@dataclass
class Rank:
    """One simulated rank: its training thread is the generator ``moves``."""

    number: int
    buckets: int
    outbox: deque[EagerEvent] = field(default_factory=deque)
    inbox: deque[Command] = field(default_factory=deque)
    knows: set[int] = field(default_factory=set)
    """Rounds whose hyperparameters have come."""
    agreed: bool = False
    drained: Drained | None = None
    pending: list[list[Gradient]] = field(default_factory=list)
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


class Simulation:
    """Runs a job to its end and keeps what happened.

    Attributes:
        carried: (bucket, round) -> the gradients it carried.
        staleness: of every gradient in every bucket.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.config
        self.random = random.Random(job.seed)
        self.rounds = Rounds(0, job.size)
        self.now = 0.0
        self.ranks = [Rank(r, self.config.buckets) for r in range(job.size)]
        for rank in self.ranks:
            rank.pending = [[] for _ in range(self.config.buckets)]
        self.threads = [self._train(rank) for rank in self.ranks]
        self.carried: dict[tuple[int, int], list[Gradient]] = {}
        self.joined: dict[tuple[int, int], int] = {}
        self.staleness: list[int] = []
        self.log: list[Command] = []
        self.produced: list[Gradient] = []
        self.illegal_tried = 0
        self.ledger = Ledger(job.config, job.size)

    # -- ranks ------------------------------------------------------------------------------------------------

    def hyper(self, rank: int, step: int) -> Hyper:
        """What ``rank`` reports at its round number ``step``."""
        return [{"lr": rank + step / 1024, "momentum": 0.5}]

    def _train(self, rank: Rank) -> Iterator[None]:
        """The training thread: yields wherever others may come between; ``rank.waits`` says that it cannot go on."""
        rank.outbox.append(Opened(0, self.config, ["w"], [1]))
        yield from self._until(rank, lambda: rank.agreed)
        for segment in self.job.steps:
            for _ in range(segment[rank.number]):
                yield from self._step(rank)
            rank.outbox.append(Done(0, rank.steps))
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
            self._check_drained(rank)
        rank.finished = True

    def _until(self, rank: Rank, ready: Callable[[], bool]) -> Iterator[None]:
        rank.waits = ready
        yield  # resumed only when ``ready``
        rank.waits = None

    def _step(self, rank: Rank) -> Iterator[None]:
        rank.steps += 1
        step, version = rank.steps + rank.base, rank.version
        gradient = (rank.number, rank.steps, version)
        yield  # backward; buckets become ready in any order, before or after step() is reached
        self.produced.append(gradient)
        order: list[int | None] = [*range(self.config.buckets), None]
        self.random.shuffle(order)
        for bucket in order:
            if bucket is None:
                event: EagerEvent = Stepped(0, step, self.hyper(rank.number, step))
                rank.outbox.append(event)
                self.ledger.told[rank.number, step] = event.hyper
            else:
                rank.pending[bucket].append(gradient)
                rank.outbox.append(Arrived(0, bucket, step))
            yield
        yield from self._until(rank, lambda: rank.ready >= step)
        most = 1 if rank.number in self.job.one_by_one else rank.ready
        rank.version = min(rank.ready, rank.version + most)

    def _check_drained(self, rank: Rank) -> None:
        """What must hold when ``drain()`` returns on a rank."""
        drained = rank.drained
        assert drained is not None
        assert rank.version == drained.rounds
        assert not any(rank.pending), "a gradient stayed behind"
        produced = self.produced[: drained.produced]
        assert self.ledger.cuts.count(len(produced)), "not what was produced when the last rank was done"
        for bucket in range(self.config.buckets):
            carried = [g for t in range(1, drained.rounds + 1) for g in self.carried[bucket, t]]
            assert sorted(carried) == sorted(produced), "lost or duplicated"
        rank.drained = None
        rank.base = drained.rounds - rank.steps

    # -- moves ------------------------------------------------------------------------------------------------

    def run(self) -> Simulation:
        """Until every rank has finished.

        Raises:
            AssertionError: a promise is broken, or nobody can move (a deadlock).
        """
        while not all(rank.finished for rank in self.ranks):
            if not self._move():
                waiting = [r.number for r in self.ranks if not r.finished]
                raise AssertionError(f"deadlock: ranks {waiting} wait for {self.rounds.waiting_for()}")
        assert all(not rank.outbox and not rank.inbox for rank in self.ranks)
        return self

    def _move(self) -> bool:
        """One move of anybody who can; False if nobody can."""
        self._probe()
        moves = [(rank, kind) for rank in self.ranks for kind in ("deliver", "obey", "land") if self._can(rank, kind)]
        trains = [r for r in self.ranks if not r.finished and (r.waits is None or r.waits())]
        weights = [self.job.speeds[rank.number] for rank in trains]
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
        next(self.threads[rank.number], None)

    def _can(self, rank: Rank, kind: str) -> bool:
        if kind == "deliver":
            return bool(rank.outbox)
        if kind == "obey":
            return bool(rank.inbox)
        return rank.ready + 1 in rank.knows and self._complete(rank.ready + 1)

    def _complete(self, round_: int) -> bool:
        """Whether every rank has submitted every bucket of the round."""
        return all(self.joined.get((b, round_), 0) == self.job.size for b in range(self.config.buckets))

    def _land(self, rank: Rank) -> None:
        rank.ready += 1

    def _obey(self, rank: Rank) -> None:
        command = rank.inbox.popleft()
        match command:
            case Agreed():
                rank.agreed = True
            case Go(_, bucket, round_, hyper, _):
                taken, rank.pending[bucket] = rank.pending[bucket], []
                for gradient in taken:
                    stale = round_ - 1 - gradient[2]
                    assert 0 <= stale <= self.config.max_staleness, f"{gradient} is {stale} stale in round {round_}"
                    self.staleness.append(stale)
                self.carried.setdefault((bucket, round_), []).extend(taken)
                self.joined[bucket, round_] = self.joined.get((bucket, round_), 0) + 1
                if hyper is not None:
                    rank.knows.add(round_)
            case Settle(_, round_, _):
                rank.knows.add(round_)
            case Drained():
                assert rank.drained is None
                rank.drained = command

    # -- the coordinator --------------------------------------------------------------------------------------

    def _deliver(self, rank: Rank) -> None:
        event = rank.outbox.popleft()
        if self.config.grace:
            deadline = self.rounds.deadline()
            later = self.now + self.random.random() * self.config.grace
            self.now = later if deadline is None else min(later, deadline)
        rank.opened = rank.opened or isinstance(event, Opened)
        self.ledger.hear(rank.number, event, self.now)
        self._advance(self.rounds.handle(rank.number, event, self.now), rank.number)

    def _advance(self, commands: list[Command], rank: int | None) -> None:
        self.ledger.check(commands, rank, self.now, len(self.produced))
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
        before = copy.deepcopy(vars(self.rounds))
        with pytest.raises(ProtocolError, match=f"rank {rank.number}"):
            self.rounds.handle(rank.number, event, self.now + 1e6)
        assert vars(self.rounds) == before
        self.illegal_tried += 1

    def _illegal(self, rank: Rank) -> list[EagerEvent]:
        r = rank.number
        if not rank.opened:
            return [Stepped(0, 1, []), Arrived(0, 0, 1), Done(0, 0)]
        if not any(isinstance(c, Agreed) for c in self.log):
            return [Opened(0, self.config, ["w"], [1]), Stepped(0, 1, []), Arrived(0, 0, 1)]
        bucket = self.random.randrange(self.config.buckets)
        ledger = self.ledger
        handed, fired = ledger.handed[bucket][r], ledger.fired[bucket]
        moves: list[EagerEvent] = [
            Opened(0, self.config, ["w"], [1]),
            Arrived(0, -1, handed + 1),
            Arrived(0, self.config.buckets, handed + 1),
            Arrived(0, bucket, handed),
            Arrived(0, bucket, handed + 2),
            Arrived(0, bucket, fired + 2),
        ]
        if r in ledger.done:
            moves += [Arrived(0, bucket, handed + 1), Stepped(0, 10**6, []), Done(0, 10**6)]
        if any(r in ledger.arrivals.get((b, ledger.fired[b] + 1), []) for b in range(self.config.buckets)):
            moves.append(Done(0, 10**6))
        return moves
