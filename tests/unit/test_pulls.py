"""Leader-pull's coordinator: several steps in one event, what it says, and which ranks it tells of a pull.

Which pulls are due and which rank leads, in any order of events, is in ``tests/machines``.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_async.algorithms.leader.config import LeaderConfig, PullDone, StartPull, StepTaken
from hvd_async.algorithms.leader.machine import LeaderStateMachine
from hvd_async.algorithms.leader.rank import StepReports
from hvd_async.algorithms.leader.selection import ALL_RANKS, NO_LEADER
from hvd_async.errors import EngineError, ProtocolError
from hvd_async.runtime.protocol import (
    Command,
    Drained,
    Finished,
    OptimizerDeleted,
    OptimizerEvent,
    Resumed,
)
from tests.conftest import examples
from tests.machines.driver import state_of
from tests.machines.test_orders import leader_configs as configs
from tests.unit.moves import registered

PAIRS = LeaderConfig("lsgd", [[0, 1], [2, 3]], 2, 4, "")
TRIO = LeaderConfig("lsgd", [[0], [1], [2]], 1, 2, "")


def opened(config: LeaderConfig = PAIRS, size: int = 4) -> LeaderStateMachine:
    """A machine whose ranks have all registered."""
    return registered(LeaderStateMachine(7, range(size)), config)


def play(machine: LeaderStateMachine, *moves: tuple[int, OptimizerEvent | float | None]) -> list[Command]:
    """(rank, event, or the loss that it tells after a step); what they brought about."""
    commands = []
    for rank, move in moves:
        event = StepTaken(7, move) if move is None or isinstance(move, float) else move
        commands += machine.handle(rank, event, 0.0)
    return commands


def steps(*losses: float | None) -> list[tuple[int, float | None]]:
    """A step of each rank."""
    return list(enumerate(losses))


def test_where_nobodys_loss_is_finite_no_rank_is_pulled_and_people_hear_once():
    machine = opened(TRIO, 3)
    assert play(machine, *steps(math.nan, math.inf, None) * 2) == []
    news = machine.take_notice()
    assert news is not None
    assert "has a finite mean loss, so it has no leader and is not pulled; check what record_loss()" in news
    assert play(machine, *steps(math.nan, math.inf, None) * 2) == []
    assert machine.take_notice() is None
    assert play(machine, *steps(math.nan, math.inf, None), *steps(4.0, math.inf, None)) == [
        StartPull(7, 1, ALL_RANKS, 0)
    ]


def test_a_rank_that_has_taken_no_step_while_the_others_ran_ahead_and_finished_is_no_reason_to_warn():
    """The others' pull completes when they have finished, and the next one is due at once, with no leader to be had."""
    machine = opened(TRIO, 3)
    assert len(play(machine, *steps(1.0, 2.0, 3.0) * 2)) == 1
    play(machine, *[(rank, 1.0) for _ in range(20) for rank in (0, 1)])
    play(machine, (0, Finished(7, [22])), (1, Finished(7, [22])))
    assert play(machine, (0, PullDone(7, 1))) == []
    assert machine.take_notice() is None


def test_a_pull_is_reported_to_the_ranks_of_its_group_only():
    machine = opened()
    pulls = play(machine, *steps(1.0, 2.0, 3.0, 4.0) * 4)
    reported = {pull.group: tuple(machine.recipients(pull)) for pull in pulls}
    assert reported == {0: (0, 1), 1: (2, 3), ALL_RANKS: (0, 1, 2, 3)}
    assert tuple(machine.recipients(Drained(7, 0, [], 0, True))) == (0, 1, 2, 3)


def test_a_rank_whose_optimizer_is_deleted_in_a_drain_holds_no_pull_up():
    """Where ranks report that they have completed a drain: it never does."""
    machine = opened(TRIO, 3)
    finished = [(rank, Finished(7, [0], resumes=True)) for rank in range(3)]
    assert isinstance(play(machine, *finished)[-1], Drained)
    due = steps(1.0, 2.0, 3.0) * 2
    assert play(machine, *due, (0, Resumed(7)), (1, Resumed(7))) == []
    assert play(machine, (2, OptimizerDeleted(7, [2]))) == [StartPull(7, 1, ALL_RANKS, 0)]


