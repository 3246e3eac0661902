"""Keras: gradients in buckets, each of which leaves as soon as backward has filled it."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.algorithms.eager.worker import EagerWorker
from hvd_async.tensorflow.bucket_layout import Layout, Terms, partition
from hvd_async.tensorflow.variables import raw
from hvd_async.testing import Cluster
from tests.conformance.cases import CASES, Case
from tests.conformance.keras_ranks import KerasTrainer, flat

SGD = Case("sgd", "sgd", 0.1)
MANY = 1e-6
"""MiB: one variable a bucket."""


def variables(*sizes: int, dtypes: str = "") -> list[tf.Variable]:
    """float32 ones ("s"), float64 ("d") or float16 ("h")."""
    kinds = {"s": tf.float32, "d": tf.float64, "h": tf.float16}
    return [tf.Variable(tf.zeros([n], kinds[d])) for n, d in zip(sizes, dtypes or "s" * len(sizes), strict=True)]


def indices(buckets: list[Any]) -> list[list[int]]:
    return [list(bucket.indices) for bucket in buckets]


# -- which variables share a bucket ---------------------------------------------------------------------------


def test_buckets_fill_from_the_last_variable_up_to_the_cap():
    five = variables(10, 30, 10, 10, 200)
    assert indices(partition(five, 160, None)) == [[4], [2, 3], [0, 1]]
    assert indices(partition(five, 1e9, None)) == [[0, 1, 2, 3, 4]]
    assert indices(partition(five, 1, None)) == [[4], [3], [2], [1], [0]]


def test_dtypes_do_not_mix_and_half_precision_counts_as_single():
    mixed = variables(10, 10, 10, 10, dtypes="sdhs")
    buckets = partition(mixed, 100, None)
    assert indices(buckets) == [[2, 3], [1], [0]]
    assert [b.dtype for b in buckets] == [tf.float32, tf.float64, tf.float32]


def test_groups_are_horovods():
    five = variables(1, 1, 1, 1, 1)
    assert indices(partition(five, 1e9, 2)) == [[3, 4], [0, 1, 2]]
    assert indices(partition(five, 1e9, 9)) == [[4], [3], [2], [1], [0]]
    assert indices(partition(five, 1e9, [[five[0], five[3]], [five[1]]])) == [[2, 4], [1], [0, 3]]
    keras_own = keras.Variable([0.0])
    assert indices(partition([raw(keras_own), *five], 1, [[keras_own, five[4]]]))[-1] == [0, 5]


@pytest.mark.parametrize(
    ("pick", "hint"), [([[0, 1], [1]], "listed twice"), ([[0, None]], "not among the optimizer's variables")]
)
def test_wrong_groups_say_what_is_wrong(pick, hint):
    two, stranger = variables(1, 1), tf.Variable([0.0])
    with pytest.raises(ValueError, match=hint):
        partition(two, 1e9, [[stranger if i is None else two[i] for i in group] for group in pick])


def test_vectors_hold_gradients_in_the_variables_order_and_give_them_back():
    three = variables(2, 3, 1)
    layout = Layout(three, partition(three, 16, None), Terms(before=0.5, after=4.0, slots=3, slot=1))
    gradients = {0: tf.constant([1.0, 2.0]), 1: tf.constant([3.0, 4.0, 5.0])}
    vectors = [layout.flatten(b, gradients) for b in range(len(layout))]
    assert [v.numpy().tolist() for v in vectors] == [[1.5, 2.0, 2.5, 0, 0, 1, 0], [0.5, 1.0, 0, 1, 0]]
    assert [g.numpy().tolist() for g in layout.averages(vectors)] == [[2.0, 4.0], [6.0, 8.0, 10.0], [0.0]]
    assert layout.nbytes == (28, 20)
    assert [layout.zeros(b).shape[0] for b in range(2)] == layout.elements


# -- overlap --------------------------------------------------------------------------------------------------


def late_backward(event: threading.Event, came: list[bool]) -> Any:
    """A layer whose backward pass waits for ``event``."""

    @tf.custom_gradient
    def through(x: tf.Tensor) -> Any:
        def backward(dy: tf.Tensor) -> tf.Tensor:
            def wait(gradient: Any) -> Any:
                came.append(event.wait(30))
                return gradient

            waited = tf.numpy_function(wait, [dy], dy.dtype, stateful=False)
            return tf.ensure_shape(waited, dy.shape)

        return x, backward

    return keras.layers.Lambda(through)


@pytest.mark.parametrize("use_fit", [True, False], ids=["fit", "loop"])
def test_a_bucket_leaves_while_backward_still_computes(use_fit, monkeypatch):
    """The last layer's gradients are handed over before backward has come to the first layer."""
    events = [threading.Event() for _ in range(2)]
    came: list[bool] = []
    original = EagerWorker.hand_over

    def hand_over(self: EagerWorker, bucket: int, vector: Any) -> None:
        original(self, bucket, vector)
        if bucket == 1:  # bucket 0 is the last layer's bias, bucket 1 its kernel
            events[self.engine.rank].set()

    monkeypatch.setattr(EagerWorker, "hand_over", hand_over)

    def train(rank: int) -> int:
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input((3,)), dense(4), late_backward(events[rank], came), dense(2)])
        model.set_weights([np.ones_like(w) for w in model.get_weights()])
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(0.1), quorum="all", bucket_cap_mb=MANY)
        opt.build(model.trainable_variables)
        opt._async.worker_now()  # the ranks meet: before that everything waits for them
        x, y = tf.ones((2, 3)), tf.zeros((2, 2))
        if use_fit:
            model.compile(optimizer=opt, loss="mse", jit_compile=False)
            model.fit(x, y, verbose=0)
        else:

            @tf.function
            def step() -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                opt.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

            step()
        opt.drain()
        return len(opt._async.replica.layout)

    assert Cluster(2).run(train) == [4, 4]
    assert came == [True, True]


