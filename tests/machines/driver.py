"""A job on one thread: the ranks and the coordinator of production, moved in any order.

All that travels waits in first-in-first-out queues: what a training thread posts to its engine, events to the
coordinator, commands to the ranks. A collective that all its ranks have submitted may complete on each of them at any
time, in any order. Each move takes one item from one queue, or runs one training thread to its next pause. So every
interleaving of threads, a network and a scheduler can occur, and a run is repeated by its moves alone.
Laws are checked by independent ledgers and by the values that vectors carry.
"""

from __future__ import annotations

import abc
import copy
import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from hvd_async.algorithms.eager.quorum import AutoQuorum, Grace
from hvd_async.errors import ProtocolError
from hvd_async.runtime.engine import CollectiveOrder
from hvd_async.runtime.in_memory import Combine
from hvd_async.runtime.interfaces import Vector, Wait, lane_of
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.runtime.protocol import (
    Accepted,
    CollectiveReady,
    Command,
    Drained,
    Finished,
    Hyper,
    OptimizerDeleted,
    OptimizerEvent,
    Registered,
    RunCollective,
    Unregister,
)
from hvd_async.simulation import job as simulated
from hvd_async.simulation.job import Part, RankCollectives, Unlocked

MOVES = 40_000
"""More moves than any job takes."""
PAUSE = Wait(lambda: True)
"""Where other threads may come between."""
HYPER: Hyper = [{"lr": 0.5}]
Program = tuple[str, ...]
"""Steps of a rank's script: "step", "begin" (the first part of a step that does not follow), "drain", "cut", "sum" (a
collective), "leave" (its optimizer is deleted)."""


def programs(*texts: str) -> tuple[Program, ...]:
    """Return the programs of ranks, one a text: "2 drain" is two steps and a drain."""
    return tuple(
        tuple(token for word in text.split() for token in (["step"] * int(word) if word.isdigit() else [word]))
        for text in texts
    )


def segments(steps: Sequence[Sequence[int]], cuts: frozenset[tuple[int, int]] = frozenset()) -> tuple[Program, ...]:
    """Return the programs of ranks that take these steps before each end, [ends][ranks]; ``cuts`` are (end, rank)."""
    return tuple(
        tuple(
            token
            for end, counts in enumerate(steps)
            for token in [*["step"] * counts[rank], "cut" if (end, rank) in cuts else "drain"]
        )
        for rank in range(len(steps[0]))
    )


@dataclass(frozen=True)
class Job:
    """What is driven, whatever the family.

    Attributes:
        programs: of the ranks.
        speeds: of their training threads; a rank of speed 0 moves only when no other can. Empty: 1.
        ranks: their numbers; from 0 if empty.
        seed: of the order of moves.
        hasty: places of ranks that begin before they know of the others (with an end: a step waits).
    """

    programs: tuple[Program, ...]
    speeds: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    seed: int = 0
    hasty: frozenset[int] = frozenset()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the ranks' numbers."""
        return self.ranks or tuple(range(len(self.programs)))


class Landing(NamedTuple):
    """A collective that may complete on a rank."""

    name: str
    then: Callable[[Vector], None]
    result: Vector