LOSSES = st.sampled_from([None, math.nan, math.inf, 0.5, 0.5, 0.7, 1.0])
MOVES = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 40), LOSSES),
    st.tuples(st.just("landed"), st.integers(0, 3), st.none()),
    st.tuples(st.sampled_from(["drain", "cut"]), st.just(0), st.none()),
)


@settings(max_examples=examples(400))
@given(st.data())
def test_steps_that_come_together_make_the_pulls_that_they_make_one_by_one(data):
    size = data.draw(st.integers(1, 6))
    config = data.draw(configs(size))
    together, singly = opened(config, size), opened(config, size)
    produced, flights = [0] * size, list[int]()
    for rank, (what, number, loss) in data.draw(st.lists(st.tuples(st.integers(0, size - 1), MOVES), max_size=60)):
        events: list[OptimizerEvent]
        if what == "landed":
            if not flights:
                continue
            events = [PullDone(7, flights.pop(number % len(flights)))]
        elif what == "step":
            events = [StepTaken(7, loss, number)]
            produced[rank] += number
        else:
            events = [Finished(7, [produced[rank]], what == "drain")]
        ones = [StepTaken(7, loss)] * number if what == "step" else events
        found = outcome(together, rank, events)
        assert found == outcome(singly, rank, ones)
        assert together.take_notice() == singly.take_notice()
        for command in found if isinstance(found, list) else []:
            if isinstance(command, StartPull) and command.leader != NO_LEADER:
                flights.append(command.round)
            if isinstance(command, Drained):
                flights = []


def outcome(machine: LeaderStateMachine, rank: int, events: list[OptimizerEvent]) -> list[Command] | str:
    """What they brought about, or why they may not be."""
    try:
        return [command for event in events for command in machine.handle(rank, event, 0.0)]
    except ProtocolError as error:
        return str(error)


@pytest.mark.parametrize("steps", [0, -1])
def test_an_event_of_no_step_is_illegal(steps):
    machine = opened(PAIRS)
    before = copy.deepcopy(state_of(machine))
    with pytest.raises(ProtocolError, match="rank 0"):
        machine.handle(0, StepTaken(7, 1.0, steps), 0.0)
    assert state_of(machine) == before


class Engine:
    """Stands in for an engine that wakes up when it is asked to.

    Attributes:
        sent: events.
        posts: what it runs at its next wake.
        failed: whether it has.
    """

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.posts: list[Callable[[], None]] = []
        self.failed = False

    def check(self) -> None:
        if self.failed:
            raise EngineError("it has failed")

    def call_soon(self, action: Callable[[], None]) -> None:
        self.check()
        self.posts.append(action)

    def send(self, event: Any) -> None:
        self.sent.append(event)

    def wake(self) -> None:
        """Run what was posted before."""
        posts, self.posts = self.posts, []
        for post in posts:
            post()


def test_steps_of_one_wake_are_one_report():
    engine: Any = Engine()
    reports = StepReports(engine)
    for loss in (3.0, 2.0, None):
        reports.add(7, loss)
    assert len(engine.posts) == 1
    engine.wake()
    reports.add(7, None)
    engine.wake()
    engine.wake()
    assert engine.sent == [StepTaken(7, 2.0, 3), StepTaken(7, None, 1)]


def test_a_step_raises_what_the_engine_has_failed_with():
    """Also when a report waits, which no rank will send."""
    engine: Any = Engine()
    reports = StepReports(engine)
    reports.add(7, 1.0)
    engine.failed = True
    with pytest.raises(EngineError):
        reports.add(7, 1.0)


def test_no_step_is_lost_between_a_report_and_the_next():
    engine: Any = Engine()
    reports, over = StepReports(engine), threading.Event()

    def steps() -> None:
        for _ in range(5_000):
            reports.add(7, 1.0)
        over.set()

    thread = threading.Thread(target=steps)
    thread.start()
    while not over.is_set() or engine.posts:
        if engine.posts:
            engine.posts.pop(0)()
    thread.join()
    assert sum(event.steps for event in engine.sent) == 5_000
