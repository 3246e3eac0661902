"""The rule for permanent stragglers: never where ranks are even, always where one is slow; and the advice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_async.algorithms.registry import ALGORITHMS
from hvd_async.monitor.slow_ranks import BEGIN, END, WINDOWS, SlowRanks, advice, by_own_waits, by_waits_for, named
from tests.conftest import examples

EAGER = {"algorithm": "eager", "quorum": "solo", "pace": "steps", "max_staleness": 16, "local_size": 1}
"""Settings of an EagerOptimizer."""
WINDOW_STEPS = 50
"""Default of the monitor."""


def noise(size: int, low: float, high: float) -> st.SearchStrategy[list[float]]:
    """A share for each rank."""
    return st.lists(st.floats(low, high), min_size=size, max_size=size)


@given(size=st.integers(2, 12), level=st.floats(0.0, 1.0), data=st.data())
@settings(max_examples=examples(400))
def test_ranks_that_are_even_are_never_called_slow(size, level, data):
    """However long the others wait for them, if not twice as long for one as for another."""
    by_others, by_own = SlowRanks(size), SlowRanks(size)
    for _ in range(3 * WINDOWS):
        shares = [level * x for x in data.draw(noise(size, 0.5, 1.0))]
        assert not by_others.judge(by_waits_for(shares))
        assert not by_own.judge(by_own_waits(shares))
    assert not by_others.slow | by_own.slow


@given(size=st.integers(2, 12), slow=st.integers(0, 11), share=st.floats(BEGIN, 1.0), data=st.data())
@settings(max_examples=examples(400))
def test_a_permanent_straggler_is_always_found(size, slow, share, data):
    slow %= size
    rule, own = SlowRanks(size), SlowRanks(size)
    changes = []
    for _ in range(2 * WINDOWS):
        shares = [share * x for x in data.draw(noise(size, 0.0, 0.3))]
        shares[slow] = share
        changes.append(rule.judge(by_waits_for(shares)))
        waits = [share + 0.1 - 0.05 * x / share for x in shares]  # the others wait, one as long as another
        waits[slow] = 0.0
        own.judge(by_own_waits(waits))
    assert rule.slow == own.slow == {slow}
    assert changes == [number == WINDOWS - 1 for number in range(2 * WINDOWS)], "and that changes once"


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_straggler_that_is_another_rank_in_each_step_is_not_called_slow(size):
    """One random rank sleeps in every step, over 200 windows; all others wait for it."""
    draw, rule = random.Random(size), SlowRanks(size)
    for _ in range(200):
        steps = [draw.randrange(size) for _ in range(WINDOW_STEPS)]
        rule.judge(by_waits_for([steps.count(rank) / WINDOW_STEPS for rank in range(size)]))
        assert not rule.slow


def test_several_slow_ranks_are_found_together_and_a_share_between_the_limits_changes_nothing():
    rule = SlowRanks(8)
    for _ in range(WINDOWS):
        rule.judge(by_waits_for([0.2, 0.2, *[0.0] * 6]))
    assert rule.slow == {0, 1}
    for _ in range(2 * WINDOWS):
        rule.judge(by_waits_for([(BEGIN + END) / 2, 0.2, *[0.0] * 6]))
    assert rule.slow == {0, 1}
    for _ in range(WINDOWS):
        rule.judge(by_waits_for([0.2, END / 2, *[0.0] * 6]))
    assert rule.slow == {0}


def test_only_windows_in_a_row_count():
    rule = SlowRanks(4)
    for _ in range(5):
        for share in (*[0.5] * (WINDOWS - 1), 0.0):
            assert not rule.judge(by_waits_for([share, 0.0, 0.0, 0.0]))


# -- words --------------------------------------------------------------------------------------------------------


def test_ranks_are_named_by_host():
    assert named([3], range(4), ["a"] * 4) == "rank 3 on host a"
    assert named([2, 0, 1], [4, 5, 9], ["a", "a", "b"]) == "ranks 4, 5 on host a and rank 9 on host b"


GIVES = "would let it contribute fewer gradients instead of delaying the others"


@pytest.mark.parametrize(
    ("settings", "slow", "told"),
    [
        ({}, 1, f'pace="rounds" {GIVES}'),
        ({"quorum": "auto"}, 1, f'pace="rounds" {GIVES}'),
        ({"quorum": 3}, 1, f'pace="rounds" {GIVES}'),
        ({"quorum": 3}, 2, f'quorum="solo", pace="rounds" {GIVES}'),
        ({"quorum": 0.75}, 1, f'pace="rounds" {GIVES}'),
        ({"quorum": "majority"}, 1, f'quorum="solo", pace="rounds" {GIVES}'),
        ({"quorum": "all"}, 1, f'quorum="solo", pace="rounds" {GIVES}'),
        ({"max_staleness": 0}, 1, f'quorum="solo", pace="rounds", max_staleness=16 {GIVES}'),
        ({"local_size": 2}, 1, f'pace="rounds" {GIVES.replace("the others", "the other hosts")}'),
        ({"pace": "rounds"}, 1, "a higher max_staleness (now 16) would have rounds wait for it later"),
        ({"pace": "rounds", "quorum": "majority"}, 1, 'quorum="solo" would let rounds start without it'),
        ({"algorithm": "lsgd"}, 1, ""),
        ({"algorithm": "adpsgd", "max_local_steps": 4}, 1, "a higher max_local_steps (now 4) would make such waits "
                                                            "rarer"),
    ],
)  # fmt: skip
def test_the_advice_fits_the_mode(settings, slow, told):
    assert advice({**EAGER, **settings}, 4, slow) == told


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_there_is_advice_wherever_a_step_waits_for_others(algorithm):
    found = advice({**EAGER, "algorithm": algorithm}, 4, 1)
    assert bool(found) == (ALGORITHMS[algorithm].waits_for != "nobody")