@pytest.mark.parametrize("case", [CASES[4], CASES[7]], ids=lambda case: case.name)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_several_buckets_give_the_same_bits_as_one(case, graph):
    def train(rank: int) -> list[bytes]:
        outcomes = []
        for options in ({}, {"bucket_cap_mb": MANY}, {"groups": 2}):
            trainer = KerasTrainer(case, graph, quorum="all", **options)
            trainer.train(rank, range(3))
            trainer.opt.drain()
            outcomes.append(flat([*trainer.model.trainable_variables, *trainer.opt.variables]).tobytes())
        return outcomes

    for outcomes in Cluster(2).run(train):
        assert len(set(outcomes)) == 1


def test_late_gradients_in_many_buckets_are_all_applied(tapes):
    def train(rank: int) -> tuple[Any, Any, Any]:
        trainer = KerasTrainer(SGD, graph=True, bucket_cap_mb=MANY, max_staleness=3)
        before, gradients = trainer.weights(), []
        for step in range(4 + 3 * rank):
            gradients.append(trainer.gradient(rank, step))
            trainer.step()
        trainer.opt.drain()
        stats = trainer.opt.stats()
        assert stats.gradients_applied == stats.total_produced == 11
        return before, trainer.weights(), sum(gradients)

    outcomes = Cluster(2, jitter=0.002).run(train)
    expected = outcomes[0][0] - 0.1 / 2 * (outcomes[0][2] + outcomes[1][2])
    for _, after, _ in outcomes:
        assert after.tobytes() == outcomes[0][1].tobytes()
        np.testing.assert_allclose(after, expected, rtol=0, atol=1e-5)


def test_different_buckets_are_refused():
    def train(rank: int) -> None:
        KerasTrainer(SGD, bucket_cap_mb=25.0 if rank else MANY).train(rank, range(1))

    for outcome in Cluster(2).outcomes(train):
        assert "Pass the same arguments on every rank" in str(outcome)
