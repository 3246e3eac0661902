"""Schedules of computation and their bounds, against numbers worked out by hand.

That jobs take as long as schedules that are played is in ``test_simulation_of_jobs``.
"""

from __future__ import annotations

import numpy as np
import pytest

from hvd_async.algorithms.eager.quorum import initiator
from hvd_async.simulation.schedule import stalls
from scripts.benchmarks.support.schedule import (
    even_seed,
    linear,
    one_random,
    own_pace,
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
    assert replay(SMALL, "ddp").seconds == replay(SMALL, "horovod").seconds == 8.0


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
    drawn = [initiator(round_, seed, {*range(8)}, range(8)) for round_ in range(4, 104)]
    assert found.contributors == pytest.approx(np.mean(drawn) + 1)
    assert found.contributors == pytest.approx(4.5, rel=0.03)
    assert found.wait == pytest.approx(0.03 * 63 / 48, rel=0.03)
    assert even_seed(1, 100, 4, start=5) == 5


def test_stalls_come_with_their_probability_to_each_rank_in_each_step():
    times = stalls(500, 8, 0.055, 1.0, 0.02, seed=3)
    assert set(np.unique(times)) == {0.055, 1.055}
    assert abs((times > 1).mean() - 0.02) < 0.007
    np.testing.assert_array_equal(times, stalls(500, 8, 0.055, 1.0, 0.02, seed=3))
