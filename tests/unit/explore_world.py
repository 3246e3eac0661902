"""A small job at one moment: model ranks around a coordinator's state machine, for ``explore``.

Each rank follows a program of tokens ("step", "drain", "cut", "sum", "leave"), sends events through an outbox, and
receives commands through an inbox, both in order and with any delay. Each world checks the laws itself, apart from its
state machine.
"""

from __future__ import annotations

import abc
import copyreg
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import (
    Accepted,
    CollectiveReady,
    Command,
    Config,
    Drained,
    Finished,
    OptimizerDeleted,
    OptimizerEvent,
    Registered,
    RunCollective,
    Unregister,
)

Action = tuple[Any, ...]
"""Its kind, the place of a rank, and what else it takes."""
Program = tuple[str, ...]
ENDS = ("drain", "cut")


@dataclass
class Rank:
    """A model rank: ``at`` is the token of its program that it is at, ``phase`` where in it; a family adds fields."""

    place: int
    number: int
    at: int = 0
    phase: int = 0
    outbox: list[OptimizerEvent] = field(default_factory=list)
    inbox: list[Any] = field(default_factory=list)
    agreed: bool = True
    drained: Drained[Any] | None = None
    produced: list[int] = field(default_factory=lambda: [0])
    calls: int = 0
    """Collectives that it has begun."""
    combined: int = 0
    """Collectives that are over."""


@dataclass
class Book:
    """What the coordinator has heard and commanded, kept apart from it."""

    done: dict[int, bool] = field(default_factory=dict)
    """Ranks that are done, and whether they drain."""
    gone: set[int] = field(default_factory=set)
    told: dict[int, list[int]] = field(default_factory=dict)
    """What each rank has produced, as it said last."""
    settled: dict[int, list[int]] = field(default_factory=dict)
    """``told`` at the last drain."""
    forced: bool = False
    """Whether a rank that went has left something behind."""
    calling: set[int] = field(default_factory=set)
    ends: int = 0


