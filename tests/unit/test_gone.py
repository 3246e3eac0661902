"""Ranks that are gone, at the coordinator's state machines: they neither count nor lead, and hold up no rank."""

from __future__ import annotations

import copy

import pytest

from hvd_async.algorithms.eager.config import EagerConfig, GradientReady, RoundsReceived, StepEntered
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.errors import ProtocolError
from hvd_async.runtime.protocol import (
    CollectiveReady,
    Finished,
    NoSuchOptimizer,
    OptimizerDeleted,
    Registered,
    RunCollective,
)
from tests.unit.moves import opened

EAGER = EagerConfig("solo", 3, 0.0, 0, 1)


def test_the_engine_of_a_rank_that_is_gone_answers_for_itself():
    """Else it would be named next to, or instead of, the one that stands still."""
    machine = opened(EAGER, 3)
    machine.handle(1, OptimizerDeleted(7, [0]), 0.0)
    machine.handle(0, StepEntered(7, 1, []), 1.0)
    machine.handle(0, GradientReady(7, [0], 1), 1.0)
    assert machine.roll_call(5.0)
    for rank in (0, 1):
        machine.handle(rank, RoundsReceived(7, 1, [0]), 5.0)
    waiting = machine.blocked_on()
    assert waiting is not None
    assert waiting[1] == {2}


def test_a_rank_in_a_collective_and_one_in_a_drain_are_reported_that_they_will_never_meet():
    machine = opened(EAGER, 2)
    assert machine.handle(0, CollectiveReady(7, 1, "sum", "consensus_distance()", 3, "float32"), 0.0) == []
    (command,) = machine.handle(1, Finished(7, [0]), 0.0)
    assert isinstance(command, RunCollective)
    assert command.problem is not None
    assert "rank 0 is in consensus_distance() while rank 1 wait(s) in drain()" in command.problem


def test_only_a_rank_that_was_asked_answers_that_it_has_no_such_optimizer():
    """No rank is blamed for an answer that comes when no rank waits any more; what is refused, no rank lacks."""
    machine = EagerStateMachine(7, [0, 1])
    machine.handle(1, Registered(7, EAGER, ["w"], [1]), 0.0)
    with pytest.raises(ProtocolError, match="without a request"):
        machine.handle(0, NoSuchOptimizer(7), 0.0)
    assert machine.ask_to_register(0)
    assert not machine.ask_to_register(0), "once is enough"
    late = copy.deepcopy(machine)
    late.handle(1, OptimizerDeleted(7, [0]), 0.0)
    assert late.handle(0, NoSuchOptimizer(7), 0.0) == []
    machine.handle(0, NoSuchOptimizer(7), 0.0)
    assert not machine.awaits_registration_of(0), "it may leave"
