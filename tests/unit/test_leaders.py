"""Leader-pull's equations, by hand and by what they promise; what can be no strength, spread or group."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms.leader import equations
from hvd_async.algorithms.leader.equations import LossWindow, Strengths
from hvd_async.stats import LeaderStats

NUMBERS = st.floats(-1e6, 1e6)
PARTS = st.floats(0.0, 0.999)


# -- losses, and who leads ------------------------------------------------------------------------------------


@given(st.lists(st.one_of(NUMBERS, st.sampled_from([math.nan, math.inf, -math.inf])), max_size=30), st.integers(1, 12))
def test_the_mean_is_of_the_last_losses_and_nan_while_one_of_them_is_not_finite(losses, length):
    window = LossWindow(length)
    assert window.mean is None
    for count, loss in enumerate(losses, 1):
        window.record(loss)
        last = losses[max(0, count - length) : count]
        assert window.recorded == pytest.approx(last, nan_ok=True)
        assert window.mean is not None
        if all(map(math.isfinite, last)):
            assert window.mean == pytest.approx(sum(last) / len(last), abs=1e-6)
        else:
            assert math.isnan(window.mean)


def test_a_window_keeps_plain_numbers():
    window = LossWindow(2)
    for loss in (np.float32(0.5), 1, np.array(2.5)):
        window.record(loss)
    assert window.recorded == [1.0, 2.5]
    assert {type(loss) for loss in window.recorded} == {float}


@given(st.dictionaries(st.integers(0, 6), st.one_of(NUMBERS, st.just(math.nan), st.just(math.inf))), st.data())
def test_the_leader_has_the_lowest_finite_mean_and_of_several_the_lowest_number(means, data):
    ranks = data.draw(st.lists(st.integers(0, 6), unique=True, max_size=5))
    led = equations.pick_leader(means, ranks)
    finite = {rank: means[rank] for rank in ranks if rank in means and math.isfinite(means[rank])}
    if not finite:
        assert led is None
    else:
        assert led in finite
        assert all((finite[led], led) <= (mean, rank) for rank, mean in finite.items())


def test_ties_nan_and_infinities_by_hand():
    assert equations.pick_leader({0: 2.0, 1: 1.0, 2: 1.0}, (0, 1, 2)) == 1
    assert equations.pick_leader({0: math.nan, 1: -math.inf, 2: 5.0}, (0, 1, 2)) == 2
    assert equations.pick_leader({0: 0.5, 1: 1.0}, (1, 2)) == 1
    assert equations.pick_leader({0: math.nan}, (0, 1)) is None
    assert equations.pick_leader({}, (0, 1)) is None


# -- pulls ----------------------------------------------------------------------------------------------------


@given(NUMBERS, NUMBERS, NUMBERS, PARTS, PARTS)
def test_pulls_at_once_add_up_and_one_after_the_other_do_not(x, local, whole, one, two):
    both = x + one * (local - x) + two * (whole - x)
    assert equations.pull_towards(x, (local, one), (whole, two)) == pytest.approx(both, rel=1e-9, abs=1e-6)
    first = x + one * (local - x)
    in_turn = equations.pull_towards(equations.pull_towards(x, (local, one)), (whole, two))
    assert in_turn == pytest.approx(first + two * (whole - first), rel=1e-9, abs=1e-6)


def test_pulled_by_nobody_and_of_whole_vectors():
    x, target = np.array([0.0, 4.0]), np.array([8.0, -4.0])
    assert equations.pull_towards(x) is x
    assert equations.pull_towards(x, (target, 0.25)).tolist() == [2.0, 2.0]
    assert x.tolist() == [0.0, 4.0]  # as it was
    assert equations.pull_towards(1.0, (1.0, 0.9)) == 1.0


def test_easgd_by_hand():
    assert equations.pull_to_center(8.0, 4.0, 0.25) == 8.0 - 0.25 * (8.0 - 4.0)
    assert equations.move_center(4.0, 8.0, 0.5) == 4.0 + 0.5 * (8.0 - 4.0)


@given(st.lists(NUMBERS, min_size=1, max_size=6), NUMBERS, PARTS)
def test_easgd_with_alpha_beta_over_p_keeps_the_sum_of_ranks_and_centre(ranks, centre, beta):
    moved = [equations.pull_to_center(x, centre, beta / len(ranks)) for x in ranks]
    after = equations.move_center(centre, sum(ranks) / len(ranks), beta)
    assert sum(moved) + after == pytest.approx(sum(ranks) + centre, rel=1e-9, abs=1e-5)


# -- strengths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 0.0, 0.43, 0.999])
def test_a_strength_is_a_number_from_0_up_to_1_or_such_a_function_of_the_step(value):
    assert equations.value_at(value, 3) == value
    assert isinstance(equations.value_at(value, 3), float)
    assert equations.value_at(lambda step: value * (step == 3), 3) == value


@pytest.mark.parametrize("value", [1, 1.0, -0.001, math.nan, math.inf, True, False, "0.1", None, [0.1]])
def test_what_is_no_strength_is_refused_with_the_step(value):
    for strength in (value, lambda step: value):
        with pytest.raises(ValueError, match=r"at step 7: take 0 \(no pull\) or more, and less than 1"):
            equations.value_at(strength, 7)


def test_strengths_of_a_step():
    own = Strengths(local_pull=lambda step: 0.1 * step, alpha=0.2)
    assert own.now(2) == {
        "local_pull": 0.2, "global_pull": 0.1, "local_prox": 0.1, "global_prox": 0.1, "alpha": 0.2, "beta": 0.43,
    }  # fmt: skip
    with pytest.raises(ValueError, match="at step 10"):
        own.now(10)


def test_spreads_of_learning_rates():
    assert [equations.lr_factor("none", place) for place in range(4)] == [1.0, 1.0, 1.0, 1.0]
    assert [equations.lr_factor("linear", place) for place in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert [equations.lr_factor("power", place) for place in range(4)] == [1.0, 2.0, 4.0, 8.0]
    with pytest.raises(ValueError, match="lr_spread='square' is not known: take one of 'none', 'linear', 'power'"):
        equations.lr_factor("square", 0)


# -- groups ---------------------------------------------------------------------------------------------------


def no_host() -> int:
    raise AssertionError("hosts were asked for")


@given(st.integers(1, 12), st.integers(-1, 13))
def test_groups_of_so_many_ranks_part_them_or_are_refused(size, group):
    ranks = range(10, 10 + size)
    if group < 1 or size % group:
        with pytest.raises(ValueError, match=rf"groups of {group} do not divide {size} ranks; take a divisor of"):
            equations.groups(group, ranks, no_host)
    else:
        parts = equations.groups(group, ranks, no_host)
        assert [place for part in parts for place in part] == list(range(size))
        assert {len(part) for part in parts} == {group}


def test_groups_by_host_by_list_and_by_process_set_are_of_places():
    ranks = (2, 3, 5, 7)
    assert equations.groups("host", ranks, lambda: 2) == ((0, 1), (2, 3))
    with pytest.raises(ValueError, match="groups of 3 do not divide 4 ranks"):
        equations.groups("host", ranks, lambda: 3)
    sets = [SimpleNamespace(ranks=[7, 2]), SimpleNamespace(ranks=[5]), SimpleNamespace(ranks=[3])]
    assert equations.groups(sets, ranks, no_host) == ((0, 3), (1,), (2,))
    assert equations.groups([[5, 2], (7, 3)], ranks, no_host) == ((0, 2), (1, 3))
    assert equations.groups((range(2, 4), [5, 7]), ranks, no_host) == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "group", [[[0, 1]], [[0, 1], [1, 2, 3]], [[0, 1], [2, 3], []], [[0, 1], [2, 4]], [[0, 1, 2, 3, 4]], []]
)
def test_groups_that_do_not_part_the_ranks_are_refused(group):
    with pytest.raises(ValueError, match=r"every one of the ranks \[0, 1, 2, 3\] must be in one group, no group empty"):
        equations.groups(group, range(4), no_host)


@pytest.mark.parametrize("group", ["hosts", 2.0, True, {0: [0, 1]}, [0, 1], [[0, 1], 2], ["01", "23"], [[0, "1"]]])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(ValueError, match=r"group=.*: .*ranks"):
        equations.groups(group, range(4), no_host)


# -- counts ---------------------------------------------------------------------------------------------------


def test_counts_of_two_runs_add_up():
    one = LeaderStats(
        10, 3, {0: 1}, {0: 1, 1: 1}, 2.0, 0.25, 300, 1.5, 0.9, ((1.0, -1, 0), (2.0, 0, 0), (3.0, 0, 1)), 3
    )
    two = LeaderStats(5, 1, {1: 1}, {}, 6.0, 0.5, 100, 0.5, 0.7, ((4.0, -1, 1),), 1)
    both = one + two
    assert (both.steps, both.pulls, both.bytes_received) == (15, 4, 400)
    assert (both.led, both.led_group) == ({0: 1, 1: 1}, {0: 1, 1: 1})
    assert (both.distance, both.pull_s, both.wait_s) == (3.0, 0.3125, 2.0)
    assert both.mean_loss == 0.7
    assert both.history == one.history + two.history
    assert LeaderStats() + one == one
    assert one + LeaderStats(mean_loss=0.9) == one
    assert LeaderStats() + LeaderStats() == LeaderStats()
