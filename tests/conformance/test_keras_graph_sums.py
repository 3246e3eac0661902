"""Keras: steps whose gradients are summed by ops of the training graph, under ``quorum="all"``."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance.eager_ranks import KERAS_GRAPH, NAN, UNIT

BUCKET_EACH = 1e-9
"""MiB at which a bucket is full: each variable has one of its own."""


def inputs_of(op: tf.Operation) -> set[str]:
    """Return the gradients, arguments of a function, that an op depends on by its inputs."""
    found, left = set[str](), [op]
    seen = set[str]()
    while left:
        one = left.pop()
        if one.name not in seen:
            seen.add(one.name)
            found |= {one.name} if one.name.startswith("gradients") else set()
            left += [each.op for each in one.inputs]
    return found


def test_in_a_graph_a_bucket_is_summed_without_waiting_for_the_gradients_of_others():
    def trace(rank: int) -> list[set[str]]:
        weights = [keras.Variable(np.zeros(size), dtype="float32") for size in (2, 3, 4)]
        optimizer = hvd.EagerOptimizer(keras.optimizers.SGD(0.1), quorum="all", bucket_cap_mb=BUCKET_EACH)
        optimizer.build(weights)
        step = tf.function(lambda *gradients: optimizer.apply(gradients, weights))
        gradients = [tf.ones(size) for size in (2, 3, 4)]
        step(*gradients)
        graph = step.get_concrete_function(*gradients).graph
        optimizer.drain()
        elements = {3, 4, 5}  # (of the vectors, with one that counts)
        sums = [op for op in graph.get_operations() if op.type == "PyFuncStateless" and len(op.inputs) == 1]
        return [inputs_of(op) for op in sums if op.inputs[0].shape.num_elements() in elements]

    (found,) = Cluster(1).run(trace)
    assert sorted(len(names) for names in found) == [1, 1, 1], found
    assert len(set.union(*found)) == 3


def trained(rank: int, steps: list[list[list[Any]]], **options: Any) -> tuple[list[float], int, int]:
    """Return a rank's weights, and the numbers of rounds that its graph summed and that Keras applied, after steps with
    gradients by step, rank and variable."""
    own = KERAS_GRAPH.vectors([2, 2], UNIT, quorum="all", bucket_cap_mb=BUCKET_EACH, **options)
    for by_rank in steps:
        for index, gradient in enumerate(by_rank[rank]):
            own.freeze(index, gradient is FROZEN)
        own.take(*by_rank[rank])
    own.opt.drain()
    return own.weights().tolist(), own.opt._async.worker._in_flight._promised, int(own.opt.iterations)


FROZEN = object()


def test_a_bucket_without_a_finite_gradient_on_any_rank_is_left_alone():
    steps = [[[1.0, NAN], [3.0, NAN]], [[NAN, 2.0], [3.0, NAN]], [[NAN, NAN], [NAN, NAN]]]
    decay = {"round_transform": lambda gradients: [one + 1.0 for one in gradients]}  # (it would move the others)
    for weights, summed, applied in Cluster(2, jitter=0.001).run(lambda rank: trained(rank, steps, **decay)):
        assert weights == [-(2.0 + 1.0 + 1.5 + 1.0)] * 2 + [-(1.0 + 1.0)] * 2
        assert (summed, applied) == (3, 2)


def test_a_variable_that_the_leading_rank_has_frozen_stays_and_counts_as_zero():
    """Each rank has frozen another one in the second step, and either rank may lead it."""
    steps = [[[1.0, 1.0], [1.0, 1.0]], [[1.0, FROZEN], [FROZEN, 4.0]]]

    def transform(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        return [one + tf.reduce_sum(gradients) for one in gradients]

    first, second = (end[0] for end in Cluster(2).run(lambda rank: trained(rank, steps, round_transform=transform)))
    assert first == second
    by_rank_0, by_rank_1 = [-5.0 - (0.5 + 1.0)] * 2 + [-5.0] * 2, [-5.0] * 2 + [-5.0 - (2.0 + 4.0)] * 2
    assert first in (by_rank_0, by_rank_1)


@pytest.mark.parametrize("confirm", ["0", "1"])
def test_an_environment_variable_has_the_engine_sum(monkeypatch, confirm):
    monkeypatch.setenv("HVD_ASYNC_CONFIRM", confirm)
    for weights, summed, _ in Cluster(2).run(lambda rank: trained(rank, [[[1.0, 2.0], [3.0, 2.0]]])):
        assert weights == [-2.0] * 4
        assert summed == (confirm == "0")
