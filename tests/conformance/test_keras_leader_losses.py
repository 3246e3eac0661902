"""Keras: training losses reach a LeaderOptimizer once a step, before its choice, unscaled; or not at all."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance.keras_ranks import LOSS, Scalar, batch

both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
sgd = keras.optimizers.SGD
ALONE = {"group": 1, "global_period": 1000, "loss_window": 100}
Event = tuple[str, float]


def spy(opt: Any) -> list[Event]:
    """("told", loss) and ("begun", number of losses so far) as they come; it takes time until a loss is told."""
    ours = getattr(opt, "inner_optimizer", opt)
    events: list[Event] = []
    tell, begin = ours._async.record_loss, ours._async.begin_step

    def told(loss: Any) -> Any:
        time.sleep(0.01)  # (a step that does not wait for its loss has begun by then)
        events.append(("told", float(loss)))
        return tell(loss)

    def begun(**given: Any) -> Any:
        events.append(("begun", float(sum(kind == "told" for kind, _ in events))))
        return begin(**given)

    vars(ours._async).update(record_loss=told, begin_step=begun)
    return events


def alternating(losses: list[float], each: int = 1) -> list[Event]:
    """So many losses told, a step begun, and so on."""
    events: list[Event] = []
    for number, loss in enumerate(losses, 1):
        events.append(("told", loss))
        events += [("begun", float(number))] * (number % each == 0)
    return events


def alone(optimizer: Any = None, **options: Any) -> Any:
    """A wrapped optimizer for a cluster of one."""
    return hvd.LeaderOptimizer(sgd(1.0) if optimizer is None else optimizer, **ALONE | options)


# -- record_loss() --------------------------------------------------------------------------------------------


def test_several_numbers_are_no_loss_in_a_graph():
    """Also where their number is not known while it is traced."""

    def train(rank: int) -> list[Any]:
        one = Scalar(alone())
        with pytest.raises(ValueError, match="takes one number, and this is a tensor of shape"):
            tf.function(one.opt.record_loss)(tf.ones([1, 2]))
        unknown = tf.function(one.opt.record_loss, input_signature=[tf.TensorSpec(None)])
        unknown(tf.ones([1, 1]))
        for shape in (2, 0):
            with pytest.raises(tf.errors.InvalidArgumentError):
                unknown(tf.ones(shape))
        one.step(1.0, 1.0)
        return [one.opt.stats().mean_loss]

    assert Cluster(1).run(train) == [[1.0]]


@pytest.mark.parametrize(
    ("graph", "each", "accumulation"),
    [(False, 1, "none"), (True, 1, "none"), (False, 2, "ours"), (True, 2, "ours"), (True, 2, "Keras'")],
)
def test_a_loss_told_where_the_step_is_comes_once_and_before_its_choice(graph, each, accumulation):
    """Also where several passes make a step, which begins in a branch of the graph."""

    def train(rank: int) -> list[Event]:
        optimizer = sgd(1.0, gradient_accumulation_steps=each if accumulation == "Keras'" else None)
        opt = alone(optimizer, backward_passes_per_step=each if accumulation == "ours" else 1)
        weight = keras.Variable(3.0)
        opt.build([weight])
        events = spy(opt)

        def step(target: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = (weight.value - target) ** 2
            gradient = tape.gradient(loss, weight.value)
            opt.record_loss(loss)
            opt.apply([gradient * 0.0], [weight])

        taken = tf.function(step) if graph else step
        for target in (1.0, 0.0, 2.0, 3.0):
            taken(tf.constant(target))
        return events

    assert Cluster(1).run(train) == [alternating([4.0, 9.0, 1.0, 0.0], each)]


def test_losses_of_several_steps_of_one_graph_come_each_before_its_own_and_in_order():
    def train(rank: int) -> list[Event]:
        opt, weight = alone(), keras.Variable(1.0)
        opt.build([weight])
        events = spy(opt)

        @tf.function
        def steps() -> None:
            for _ in range(2):
                opt.record_loss(weight.value)
                opt.record_loss(weight.value + 0.5)
                opt.apply([tf.constant(1.0)], [weight])

        steps()
        steps()
        return events

    assert Cluster(1).run(train) == [alternating([1.0, 1.5, 0.0, 0.5, -1.0, -0.5, -2.0, -1.5], each=2)]


@pytest.mark.parametrize("apart", ["two functions", "an eager apply", "an eager loss"])
def test_a_loss_told_elsewhere_than_the_step(apart):
    """In another graph, which is traced before or after; or eagerly."""

    def train(rank: int) -> list[Event]:
        one = Scalar(alone(), graph=apart != "an eager apply")
        events = spy(one.opt)
        record = one.opt.record_loss if apart == "an eager loss" else tf.function(one.opt.record_loss)
        for loss in (1.0, 2.0, 3.0):
            record(tf.constant(loss))
            one.step(1.0)
        return events

    assert Cluster(1).run(train) == [alternating([1.0, 2.0, 3.0])]


@both_modes
def test_scale_loss_tells_it_as_in_keras_train_step(graph):
    """Before it is scaled; its gradient is that of the loss."""

    def train(rank: int) -> tuple[list[Event], float]:
        opt, weight = alone(sgd(0.5, loss_scale_factor=8.0)), keras.Variable(3.0)
        opt.build([weight])
        events = spy(opt)

        def step(target: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = opt.scale_loss((weight.value - target) ** 2)
            opt.apply_gradients([(tape.gradient(loss, weight.value), weight)])
            return loss

        taken = tf.function(step) if graph else step
        assert [float(taken(tf.constant(target))) for target in (1.0, 2.0, 0.0)] == [8 * 4.0, 8 * 1.0, 8 * 4.0]
        return events, float(weight)

    assert Cluster(1).run(train) == [(alternating([4.0, 1.0, 4.0]), 0.0)]


@both_modes
def test_a_step_that_overflows_is_none(graph):
    """Its losses count with its next step."""

    def train(rank: int) -> list[Any]:
        opt = alone(keras.optimizers.LossScaleOptimizer(sgd(1.0), initial_scale=16.0))
        one = Scalar(opt, graph)
        for number in range(3):
            spoilt = rank == 1 and number == 1
            one.step(np.inf if spoilt else (1.0 + rank) * float(opt.scale_loss(tf.constant(1.0))), 3.0 * number)
        own = float(one.weight)
        opt.drain()
        scale = float(opt.get_state()["dynamic_scale"])
        return [own, float(one.weight), opt.stats().steps, opt.stats().mean_loss, scale]

    first, second = Cluster(2).run(train)
    assert first == [-3.0, -3.0, 3, 2.0, 16.0]
    assert second == [-4.0, -3.0, 2, pytest.approx((1 + 0 + 3 + 1 + 6) / 5), 8.0]


# -- fit() ----------------------------------------------------------------------------------------------------


def fitted(
    optimizer: Any, batches: int, dtype: str = "float32", epochs: int = 1, **how: Any
) -> tuple[list[Event], float]:
    """Return the events while a model was fitted, and the mean of the last epoch's losses."""
    layers = [keras.Input((5, 5, 1)), keras.layers.Flatten(), keras.layers.Dense(3, dtype=dtype)]
    model = keras.Sequential(layers)
    model.set_weights([np.full(w.shape, 0.1, np.float32) for w in model.get_weights()])
    model.dtype_policy = keras.DTypePolicy(dtype)
    model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False, **how)
    data = [batch(0, step) for step in range(batches)]
    images, labels = (np.concatenate([one[i] for one in data]) for i in (0, 1))
    events = spy(model.optimizer)
    history = model.fit(images, labels, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return events, history.history["loss"][-1]


@pytest.mark.parametrize(
    "how", [{}, {"steps_per_execution": 3}, {"run_eagerly": True}], ids=["graph", "three-at-once", "eagerly"]
)
def test_fit_tells_each_steps_loss_once_and_before_its_choice(how):
    def train(rank: int) -> None:
        opt = alone(loss_window=7)
        events, mean = fitted(opt, 7, epochs=2, **how)
        assert opt.stats().steps == 14
        losses = [loss for kind, loss in events if kind == "told"]
        assert events == alternating(losses)
        assert len(losses) == len(set(losses)) == 14
        assert opt.stats().mean_loss == pytest.approx(np.mean(losses[7:]), rel=1e-6) == pytest.approx(mean, rel=1e-5)

    Cluster(1).run(train)


@pytest.mark.parametrize("how", [{"steps_per_execution": 3}, {"run_eagerly": True}], ids=["three-at-once", "eagerly"])
def test_fit_in_mixed_float16_tells_losses_as_they_are(how):
    """Not those that a LossScaleOptimizer has scaled."""

    def train(rank: int) -> None:
        opt = alone(keras.optimizers.LossScaleOptimizer(sgd(0.05), initial_scale=64.0))
        assert isinstance(opt, keras.optimizers.LossScaleOptimizer)
        events, mean = fitted(opt, 4, "mixed_float16", **how)
        losses = [loss for kind, loss in events if kind == "told"]
        assert events == alternating(losses)
        assert opt.stats().steps == len(losses) == 4
        assert opt.stats().mean_loss == pytest.approx(np.mean(losses), rel=1e-6) == pytest.approx(mean, rel=1e-2)
        opt.drain()

    Cluster(1).run(train)


def test_a_loss_scale_optimizer_outside_keeps_losses_away_and_the_message_says_so():
    """As ``compile()`` puts one around under mixed_float16. EASGD has no use for losses."""

    def train(rank: int) -> None:
        inside = r"(?s)LossScaleOptimizer must be inside: LeaderOptimizer\(LossScaleOptimizer\(optimizer\)\)"
        with pytest.raises(tf.errors.OpError, match=inside):
            fitted(alone(global_period=2), 20, "mixed_float16")
        easgd = hvd.LeaderOptimizer(sgd(0.1), algorithm="easgd", global_period=1)
        assert fitted(easgd, 3, "mixed_float16")[0] == [("begun", 0.0)] * 3
        assert (easgd.stats().mean_loss, easgd.stats().steps) == (None, 3)
        easgd.drain()

    (outcome,) = Cluster(1).outcomes(train)
    assert isinstance(outcome, ValueError | None), outcome  # (the other optimizer cannot be drained)
    assert outcome is None or "a leader is to be chosen" in str(outcome)


def test_a_graph_begins_a_step_before_it_moves_weights():
    """A step that cannot begin, as it meets ranks with other settings, leaves the weights as they are."""

    def train(rank: int) -> list[float]:
        one = Scalar(alone(), graph=True)
        begin, seen = one.opt._async.begin_step, []

        def begun(**given: Any) -> Any:
            time.sleep(0.05)  # (an update that does not wait is done by then)
            seen.append(float(one.weight.numpy()))
            return begin(**given)

        vars(one.opt._async).update(begin_step=begun)
        for _ in range(2):
            one.step(1.0, 1.0)
        return seen

    assert Cluster(1).run(train) == [[0.0, -1.0]]
