"""An event costs a state machine the same with more ranks: counted in lines of Python and in bytes, not in seconds."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import pytest

from hvd_async.algorithms.gossip.config import ALGORITHMS as GOSSIP
from hvd_async.algorithms.leader.config import ALGORITHMS as LEADERS
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command
from scripts.benchmarks.support.events import BUCKETS, KINDS, Ranks, measure

FEW, MANY = 64, 512
EAGER = ("solo", "majority", "all", "auto", "solo, hosts of 8", "solo, bucket by bucket", "majority, pace by rounds")


class Watched:
    """Counter of the lines of Python that run while events are handled, and of the memory that they take meanwhile."""

    def __init__(self) -> None:
        self.lines = self.bytes = 0

    def count_lines(self, machine: StateMachine[Any], rank: int, event: Any, now: float) -> list[Command]:
        """Handle an event as the machine does."""
        before = sys.gettrace()
        sys.settrace(lambda frame, what, arg: self._on_line)
        try:
            return machine.handle(rank, event, now)
        finally:
            sys.settrace(before)

    def _on_line(self, frame: FrameType, what: str, arg: Any) -> Callable[..., Any]:
        self.lines += what == "line"
        return self._on_line

    def count_bytes(self, machine: StateMachine[Any], rank: int, event: Any, now: float) -> list[Command]:
        """Handle an event as the machine does."""
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        commands = machine.handle(rank, event, now)
        self.bytes += tracemalloc.get_traced_memory()[1] - before
        return commands


class Cost(NamedTuple):
    """Lines and bytes of an event, mean, and lines of the end of a rank."""

    lines: float
    bytes: float
    lines_of_end: float


def counted(kind: str, size: int, steps: int) -> Cost:
    """Return what an event costs: bytes in the first two steps, lines in the ones after these."""
    ranks, watched = Ranks(kind, size), Watched()

    def handled(steps: int) -> int:
        events = 0
        for _ in range(steps):
            ranks.step()
            events += ranks.events
        return events

    ranks.handle = watched.count_bytes
    tracemalloc.start()
    try:
        events = handled(2)
    finally:
        tracemalloc.stop()
    each_bytes, ranks.handle = watched.bytes / events, watched.count_lines
    events = handled(steps)
    each_lines, watched.lines = watched.lines / events, 0
    if kind in EAGER:
        ranks.finish()
    return Cost(each_lines, each_bytes, watched.lines / size)


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_costs_the_same_with_more_ranks(kind: str) -> None:
    """Copies take no lines, but memory: of a set of all ranks at least 32 bytes a rank."""
    few, many = counted(kind, FEW, steps=8), counted(kind, MANY, steps=2)
    assert many.lines <= 1.2 * few.lines
    assert many.lines_of_end <= 1.2 * few.lines_of_end
    assert many.bytes <= 2 * few.bytes


def test_every_algorithm_is_measured() -> None:
    assert {*GOSSIP, *LEADERS} <= KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_scripts_make_progress(kind: str) -> None:
    """Each step of all ranks starts rounds, exchanges, averages or pulls, and nothing piles up."""
    ranks = Ranks(kind, 16)
    for _ in range(40):
        ranks.step()
        assert ranks.events >= 16 or kind == "adpsgd"
    assert ranks.bytes_out > 0 or kind == "easgd"
    assert ranks.machine.blocked_on() is None


def test_messages_are_counted() -> None:
    """Solo: the first rank starts the round of all buckets, with one command to each rank; else one for each bucket."""
    together, apart = measure("solo", 4), measure("solo, bucket by bucket", 4)
    assert (together.events, apart.events) == (4, 4 * BUCKETS)
    assert 40 * 4 < together.bytes_in < 140 * 4
    assert 60 < together.bytes_out < 120 < apart.bytes_out
