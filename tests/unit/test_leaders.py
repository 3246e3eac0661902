"""Leader-pull's equations, by hand and by what they promise; values that are refused as strength, spread or group."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms.leader import selection
from hvd_async.algorithms.leader.config import ALGORITHMS, LeaderConfig
from hvd_async.algorithms.leader.selection import ALL_RANKS, Strengths

# -- pulls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["lsgd", "easgd"])
def test_a_rule_saves_and_restores_its_state(algorithm):
    config = LeaderConfig(algorithm, [[0], [1]], 2, 4, "")
    rule = ALGORITHMS[algorithm].rule(config, Strengths(alpha=0.25, beta=0.5), 1, 2)
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


def test_an_algorithms_own_option_need_not_be_a_strength():
    """Any rank that adds one reads it as an attribute; only what all algorithms have is looked up by step."""
    strengths = Strengths(global_pull=lambda step: 1 / (1 + step), inner_steps=20, nesterov=None)
    assert (strengths.inner_steps, strengths.nesterov) == (20, None)  # type: ignore[attr-defined]
    assert strengths.at(3) == {**Strengths().at(3), "global_pull": 0.25}


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
def test_groups_of_this_many_ranks_part_them_or_are_refused(size, group):
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
