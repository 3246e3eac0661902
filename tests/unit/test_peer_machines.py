"""What an event costs the state machines of gossip and of leaders, counted: no more among many ranks than among few.

(In Python: what one line does to all ranks at once, in C, is measured, by ``peer_machines.cost``.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from hvd_async.algorithms.gossip.config import ALGORITHMS as GOSSIP
from hvd_async.algorithms.leader.config import ALGORITHMS as LEADERS
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command
from scripts.benchmarks.support.peer_machines import KINDS, Run, summary

FEW, MANY = 64, 4096
MORE = 1.2
"""An event may take so many times as much of Python among many ranks as among few."""


class Counter:
    """Counts the functions that Python calls and the lines that it runs while events are handled.

    Attributes:
        calls, lines: of all events so far.
        events: handled.
    """

    def __init__(self) -> None:
        self.calls = self.lines = self.events = 0

    def handle(self, machine: StateMachine[Any], rank: int, event: Any, now: float) -> list[Command]:
        """In place of the machine's own."""
        self.events += 1
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            return machine.handle(rank, event, now)
        finally:
            sys.settrace(before)

    def _on_call(self, frame: Any, what: str, arg: Any) -> Callable[..., Any]:
        self.calls += 1
        return self._on_line

    def _on_line(self, frame: Any, what: str, arg: Any) -> Callable[..., Any]:
        self.lines += what == "line"
        return self._on_line


def counted(family: str, kind: str, ranks: int, steps: int) -> tuple[float, float]:
    """The calls and the lines that an event takes, on the average."""
    run, counter = Run(family, kind, ranks), Counter()
    run.step(measures=False)
    run.handle = counter.handle
    for _ in range(steps):
        run.step(measures=False)
    return counter.calls / counter.events, counter.lines / counter.events


CASES = [pytest.param(family, kind, id=f"{family}: {kind}") for family in KINDS for kind in KINDS[family]]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_an_event_costs_the_same_among_many_ranks(family: str, kind: str) -> None:
    few, many = counted(family, kind, FEW, steps=8), counted(family, kind, MANY, steps=1)
    assert many[0] <= few[0] * MORE, "calls"
    assert many[1] <= few[1] * MORE, "lines"


def test_every_algorithm_is_counted() -> None:
    assert {*GOSSIP} <= KINDS["gossip"].keys()
    assert {*LEADERS} <= KINDS["leader"].keys()


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_scripts_are_of_jobs_that_get_on(family: str, kind: str) -> None:
    """Each step of all ranks starts exchanges, averages or pulls, and nothing piles up."""
    run = Run(family, kind, 16)
    for _ in range(40):
        run.step()
    found = summary(run, family, kind)
    assert found.events >= 16
    assert found.microseconds > 0
    assert found.bytes_in > found.events
    assert found.bytes_out > 16
    assert run.machine.blocked_on() is None
