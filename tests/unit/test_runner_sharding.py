import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.runner.sharding import evaluation_batches, most_batches, training_batches

JOBS = {"samples": st.integers(1, 200), "size": st.integers(1, 9), "batch_size": st.integers(1, 40)}


def everybody(samples, size, batch_size, *, lockstep, seed=0, epoch=0):
    return [
        training_batches(samples, rank, size, batch_size, seed=seed, epoch=epoch, lockstep=lockstep)
        for rank in range(size)
    ]


@given(**JOBS, epoch=st.integers(0, 5))
def test_every_sample_exactly_once_an_epoch(samples, size, batch_size, epoch):
    ranks = everybody(samples, size, batch_size, lockstep=False, epoch=epoch)
    seen = sorted(int(index) for batches in ranks for batch in batches for index in batch)
    assert seen == list(range(samples))
    for batches in ranks:
        sizes = [len(batch) for batch in batches]
        assert all(1 <= length <= batch_size for length in sizes)
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert max(len(batches) for batches in ranks) == most_batches(samples, size, batch_size, lockstep=False)


@given(**JOBS)
def test_in_lockstep_all_ranks_do_the_same_steps_with_different_samples(samples, size, batch_size):
    if samples < size:
        with pytest.raises(ValueError, match="start fewer ranks, or use --algorithm eager"):
            everybody(samples, size, batch_size, lockstep=True)
        return
    ranks = everybody(samples, size, batch_size, lockstep=True)
    steps = most_batches(samples, size, batch_size, lockstep=True)
    assert {len(batches) for batches in ranks} == {steps}
    assert {len(batch) for batches in ranks for batch in batches} == {min(batch_size, samples // size)}
    seen = [int(index) for batches in ranks for batch in batches for index in batch]
    assert len(set(seen)) == len(seen)
    left_out = samples // size - len(seen) // size
    assert left_out < min(batch_size, samples // size)


def test_a_rank_may_have_no_batch():
    assert [len(batches) for batches in everybody(2, 4, 8, lockstep=False)] == [1, 1, 0, 0]


def test_the_order_depends_on_seed_and_epoch():
    def order(**key):
        return np.concatenate(everybody(50, 1, 8, lockstep=False, **key)[0]).tolist()

    assert order(seed=1, epoch=2) == order(seed=1, epoch=2)
    assert len({tuple(order(seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}) == 9


@given(**JOBS)
def test_evaluation_sees_every_sample_exactly_once(samples, size, batch_size):
    batches = [batch for rank in range(size) for batch in evaluation_batches(samples, rank, size, batch_size)]
    assert sorted(int(index) for batch in batches for index in batch) == list(range(samples))
    assert all(1 <= len(batch) <= batch_size for batch in batches)


def test_every_lap_of_an_epoch_has_its_own_order():
    def order(**where):
        return training_batches(50, 0, 1, 50, seed=1, lockstep=False, **where)[0].tolist()

    orders = [order(epoch=0), order(epoch=0, lap=1), order(epoch=0, lap=2), order(epoch=1), order(epoch=1, lap=1)]
    assert len({tuple(one) for one in orders}) == 5
    assert order(epoch=0, lap=0) == orders[0]
