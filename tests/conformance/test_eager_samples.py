"""Rounds weighted by samples, in either binding: those of one large batch, exact counts, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.eager.gradient_format import Tail
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.eager_ranks import TINY, UNIT, Binding, all_modes, both

SAMPLES = (1, 0, 7)


def trained(binding: Binding, samples: Any, **options: Any) -> list[list[float]]:
    """Each rank's weights after 6 rounds of all ranks, of gradients (rank + 1) and 2 (rank + 1) in two parameters."""

    def train(rank: int) -> list[float]:
        one = binding.vectors([2, 1], UNIT, quorum="all", weighting="samples", **options)
        for step in range(6):
            one.samples = samples(rank, step)
            one.take(rank + 1.0, float("nan") if one.samples == 0 else 2.0 * (rank + 1))
        one.opt.drain()
        weights: list[float] = one.weights().tolist()
        return weights

    return Cluster(3).run(train)


@all_modes
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": TINY}, {"gradient_predivide_factor": 4.0}, {"op": "Sum"}], ids=str
)
def test_all_ranks_equal_one_large_batch(binding, options):
    given = {**options, "op": binding.hvd.Sum} if "op" in options else options
    expected = sum(np.average([1.0, 2.0, 3.0], weights=[n + step * (n > 0) for n in SAMPLES]) for step in range(6))
    expected *= 3 if "op" in options else 1
    for weights in trained(binding, lambda rank, step: SAMPLES[rank] + step * (SAMPLES[rank] > 0), **given):
        np.testing.assert_allclose(sorted(-np.array(weights)), [expected, expected, 2 * expected], rtol=1e-6)


@both
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_many_samples_do_not_overflow_and_count_exactly(binding, kind):
    options = {"compression": getattr(binding.hvd.Compression, kind)}
    for weights in trained(binding, lambda rank, step: 3**rank * 1000 + rank, **options):
        expected = 6 * np.average([1.0, 2.0, 3.0], weights=[1000, 3001, 9002])
        np.testing.assert_allclose(sorted(-np.array(weights)), [expected, expected, 2 * expected], rtol=1e-2)


@both
def test_a_round_without_samples_moves_nothing(binding):
    assert trained(binding, lambda rank, step: 0) == [[0.0, 0.0, 0.0]] * 3


@both
def test_what_cannot_be_is_refused(binding):
    with scripted_engine(2):
        weighted, plain = (binding.vectors([1], UNIT, **o) for o in ({"weighting": "samples"}, {}))
        with pytest.raises(ValueError, match="take one of 'ranks', 'samples'"):
            binding.vectors([1], UNIT, weighting="batches")
    with pytest.raises(ValueError, match="pass weighting='samples'"):
        plain.opt.record_samples(3)
    for wrong in (-1, 1.5, True, 2**32, "3"):
        with pytest.raises(ValueError, match="give a whole number of samples"):
            weighted.opt.record_samples(wrong)

    def forgets(rank: int) -> str:
        one = binding.vectors([1], UNIT, weighting="samples")
        with pytest.raises(ReplicaStateError, match="record_samples") as told:
            one.take(1.0)
        one.samples = 2
        one.take(1.0)
        one.opt.drain()
        assert one.weights().tolist() == [-1.0]
        return str(told.value)

    assert Cluster(1).run(forgets)


def test_tails_add_up():
    tails = [Tail(2, rank % 2, True).of(samples) for rank, samples in enumerate((2**32 - 1, 0, 5))]
    assert Tail(2, 0, True).read([sum(one) * 0.25 for one in zip(*tails, strict=True)], 0.25) == (3, 2**32 + 4)
