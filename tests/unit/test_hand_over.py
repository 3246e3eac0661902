"""One event reports all buckets of a step that the engine finds at one wake, after the rank has said it is in it."""

from __future__ import annotations

import numpy as np

from hvd_async.algorithms.eager.config import GradientReady
from hvd_async.algorithms.eager.rank import Counters, HandOver, ready


def handing(*given: tuple[int, int, bool]) -> HandOver:
    """What has been given: (bucket, step, whether in ``step()``), bucket 1 empty."""
    hand_over = HandOver([8] * 4, Counters([0]))
    for bucket, step, in_step in given:
        hand_over.give(bucket, None if bucket == 1 else np.zeros(1), 0, step, in_step)
    return hand_over


def test_one_event_reports_all_that_backward_has_brought() -> None:
    hand_over = handing((3, 1, False), (1, 1, False))
    assert ready(7, hand_over.take(1, False), 5) == GradientReady(7, [3, 1], 1, 5, empty=[1])
    assert hand_over.take(1, False) == []


def test_what_comes_with_the_step_comes_after_it_and_brings_the_rest() -> None:
    hand_over = handing((3, 1, False), (2, 1, True), (0, 1, True))
    assert hand_over.take(1, False) == [], "the rank is about to say that it is in step()"
    assert [one.bucket for one in hand_over.take(1, True)] == [3, 2, 0]


def test_the_next_step_is_not_taken_for_this_one() -> None:
    hand_over = handing((3, 1, False), (2, 2, False), (0, 2, True))
    assert [one.bucket for one in hand_over.take(1, False)] == [3]
    assert hand_over.take(1, True) == []
    assert [one.bucket for one in hand_over.take(2, True)] == [2, 0]
