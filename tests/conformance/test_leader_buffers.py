"""Batch-norm statistics of ranks that follow: averaged by pulls and at ends, or each rank's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hvd_async.testing import Cluster
from tests.conformance.leader_cases import leads
from tests.conformance.leader_drive import in_step
from tests.conformance.leader_reference import Following, several
from tests.conformance.weight_ranks import SGD, Rank, TorchRank, both

PAIRS = Following("lsgd", several(4, 2), 3, 8)
ELASTIC = Following("easgd", global_period=3)
EACH_STEP = Following("easgd", global_period=1)
ALGORITHMS = pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])
NAN = float("nan")


def normed(binding: Any, size: int, rank: int, following: Following, **options: Any) -> Rank:
    rank_: Rank = binding(binding.least_squares(size, SGD), rank, following, normed=True, **options)
    return rank_


def mean(one: Rank) -> list[float]:
    """The mean that a rank holds; the variance is ten times as much."""
    first, second = np.split(one.statistics(), 2)
    np.testing.assert_allclose(second, 10.0 * first, rtol=1e-6)
    return [float(value) for value in first]


def set_mean(one: Rank, value: float) -> None:
    one.set_statistics(np.full(2, value), np.full(2, 10.0 * value))


# -- at ends --------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("following", "buffers", "expected"),
    [
        (leads(2, PAIRS), "average", [2.5] * 4),
        (leads(2, PAIRS), "local", [3.0] * 4),
        (ELASTIC, "local", [1.0, 2.0, 3.0, 4.0]),
    ],
    ids=["lsgd-average", "lsgd-local", "easgd-local"],
)
def test_ends_show_averages_or_the_leaders_own_or_leave_each_rank_its_own(binding, following, buffers, expected):
    """In ``consensus()``, which puts back what was there, and after ``drain()``."""

    def train(rank: int) -> tuple[float, ...]:
        one = normed(binding, 4, rank, following, buffers=buffers)
        one.step(mean=1.0 + rank)
        with one.opt.consensus():
            inside = mean(one)[0]
        after = mean(one)[0]
        one.opt.drain()
        return inside, after, mean(one)[0]

    assert Cluster(4).run(train) == [(value, 1.0 + rank, value) for rank, value in enumerate(expected)]


def test_counters_of_batches_are_the_ranks_own_until_the_leaders_are_taken():
    def train(rank: int) -> list[int]:
        count = torch.tensor(5 + rank)
        following = Following("lsgd", several(2, 2), 1, 1, loss_of=lambda z, own, step: 1.0 - own)
        one = TorchRank(TorchRank.least_squares(2, SGD), rank, following, named_buffers=[("n", count)], buffers="local")
        in_step(one, 2)
        seen = [int(count)]
        with one.opt.consensus():
            seen.append(int(count))
        seen.append(int(count))
        one.opt.drain()
        return [*seen, int(count)]

    assert Cluster(2).run(train) == [[5, 6, 5, 6], [6, 6, 6, 6]]
