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

FEW, MANY = 32, 384
EAGER = ("solo", "majority", "all", "auto", "solo, hosts of 8", "solo, bucket by bucket", "majority, pace by rounds")


class Cost(NamedTuple):
    """Lines of Python that run while an event is handled, and the most memory that it takes meanwhile, bytes; means."""

    lines: float
    bytes: float


class Watched:
    """Handler of a state machine's events that counts what they cost."""

    def __init__(self) -> None:
        self._lines = self._bytes = self._events = 0

    def handle(self, machine: StateMachine[Any], rank: int, event: Any, now: float) -> list[Command]:
        """Handle an event as the machine does."""
        tracemalloc.reset_peak()
        held, _ = tracemalloc.get_traced_memory()
        before = sys.gettrace()
        sys.settrace(lambda frame, what, arg: self._on_line)
        try:
            return machine.handle(rank, event, now)
        finally:
            sys.settrace(before)
            self._bytes += tracemalloc.get_traced_memory()[1] - held
            self._events += 1

    def _on_line(self, frame: FrameType, what: str, arg: Any) -> Callable[..., Any]:
        self._lines += what == "line"
        return self._on_line

    def cost(self) -> Cost:
        """Return the cost of the events since the last call."""
        found = Cost(self._lines / self._events, self._bytes / self._events)
        self.__init__()  # type: ignore[misc]
        return found


def counted(kind: str, size: int, steps: int) -> list[Cost]:
    """Return what an event of these steps costs, and one of the end of a rank."""
    ranks, watched = Ranks(kind, size), Watched()
    ranks.step()
    ranks.handle = watched.handle
    tracemalloc.start()
    try:
        for _ in range(steps):
            ranks.step()
        found = [watched.cost()]
        if kind in EAGER:
            ranks.finish()
            found.append(watched.cost())
    finally:
        tracemalloc.stop()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_costs_the_same_with_more_ranks(kind: str) -> None:
    """Copies take no lines, but memory: of a set of all ranks at least 32 bytes a rank."""
    few, many = counted(kind, FEW, steps=8), counted(kind, MANY, steps=2)
    for of_few, of_many in zip(few, many, strict=True):
        assert of_many.lines <= 1.2 * of_few.lines
        assert of_many.bytes <= 1.5 * of_few.bytes


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
