"""An event costs a state machine the same with more ranks: counted in lines of Python, not in seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from hvd_async.algorithms.gossip.config import ALGORITHMS as GOSSIP
from hvd_async.algorithms.leader.config import ALGORITHMS as LEADERS
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command
from scripts.benchmarks.support.events import BUCKETS, KINDS, Ranks, measure

FEW, MANY = 64, 4096
EAGER = ("solo", "majority", "all", "auto", "solo, hosts of 8", "solo, bucket by bucket", "majority, pace by rounds")


class Lines:
    """Counter of the lines of Python that run while events are handled."""

    def __init__(self) -> None:
        self.count = 0

    def handle(self, machine: StateMachine[Any], rank: int, event: Any, now: float) -> list[Command]:
        """Handle an event as the machine does."""
        before = sys.gettrace()
        sys.settrace(lambda frame, what, arg: self._on_line)
        try:
            return machine.handle(rank, event, now)
        finally:
            sys.settrace(before)

    def _on_line(self, frame: FrameType, what: str, arg: Any) -> Callable[..., Any]:
        self.count += what == "line"
        return self._on_line


def counted(kind: str, size: int, steps: int) -> tuple[float, float]:
    """Return the lines of an event, mean, and of the end of a rank."""
    ranks, lines = Ranks(kind, size), Lines()
    ranks.step()
    ranks.handle, events = lines.handle, 0
    for _ in range(steps):
        ranks.step()
        events += ranks.events
    each, lines.count = lines.count / events, 0
    if kind in EAGER:
        ranks.finish()
    return each, lines.count / size


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_takes_as_many_lines_with_more_ranks(kind: str) -> None:
    few, many = counted(kind, FEW, steps=8), counted(kind, MANY, steps=1)
    assert many[0] <= 1.2 * few[0], "lines of an event"
    assert many[1] <= 1.2 * few[1], "lines of a rank's end"


@pytest.mark.parametrize("kind", ["solo", "majority", "solo, hosts of 8"])
def test_no_event_copies_the_state_of_all_ranks(kind: str) -> None:
    """Copies take no lines, but time: of all ranks' sets, more than ten times the time of an event."""
    few, many = (min(measure(kind, size).microseconds for _ in range(3)) for size in (FEW, MANY))
    assert many <= 5 * few


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
