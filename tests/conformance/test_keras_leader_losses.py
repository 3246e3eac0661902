"""Keras: how training losses reach a LeaderOptimizer: once a step, before its choice, unscaled; or not at all."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster, InjectedError
from tests.conformance.cases import CASES
from tests.conformance.keras_gossip_ranks import least_squares
from tests.conformance.keras_leader_ranks import LeaderTrainer
from tests.conformance.keras_ranks import LOSS, Scalar, batch
from tests.conformance.leader_cases import PAIRS
from tests.conformance.leader_drive import TIMEOUT
from tests.conformance.leader_reference import drawn, several

both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
sgd = keras.optimizers.SGD
ALONE = {"group": 1, "global_period": 1000, "loss_window": 100}
NONE_TOLD = r"this rank has recorded none: call opt.record_loss\(loss\) before each"
Event = tuple[str, float]


def spy(opt: Any, delay: float = 0.03) -> list[Event]:
    """("told", loss) and ("begun", number of losses so far) as they come; it takes time until a loss is told."""
    ours = getattr(opt, "inner_optimizer", opt)
    events: list[Event] = []
    tell, begin = ours._async.record_loss, ours._async.begin_step

    def told(loss: Any) -> Any:
        time.sleep(delay)
        events.append(("told", float(loss)))
        return tell(loss)

    def begun() -> Any:
        events.append(("begun", float(sum(kind == "told" for kind, _ in events))))
        return begin()

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


def test_what_a_loss_may_be():
    """A number or a tensor of one; several since the last step all count."""

    def train(rank: int) -> list[Any]:
        one = Scalar(alone(loss_window=4))
        variable = tf.Variable(2.0)
        for loss in (1, 0.5, np.float32(3.0), tf.constant([[4.0]]), tf.constant([5.0], tf.float64), variable * 1.5):
            one.opt.record_loss(loss)
        one.step(0.0)
        means = [one.opt.stats().mean_loss]
        one.step(0.0, 7.0)
        return [*means, one.opt.stats().mean_loss]

    assert Cluster(1).run(train) == [[(3.0 + 4.0 + 5.0 + 3.0) / 4, (4.0 + 5.0 + 3.0 + 7.0) / 4]]


@both_modes
@pytest.mark.parametrize("shape", [(2,), (1, 2), (0,)], ids=str)
def test_several_numbers_are_no_loss(graph, shape):
    def train(rank: int) -> list[Any]:
        one = Scalar(alone())
        record = tf.function(one.opt.record_loss) if graph else one.opt.record_loss
        with pytest.raises(ValueError, match="takes one number, and this is a tensor of shape"):
            record(tf.ones(shape))
        if graph:
            unknown = tf.function(one.opt.record_loss, input_signature=[tf.TensorSpec(None)])
            unknown(tf.ones([1, 1]))
            with pytest.raises(tf.errors.InvalidArgumentError):
                unknown(tf.ones(shape))
        one.step(1.0, 1.0)
        return [one.opt.stats().mean_loss]

    assert Cluster(1).run(train) == [[1.0]]


@both_modes
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("accumulation", ["ours", "Keras'"])
def test_a_loss_told_where_the_step_is_comes_once_and_before_its_choice(graph, each, accumulation):
    """Also where several passes make a step, which begins in a branch of the graph."""

    def train(rank: int) -> list[Event]:
        optimizer = sgd(1.0, gradient_accumulation_steps=each if each > 1 and accumulation == "Keras'" else None)
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


def test_losses_of_several_steps_of_one_graph_come_each_before_its_own():
    def train(rank: int) -> list[Event]:
        opt, weight = alone(), keras.Variable(1.0)
        opt.build([weight])
        events = spy(opt)

        @tf.function
        def steps() -> None:
            for _ in range(3):
                opt.record_loss(weight.value)
                opt.apply([tf.constant(1.0)], [weight])

        steps()
        steps()
        return events

    assert Cluster(1).run(train) == [alternating([1.0, 0.0, -1.0, -2.0, -3.0, -4.0])]


def test_several_losses_of_one_step_in_a_graph_all_come_before_it_in_order():
    def train(rank: int) -> list[Event]:
        opt, weight = alone(), keras.Variable(1.0)
        opt.build([weight])
        events = spy(opt)

        @tf.function
        def step(*losses: tf.Tensor) -> None:
            for loss in losses:
                opt.record_loss(loss)
            opt.apply([tf.constant(1.0)], [weight])

        for _ in range(3):
            step(*map(tf.constant, (1.0, 2.0, 3.0)))
        return events

    assert Cluster(1).run(train) == [alternating([1.0, 2.0, 3.0] * 3, each=3)]


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


# -- fit() ----------------------------------------------------------------------------------------------------


def dense(optimizer: Any, dtype: str = "float32", **options: Any) -> keras.Model:
    """A compiled model."""
    layers = [keras.Input((5, 5, 1)), keras.layers.Flatten(), keras.layers.Dense(3, dtype=dtype)]
    model = keras.Sequential(layers)
    model.set_weights([np.full(w.shape, 0.1, np.float32) for w in model.get_weights()])
    model.dtype_policy = keras.DTypePolicy(dtype)
    model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False, **options)
    return model


HOW = {"graph": {}, "three-at-once": {"steps_per_execution": 3}, "eagerly": {"run_eagerly": True}}


def fitted(model: keras.Model, batches: int, epochs: int = 1) -> tuple[list[Event], float]:
    """What came while it was fitted, and the mean of the last epoch's losses."""
    data = [batch(0, step) for step in range(batches)]
    images, labels = (np.concatenate([one[i] for one in data]) for i in (0, 1))
    events = spy(model.optimizer)
    history = model.fit(images, labels, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return events, history.history["loss"][-1]


@pytest.mark.parametrize("how", HOW)
def test_fit_tells_each_steps_loss_once_and_before_its_choice(how):
    def train(rank: int) -> None:
        opt = alone(loss_window=7)
        events, mean = fitted(dense(opt, **HOW[how]), batches=7, epochs=2)
        assert opt.stats().steps == 14
        losses = [loss for kind, loss in events if kind == "told"]
        assert events == alternating(losses)
        assert len(losses) == len(set(losses)) == 14
        assert opt.stats().mean_loss == pytest.approx(np.mean(losses[7:]), rel=1e-6) == pytest.approx(mean, rel=1e-5)

    Cluster(1).run(train)


@pytest.mark.parametrize("how", HOW)
def test_fit_in_mixed_float16_tells_losses_as_they_are(how):
    """Not those that a LossScaleOptimizer has scaled."""

    def train(rank: int) -> None:
        scaling = keras.optimizers.LossScaleOptimizer(sgd(0.05), initial_scale=64.0)
        opt = alone(scaling)
        assert isinstance(opt, keras.optimizers.LossScaleOptimizer)
        model = dense(opt, "mixed_float16", **HOW[how])
        assert model.optimizer is opt
        events, mean = fitted(model, batches=4)
        losses = [loss for kind, loss in events if kind == "told"]
        assert events == alternating(losses)
        assert opt.stats().steps == len(losses) == 4
        assert opt.stats().mean_loss == pytest.approx(np.mean(losses), rel=1e-6) == pytest.approx(mean, rel=1e-2)
        opt.drain()

    Cluster(1).run(train)


@both_modes
def test_a_step_that_overflows_is_none(graph):
    """Of that rank; what it told counts with its next one."""

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


# -- what misses them -----------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("silent", [(0, 1), (1,)], ids=str)
def test_a_rank_that_tells_no_loss_hears_so_at_the_first_pull_and_cannot_end(graph, silent):
    """Before any weight has changed; no rank leads for want of losses; once they are told, all goes on."""
    together = threading.Barrier(2)
    following = dataclasses.replace(PAIRS, groups=several(2, 2))

    def train(rank: int) -> bytes:
        tells = [rank not in silent]
        told = dataclasses.replace(following, told=lambda *step: drawn(*step) if tells[0] else None)
        one = LeaderTrainer(least_squares(2, CASES[0]), rank, told, graph=graph)
        one.worker()
        if rank in silent:
            with pytest.raises(tf.errors.OpError if graph else ValueError, match=NONE_TOLD):
                one.train(10_000)
            before = one.path[-1].tobytes()
            assert one.weights().tobytes() == before
            for end in (one.opt.drain, one.opt.cut, one.opt.consensus_distance):
                with pytest.raises(ValueError, match=NONE_TOLD):
                    end()
            assert one.weights().tobytes() == before
        else:
            one.train(8)
        together.wait(TIMEOUT)
        tells[0] = True
        one.train(3)
        one.opt.drain()
        return one.weights().tobytes()

    assert len(set(Cluster(2).run(train, timeout=40))) == 1


def test_where_one_rank_tells_no_loss_and_gives_up_the_others_hear_which():
    following = dataclasses.replace(PAIRS, groups=several(2, 1))

    def train(rank: int) -> None:
        told = dataclasses.replace(following, told=lambda *step: drawn(*step) if rank == 0 else None)
        LeaderTrainer(least_squares(2, CASES[0]), rank, told).train(10_000)

    one, silent = Cluster(2).outcomes(train)
    assert isinstance(silent, ValueError)
    assert isinstance(one, InjectedError)
    assert "rank 1 on host host1 failed: ValueError: a leader is to be chosen" in str(one)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_loss_scale_optimizer_outside_keeps_losses_away_and_the_message_says_so(run_eagerly):
    """As ``compile()`` puts one around under mixed_float16. EASGD has no use for losses."""

    def train(rank: int) -> None:
        model = dense(alone(global_period=2), "mixed_float16", run_eagerly=run_eagerly)
        inside = r"(?s)LossScaleOptimizer must be inside: LeaderOptimizer\(LossScaleOptimizer\(optimizer\)\)"
        with pytest.raises(ValueError if run_eagerly else tf.errors.OpError, match=inside):
            fitted(model, batches=20)
        easgd = hvd.LeaderOptimizer(sgd(0.1), algorithm="easgd", global_period=1)
        events, _ = fitted(dense(easgd, "mixed_float16", run_eagerly=run_eagerly), batches=3)
        assert events == [("begun", 0.0)] * 3
        assert easgd.stats().mean_loss is None
        assert easgd.stats().steps == 3
        easgd.drain()

    (outcome,) = Cluster(1).outcomes(train)
    assert isinstance(outcome, ValueError | None), outcome  # (the other optimizer cannot be drained)
    assert outcome is None or "a leader is to be chosen" in str(outcome)
