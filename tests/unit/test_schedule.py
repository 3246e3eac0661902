"""Schedules of computation and their bounds, against numbers worked out by hand.

That jobs take as long as schedules that are played is in ``test_simulation_of_jobs``.
"""

from __future__ import annotations

import numpy as np
import pytest

from hvd_async.algorithms.eager.quorum import initiator
from hvd_async.simulation.schedule import stalls
from scripts.benchmarks.support.schedule import (
    Replay,
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


def test_bounds_by_hand_and_as_published():
    assert (synchronous_seconds(SMALL), slowest_work(SMALL)) == (8.0, 6.0)
    times = one_random(100_000, 8, 0.3, 0.4, seed=0)
    assert synchronous_seconds(times) / slowest_work(times) == pytest.approx((0.3 + 0.4) / (0.3 + 0.4 / 8), rel=0.01)


def test_what_is_drawn():
    times = one_random(200, 8, 0.3, 0.2, seed=1)
    assert (times == 0.5).sum(axis=1).tolist() == [1] * 200, "one rank a step"
    assert (times == 0.3).sum() == 200 * 7
    assert np.array_equal(times, one_random(200, 8, 0.3, 0.2, seed=1))
    assert not np.array_equal(times, one_random(200, 8, 0.3, 0.2, seed=2))
    times = stalls(500, 8, 0.055, 1.0, 0.02, seed=3)
    assert set(np.unique(times)) == {0.055, 1.055}
    assert abs((times > 1).mean() - 0.02) < 0.007
    assert np.array_equal(times, stalls(500, 8, 0.055, 1.0, 0.02, seed=3))


def test_own_pace_shares_the_steps_by_speed():
    times = np.full((70, 4), 0.006)
    times[:, -1] *= 2
    assert own_pace(times) == [80, 80, 80, 40]
    assert own_pace(SMALL) == [3, 3]


def test_replay_by_hand():
    # Rank 0 arrives at 1, 2, 6; rank 1 at 3, 4, 5. Solo fires at 1, 2, 5.
    assert replay(SMALL, "solo") == Replay(seconds=6.0, wait=0.0, contributors=1.0)
    # All: rounds at 3, 4, 8; rank 0 waits 2, 0, 0, rank 1 waits 0, 0, 3.
    for arm in ("all", "ddp", "horovod"):
        assert replay(SMALL, arm) == Replay(seconds=8.0, wait=pytest.approx(5 / 6), contributors=2.0)
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
