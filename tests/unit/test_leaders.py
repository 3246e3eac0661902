"""Leader-pull's equations, by hand and by what they promise; values that are refused as strength, spread or group."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms.leader import easgd, lsgd, selection
from hvd_async.algorithms.leader.config import LeaderConfig
from hvd_async.algorithms.leader.rank import make_rule
from hvd_async.algorithms.leader.selection import ALL_RANKS, LossWindow, Strengths
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
    led = selection.pick_leader(means, ranks)
    finite = {rank: means[rank] for rank in ranks if rank in means and math.isfinite(means[rank])}
    if not finite:
        assert led is None
    else:
        assert led in finite
        assert all((finite[led], led) <= (mean, rank) for rank, mean in finite.items())


def test_ties_nan_and_infinities_by_hand():
    assert selection.pick_leader({0: 2.0, 1: 1.0, 2: 1.0}, (0, 1, 2)) == 1
    assert selection.pick_leader({0: math.nan, 1: -math.inf, 2: 5.0}, (0, 1, 2)) == 2
    assert selection.pick_leader({0: 0.5, 1: 1.0}, (1, 2)) == 1
    assert selection.pick_leader({0: math.nan}, (0, 1)) is None
    assert selection.pick_leader({}, (0, 1)) is None


# -- pulls ----------------------------------------------------------------------------------------------------


@given(NUMBERS, NUMBERS, NUMBERS, PARTS, PARTS)
def test_pulls_at_once_add_up_and_one_after_the_other_do_not(x, local, whole, one, two):
    both = x + one * (local - x) + two * (whole - x)
    assert lsgd.pull_towards(x, (local, one), (whole, two)) == pytest.approx(both, rel=1e-9, abs=1e-6)
    first = x + one * (local - x)
    in_turn = lsgd.pull_towards(lsgd.pull_towards(x, (local, one)), (whole, two))
    assert in_turn == pytest.approx(first + two * (whole - first), rel=1e-9, abs=1e-6)


def test_pulled_by_nobody_and_of_whole_vectors():
    x, target = np.array([0.0, 4.0]), np.array([8.0, -4.0])
    assert lsgd.pull_towards(x) is x
    assert lsgd.pull_towards(x, (target, 0.25)).tolist() == [2.0, 2.0]
    assert x.tolist() == [0.0, 4.0]  # as it was
    assert lsgd.pull_towards(1.0, (1.0, 0.9)) == 1.0


def test_lsgd_by_hand():
    """Pulled by one leader after the other in the step after pulls, by both at once between them."""
    state = lsgd.on_pull(lsgd.State(), False, 8.0)
    assert lsgd.on_step(state, 4.0, 0.5, 0.25) == (6.0, (4.0,))
    state = lsgd.on_pull(state, True, -2.0)
    assert lsgd.on_step(state, 4.0, 0.5, 0.25) == (6.0 - 0.25 * 8.0, (4.0, -8.0))
    assert lsgd.between_pulls(state, 4.0, 0.125, 0.5) == 4.0 + 0.125 * 4.0 - 0.5 * 6.0
    assert lsgd.between_pulls(lsgd.on_pull(state, True, None), 4.0, 0.125, 0.5) == 4.5  # it leads all itself
    assert lsgd.on_step(lsgd.State(), 4.0, 0.5, 0.25) == (4.0, ())


def test_easgd_by_hand():
    state, difference = easgd.on_pull(easgd.State(4.0), 8.0, 6.0, 0.25, 0.5)
    assert (state, difference) == (easgd.State(4.0 + 0.5 * (6.0 - 4.0), 0.25 * (4.0 - 8.0)), -4.0)
    assert easgd.on_step(state, 9.0) == (easgd.State(5.0), 8.0)
    assert easgd.on_step(easgd.State(5.0), 9.0) == (easgd.State(5.0), 9.0)


def test_forces_of_two_pulls_add_up_also_if_a_step_takes_the_first_meanwhile():
    first, _ = easgd.on_pull(easgd.State(4.0), 8.0, 6.0, 0.25, 0.5)
    second, _ = easgd.on_pull(first, 6.0, 7.0, 0.25, 0.5)
    assert second.force == 0.25 * (5.0 - 6.0)
    assert easgd.merge(first, second) == easgd.State(6.0, -1.25)
    assert easgd.merge(easgd.on_step(first, 0.0)[0], second) == easgd.State(6.0, -0.25)


@given(st.lists(NUMBERS, min_size=1, max_size=6), NUMBERS, PARTS)
def test_easgd_with_alpha_beta_over_p_keeps_the_sum_of_ranks_and_center(ranks, center, beta):
    mean = sum(ranks) / len(ranks)
    pulled = [easgd.on_pull(easgd.State(center), x, mean, beta / len(ranks), beta)[0] for x in ranks]
    moved = [easgd.on_step(state, x)[1] for state, x in zip(pulled, ranks, strict=True)]
    assert len({state.center for state in pulled}) == 1
    assert sum(moved) + pulled[0].center == pytest.approx(sum(ranks) + center, rel=1e-9, abs=1e-5)


@pytest.mark.parametrize("algorithm", ["lsgd", "easgd"])
def test_a_rule_saves_and_restores_its_state(algorithm):
    rule = make_rule(LeaderConfig(algorithm, [[0], [1]], 2, 4, ""), Strengths(alpha=0.25, beta=0.5), 1, 2)
    state = rule.begin(np.zeros(2))
    for group in (1, ALL_RANKS):
        state = rule.merge(state, rule.on_pull(state, group, np.ones(2), np.full(2, 3.0))[0])
    targets, force = rule.save(state)
    assert repr(rule.restore(targets, force)) == repr(state)
    assert targets.keys() == {"lsgd": {1, ALL_RANKS}, "easgd": {ALL_RANKS}}[algorithm]


# -- strengths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 0.0, 0.43, 0.999])
def test_a_strength_is_a_number_from_0_up_to_1_or_such_a_function_of_the_step(value):
    assert selection.value_at(value, 3) == value
    assert isinstance(selection.value_at(value, 3), float)
    assert selection.value_at(lambda step: value * (step == 3), 3) == value


@pytest.mark.parametrize("value", [1, 1.0, -0.001, math.nan, math.inf, True, False, "0.1", None, [0.1]])
def test_what_is_no_strength_is_refused_with_the_step(value):
    for strength in (value, lambda step: value):
        with pytest.raises(ValueError, match=r"at least 0 \(no pull\) and below 1, got .* at step 7"):
            selection.value_at(strength, 7)


def test_strengths_of_a_step():
    own = Strengths(local_pull=lambda step: 0.1 * step, alpha=0.2)
    assert own.at(2) == {
        "local_pull": 0.2, "global_pull": 0.1, "local_prox": 0.1, "global_prox": 0.1, "alpha": 0.2, "beta": 0.43,
    }  # fmt: skip
    with pytest.raises(ValueError, match="at step 10"):
        own.at(10)


def test_spreads_of_learning_rates():
    assert [selection.lr_factor("none", place) for place in range(4)] == [1.0, 1.0, 1.0, 1.0]
    assert [selection.lr_factor("linear", place) for place in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert [selection.lr_factor("power", place) for place in range(4)] == [1.0, 2.0, 4.0, 8.0]
    with pytest.raises(ValueError, match="lr_spread must be one of 'none', 'linear', 'power', got 'square'"):
        selection.lr_factor("square", 0)


# -- groups ---------------------------------------------------------------------------------------------------


def no_host() -> int:
    raise AssertionError("hosts were asked for")


@given(st.integers(1, 12), st.integers(-1, 13))
def test_groups_of_so_many_ranks_part_them_or_are_refused(size, group):
    ranks = range(10, 10 + size)
    if group < 1 or size % group:
        with pytest.raises(ValueError, match=rf"groups of {group} do not divide {size} ranks; take a divisor of"):
            selection.groups(group, ranks, no_host)
    else:
        parts = selection.groups(group, ranks, no_host)
        assert [place for part in parts for place in part] == list(range(size))
        assert {len(part) for part in parts} == {group}


def test_groups_by_host_by_list_and_by_process_set_are_of_places():
    ranks = (2, 3, 5, 7)
    assert selection.groups("host", ranks, lambda: 2) == ((0, 1), (2, 3))
    with pytest.raises(ValueError, match="groups of 3 do not divide 4 ranks"):
        selection.groups("host", ranks, lambda: 3)
    sets = [SimpleNamespace(ranks=[7, 2]), SimpleNamespace(ranks=[5]), SimpleNamespace(ranks=[3])]
    assert selection.groups(sets, ranks, no_host) == ((0, 3), (1,), (2,))
    assert selection.groups([[5, 2], (7, 3)], ranks, no_host) == ((0, 2), (1, 3))
    assert selection.groups((range(2, 4), [5, 7]), ranks, no_host) == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "group", [[[0, 1]], [[0, 1], [1, 2, 3]], [[0, 1], [2, 3], []], [[0, 1], [2, 4]], [[0, 1, 2, 3, 4]], []]
)
def test_groups_that_do_not_part_the_ranks_are_refused(group):
    with pytest.raises(ValueError, match=r"every one of the ranks \[0, 1, 2, 3\] must be in one group, no group empty"):
        selection.groups(group, range(4), no_host)


@pytest.mark.parametrize("group", ["hosts", 2.0, True, {0: [0, 1]}, [0, 1], [[0, 1], 2], ["01", "23"], [[0, "1"]]])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(ValueError, match=r"group(=.*:| must be) .*ranks"):
        selection.groups(group, range(4), no_host)


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


def test_an_algorithms_own_option_need_not_be_a_strength():
    """Whoever adds one reads it as an attribute; only what all algorithms have is looked up by step."""
    strengths = Strengths.of({"global_pull": lambda step: 1 / (1 + step), "inner_steps": 20, "nesterov": None})
    assert (strengths.inner_steps, strengths.nesterov) == (20, None)  # type: ignore[attr-defined]
    assert strengths.at(3) == {**Strengths().at(3), "global_pull": 0.25}