class InPlace(RankCollectives):
    """Collectives whose sums are in place, as Horovod's: what was handed over is gone, unless it is to be kept."""

    def allreduce_sum(
        self, vector: Vector, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Part:
        part = super().allreduce_sum(vector + 0, name, process_set, keep, scale)
        if not keep and isinstance(vector, np.ndarray):  # (else it is a rank's zero)
            vector[:] = np.nan
        return part


class Rank(simulated.Rank):
    """The ``RankRuntime`` of one rank, and its training thread; what is no move is as in a simulated job.

    Attributes:
        place: its place among the job's ranks; ``rank`` is its number.
        random: draws what its script does; so that depends on no other rank.
        posts, outbox, inbox: what waits for its engine, for the coordinator, and for its engine again.
        landings: collectives that may complete here, by name.
        until: what its training thread waits for.
        over: whether that has ended.
        opened: whether the coordinator has its registration.
        applied: what its model holds, as the family says.
    """

    def __init__(self, place: int, drive: Drive) -> None:
        self.place, self.rank, self.size = place, drive.numbers[place], max(drive.numbers) + 1
        self.random = random.Random(f"{drive.job.seed} {place}")
        self.collectives: Any = InPlace(self.rank, self.size, drive)  # type: ignore[arg-type]
        self.collectives.in_order = drive.in_order
        self._order = CollectiveOrder() if drive.in_order else None
        self.changed = Unlocked()
        self.clock = lambda: drive.now
        self.worker: Any = None
        self.quick = drive.quick
        self.posts: deque[Callable[[], None]] = deque()
        self.outbox: deque[Any] = deque()
        self.inbox: deque[Command] = deque()
        self.landings: dict[str, Landing] = {}
        self.until: Callable[[], bool] = PAUSE.ready
        self.thread: Iterator[Wait] = iter(())
        self.over = self.opened = False
        self.ends = self.steps = 0
        self.applied: Any = None

    def call_soon(self, action: Callable[[], None]) -> None:
        """Have the engine run an action; at once, if engines are quick."""
        if self.quick:
            action()
        else:
            self.posts.append(action)

    def notify(self, action: Callable[[], None], hurry: bool = True) -> None:
        """As ``call_soon``."""
        self.call_soon(action)

    def send(self, event: Any) -> None:
        """Put an event on its way."""
        self.outbox.append(event)

    def turn(self) -> int | None:
        """Reserve a turn, if collectives must start in order."""
        return None if self._order is None else self._order.turn()

    def submit(
        self,
        start: Callable[[], Any],
        done: Callable[[Vector], None],
        group: Hashable = None,
        turn: int | None = None,
        usable: Callable[[Any], None] | None = None,
    ) -> None:
        """Submit this rank's part of a collective."""

        def begin() -> None:
            start().then = done

        if self._order is None:
            begin()
        else:
            self._order.start(turn, begin)


@dataclass
class Book:
    """The events and commands of the coordinator, whatever the family, recorded independently of it."""

    opened: set[int] = field(default_factory=set)
    done: dict[int, bool] = field(default_factory=dict)
    """Ranks that have finished, and whether they drain."""
    gone: set[int] = field(default_factory=set)
    reported: dict[int, list[int]] = field(default_factory=dict)
    """What each rank has produced, as it said last."""
    settled: dict[int, list[int]] = field(default_factory=dict)
    """``reported`` at the last drain."""
    forced: bool = False
    """Whether a rank that went has left something behind."""
    calling: set[int] = field(default_factory=set)

    def hear(self, rank: int, event: OptimizerEvent) -> None:
        """Note an event that is about to reach the machine."""
        match event:
            case Registered():
                self.opened.add(rank)
            case Finished(_, produced, flush):
                self.done[rank], self.reported[rank] = flush, produced
            case OptimizerDeleted(_, produced):
                self.gone.add(rank)
                self.calling.discard(rank)
                self.done[rank], self.reported[rank] = False, produced
                self.forced |= produced != self.settled.get(rank, [0] * len(produced))
            case CollectiveReady():
                self.calling.add(rank)

    def check(self, commands: list[Command], rank: int | None, everyone: set[int]) -> None:
        """Check the laws that all families keep."""
        for command in commands:
            match command:
                case Accepted():
                    assert self.opened == everyone, "accepted although a rank has not registered"
                case RunCollective():
                    assert command.problem is None, command.problem
                    assert set(command.ranks) == self.calling == everyone - self.gone
                    self.calling = set()
                case Unregister():
                    assert self.gone == everyone, "forgotten although a rank has it"
                case Drained():
                    assert rank is not None
                    self._check_drained(command, everyone)

    def _check_drained(self, drained: Drained[Any], everyone: set[int]) -> None:
        assert self.done.keys() == everyone, "drained although a rank has not finished"
        assert set(drained.gone) == self.gone
        flushed = any(self.done.values()) or self.forced
        assert drained.flushed == flushed, "a drain is taken for a cut, or a cut for a drain"
        assert drained.produced == [sum(counts) for counts in zip(*self.reported.values(), strict=True)]
        if drained.flushed:
            self.settled = dict(self.reported)
        self.done, self.forced = dict.fromkeys(self.gone, False), False


Move = tuple[str, int, str]
"""Its kind, the place of a rank, and the name of a collective."""


class Drive(abc.ABC):
    """Moves a job to its end.

    Args:
        job: what is moved.
        machine: the coordinator's.
        quick: whether engines run what is posted at once.

    Attributes:
        log: all commands.
        drains: the commands that ended each drain or cut.
        moves: the ones that were made.
        illegal_tried: events that the coordinator has refused, as it should.
        in_order: whether all collectives start in one order, as on NCCL; those of odd seeds.
    """

    def __init__(self, job: Job, machine: StateMachine[Any], quick: bool = False) -> None:
        self.job, self.machine, self.numbers, self.quick = job, machine, job.numbers, quick
        self.in_order = job.seed % 2 == 1
        self.random = random.Random(job.seed)
        self.now = 0.0
        self.log: list[Command] = []
        self.drains: list[Drained[Any]] = []
        self.moves: list[Move] = []
        self.illegal_tried = 0
        self.book = Book()
        self._open: dict[tuple[str, Sequence[int]], dict[int, Part]] = {}
        self._submitted: dict[tuple[str, Sequence[int]], list[str]] = {}
        """The collectives of each lane, in the order in which the first rank has submitted each."""
        self._places: Counter[tuple[str, Sequence[int], int]] = Counter()
        """The number of collectives that each rank has submitted in a lane."""
        self.ranks = [Rank(place, self) for place in range(len(self.numbers))]
        for rank in self.ranks:
            rank.worker = self.worker(rank)
            rank.thread = self._train(rank)

    def group(self, rank: Rank) -> RankGroup:
        """Return the ranks that share the optimizer, as one of them knows them."""
        everyone = self.numbers == tuple(range(len(self.numbers)))
        return RankGroup(None if everyone else self.numbers, self.numbers, rank.place, 0, len(self.numbers))

    # -- what a family supplies -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def worker(self, rank: Rank) -> Any:
        """Return a rank's worker, before it is registered."""

    @abc.abstractmethod
    def step(self, rank: Rank) -> Generator[Wait, None, None]:
        """Take a step."""

    def begin(self, rank: Rank) -> Generator[Wait, None, None]:
        """Take the first part of a step."""
        raise NotImplementedError

    @abc.abstractmethod
    def ended(self, rank: Rank, drained: Drained[Any]) -> None:
        """Check what must hold when a drain or cut returns on a rank."""

    @abc.abstractmethod
    def hear(self, rank: int, event: OptimizerEvent) -> None:
        """Note an event that is about to reach the machine."""

    @abc.abstractmethod
    def check(self, commands: list[Command], rank: int | None) -> None:
        """Check the commands that came of it; None: of time alone."""

    def illegal(self, rank: Rank) -> list[OptimizerEvent]:
        """Return events that the machine must refuse now; none where a job does not probe."""
        return []

    # -- training threads -----------------------------------------------------------------------------------------

    def _train(self, rank: Rank) -> Iterator[Wait]:
        worker = rank.worker
        worker.register(["w"], [1], self.first_hyper(rank))
        if rank.place not in self.job.hasty:
            yield from worker.await_registration_program()
        for token in self.job.programs[rank.place]:
            yield PAUSE
            if token == "step":
                rank.steps += 1
                yield from self.step(rank)
            elif token == "begin":
                rank.steps += 1
                yield from self.begin(rank)
            elif token == "sum":
                found = yield from worker.sum_program(self.vector(rank), "a sum")
                assert rank.rank in found.ranks
            elif token == "leave":
                worker.delete()
            else:
                yield from worker.drain_program(token == "drain")
                self.ended(rank, self.drains[rank.ends])
                rank.ends += 1
        rank.over = True

    def first_hyper(self, rank: Rank) -> Hyper:
        """Return the hyperparameters that a rank registers with."""
        return HYPER

    def vector(self, rank: Rank) -> Vector:
        """Return a vector for a sum at an end."""
        return np.ones(1)

    # -- the data plane -------------------------------------------------------------------------------------------

    def join(self, name: str, members: Sequence[int], part: Part, kind: str, combine: Combine) -> Part:
        """Submit a rank's part; when all have, the collective may complete on each of them."""
        members = tuple(self.numbers) if len(members) >= len(self.numbers) else tuple(members)
        parts = self._open.setdefault((name, members), {})
        assert part.rank not in parts, f"rank {part.rank} has submitted {name} twice"
        self._check_order(name, members, part.rank)
        parts[part.rank] = part
        if len(parts) == len(members):
            del self._open[name, members]
            ordered = [parts[rank] for rank in members]
            for each, result in zip(ordered, combine([part.sent for part in ordered]), strict=True):
                rank = self.ranks[self.numbers.index(each.rank)]
                assert name not in rank.landings, f"{name} is in flight twice on rank {each.rank}"
                rank.landings[name] = Landing(name, lambda found, each=each: each.then(found), result)  # type: ignore[misc]
        return part

    def _check_order(self, name: str, members: Sequence[int], rank: int) -> None:
        """Check that all ranks submit the collectives of a lane, or all, in one order: data planes match them by it."""
        lane = "" if self.in_order else lane_of(name), members
        names, place = self._submitted.setdefault(lane, []), self._places[(*lane, rank)]
        self._places[(*lane, rank)] += 1
        if place == len(names):
            names.append(name)
        assert names[place] == name, f"rank {rank} submits {name} where another rank has submitted {names[place]}"

    # -- moves ----------------------------------------------------------------------------------------------------

    def possible(self) -> list[Move]:
        """Return all moves that can be made now, except that time passes."""
        found: list[Move] = []
        for rank in self.ranks:
            if rank.posts:
                found.append(("post", rank.place, ""))
            if rank.outbox:
                found.append(("deliver", rank.place, ""))
            if rank.inbox:
                found.append(("obey", rank.place, ""))
            found += [("land", rank.place, name) for name in rank.landings]
            if not rank.over and rank.until():
                found.append(("train", rank.place, ""))
        return found

    def move(self, move: Move) -> None:
        """Make a move.

        Raises:
            AssertionError: it breaks a law.
        """
        self.moves.append(move)
        kind, place, name = move
        rank = self.ranks[place]
        if kind == "post":
            rank.posts.popleft()()
        elif kind == "deliver":
            self._deliver(rank)
        elif kind == "obey":
            rank.worker.on_command(rank.inbox.popleft())
        elif kind == "land":
            landing = rank.landings.pop(name)
            landing.then(landing.result)
        elif kind == "train":
            rank.until = next((wait.ready for wait in rank.thread), PAUSE.ready)
        else:
            self._tick()

    def _deliver(self, rank: Rank) -> None:
        event = rank.outbox.popleft()
        rank.opened = True
        self.book.hear(rank.rank, event)
        self.hear(rank.rank, event)
        self._command(self.machine.handle(rank.rank, event, self.now), rank.rank)

    def _tick(self) -> None:
        deadline = self.machine.deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        self._command(self.machine.tick(self.now), None)

    def _command(self, commands: list[Command], rank: int | None) -> None:
        self.book.check(commands, rank, set(self.numbers))
        self.check(commands, rank)
        self.log += commands
        for command in commands:
            if isinstance(command, Drained):
                self.drains.append(command)
            for number in self.machine.recipients(command):
                self.ranks[self.numbers.index(number)].inbox.append(command)

    @property
    def finished(self) -> bool:
        """Whether all training threads have ended."""
        return all(rank.over for rank in self.ranks)

    # -- an order that a seed draws -------------------------------------------------------------------------------

    def run(self) -> Any:
        """Move in a drawn order until every rank has finished; return this.

        Raises:
            AssertionError: a law is broken, no rank can move (a deadlock), or all move without end.
        """
        while not self.finished:
            self._probe()
            move = self._draw()
            if move is None:
                waiting = [rank.rank for rank in self.ranks if not rank.over]
                raise AssertionError(f"deadlock: ranks {waiting} wait for {self.machine.blocked_on()}")
            self.move(move)
            assert len(self.moves) < MOVES, f"no end: {self.machine.blocked_on()}"
        for move in iter(lambda: next(iter(self.possible()), None), None):
            self.move(move)
        self.over()
        return self

    def over(self) -> None:  # noqa: B027  some have nothing to check
        """Check what must hold at the end."""

    def _draw(self) -> Move | None:
        moves = self.possible()
        trains = [move for move in moves if move[0] == "train"]
        others = [move for move in moves if move[0] != "train"]
        weights = [self._speed(place) for _, place, _ in trains]
        share, deadline = sum(weights), self.machine.deadline()
        if deadline is not None and (not (others or share) or self.random.random() < 0.05):
            return ("time", 0, "")
        if others and self.random.random() * (len(others) + share) >= share:
            move = self.random.choice(others)
            if move[0] == "deliver":
                later = self.now + self.random.choice([0.0, 0.01, 0.3]) * self.random.random()
                self.now = later if deadline is None else min(later, deadline)
            return move
        if share:
            return self.random.choices(trains, weights)[0]
        return self.random.choice(trains) if trains else None

    def _speed(self, place: int) -> float:
        return self.job.speeds[place] if self.job.speeds else 1.0

    def _probe(self) -> None:
        """Sometimes try an event that is not allowed now: it must be refused and change nothing."""
        if self.random.random() > 0.05:
            return
        rank = self.random.choice(self.ranks)
        events = self.illegal(rank)
        if not events:
            return
        before = copy.deepcopy(state_of(self.machine))
        with pytest.raises(ProtocolError, match=f"rank {rank.rank}"):
            self.machine.handle(rank.rank, self.random.choice(events), self.now + 1e6)
        assert state_of(self.machine) == before
        self.illegal_tried += 1


def state_of(machine: StateMachine[Any]) -> dict[str, Any]:
    """Return a state machine's state, for comparison."""
    parts = AutoQuorum | Grace
    return {key: vars(value) if isinstance(value, parts) else value for key, value in vars(machine).items()}
