"""An event costs a coordinator's state machine the same with more ranks: counted in lines of Python, not in seconds.

(What one line does to all ranks at once, in C, is measured by ``scripts/benchmarks/support/peer_machines.cost``.)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from hvd_async.algorithms.gossip.config import ALGORITHMS as GOSSIP
from hvd_async.algorithms.leader.config import ALGORITHMS as LEADERS
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command, Finished, Registered
from scripts.benchmarks.support.peer_machines import KINDS, Run, summary
from scripts.benchmarks.support.state_machines import Cost, Family, eager, measure

FEW, MANY = 64, 1024
ROUNDS = 3
FAMILIES = {
    **{str(quorum): eager(quorum) for quorum in ("solo", "majority", "all", 0.5, "auto")},
    "bucket by bucket": eager("all", together=False),
    "pace by rounds": eager("majority", pace="rounds"),
    "hosts": eager("solo", local_size=8),
    "hosts, all, bucket by bucket": eager("all", local_size=8, together=False),
}


def lines(action: Callable[[], None]) -> int:
    """How many lines of Python it takes."""
    count = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: local)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


class Job:
    """A family's machine, and what its ranks send."""

    def __init__(self, family: Family, size: int) -> None:
        self.family, self.size, self.machine = family, size, family.machine(0, range(size))
        rounds = zip(range(ROUNDS), family.rounds(range(size), family.config), strict=False)
        self.sent = [one for _, each in rounds for one in each]

    def register(self) -> None:
        for rank in range(self.size):
            self.machine.handle(rank, Registered(0, self.family.config, ["w"], [1]), 0.0)

    def run(self) -> None:
        for number, (rank, event) in enumerate(self.sent):
            self.machine.handle(rank, event, 1e-6 * number)

    def finish(self) -> None:
        done = Finished(0, self.family.produced(self.family.config, ROUNDS))
        for rank in range(self.size):
            self.machine.handle(rank, done, 1.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_event_of_partial_allreduce_takes_as_many_lines_with_more_ranks(name: str) -> None:
    def an_event(size: int) -> float:
        job = Job(FAMILIES[name], size)
        job.register()
        return lines(job.run) / len(job.sent)

    few, many = an_event(FEW), an_event(MANY)
    assert many <= 1.2 * few, f"{few:.1f} lines an event with {FEW} ranks, {many:.1f} with {MANY}"


PEERS = [pytest.param(family, kind, id=f"{family}: {kind}") for family in KINDS for kind in KINDS[family]]


@pytest.mark.parametrize(("family", "kind"), PEERS)
def test_an_event_of_gossip_or_leaders_takes_as_many_lines_with_more_ranks(family: str, kind: str) -> None:
    def an_event(size: int, steps: int) -> float:
        run, counts = Run(family, kind, size), list[int]()
        run.step(measures=False)

        def handle(machine: StateMachine[Any], rank: int, event: Any, now: float) -> list[Command]:
            commands: list[Command] = []
            counts.append(lines(lambda: commands.extend(machine.handle(rank, event, now))))
            return commands

        run.handle = handle
        for _ in range(steps):
            run.step(measures=False)
        return sum(counts) / len(counts)

    few, many = an_event(FEW, 8), an_event(MANY, 1)
    assert many <= 1.2 * few, f"{few:.1f} lines an event with {FEW} ranks, {many:.1f} with {MANY}"


def test_every_algorithm_is_counted() -> None:
    assert {*GOSSIP} <= KINDS["gossip"].keys()
    assert {*LEADERS} <= KINDS["leader"].keys()


@pytest.mark.parametrize(("family", "kind"), PEERS)
def test_the_counted_jobs_progress(family: str, kind: str) -> None:
    """Each step of all ranks starts exchanges, averages or pulls, and nothing piles up."""
    run = Run(family, kind, 16)
    for _ in range(20):
        run.step()
    found = summary(run, family, kind)
    assert found.events >= 16
    assert found.microseconds > 0
    assert found.bytes_in > found.events
    assert found.bytes_out > 16
    assert run.machine.blocked_on() is None


@pytest.mark.parametrize("name", ["solo", "hosts"])
def test_a_rank_s_ends_take_as_many_lines_with_more_ranks(name: str) -> None:
    def a_rank(size: int) -> float:
        job = Job(FAMILIES[name], size)
        before = lines(job.register)
        job.run()
        return (before + lines(job.finish)) / size

    few, many = a_rank(FEW), a_rank(MANY)
    assert many <= 1.2 * few, f"{few:.1f} lines a rank with {FEW} ranks, {many:.1f} with {MANY}"


@pytest.mark.parametrize("name", ["solo", "majority", "hosts"])
def test_no_event_copies_what_it_keeps_of_each_rank(name: str) -> None:
    """Copies take no lines, but time: of all ranks' sets, more than ten times what an event takes."""

    def an_event(size: int) -> float:
        seconds = []
        for _ in range(3):
            job = Job(FAMILIES[name], size)
            job.register()
            began = time.thread_time()
            job.run()
            job.finish()
            seconds.append((time.thread_time() - began) / len(job.sent))
        return min(seconds)

    few, many = an_event(FEW), an_event(MANY)
    assert many <= 5 * few, f"{1e6 * few:.1f} us an event with {FEW} ranks, {1e6 * many:.1f} with {MANY}"


def test_what_is_counted_of_messages() -> None:
    """Solo, two buckets in one event each: the first rank starts both, with one command to rank 0."""
    cost = measure(eager("solo", buckets=2), 4, blocks=2, warm_up=1)
    assert isinstance(cost, Cost)
    assert (cost.ranks, cost.events, cost.commands) == (4, 4, 1)
    assert 40 * 4 < cost.bytes_in < 140 * 4
    assert 60 < cost.bytes_out < 120
    apart = measure(eager("solo", buckets=2, together=False), 4, blocks=2, warm_up=1)
    assert (apart.events, apart.commands) == (8, 2)
    assert apart.bytes_out > cost.bytes_out
