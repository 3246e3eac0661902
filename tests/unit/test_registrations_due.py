"""Ranks that drain register what others wait in, so that no two groups of ranks wait for each other for ever."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import pytest

from hvd_async.algorithms.eager.config import EagerConfig
from hvd_async.algorithms.registry import FAMILIES
from hvd_async.runtime import coordinator, machine
from hvd_async.runtime.coordinator import Coordinator
from hvd_async.runtime.interfaces import Gone
from hvd_async.runtime.protocol import (
    Accepted,
    Command,
    Drained,
    Event,
    Finished,
    Hello,
    Leaving,
    Registered,
    RegisterOptimizer,
)
from tests.conftest import examples
from tests.unit.hub import Hub

CONFIG = EagerConfig("solo", 2, 0.0, 0, 1)
RANKS = 4
OPTIMIZERS = 3


def registered(number: int) -> Registered[EagerConfig]:
    return Registered(number, CONFIG, ["w"], [1])


class Rank:
    """A rank that steps some optimizers, each for the first time, and then drains all that it has.

    As a real one it waits for all ranks to register before a step, registers optimizers that it has not stepped as it
    begins to drain, and leaves the drain when all optimizers that it knows of are drained. It hands over no gradient.

    Args:
        number: this rank.
        steps: how many optimizers it steps.
        registers: how many it has registered when it drains.
    """

    def __init__(self, number: int, steps: int, registers: int) -> None:
        self.number, self.inbox = number, deque[Command]()
        self._accepted: set[int] = set()
        self._drained: set[int] = set()
        self._asked: deque[int] = deque()
        self._run = self._program(steps, registers)
        self.asked_in_all = 0
        self.done = False

    def advance(self) -> Event | None:
        """Return the next event; None if it has ended, or waits for a command."""
        if self.inbox:
            match self.inbox.popleft():
                case Accepted(number):
                    self._accepted.add(number)
                case Drained(number):
                    self._drained.add(number)
                case RegisterOptimizer(number, rank) if rank == self.number:
                    self._asked.append(number)
                    self.asked_in_all += 1
        return next(self._run, None)

    def _program(self, steps: int, registers: int) -> Generator[Event | None, None, None]:
        yield Hello("here", 1)
        mine = list(range(registers))
        for number in mine:
            yield registered(number)
            while number < steps and number not in self._accepted:
                yield None
        for number in mine:
            yield Finished(number, [0])
        while self._asked or not self._drained.issuperset(mine):
            while self._asked:
                mine.append(number := self._asked.popleft())
                yield registered(number)
                yield Finished(number, [0])
            yield None
        self.done = True
        yield Leaving()


class Stage(Hub):
    """A hub between the coordinator and ranks whose events are read in a drawn order.

    Args:
        programs: what each rank steps and registers.
        draw: draws the order.
    """

    def __init__(self, programs: Sequence[tuple[int, int]], draw: random.Random) -> None:
        self.ranks = [Rank(number, *program) for number, program in enumerate(programs)]
        self._draw, self._idle = draw, 0
        self.coordinator = Coordinator(self, FAMILIES, ["here"] * len(programs), clock=lambda: 0.0)

    def send(self, ranks: Sequence[int], command: Command) -> None:
        for rank in ranks:
            self.ranks[rank].inbox.append(command)

    def receive(self, timeout: float | None) -> tuple[Sequence[int], Event | Gone] | None:
        rank = self._draw.choice(self.ranks)
        event = rank.advance()
        self._idle = self._idle + 1 if event is None else 0
        if self._idle > 100 * len(self.ranks):
            raise AssertionError(f"ranks {self.waiting()} wait for ever")
        return None if event is None else ([rank.number], event)

    def waiting(self) -> list[int]:
        """Return the ranks that have not finish."""
        return [rank.number for rank in self.ranks if not rank.done]


def asked_in(seed: int) -> int:
    """Run a job in which ranks run out of batches at different optimizers; return how many requests there were."""
    draw = random.Random(seed)
    steps = [draw.randint(1, OPTIMIZERS) for _ in range(RANKS)]
    stage = Stage([(number, draw.randint(number, OPTIMIZERS)) for number in steps], draw)
    stage.coordinator.run()
    assert not stage.waiting(), "some ranks are left behind"
    assert max(rank.asked_in_all for rank in stage.ranks) <= OPTIMIZERS
    return sum(rank.asked_in_all for rank in stage.ranks)


def jobs_with_requests(jobs: int) -> int:
    """Run drawn jobs; return in how many of them a rank was asked."""
    return sum(asked_in(seed) > 0 for seed in range(jobs))


def test_no_job_waits_for_ever() -> None:
    jobs = examples(600)
    assert jobs_with_requests(jobs) > jobs / 3, "the draw has lost its teeth"


def only_the_finishing_rank(rank: int, *others: Any) -> list[tuple[Any, int]]:
    return [(one, other) for one, other in machine.to_register_before(rank, *others) if other == rank]


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("to_register_before", lambda *_: []),
        ("to_register_before", only_the_finishing_rank),
        ("registrations_due", lambda *_: []),
    ],
)
def test_without_a_rule_some_wait_for_ever(monkeypatch: pytest.MonkeyPatch, rule: str, fault: Any) -> None:
    monkeypatch.setattr(coordinator, rule, fault)
    with pytest.raises(AssertionError, match=r"wait for ever|left behind"):
        jobs_with_requests(600)
