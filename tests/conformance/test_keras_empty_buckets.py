"""Keras: an empty bucket is not moved, an interrupt between rounds loses none; groups, float16 counts: as in torch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from horovod.common.util import split_list

import hvd_async.tensorflow.keras as hvd
import hvd_async.torch
from hvd_async.algorithms.eager.gradient_format import count_slots, largest_summand
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.tensorflow.bucket_layout import partition
from hvd_async.tensorflow.compression import Codec
from hvd_async.testing import Cluster
from hvd_async.torch.bucket_layout import Layout
from hvd_async.torch.compression import make_wire
from hvd_async.torch.compression import slots as torch_slots
from tests.conformance.test_keras_finite import applier, both_modes

NAN = float("nan")
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
}


def full(opt: Any, variables: list[Any]) -> dict[str, list[float]]:
    """Weights, and the optimizer's variables that belong to them."""
    every = [*variables, *opt.variables]
    return {v.name: [float(np.sum(o.numpy())) for o in every if v.name in o.path] for v in variables}


@both_modes
@pytest.mark.parametrize("empty", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_an_empty_bucket_is_not_moved(make, empty, graph):
    """Step 2 is NaN in some buckets, on both ranks; step 3 in one bucket of one rank."""

    def train(rank: int) -> list[dict[str, list[float]]]:
        variables = [keras.Variable(np.full(2, 1.0 + i, np.float32), name=f"own{i}") for i in range(2)]
        opt = hvd.EagerOptimizer(make(), quorum="all", bucket_cap_mb=1e-6)
        opt.build(variables)
        step, seen = applier(opt, variables, graph), []
        for number in range(3):
            gradients = []
            for index in range(2):
                bad = (number == 1 and index in empty) or (number == 2 and index == 0 and rank == 1)
                gradients.append(tf.constant([1.0, NAN if bad else 1.0 + rank]))
            step(*gradients)
            seen.append(full(opt, variables))
        opt.drain()
        assert full(opt, variables) == seen[-1]
        return seen

    first, other = Cluster(2).run(train)
    assert first == other
    for index in range(2):
        one, two, three = (seen[f"own{index}"] for seen in first)
        assert (one == two) == (index in empty)
        assert three != two


# -- broken off -----------------------------------------------------------------------------------------------


def test_a_round_that_was_not_begun_is_applied_by_the_next_step(monkeypatch):
    """Ctrl-C between waiting for a round and applying it."""

    def train(rank: int) -> tuple[float, int]:
        weight = keras.Variable(0.0)
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(1.0))
        opt.build([weight])
        fetch, strikes = opt._async.replica.fetch, iter([False, True, False, False])

        def fetch_or_not(*arguments: Any) -> Any:
            if next(strikes):
                raise KeyboardInterrupt
            return fetch(*arguments)

        opt._async.replica.fetch = fetch_or_not
        opt.apply([tf.constant(1.0)], [weight])
        with pytest.raises(KeyboardInterrupt):
            opt.apply([tf.constant(10.0)], [weight])
        assert float(weight.numpy()) == -1.0
        opt.apply([tf.constant(100.0)], [weight])  # ends the step before; its own gradient was of weights without it
        opt.apply([tf.constant(1000.0)], [weight])
        opt.drain()
        return float(weight.numpy()), opt.stats().gradients_applied

    assert Cluster(1).run(train) == [(-1011.0, 3)]


def test_a_round_that_was_half_applied_stops_the_rank_for_good():
    def train(rank: int) -> None:
        weight = keras.Variable(0.0)
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(1.0))
        opt.build([weight])
        opt.apply([tf.constant(1.0)], [weight])

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        opt._async.replica.applied = fail
        with pytest.raises(KeyboardInterrupt):
            opt.apply([tf.constant(1.0)], [weight])
        for call in (lambda: opt.apply([tf.constant(1.0)], [weight]), opt.drain):
            with pytest.raises(ReplicaStateError, match=r"round 2 could not be applied.*restart from a checkpoint"):
                call()

    Cluster(1).outcomes(train)


# -- the same in both bindings --------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 9])
def test_groups_are_split_as_horovod_splits_them(groups):
    theirs = [part for part in split_list(list(range(5)), groups) if part][::-1]
    variables = [tf.Variable([0.0]) for _ in range(5)]
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(5)]
    place = {id(p): index for index, p in enumerate(parameters)}
    ours = [list(bucket.indices) for bucket in partition(variables, 1e9, groups)]
    torchs = [sorted(place[id(p)] for p in bucket.parameters) for bucket in Layout(parameters, groups=groups).buckets]
    assert ours == torchs == theirs


@pytest.mark.parametrize("size", [2, 3, 1000, 5000, 10_000])
def test_float16_counts_are_exact_however_many_ranks_there_are(size):
    """Every rank has as many pending as ``max_staleness`` lets it, and gradients that are cut off."""
    staleness, most = 16, 18
    slots = count_slots(size, staleness, "float16")
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert torch_slots(hvd_async.torch.Compression.fp16, [parameter], size, staleness) == slots
    sharers = RankGroup(None, tuple(range(size)), 0, 0, size)
    wire = make_wire(Layout([parameter], slots=slots), hvd_async.torch.Compression.fp16, slots, sharers)
    codec = Codec(hvd.Compression.fp16, [tf.float32], size, staleness)
    assert codec.slots == slots
    vector = np.zeros(2 + slots, np.float32)
    vector[:3] = [1e6, -1e6, most]
    for encoded in (wire.encode(torch.as_tensor(vector)).numpy(), codec.encode(tf.constant(vector)).numpy()):
        assert encoded.dtype == np.float16
        assert encoded[2] == most
        sharing = -(-size // slots)
        assert encoded[2:3].repeat(sharing).cumsum(dtype=np.float16)[-1] == most * sharing
        total = encoded[:2].copy()
        for _ in range(size - 1):
            total += encoded[:2]
        assert np.isfinite(total).all()
        assert abs(encoded[0] - largest_summand(size)) <= 2**-10 * encoded[0]