class World(abc.ABC):
    """One job at one moment.

    Args:
        machine: of what class.
        config: of the optimizer.
        programs: of the ranks.
        opening: whether the ranks still have to register; else they have.
    """

    rank_type: ClassVar[type[Rank]] = Rank
    book_type: ClassVar[type[Book]] = Book
    timed: ClassVar[bool] = False

    def __init__(
        self, machine: type[StateMachine[Any]], config: Config, programs: Sequence[Program], opening: bool = False
    ) -> None:
        self.config, self.programs, self.opening = config, tuple(programs), opening
        self.numbers = tuple(range(len(self.programs)))
        self.machine = machine(0, self.numbers)
        self.ranks: list[Any] = [self._new_rank(place, number) for place, number in enumerate(self.numbers)]
        self.book: Any = self.book_type()
        self.constants: list[Any] = [config]
        self.constants += [Registered(0, config, ["w"], [1], hyper=self.first_hyper(rank)) for rank in self.numbers]
        for rank in self.ranks:
            rank.agreed = not opening
            if opening:
                rank.outbox.append(self.constants[1 + rank.place])
            else:
                commands = self.machine.handle(rank.number, self.constants[1 + rank.place], 0.0)
        if not opening:
            assert commands == [Accepted(0)]
        self.begin()

    def _new_rank(self, place: int, number: int) -> Rank:
        return self.rank_type(place, number, produced=[0] * self.config.counts)

    def first_hyper(self, rank: int) -> list[dict[str, Any]]:
        """The hyperparameters that a rank registers with."""
        return []

    def begin(self) -> None:  # noqa: B027  most have nothing to add
        """Called once, when the machine's ranks have registered, or will."""

    # -- states -----------------------------------------------------------------------------------------------

    def save(self) -> bytes:
        """The state, the same bytes for equal states."""
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, 5)
        pickler.fast = True  # (no memory of objects: equal states have equal bytes, whoever shares what)
        pickler.dispatch_table = copyreg.dispatch_table.copy()
        for kind in {type(constant) for constant in self.constants}:
            pickler.dispatch_table[kind] = self._reduce_constant
        pickler.dispatch_table[set] = _reduce_set
        pickler.dump((vars(self.machine), self.ranks, self.book))
        return buffer.getvalue()

    def _reduce_constant(self, constant: Any) -> Any:
        return _constant, (self.constants.index(constant),)

    def load(self, state: bytes) -> None:
        """Go back to a state that ``save`` gave."""
        _CONSTANTS[:] = self.constants
        fields, self.ranks, self.book = pickle.loads(state)
        machine: StateMachine[Any] = object.__new__(type(self.machine))
        machine.__dict__.update(fields)
        self.machine = machine

    # -- actions ----------------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        """All that can happen now."""
        found: list[Action] = []
        for rank in self.ranks:
            if rank.outbox:
                found.append(("deliver", rank.place))
            if rank.inbox:
                found.append(("obey", rank.place))
            found += [("land", rank.place, what) for what in self.landing(rank)]
            if self.can_go_on(rank):
                found.append(("go on", rank.place))
        if self.timed and self.ages():
            found.append(("time", 0))
        return found

    def act(self, action: Action) -> None:
        """Do it.

        Raises:
            AssertionError: it breaks a law.
        """
        kind, place, *more = action
        rank = self.ranks[place]
        if kind == "deliver":
            self._deliver(rank)
        elif kind == "obey":
            self.on_command(rank, rank.inbox.pop(0))
        elif kind == "land":
            self.land(rank, *more)
        elif kind == "go on":
            self._go_on(rank)
        else:
            deadline = self.machine.deadline()
            if deadline is not None and deadline <= 1.0:  # (nobody calls it otherwise)
                self._command(self.machine.tick(1.0), None)
            self.age()

    def sure(self) -> Action | None:
        """An action that commutes with all others, if one is known."""
        for rank in self.ranks:
            if rank.inbox and self.obeys_surely(rank):
                return ("obey", rank.place)
            lands = self.landing(rank)
            if len(lands) == 1 and self.lands_surely(rank):
                return ("land", rank.place, lands[0])
            if self.can_go_on(rank) and self.goes_on_surely(rank):
                return ("go on", rank.place)
        return None

    def _deliver(self, rank: Rank) -> None:
        event = rank.outbox.pop(0)
        book = self.book
        match event:
            case Finished(_, produced, flush):
                book.done[rank.number], book.told[rank.number] = flush, produced
            case OptimizerDeleted(_, produced):
                book.gone.add(rank.number)
                book.calling.discard(rank.number)
                book.done[rank.number], book.told[rank.number] = False, produced
                book.forced |= produced != book.settled.get(rank.number, [0] * len(produced))
            case CollectiveReady():
                book.calling.add(rank.number)
        self.hear(rank, event)
        self._command(self.machine.handle(rank.number, event, 0.0), rank)
        self.check_due(event)

    def _command(self, commands: list[Command], rank: Rank | None) -> None:
        ending = any(isinstance(command, Drained) for command in commands)
        for command in commands:
            match command:
                case Accepted():
                    assert not any(each.outbox[:1] == [self.constants[1 + each.place]] for each in self.ranks)
                case Drained():
                    self._check_drained(command, rank)
                case RunCollective():
                    assert command.problem is None, command.problem
                    assert set(command.ranks) == self.book.calling == set(self.numbers) - self.book.gone
                    self.book.calling = set()
                case Unregister():
                    assert self.book.gone == set(self.numbers), "forgotten although a rank has it"
                case _:
                    self.check(command, ending)
        slim = [self.slim(command) for command in commands]
        for each in self.ranks:
            each.inbox += slim

    def _check_drained(self, drained: Drained[Any], rank: Rank | None) -> None:
        book = self.book
        assert book.done.keys() == set(self.numbers), "drained although a rank is not done"
        assert rank is not None
        assert book.gone == set(drained.gone)
        assert drained.flushed == (any(book.done.values()) or book.forced), (
            "a drain is taken for a cut, or a cut for it"
        )
        assert drained.produced == [sum(counts) for counts in zip(*book.told.values(), strict=True)]
        self.check_end(drained)
        if drained.flushed:
            book.settled = dict(sorted(book.told.items()))
        book.done = dict.fromkeys(sorted(book.gone), False)
        book.forced, book.ends = False, book.ends + 1

    # -- training threads -------------------------------------------------------------------------------------

    def token(self, rank: Rank) -> str:
        """What a rank's training thread is at; "" after the last."""
        program = self.programs[rank.place]
        return program[rank.at] if rank.at < len(program) else ""

    def can_go_on(self, rank: Any) -> bool:
        """Whether a rank's training thread does not wait."""
        token = self.token(rank)
        if not token or not rank.agreed:
            return False
        if token in ENDS:
            return not rank.phase or (rank.drained is not None and self.has_all(rank))
        if token == "sum":
            return not rank.phase or rank.combined == rank.calls
        return token == "leave" or self.can_step(rank)

    def _go_on(self, rank: Rank) -> None:
        token = self.token(rank)
        if token == "leave":
            rank.outbox.append(OptimizerDeleted(0, list(rank.produced)))
            self.left(rank)
        elif token in ENDS and not rank.phase:
            rank.outbox.append(Finished(0, list(rank.produced), token == "drain"))
            rank.phase = 1
            return
        elif token in ENDS:
            self.after_end(rank)
            rank.drained = None
        elif token == "sum" and not rank.phase:
            rank.calls += 1
            rank.outbox.append(CollectiveReady(0, rank.calls, "sum", "a sum", 1, "float32"))
            rank.phase = 1
            return
        elif token != "sum":
            self.step(rank)
            return
        rank.at, rank.phase = rank.at + 1, 0

    def goes_on_surely(self, rank: Rank) -> bool:
        """Whether going on commutes with all that may happen: the thread says something that depends on nothing."""
        token = self.token(rank)
        return token == "sum" or (token in ENDS and not rank.phase)

    def in_end(self, rank: Rank) -> bool:
        """Whether a rank's training thread is over, or waits for the others in an end."""
        token = self.token(rank)
        return not token or (token in ENDS and rank.phase == 1)

    def on_command(self, rank: Any, command: Any) -> None:
        """A rank obeys a command; a family adds its own."""
        match command:
            case Accepted():
                rank.agreed = True
            case Drained():
                assert rank.drained is None
                rank.drained = command if self.token(rank) else None
            case RunCollective():
                rank.combined += rank.number in command.ranks

    # -- the end of a path ------------------------------------------------------------------------------------

    def check_over(self) -> None:
        """Nothing can happen any more.

        Raises:
            AssertionError: somebody waits all the same (a deadlock), or something is left.
        """
        waiting = [rank.number for rank in self.ranks if self.token(rank)]
        assert not waiting, f"deadlock: ranks {waiting} wait for {self.machine.blocked_on()}"
        assert self.machine.over == (self.book.gone == set(self.numbers))
        assert self.machine.blocked_on() is None

    # -- what a family supplies -------------------------------------------------------------------------------

    def slim(self, command: Command) -> Any:
        """A command without what no rank goes by."""
        return command

    def left(self, rank: Any) -> None:  # noqa: B027
        """A rank's optimizer is gone; its engine serves."""

    def hear(self, rank: Any, event: OptimizerEvent) -> None:  # noqa: B027
        """An event is about to reach the machine."""

    @abc.abstractmethod
    def check(self, command: Command, ending: bool) -> None:
        """A family's command; ``ending``: one of those that end all."""

    def check_due(self, event: OptimizerEvent) -> None:  # noqa: B027
        """After an event: what can go now has gone, or there is a deadline for what only waits for time to pass."""

    @abc.abstractmethod
    def check_end(self, drained: Drained[Any]) -> None:
        """All are told that all are done."""

    @abc.abstractmethod
    def landing(self, rank: Any) -> list[Any]:
        """Collectives that may land on a rank now."""

    @abc.abstractmethod
    def land(self, rank: Any, what: Any) -> None:
        """One lands."""

    @abc.abstractmethod
    def has_all(self, rank: Any) -> bool:
        """Whether all has come that a rank's end has to wait for."""

    @abc.abstractmethod
    def after_end(self, rank: Any) -> None:
        """A rank's drain or cut returns."""

    @abc.abstractmethod
    def can_step(self, rank: Any) -> bool:
        """Whether a training thread that is in, or before, a step does not wait."""

    @abc.abstractmethod
    def step(self, rank: Any) -> None:
        """It goes on."""

    @abc.abstractmethod
    def obeys_surely(self, rank: Any) -> bool:
        """Whether obeying the next command commutes with all that may happen before."""

    @abc.abstractmethod
    def lands_surely(self, rank: Any) -> bool:
        """Whether landing does."""

    def ages(self) -> bool:
        """Whether it makes a difference that time passes."""
        return self.machine.deadline() is not None

    def age(self) -> None:  # noqa: B027
        """One unit of time has passed: make all times relative to now."""


_CONSTANTS: list[Any] = []


def _constant(index: int) -> Any:
    return _CONSTANTS[index]


def _reduce_set(members: set[Any]) -> Any:
    return set, (sorted(members),)
