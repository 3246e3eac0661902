"""Schedules of computation, their bounds, and how late gradients are, against numbers worked out by hand."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms.eager.quorum import initiator, needed
from hvd_async.simulation.schedule import stalls
from scripts.benchmarks.support.names import quorum_of
from scripts.benchmarks.support.schedule import (
    Gradient,
    even_seed,
    gradients_of,
    linear,
    one_random,
    own_pace,
    play,
    replay,
    slowest_work,
    synchronous_seconds,
)

SMALL = np.array([[1.0, 3.0], [1.0, 1.0], [4.0, 1.0]])
"""Two ranks, three steps: maxima 3, 1, 4; sums 6 and 5."""


def test_bounds_by_hand():
    assert synchronous_seconds(SMALL) == 8.0
    assert slowest_work(SMALL) == 6.0


def test_one_random_delays_one_rank_a_step():
    times = one_random(200, 8, 0.3, 0.2, seed=1)
    assert times.shape == (200, 8)
    assert sorted(np.unique(times).tolist()) == pytest.approx([0.3, 0.5])
    assert (times > 0.4).sum(axis=1).tolist() == [1] * 200
    assert np.array_equal(times, one_random(200, 8, 0.3, 0.2, seed=1))
    assert not np.array_equal(times, one_random(200, 8, 0.3, 0.2, seed=2))


def test_own_pace_shares_the_steps_by_speed():
    times = np.full((70, 4), 0.006)
    times[:, -1] *= 2
    assert own_pace(times) == [80, 80, 80, 40]
    assert own_pace(np.ones((5, 3))) == [5, 5, 5]
    assert own_pace(SMALL) == [3, 3]


def test_the_published_bound_is_the_limit():
    times = one_random(100_000, 8, 0.3, 0.4, seed=0)
    assert synchronous_seconds(times) / slowest_work(times) == pytest.approx((0.3 + 0.4) / (0.3 + 0.4 / 8), rel=0.01)


def test_replay_by_hand():
    # Rank 0 arrives at 1, 2, 6; rank 1 at 3, 4, 5. Solo fires at 1, 2, 5.
    solo = replay(SMALL, "solo")
    assert solo.seconds == 6.0
    assert solo.wait == 0.0
    assert solo.contributors == 1.0
    # All: rounds at 3, 4, 8; rank 0 waits 2, 0, 0, rank 1 waits 0, 0, 3.
    everybody = replay(SMALL, "all")
    assert everybody.seconds == 8.0
    assert everybody.wait == pytest.approx(5 / 6)
    assert everybody.contributors == 2.0


def test_replay_of_a_count():
    # Three ranks; two make a round. Rank 2 takes 5 s in the first step and never waits again.
    times = np.array([[1.0, 2.0, 5.0], [1.0, 1.0, 1.0]])
    found = replay(times, "k2")
    # Round 1 at 2; ranks 0 and 1 arrive at 3 for round 2, which fires then; rank 2 arrives at 5 and 6.
    assert found.seconds == 6.0
    assert found.wait == pytest.approx(1.0 / 6)


def test_replay_keeps_the_staleness_bound():
    # Rank 1 takes three times as long: rank 0 may be no more than one step ahead.
    times = np.array([[1.0, 3.0]] * 4)
    found = replay(times, "solo", max_staleness=1)
    # Rank 0 arrives for step 2 at 2, for round 2 to wait for rank 1's first step at 3, and so on.
    assert found.seconds == 12.0
    assert found.wait > 0
    assert replay(times, "solo", max_staleness=16).wait == 0.0


@given(steps=st.integers(1, 30), ranks=st.integers(1, 6), delay=st.floats(0, 2), seed=st.integers(0, 5), data=st.data())
def test_every_quorum_lies_between_solo_and_all(steps, ranks, delay, seed, data):
    times = one_random(steps, ranks, 1.0, delay, seed)
    arm = data.draw(st.sampled_from(["majority", "solo", "all", "horovod", f"k{ranks}", "k1", "0.5"]))
    seconds = replay(times, arm, seed=seed).seconds
    assert slowest_work(times) - 1e-9 <= seconds <= synchronous_seconds(times) + 1e-9
    assert replay(times, "ddp").seconds == pytest.approx(synchronous_seconds(times))


def test_majority_follows_its_draw():
    times = linear(50, 4, 1.0)
    found = replay(times, "majority", seed=3, first_round=5, barrier=True)
    drawn = [initiator(round_, 3, {0, 1, 2, 3}, range(4)) for round_ in range(5, 55)]
    assert found.contributors == pytest.approx(np.mean(drawn) + 1)
    assert found.wait == pytest.approx(np.mean([i * (i + 1) / 2 for i in drawn]) / 4)


def test_skew_tends_to_the_published_ratio():
    ranks, times = 8, linear(4_000, 8, 0.03)
    ratio = replay(times, "all", barrier=True).wait / replay(times, "majority", barrier=True).wait
    assert replay(times, "all", barrier=True).wait == pytest.approx(0.03 * 3.5)
    assert ratio == pytest.approx(3 * ranks / (ranks + 1), rel=0.02)


def test_auto_cannot_be_replayed():
    with pytest.raises(ValueError, match="depends on what is measured"):
        replay(SMALL, "auto")


def test_an_even_seed_draws_evenly():
    seed = even_seed(8, 100, 4, start=1000)
    assert 1000 <= seed < 1300
    found = replay(linear(100, 8, 0.03), "majority", seed=seed, first_round=4, barrier=True)
    assert found.contributors == pytest.approx(4.5, rel=0.03)
    assert found.wait == pytest.approx(0.03 * 63 / 48, rel=0.03)
    assert even_seed(1, 100, 4, start=5) == 5


def test_stalls_come_with_their_probability_to_each_rank_in_each_step():
    times = stalls(500, 8, 0.055, 1.0, 0.02, seed=3)
    assert set(np.unique(times)) == {0.055, 1.055}
    assert abs((times > 1).mean() - 0.02) < 0.007
    np.testing.assert_array_equal(times, stalls(500, 8, 0.055, 1.0, 0.02, seed=3))


# -- who is how late -------------------------------------------------------------------------------------------

QUORUMS = ("solo", "k2", "0.5", "all")


def drawn(steps, ranks, seed):
    return 1.0 + 2.0 * np.random.default_rng(seed).random((steps, ranks))


def by_events(times, quorum, bound):
    """(Gradients, seconds): the rules event by event, from who arrives next."""
    steps, ranks = times.shape
    wanted = {"solo": 1, "all": ranks}.get(quorum) or needed(quorum_of(quorum), ranks)
    coming = [(times[0, rank], rank) for rank in range(ranks)]
    heapq.heapify(coming)
    arrived, version, fired, ended = [0] * ranks, [0] * ranks, 0, 0.0
    pending, waits, found = [], set(), []
    while coming:
        ended, rank = heapq.heappop(coming)
        pending.append((rank, arrived[rank], version[rank]))
        arrived[rank] += 1
        waits.add(rank)
        while fired < steps and sum(count > fired for count in arrived) >= wanted and min(arrived) >= fired + 1 - bound:
            fired += 1
            found += [Gradient(*one, fired) for one in pending]
            pending = []
        for free in [one for one in waits if fired >= arrived[one]]:
            waits.remove(free)
            version[free] = fired
            if arrived[free] < steps:
                heapq.heappush(coming, (ended + times[arrived[free], free], free))
    return found + [Gradient(*one, steps + 1) for one in pending], ended


@given(
    steps=st.integers(1, 30),
    ranks=st.integers(2, 6),
    seed=st.integers(0, 99),
    quorum=st.sampled_from(QUORUMS),
    bound=st.sampled_from([0, 1, 2, 16]),
)
def test_gradients_are_as_late_as_the_rules_say_and_count_once(steps, ranks, seed, quorum, bound):
    times = drawn(steps, ranks, seed)
    times[:, 0] *= 1 + seed % 4
    played = play(times, quorum, max_staleness=bound)
    found = gradients_of(played)
    expected, seconds = by_events(times, quorum, bound)
    assert sorted(found) == sorted(expected)
    assert played.seconds == pytest.approx(seconds)
    assert played.seconds == replay(times, quorum, max_staleness=bound).seconds
    assert sorted((each.rank, each.step) for each in found) == [(r, s) for r in range(ranks) for s in range(steps)]
    assert all(each.staleness >= 0 and each.step < each.round <= each.step + 1 + bound for each in found)


def test_under_all_no_rank_is_late():
    assert {(each.round, each.version) for each in gradients_of(play(drawn(5, 3, 0), "all"))} == {
        (number, number - 1) for number in range(1, 6)
    }
