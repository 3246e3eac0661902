"""The parameters that Horovod's wrappers have too, in either binding, against averages in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_async.testing import Cluster
from tests.conformance.eager_ranks import KERAS, TINY, TORCH, UNIT, Binding, all_modes, both
from tests.conformance.reference import Array

SIZES, STEPS = (6, 4, 1), 5
ELEMENTS = sum(SIZES)


def gradient(rank: int, step: int) -> Array:
    """Whole numbers from -8 to 8, which even bfloat16 holds and adds exactly for a few ranks."""
    return np.random.default_rng([rank, step]).integers(-8, 9, ELEMENTS).astype(np.float64)


def trained(
    binding: Binding, rank: int, options: dict[str, Any], steps: int = STEPS, passes: int = 1, dtype: str = "float32"
) -> tuple[Array, Any]:
    """One rank's weights after plain SGD with learning rate 1, and its optimizer."""
    one = binding.vectors(SIZES, UNIT, dtypes=[dtype] * len(SIZES), **options)
    for step in range(steps):
        parts = [np.split(gradient(rank, step * passes + part), [6, 10]) for part in range(passes)]
        one.take_passes(parts)
    one.opt.drain()
    return one.weights(), one.opt


def expected(ranks: Sequence[int], factor: float, steps: int = STEPS) -> Array:
    """Minus ``factor`` times the sum of the ranks' gradients."""
    return -factor * sum(gradient(rank, step) for rank in ranks for step in range(steps))


def check(weights: Array, exact: Array) -> None:
    np.testing.assert_allclose(weights, exact, rtol=0, atol=1e-5)


def slots(opt: Any) -> int:
    """Elements of a vector that count gradients."""
    replica = opt._async.replica
    return int(getattr(replica, "codec", replica).tail.slots)


# -- factors --------------------------------------------------------------------------------------------------


@all_modes
def test_op_and_predivide(binding):
    hvd = binding.hvd
    cases: list[tuple[dict[str, Any], float]] = [
        ({}, 1 / 3),
        ({"op": hvd.Sum}, 1.0),
        ({"op": hvd.Average, "quorum": "solo"}, 1 / 3),
        ({"gradient_predivide_factor": 4.0}, 1 / 3),
        ({"gradient_predivide_factor": 0.5, "op": hvd.Average}, 1 / 3),
    ]

    def train(rank: int) -> list[Array]:
        return [trained(binding, rank, {"quorum": "all", **options})[0] for options, _ in cases]

    for outcomes in Cluster(3).run(train):
        for weights, (_, factor) in zip(outcomes, cases, strict=True):
            check(weights, expected(range(3), factor))


@both
def test_predivide_divides_before_the_sum(binding):
    """Sums that would not fit into float16 do once they are divided first."""
    options = {"compression": binding.hvd.Compression.fp16, "gradient_predivide_factor": 4.0, "max_staleness": 2}

    def train(rank: int) -> list[float]:
        one = binding.vectors([1], UNIT, quorum="all", **options)
        one.take([60000.0])
        one.opt.drain()
        return one.weights().tolist()

    assert Cluster(4).run(train) == [[pytest.approx(-60000.0, rel=1e-3)]] * 4


# -- buckets --------------------------------------------------------------------------------------------------


@both
@pytest.mark.filterwarnings("ignore:num_groups")
def test_groups_travel_together_and_change_no_number(binding):
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 1),
        ({"bucket_cap_mb": TINY}, 3),
        ({"groups": 1, "bucket_cap_mb": TINY}, 1),
        ({"groups": 2}, 2),
        ({"groups": 9}, 3),
        ({"num_groups": 2}, 2),
        ({"groups": lambda ps: [[ps[2], ps[0]]]}, 2),
        ({"groups": lambda ps: [[ps[1]], [ps[0]], [ps[2]]]}, 3),
        ({"groups": lambda ps: [[ps[1], ps[2]]], "bucket_cap_mb": TINY}, 2),
        ({"groups": lambda ps: [list(ps)], "bucket_cap_mb": TINY}, 1),
    ]

    def train(rank: int) -> list[tuple[Array, int]]:
        ends = [trained(binding, rank, {"quorum": "solo", **options}, steps=3 + rank) for options, _ in cases]
        return [(weights, len(opt._async.replica.layout)) for weights, opt in ends]

    exact = expected([0], 1 / 2, 3) + expected([1], 1 / 2, 4)
    for outcomes in Cluster(2).run(train):
        for (weights, buckets), (options, count) in zip(outcomes, cases, strict=True):
            check(weights, exact)
            assert buckets == count, options


# -- compression ----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compression_halves_what_travels_and_keeps_whole_numbers(binding, dtype):
    kinds = ("none", "fp16", "bf16")

    def train(rank: int) -> list[tuple[Array, Any]]:
        options = {"quorum": "solo", "max_staleness": 3}
        return [
            trained(binding, rank, {**options, "compression": getattr(binding.hvd.Compression, kind)}, dtype=dtype)
            for kind in kinds
        ]

    for outcomes in Cluster(3).run(train):
        for (weights, opt), kind in zip(outcomes, kinds, strict=True):
            check(weights, expected(range(3), 1 / 3))
            width = {"none": 8 if dtype == "float64" else 4}.get(kind, 2)
            assert opt.stats().bytes_sent == opt.stats().rounds * (ELEMENTS + slots(opt)) * width


class TorchEighth:
    """A compression of one's own: sends an eighth, as float64."""

    compress = staticmethod(lambda tensor: (tensor.double() / 8, (8, tensor.dtype)))
    decompress = staticmethod(lambda tensor, ctx: (tensor * ctx[0]).to(ctx[1]))


class KerasEighth:
    """The same."""

    compress = staticmethod(lambda tensor: (tf.cast(tensor, tf.float64) / 8, (8, tensor.dtype)))
    decompress = staticmethod(lambda tensor, ctx: tf.cast(tensor * ctx[0], ctx[1]))


@pytest.mark.parametrize(("binding", "eighth"), [(TORCH, TorchEighth), (KERAS, KerasEighth)], ids=["torch", "keras"])
def test_a_compression_of_ones_own(binding, eighth):
    for weights, opt in Cluster(2).run(lambda rank: trained(binding, rank, {"compression": eighth, "quorum": "all"})):
        check(weights, expected(range(2), 1 / 2))
        assert opt.stats().bytes_sent == STEPS * 8 * (ELEMENTS + 1)


# -- backward passes ------------------------------------------------------------------------------------------


@all_modes
def test_backward_passes_add_up(binding):
    passes = 3
    options = {"backward_passes_per_step": passes, "quorum": "solo", "bucket_cap_mb": TINY}
    for weights, opt in Cluster(2).run(lambda rank: trained(binding, rank, options, passes=passes)):
        check(weights, expected(range(2), 1 / 2, STEPS * passes))
        assert opt.stats().gradients_produced == STEPS
