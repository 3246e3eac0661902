"""The state machine alone: moves that are not allowed raise, and change nothing."""

from __future__ import annotations

import pytest

from hvd_async.algorithms.eager.config import EagerConfig, GradientReady, StartRound, StepEntered, VersionTaken
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.errors import ProtocolError
from hvd_async.runtime.protocol import Accepted, Drained, Finished, Registered
from tests.machines.driver import snapshot
from tests.unit.moves import PACED, SOLO, opened, step

ILLEGAL = {
    "opened twice": (lambda: opened(SOLO, 2), Registered(7, SOLO, ["w"], [1])),
    "stepped before opening": (lambda: EagerStateMachine(7, range(2)), StepEntered(7, 1, [])),
    "arrived before opening": (lambda: EagerStateMachine(7, range(2)), GradientReady(7, [0], 1)),
    "done before opening": (lambda: EagerStateMachine(7, range(2)), Finished(7, [0])),
    "bucket too high": (lambda: opened(SOLO, 2), GradientReady(7, [1], 1)),
    "bucket negative": (lambda: opened(SOLO, 2), GradientReady(7, [-1], 1)),
    "step skipped": (lambda: opened(SOLO, 2), GradientReady(7, [0], 2)),
    "step zero": (lambda: opened(SOLO, 2), GradientReady(7, [0], 0)),
    "step again": (lambda: _after(step, 0, 1), GradientReady(7, [0], 1)),
    "ahead of the rounds": (
        lambda: _after(step, 0, 1, config=EagerConfig("all", 0, 0.0, 0, 1)),
        GradientReady(7, [0], 2),
    ),
    "hyper again": (lambda: _after(step, 0, 1), StepEntered(7, 1, [])),
    "done while waiting": (lambda: _after(step, 0, 1, config=EagerConfig("all", 0, 0.0, 0, 1)), Finished(7, [1])),
    "step after done": (lambda: _after(EagerStateMachine.handle, 0, Finished(7, [0]), 0.0), GradientReady(7, [0], 1)),
    "hyper after done": (lambda: _after(EagerStateMachine.handle, 0, Finished(7, [0]), 0.0), StepEntered(7, 1, [])),
    "took in pace steps": (lambda: opened(SOLO, 2), VersionTaken(7, 0)),
    "took what has not fired": (lambda: opened(PACED, 2), VersionTaken(7, 1)),
    "took backwards": (lambda: _after(step, 0, 1, config=PACED), VersionTaken(7, 0)),
    "took after done": (
        lambda: _after(EagerStateMachine.handle, 0, Finished(7, [0]), 0.0, config=PACED),
        VersionTaken(7, 0),
    ),
    "done with other buckets": (lambda: opened(SOLO, 2), Finished(7, [0, 0])),
    "done with none": (lambda: opened(SOLO, 2), Finished(7, [])),
    "done twice": (lambda: _after(EagerStateMachine.handle, 0, Finished(7, [0]), 0.0), Finished(7, [0])),
}


def _after(move, *args, config=SOLO):  # type: ignore[no-untyped-def]
    rounds = opened(config, 2)
    move(rounds, *args)
    return rounds


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_moves_raise_and_change_nothing(name):
    make, event = ILLEGAL[name]
    rounds = make()
    before = snapshot(rounds)
    with pytest.raises(ProtocolError, match=r"^rank 0 "):
        rounds.handle(0, event, 1.0)
    assert snapshot(rounds) == before


def test_events_before_all_have_opened_are_illegal():
    rounds = EagerStateMachine(7, range(2))
    rounds.handle(0, Registered(7, SOLO, ["w"], [1]), 0.0)
    before = snapshot(rounds)
    for event in (StepEntered(7, 1, []), GradientReady(7, [0], 1)):
        with pytest.raises(ProtocolError, match="before all ranks had registered"):
            rounds.handle(0, event, 0.0)
    assert snapshot(rounds) == before
    assert rounds.blocked_on() == ("the first step or drain", {1})


def test_a_rank_may_be_done_before_the_others_have_opened():
    rounds = EagerStateMachine(7, range(2))
    rounds.handle(0, Registered(7, SOLO, ["w"], [1]), 0.0)
    assert rounds.handle(0, Finished(7, [0]), 0.0) == []
    with pytest.raises(ProtocolError, match="although it is done"):
        rounds.handle(0, Finished(7, [0]), 0.0)
    assert rounds.handle(1, Registered(7, SOLO, ["w"], [1]), 0.0) == [Accepted(7)]
    rounds.handle(1, StepEntered(7, 1, []), 0.0)
    assert [type(c) for c in rounds.handle(1, GradientReady(7, [0], 1), 0.0)] == [StartRound]
    assert rounds.handle(1, Finished(7, [1]), 0.0) == [Drained(7, 1, [1], 1)]


def test_gradients_cannot_be_unproduced():
    rounds = opened(SOLO, 1)
    step(rounds, 0, 1)
    rounds.handle(0, Finished(7, [1]), 0.0)
    with pytest.raises(ProtocolError, match=r"has produced \[0\] gradients per bucket, earlier \[1\]"):
        rounds.handle(0, Finished(7, [0]), 0.0)
