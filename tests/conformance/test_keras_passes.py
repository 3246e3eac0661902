"""Keras: several backward passes that make a step of gossip or leaders: traced once, and what has no gradient stays."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster

sgd = keras.optimizers.SGD


@pytest.mark.parametrize("built", ["before it is wrapped", "afterwards"])
@pytest.mark.parametrize("leaders", [False, True])
def test_a_step_of_several_passes_is_traced_once(leaders, built):
    """TensorFlow traces a function twice that makes variables while it is traced, and the first step takes longer."""

    def train(rank: int) -> tuple[int, list[float]]:
        plain, weight = sgd(1.0, momentum=0.5), keras.Variable(0.0)
        if built == "before it is wrapped":
            plain.build([weight])
        options = {"group": 1, "global_period": 1000} if leaders else {}
        wrap = hvd.LeaderOptimizer if leaders else hvd.GossipOptimizer
        opt = wrap(plain, backward_passes_per_step=2, **options)
        if built == "afterwards":
            opt.build([weight])
        step = tf.function(lambda gradient: opt.apply([gradient], [weight]))
        path = []
        for gradient in (1.0, 2.0, 4.0, 8.0):
            if leaders:
                opt.record_loss(1.0)
            step(tf.constant(gradient))
            path.append(float(weight))
        opt.drain()
        return int(step.experimental_get_tracing_count()), path

    assert Cluster(2).run(train) == [(1, [0.0, -3.0, -3.0, -16.5])] * 2


def test_a_variable_without_gradients_in_any_pass_does_not_move():
    """Decay would move it, were its gradients added up to zero."""

    def train(rank: int) -> list[float]:
        moved, still = keras.Variable(1.0), keras.Variable(1.0)
        opt = hvd.GossipOptimizer(sgd(1.0, weight_decay=0.5), backward_passes_per_step=2)
        opt.build([moved, still])
        step = tf.function(lambda: opt.apply([tf.constant(0.0), None], [moved, still]))
        for _ in range(4):
            step()
        opt.drain()
        return [float(moved), float(still)]

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        assert Cluster(1).run(train) == [[0.25, 1.0]]


def test_a_scaled_loss_has_its_passes_added_up_by_the_optimizer_inside():
    """Keras builds the inner optimizer by the outer one."""

    def train(rank: int) -> tuple[int, float]:
        weight = keras.Variable(0.0)
        opt = hvd.GossipOptimizer(
            keras.optimizers.LossScaleOptimizer(sgd(1.0), initial_scale=4.0), backward_passes_per_step=2
        )
        opt.build([weight])
        step = tf.function(lambda gradient: opt.apply([gradient], [weight]))
        for gradient in (4.0, 8.0, 16.0):
            step(tf.constant(gradient))
        with pytest.warns(UserWarning, match=r"1 backward pass\(es\) short of a step of 2"):
            opt.drain()
        return int(step.experimental_get_tracing_count()), float(weight)

    assert Cluster(1).run(train) == [(1, -3.0)]
