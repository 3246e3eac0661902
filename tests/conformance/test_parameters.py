"""Parameters of all kinds in either binding: without gradient, frozen, of other dtypes, sparse, with NaN."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_async.testing import Cluster
from tests.conformance.cases import SCRIPTS, Case
from tests.conformance.drive import ScriptedWorker, attach, scripted_engine
from tests.conformance.eager_ranks import INF, KERAS, KERAS_GRAPH, NAN, TINY, TORCH, UNIT, Embedding, all_modes, both
from tests.conformance.fake_gpu import FakeGpu
from tests.conformance.torch_ranks import hand_overs

HALVING = Case("halving", "sgd", 1.0, momentum=0.5)


# -- without gradient -----------------------------------------------------------------------------------------


@all_modes
@pytest.mark.parametrize("cap", [TINY, 25.0], ids=["apart", "together"])
def test_a_missing_gradient_counts_as_zero_in_whatever_bucket(binding, cap):
    """As in Horovod: weight decay moves a parameter whether one rank has a gradient for it or none has."""
    case = Case("decay", "sgd", 0.5, weight_decay=0.5)

    def train(rank: int) -> list[float]:
        one = binding.vectors([1, 1, 1], case, start=1.0, quorum="all", bucket_cap_mb=cap)
        one.take(None, 0.0 if rank else None, 0.0)
        one.opt.drain()
        return one.weights().tolist()

    assert Cluster(2).run(train) == [[0.75] * 3] * 2


# -- frozen ---------------------------------------------------------------------------------------------------


@all_modes
@pytest.mark.parametrize("drains", [0, 2])
def test_a_round_moves_a_parameter_only_if_its_leader_has_not_frozen_it(binding, drains):
    """Nor does momentum or decay; and its velocity stays. Between two drains it may be frozen as well."""

    def train(rank: int) -> list[list[float]]:
        one = binding.vectors([1, 1], HALVING, quorum="all")
        seen = []
        for frozen in (False, True, True, False):
            one.freeze(0, frozen)
            for _ in range(drains):
                one.opt.drain()
            one.take(None if frozen else 1.0, 1.0)
            seen.append(one.weights().tolist())
        one.opt.drain()
        return seen

    moved = [[-1.0, -1.0], [-1.0, -2.5], [-1.0, -4.25], [-2.5, -6.125]]
    assert Cluster(2).run(train) == [moved, moved]


@pytest.mark.parametrize(
    ("binding", "quorum"),
    [
        pytest.param(TORCH, "solo", id="torch-solo"),
        pytest.param(TORCH, 2, id="torch-2"),
        pytest.param(KERAS, 2, id="keras-2"),
        pytest.param(KERAS_GRAPH, "solo", id="keras-graph-solo"),
    ],
)
def test_ranks_may_freeze_and_unfreeze_at_different_steps(binding, quorum):
    """Rank r freezes a vector from its step 2 + r to 5 + 2 r; with weight decay, which would move it."""
    case = Case("decay", "sgd", 0.05, momentum=0.9, weight_decay=0.1)

    def train(rank: int) -> list[Any]:
        one = binding.vectors([3, 2], case, start=1.0, quorum=quorum, bucket_cap_mb=TINY, max_staleness=3)
        random = np.random.default_rng(rank)
        for step in range(12):
            frozen = 2 + rank <= step < 5 + 2 * rank
            one.freeze(0, frozen)
            one.take(None if frozen else random.normal(size=3), random.normal(size=2))
        one.freeze(0, False)
        one.opt.drain()
        return one.state()

    outcomes = Cluster(3, jitter=0.002).run(train)
    assert outcomes[1:] == outcomes[:1] * 2


# -- dtypes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("binding", "dtype", "tolerance"),
    [
        pytest.param(TORCH, "float64", 0, id="torch-float64"),
        pytest.param(TORCH, "float16", 2.0**-8, id="torch-float16"),
        pytest.param(TORCH, "bfloat16", 2.0**-5, id="torch-bfloat16"),
        pytest.param(KERAS, "float64", 0, id="keras-float64"),
        pytest.param(KERAS, "float16", 2.0**-8, id="keras-float16"),
    ],
)
def test_other_dtypes(binding, dtype, tolerance):
    """One that accumulates apart is a second bucket; half precision is summed as float32."""

    def train(rank: int) -> tuple[list[float], int]:
        one = binding.vectors([2, 3], UNIT, dtypes=["float32", dtype], quorum=1, max_staleness=2)
        for step in range(4):
            one.take(1.0 + rank + np.zeros(2), np.full(3, 2.0**-8 if step else 1.0))
        one.opt.drain()
        return one.weights().tolist(), len(one.opt._async.replica.layout)

    for weights, buckets in Cluster(2).run(train):
        assert buckets == (2 if dtype == "float64" else 1)
        assert weights[:2] == [-6.0, -6.0]
        assert weights[2:] == pytest.approx([-1 - 3 * 2.0**-8] * 3, abs=tolerance)


# -- sparse gradients -----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("quorum", "passes"), [("solo", 1), ("solo", 2), ("all", 1), ("majority", 1)])
def test_sparse_gradients_are_conserved(binding, quorum, passes):
    """Ranks have other rows, of which one may come twice; and other numbers of batches."""
    counts = (5, 5, 5) if quorum == "all" else (5, 3, 6)

    def words(rank: int, number: int) -> list[int]:
        return [int(w) for w in np.random.default_rng([rank, number]).integers(0, 9, 3)]

    def train(rank: int) -> list[float]:
        one = Embedding(binding, quorum=quorum, backward_passes_per_step=passes)
        for step in range(counts[rank]):
            one.take(*(words(rank, step * passes + part) for part in range(passes)))
        one.opt.drain()
        return one.rows()

    expected = np.full(9, 100.0)
    for rank, count in enumerate(counts):
        for number in range(count * passes):
            np.subtract.at(expected, words(rank, number), 1 / 3)
    for rows in Cluster(3, jitter=0.001).run(train):
        np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-4)


@both
def test_sparse_gradients_travel_as_dense_ones(binding):
    with scripted_engine(2):
        one = Embedding(binding, sparse_as_dense=True)
    attach(one.opt, ScriptedWorker(SCRIPTS[0], 2, 36, 0.1, binding.tensor))
    one.take([1, 1, 3])
    handed = one.opt._async.worker.handed[0]
    assert handed[-1] == 1
    assert handed[:-1].reshape(9, 4).tolist() == [[float((0, 2, 0, 1)[row] if row < 4 else 0)] * 4 for row in range(9)]


# -- what is not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("quorum", ["solo", "all"])
@pytest.mark.parametrize(
    ("binding", "options"),
    [
        pytest.param(TORCH, {}, id="torch"),
        pytest.param(TORCH, {"early": False}, id="torch-without-hooks"),
        pytest.param(TORCH, {"gpu": True}, id="torch-on-a-fake-gpu"),
        pytest.param(KERAS, {}, id="keras"),
        pytest.param(KERAS_GRAPH, {}, id="keras-graph"),
    ],
)
def test_what_is_not_finite_is_left_out_and_counted(binding, options, quorum):
    """Three steps of rank 1: the bucket that has it goes empty, the other bucket as it is."""
    bad, given = {1: NAN, 2: INF, 3: -INF}, dict(options)
    gpu = FakeGpu().installed() if given.pop("gpu", False) else contextlib.nullcontext()

    def train(rank: int) -> tuple[list[float], Any]:
        one = binding.vectors([2, 2], UNIT, quorum=quorum, bucket_cap_mb=TINY, **given)
        for step in range(5):
            one.take([1.0, bad.get(step, 1.0) if rank else 1.0], [1.0, 1.0])
        one.opt.drain()
        return one.weights().tolist(), one.opt.stats()

    with gpu, pytest.warns(UserWarning, match=r"3 step\(s\) of this rank"):
        ends = Cluster(2).run(train)
    for rank, (weights, stats) in enumerate(ends):
        assert weights == [-3.5, -3.5, -5.0, -5.0]
        assert stats.gradients_skipped == 3 * rank
        assert stats.gradients_produced == 5  # of the bucket that had most
        assert stats.steps == 5


@both
def test_sums_of_large_finite_numbers_are_no_reason_to_skip(binding):
    def train(rank: int) -> list[float]:
        one = binding.vectors([4], Case("slow", "sgd", 1e-37), quorum="all")
        one.take([2e38] * 4)  # their sum is infinite in float32
        one.opt.drain()
        assert one.opt.stats().gradients_skipped == 0
        return one.weights().tolist()

    assert Cluster(1).run(train) == [pytest.approx([-20.0] * 4)]


@all_modes
def test_nonfinite_raise_hands_nothing_over_and_the_step_may_be_tried_again(binding):
    said = r"not finite.*: the gradients of parameter 0$" if binding is TORCH else "NaN or infinity in this rank's"

    def train(rank: int) -> tuple[list[float], int]:
        one = binding.vectors([1, 1], UNIT, quorum="all", bucket_cap_mb=TINY, nonfinite="raise")
        log = hand_overs(one.opt)
        for step in range(3):
            if (rank, step) == (1, 1):
                with pytest.raises((FloatingPointError, tf.errors.UnknownError), match=said):
                    one.take(math.nan, 1.0)
                assert one.opt.stats().steps == 1
            one.take(1.0, 1.0)
        one.opt.drain()
        assert log == []
        return one.weights().tolist(), one.opt.stats().gradients_applied

    assert Cluster(2).run(train) == [([-3.0, -3.0], 6)] * 2
