"""Partial allreduce's coordinator: why a round starts, what it says of ranks that do not fit, and illegal events.

When rounds start in any order of events, and that refusals change nothing, is in ``tests/machines``.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest

from hvd_async.algorithms.eager.config import (
    EagerConfig,
    ExplainRound,
    GradientReady,
    RoundTrigger,
    SetHyperparameters,
    StartRound,
    StepEntered,
)
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.errors import ProtocolError
from hvd_async.runtime.protocol import Accepted, Drained, Finished, OptimizerDeleted, Registered, Rejected
from tests.unit.moves import SOLO, kinds, opened, step, whys

HINT_TORCH = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"


# -- reasons, times and whom a round waits for, to the letter -------------------------------------------------


def test_solo_fires_for_the_first_with_its_hyperparameters():
    rounds = opened(SOLO, 2, timeline=True)
    explain, start = step(rounds, 1, 1, 3.0)
    trigger = RoundTrigger("solo: rank 1 came first", 1, 1, first=3.0, fired=3.0, held=0.0)
    assert explain == ExplainRound(7, 0, 1, trigger)
    assert start == StartRound(7, [0], 1, by=1, arrived=[1], held=0.0, settled=True, hyper=[{"lr": 1}])
    assert list(rounds.recipients(explain)) == [0], "no other rank reads why"
    assert list(rounds.recipients(start)) == [0, 1]
    assert step(rounds, 0, 1) == []


def test_a_late_gradient_keeps_its_rank_from_nothing():
    rounds = opened(SOLO, 3)
    assert kinds(step(rounds, 0, 1) + step(rounds, 0, 2)) == ["StartRound", "StartRound"]
    assert step(rounds, 2, 1) == []
    assert step(rounds, 0, 3) == []  # rank 1 would be 3 rounds late, rank 2 just 2
    assert rounds.blocked_on() == ("round 3", {1})
    assert kinds(step(rounds, 1, 1)) == ["StartRound"]
    assert rounds.blocked_on() is None


def test_count_fires_with_the_count_and_the_first_leads():
    rounds = opened(EagerConfig(2, 9, 0.0, 0, 1), 3, timeline=True)
    assert step(rounds, 2, 1, 3.0) == []
    assert rounds.blocked_on() == ("round 1", {0, 1})
    why = RoundTrigger("quorum: 2 of 3 are in, 2 needed", 0, 2, first=3.0, fired=4.5, held=1.5)
    assert step(rounds, 0, 1, 4.5) == [
        ExplainRound(7, 0, 1, why),
        StartRound(7, [0], 1, by=0, arrived=[2], held=1.5, settled=True, hyper=[{"lr": 2}]),
    ]


def test_a_round_that_no_rank_has_come_to_step_for_gets_its_hyperparameters_at_the_end():
    """Rank 0's backward pass hands all over; then its optimizer is deleted."""
    rounds = opened(SOLO, 2, timeline=True)
    assert whys(rounds.handle(0, GradientReady(7, [0], 1), 0.0)) == [(0, 1, None, "solo: rank 0 came first")]
    assert rounds.handle(0, OptimizerDeleted(7, [1]), 0.0) == []
    reported, drained = rounds.handle(1, Finished(7, [0]), 0.0)
    assert reported == SetHyperparameters(7, 1, [])
    assert isinstance(drained, Drained)


def test_only_the_ranks_of_a_process_set_count():
    rounds = EagerStateMachine(7, (1, 3))
    config = EagerConfig("all", 2, 0.0, 0, 1)
    assert rounds.handle(3, Registered(7, config, ["w"], [1], [1, 3]), 0.0) == []
    assert rounds.blocked_on() == ("the first step or drain", {1})
    with pytest.raises(ProtocolError, match="rank 0 does not share optimizer 7"):
        rounds.handle(0, Registered(7, config, ["w"], [1], [1, 3]), 0.0)
    assert rounds.handle(1, Registered(7, config, ["w"], [1], [1, 3]), 0.0) == [Accepted(7)]
    assert step(rounds, 3, 1) == []
    assert rounds.blocked_on() == ("round 1", {1})
    assert kinds(step(rounds, 1, 1)) == ["StartRound"]
    assert rounds.handle(3, Finished(7, [1]), 0.0) == []
    assert rounds.blocked_on() == ("drain", {1})
    assert rounds.handle(1, Finished(7, [1]), 0.0) == [Drained(7, 1, [2], 1)]


# -- ranks that do not fit together ---------------------------------------------------------------------------


def refusal(*events: Registered) -> str:
    """Return the refusal that ranks receive which register with these events, in any order."""
    reported = set()
    for order in itertools.permutations(range(len(events))):
        rounds = EagerStateMachine(7, range(len(events)))
        commands = [c for rank in order for c in rounds.handle(rank, events[rank], 0.0)]
        assert kinds(commands) == ["Rejected"]
        assert isinstance(commands[0], Rejected)
        assert rounds.blocked_on() is None
        assert rounds.handle(0, StepEntered(7, 1, []), 0.0) == []  # on its way when the refusal went out
        reported.add(commands[0].problem)
    assert len(reported) == 1
    return reported.pop()


PAIR = Registered(7, SOLO, ["a (2,)", "b (3,)"], [1, 2])
UNLIKE = {
    "weights": (
        msgspec.structs.replace(PAIR, checksums=[1, 3]),
        ["weights differ", "ranks 1, 2 from rank 0", "'b (3,)'", HINT_TORCH, "BroadcastGlobalVariablesCallback(0)"],
    ),
    "settings": (
        msgspec.structs.replace(PAIR, config=EagerConfig("all", 2, 0.0, 0, 1)),
        ["wrapped their optimizers differently", "rank 1 has", "quorum='all'", "Pass the same arguments on every rank"],
    ),
    "too few": (Registered(7, SOLO, ["a"], [1]), ["different parameters", "where rank 1 has 'a'"]),
    "another name": (
        msgspec.structs.replace(PAIR, names=["a (2,)", "c (3,)"]),
        ["different parameters", "where rank 1 has 'c (3,)'"],
    ),
    "one less": (Registered(7, SOLO, ["a (2,)"], [1]), ["different parameters", "where rank 1 has 'nothing'"]),
}


@pytest.mark.parametrize(("other", "words"), UNLIKE.values(), ids=UNLIKE)
def test_ranks_that_do_not_fit_are_reported_by_name_with_how_to_fix_them(other, words):
    text = refusal(PAIR, other, other)
    assert [one for one in words if one not in text] == []
