"""Pure functions that set the course of a run: learning rates, who trains on which image, injected delays."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.runner.course import Injector, Schedule, evaluation_batches, training_batches

JOBS = {"samples": st.integers(1, 200), "size": st.integers(1, 9), "batch_size": st.integers(1, 40)}


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (Schedule(2.0, epochs=10, warmup=4), {0: 0.2, 1: 0.65, 2: 1.1, 4: 2.0, 9.9: 2.0}),
        (Schedule(1.0, epochs=90, decay_epochs=(30, 60)), {0: 1, 29.99: 1, 30: 0.1, 60: 0.01, 89: 0.01}),
        (
            Schedule(1.0, epochs=10, warmup=2, cosine=True),
            {2: 1, 4: 0.5 + 0.5 * math.sqrt(0.5), 6: 0.5, 10: 0, 12: 0},
        ),
    ],
)
def test_learning_rates(schedule, rates):
    assert [schedule.rate(epoch) for epoch in rates] == pytest.approx(list(rates.values()), abs=1e-12)


def everybody(samples, size, batch_size, *, lockstep, seed=0, epoch=0):
    return [
        training_batches(samples, rank, size, batch_size, seed=seed, epoch=epoch, lockstep=lockstep)
        for rank in range(size)
    ]


@given(**JOBS, epoch=st.integers(0, 5))
def test_every_sample_exactly_once_an_epoch(samples, size, batch_size, epoch):
    ranks = everybody(samples, size, batch_size, lockstep=False, epoch=epoch)
    assert sorted(int(index) for batches in ranks for batch in batches for index in batch) == list(range(samples))
    for batches in ranks:
        sizes = [len(batch) for batch in batches]
        assert all(1 <= length <= batch_size for length in sizes)
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert max(len(batches) for batches in ranks) == len(ranks[0]), "rank 0 has the most"


@given(**JOBS)
def test_in_lockstep_all_ranks_do_the_same_steps_with_different_samples(samples, size, batch_size):
    if samples < size:
        with pytest.raises(ValueError, match="start fewer ranks, or use --algorithm eager"):
            everybody(samples, size, batch_size, lockstep=True)
        return
    ranks = everybody(samples, size, batch_size, lockstep=True)
    share = samples // size
    assert {len(batches) for batches in ranks} == {len(ranks[0])}
    assert {len(batch) for batches in ranks for batch in batches} == {min(batch_size, share)}
    seen = [int(index) for batches in ranks for batch in batches for index in batch]
    assert len(set(seen)) == len(seen)
    assert share - len(seen) // size < min(batch_size, share), "no more is left out than a batch"


def test_the_order_depends_on_seed_epoch_and_lap():
    keys = [{"seed": seed, "epoch": epoch, "lap": lap} for seed in range(2) for epoch in range(2) for lap in range(2)]
    orders = [tuple(training_batches(50, 0, 1, 50, lockstep=False, **key)[0].tolist()) for key in keys]
    assert len(set(orders)) == 8
    assert orders[0] == tuple(training_batches(50, 0, 1, 50, lockstep=False, seed=0, epoch=0)[0].tolist())


@given(**JOBS)
def test_evaluation_sees_every_sample_exactly_once(samples, size, batch_size):
    batches = [batch for rank in range(size) for batch in evaluation_batches(samples, rank, size, batch_size)]
    assert sorted(int(index) for batch in batches for index in batch) == list(range(samples))
    assert all(1 <= len(batch) <= batch_size for batch in batches)


# -- injected delays --------------------------------------------------------------------------------------------------


@given(size=st.integers(1, 9), step=st.integers(0, 10**6), seed=st.integers(0, 99), data=st.data())
def test_random_delays_exactly_k_ranks_a_step(size, step, seed, data):
    k = data.draw(st.integers(1, size))
    injector = Injector.parse(f"random:{k}:0.3", seed)
    assert sorted(injector.seconds(step, size)) == [0.0] * (size - k) + [0.3] * k


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [("none", [0, 0, 0]), (" rank:1:2e-1 ", [0, 0.2, 0]), ("linear:0.5", [0, 0.5, 1.0]), ("random:3:1", [1, 1, 1])],
)
def test_delays(spec, seconds):
    injector = Injector.parse(spec)
    assert injector.seconds(7, 3) == seconds


@pytest.mark.parametrize("spec", ["slow:1", "random:1", "none:1", "random:0:1", "rank:-1:1", "rank:0:-1", "linear:inf"])
def test_a_wrong_spec_says_what_is_right(spec):
    with pytest.raises(ValueError, match=rf"must be none, random:K:SECONDS, .*, got '{re.escape(spec)}'"):
        Injector.parse(spec)


def test_a_spec_that_does_not_fit_the_job():
    with pytest.raises(ValueError, match=r"start at least 3 ranks, or pass random:2:0\.1"):
        Injector.parse("random:3:0.1").check(2)
    with pytest.raises(ValueError, match="ranks are 0 to 1"):
        Injector.parse("rank:2:0.1").check(2)
    Injector.parse("random:2:0.1").check(2)
    Injector.parse("rank:1:0.1").check(2)
