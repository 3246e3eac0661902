import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.runner.stragglers import Injector, parse_inject

SIZES = st.integers(1, 9)
STEPS = st.integers(0, 10**6)


@given(size=SIZES, step=STEPS, seed=st.integers(0, 99), data=st.data())
def test_random_delays_exactly_k_ranks_a_step(size, step, seed, data):
    k = data.draw(st.integers(1, size))
    injector = parse_inject(f"random:{k}:0.3", seed)
    delays = [injector.seconds(step, rank, size) for rank in range(size)]
    assert sorted(delays) == [0.0] * (size - k) + [0.3] * k


def test_random_varies_with_the_step_and_the_seed_only():
    def drawn(seed):
        injector = parse_inject("random:1:1", seed)
        return [[injector.seconds(step, rank, 4) for rank in range(4)].index(1.0) for step in range(400)]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    counts = [drawn(0).count(rank) for rank in range(4)]
    assert min(counts) > 60, f"every rank should come up about 100 times: {counts}"


@given(size=SIZES, step=STEPS, spec=st.sampled_from(["none", "random:1:0.3", "rank:0:0.2", "linear:0.1"]))
def test_slowest_is_the_maximum_over_the_ranks(size, step, spec):
    injector = parse_inject(spec)
    assert injector.slowest(step, size) == max(injector.seconds(step, rank, size) for rank in range(size))


def test_rank_linear_none():
    assert [parse_inject("rank:1:0.2").seconds(7, rank, 3) for rank in range(3)] == [0.0, 0.2, 0.0]
    assert [parse_inject("linear:0.5").seconds(7, rank, 3) for rank in range(3)] == [0.0, 0.5, 1.0]
    assert [parse_inject("none").seconds(7, rank, 3) for rank in range(3)] == [0.0, 0.0, 0.0]
    assert parse_inject(" rank:0:1e-3 ") == Injector("rank", 0, 0.001)


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("", "say none, random:K:SECONDS"),
        ("slow:1", "say none, random:K:SECONDS"),
        ("random:1", "say none, random:K:SECONDS"),
        ("none:1", "say none, random:K:SECONDS"),
        ("linear:1:2", "say none, random:K:SECONDS"),
        ("random:x:0.3", "whole number, not 'x'"),
        ("random:0:0.3", "at least 1"),
        ("rank:-1:0.3", "at least 0"),
        ("rank:0:soon", "must be a number such as"),
        ("rank:0:-0.1", "not negative"),
        ("linear:nan", "finite"),
        ("linear:inf", "finite"),
    ],
)
def test_a_wrong_spec_says_what_is_right(spec, hint):
    with pytest.raises(ValueError, match=re.escape(hint)):
        parse_inject(spec)


def test_a_spec_that_does_not_fit_the_job():
    with pytest.raises(ValueError, match=r"start at least 3 ranks, or say random:2:0\.1"):
        parse_inject("random:3:0.1").check(2)
    with pytest.raises(ValueError, match="ranks are 0 to 1"):
        parse_inject("rank:2:0.1").check(2)
    parse_inject("random:2:0.1").check(2)
    parse_inject("rank:1:0.1").check(2)
