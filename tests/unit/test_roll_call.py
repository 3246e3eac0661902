"""A round that has fired and does not come back: any rank that holds it up is named."""

from __future__ import annotations

import pytest

from hvd_async.algorithms.eager.config import EagerConfig, GradientReady, ReportReceived, RoundsReceived, StepEntered
from hvd_async.errors import ProtocolError
from hvd_async.runtime.protocol import Finished
from tests.unit.moves import SOLO, kinds, opened, step

TWO = EagerConfig("solo", 2, 0.0, 0, 2)


def test_a_round_that_came_back_needs_no_roll_call():
    rounds = opened(SOLO, 3)
    assert rounds.roll_call(9.0) == []  # none has fired
    step(rounds, 0, 1, now=10.0)
    assert rounds.roll_call(9.0) == []  # not long enough
    step(rounds, 0, 2, now=11.0)  # rank 0 continues, so round 1 is back
    step(rounds, 1, 1, now=20.0)
    assert rounds.roll_call(20.0) == [ReportReceived(7, 1)]  # of round 2
    assert rounds.handle(1, RoundsReceived(7, 1, [2]), 20.1) == []
    assert rounds.blocked_on() is None
    assert rounds.roll_call(90.0) == []  # ranks may compute as long as they like


def test_an_engine_that_does_not_answer_is_named():
    rounds = opened(SOLO, 3)
    step(rounds, 0, 1, now=10.0)
    assert rounds.blocked_on() is None
    assert rounds.roll_call(11.0) == [ReportReceived(7, 1)]
    for rank in (0, 2):
        rounds.handle(rank, RoundsReceived(7, 1, [0]), 12.0)
    assert rounds.blocked_on() == ("round 1, which has begun,", frozenset({1}))
    assert rounds.roll_call(13.0) == [ReportReceived(7, 2)]
    rounds.handle(0, RoundsReceived(7, 2, [0]), 13.0)
    assert rounds.blocked_on() == ("round 1, which has begun,", frozenset({1}))
    rounds.handle(1, RoundsReceived(7, 1, [0]), 14.0)  # its engine runs again
    what, whom = rounds.blocked_on() or ("", frozenset())
    assert "all have begun and whose collective has not ended" in what
    assert whom == {0, 1, 2}
    rounds.handle(2, RoundsReceived(7, 2, [1]), 14.0)
    assert rounds.blocked_on() is None


def test_an_answer_to_an_earlier_roll_call_says_nothing_of_a_later_round():
    rounds = opened(SOLO, 2)
    step(rounds, 0, 1, now=1.0)
    assert rounds.roll_call(2.0) == [ReportReceived(7, 1)]
    step(rounds, 0, 2, now=3.0)
    assert rounds.roll_call(4.0) == [ReportReceived(7, 2)]
    rounds.handle(0, RoundsReceived(7, 2, [1]), 5.0)
    rounds.handle(1, RoundsReceived(7, 1, [0]), 5.0)
    assert rounds.blocked_on() == ("round 2, which has begun,", frozenset({1}))


def test_each_bucket_is_looked_after():
    rounds = opened(TWO, 2)
    rounds.handle(0, StepEntered(7, 1, []), 1.0)
    for bucket in (0, 1):
        assert "StartRound" in kinds(rounds.handle(0, GradientReady(7, [bucket], 1), 1.0))
    assert kinds(rounds.roll_call(2.0)) == ["ReportReceived"]
    rounds.handle(0, RoundsReceived(7, 1, [1, 0]), 2.0)
    assert rounds.blocked_on() == ("round 1, which has begun,", frozenset({1}))
    rounds.handle(0, RoundsReceived(7, 1, [1, 1]), 2.0)
    assert rounds.blocked_on() is None


def test_the_last_round_of_a_drain_too():
    rounds = opened(SOLO, 2)
    step(rounds, 0, 1)
    step(rounds, 1, 1)
    rounds.handle(0, Finished(7, [1]), 1.0)
    assert kinds(rounds.handle(1, Finished(7, [1]), 1.0)) == ["StartRound", "Drained"]
    rounds.roll_call(2.0)
    rounds.handle(1, RoundsReceived(7, 1, [1]), 2.0)
    assert rounds.blocked_on() == ("round 2, which has begun,", frozenset({0}))


@pytest.mark.parametrize("landed", [[], [0, 0], [2]])
def test_an_answer_that_cannot_be_is_refused(landed):
    rounds = opened(SOLO, 2)
    step(rounds, 0, 1)
    with pytest.raises(ProtocolError):
        rounds.handle(0, RoundsReceived(7, 1, landed), 1.0)


def test_a_drain_says_whose_rounds_were_shown_where_that_differs():
    for shown, expected in (([0, 0], None), ([3, 3], None), ([3, 8], 1), ([1, 0], 0)):
        rounds = opened(SOLO, 2)
        rounds.handle(0, Finished(7, [0], True, shown[0]), 1.0)
        (drained,) = rounds.handle(1, Finished(7, [0], True, shown[1]), 1.0)
        assert drained.copied_from == expected
