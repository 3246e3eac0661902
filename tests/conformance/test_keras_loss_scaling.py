"""Keras: loss scaling under the wrapper: each rank its own scale, whose overflows reach no other rank."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance.keras_ranks import KerasVectors, batch, compiled, data, flat

both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
INF, TINY = float("inf"), 1e-6


def scaling(scale: float, growth: int = 2) -> Any:
    """Makes a loss-scaled optimizer for variables."""
    inner = keras.optimizers.SGD(1.0, momentum=0.5)
    return lambda _: keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale, dynamic_growth_steps=growth)


def momentum(gradients: list[float]) -> float:
    """SGD(1.0, momentum=0.5) from 0."""
    weight = velocity = 0.0
    for gradient in gradients:
        velocity = 0.5 * velocity - gradient
        weight += velocity
    return weight


@both_modes
def test_one_rank_overflows_and_no_other_is_poisoned(graph):
    """Every rank has its own scale, which moves by its own overflows."""

    def train(rank: int) -> Any:
        one = KerasVectors([1, 1], scaling(2.0 ** (4 + rank)), graph=graph, quorum="all", bucket_cap_mb=TINY)
        opt, scales = one.opt, []
        assert isinstance(opt, keras.optimizers.LossScaleOptimizer)
        for number in range(4):
            scales.append(scale := float(opt.scale_loss(1.0)))
            one.take(INF if (rank, number) == (1, 1) else 3.0 * scale, (1.0 + rank) * scale)
        opt.drain()
        return one.weights(), scales, opt.stats(), int(opt.iterations)

    outcomes = Cluster(2).run(train)
    one, two = momentum([3.0, 1.5, 3.0, 3.0]), momentum([1.5, 0.5, 1.5, 1.5])
    for rank, (weights, _, stats, iterations) in enumerate(outcomes):
        np.testing.assert_allclose(weights, [one, two], rtol=1e-6)
        assert (stats.steps, stats.gradients_skipped, iterations) == (4, rank, 4)
    assert outcomes[0][1] == [16, 16, 32, 32]
    assert outcomes[1][1] == [32, 32, 16, 16]


@both_modes
def test_the_scale_moves_as_keras_own(graph):
    bad = [False, False, True, True, False, False, False, True, False]

    def scales(opt: Any, take: Any) -> list[Any]:
        found = []
        for spoilt in bad:
            take(INF if spoilt else 1.0)
            found.append((float(opt.dynamic_scale.numpy()), int(opt.step_counter.numpy())))
        return found

    def train(rank: int) -> Any:
        one = KerasVectors([1], scaling(8.0), graph=graph)
        found = scales(one.opt, one.take)
        one.opt.drain()
        return found

    plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0, 2)
    plain.build([weight := keras.Variable(0.0)])
    assert Cluster(1).run(train) == [scales(plain, lambda gradient: plain.apply([tf.constant(gradient)], [weight]))]


def test_a_loss_has_the_present_scale_where_its_step_builds_the_optimizer():
    """TensorFlow traces such a step twice; the first time Keras scales the loss by a number."""

    def train(rank: int) -> list[float]:
        opt, weight, seen = hvd.EagerOptimizer(scaling(8.0)(None), quorum="all"), keras.Variable(0.0), []

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = opt.scale_loss(weight * 1.0)
            opt.apply([tape.gradient(loss, weight.value)], [weight])

        for _ in range(5):
            step()
            seen.append(float(weight.numpy()))
        opt.drain()
        return seen

    assert Cluster(2).run(train) == [[momentum([1.0] * steps) for steps in range(1, 6)]] * 2


def half_model() -> Any:
    """In mixed precision: float16 inside, float32 weights."""
    policy = keras.DTypePolicy("mixed_float16")
    layers = [keras.Input((5, 5, 1)), keras.layers.Flatten(), keras.layers.Dense(3, dtype=policy, name="dense")]
    model = keras.Sequential(layers)
    random = np.random.default_rng(0)
    model.set_weights([random.normal(size=w.shape).astype(np.float32) * 0.3 for w in model.get_weights()])
    model.dtype_policy = policy
    return model


def test_fit_in_mixed_float16():
    """The scale begins far too high on rank 1, so that its first steps overflow."""

    def train(rank: int) -> Any:
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        opt = hvd.EagerOptimizer(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0 ** (10 + 15 * rank)))
        model = compiled(opt, half_model())
        assert model.optimizer is opt
        before = flat(model.trainable_variables)
        averaged = hvd.callbacks.LearningRateScheduleCallback(0.05, 1.0, momentum_correction=False)
        model.fit(*data(rank, 12), batch_size=4, epochs=2, verbose=0, callbacks=[averaged])
        after = flat(model.trainable_variables)
        return after, opt.stats(), float(opt.dynamic_scale.numpy()), float(np.abs(after - before).max())

    outcomes = Cluster(2).run(train)
    for rank, (weights, stats, scale, moved) in enumerate(outcomes):
        assert weights.tobytes() == outcomes[0][0].tobytes()
        assert np.isfinite(weights).all()
        assert moved > 0.01
        assert stats.steps == 24
        skipped = stats.gradients_skipped
        assert (4 < skipped < 20) if rank else (skipped == 0)
        assert stats.gradients_produced == 24 - skipped
        assert stats.gradients_applied == stats.total_produced == 48 - outcomes[1][1].gradients_skipped
        assert scale == 2.0 ** (10 + 15 * rank - skipped)


def test_a_fixed_scale_is_taken_out_before_gradients_are_pending():
    """``loss_scale_factor=`` of any Keras optimizer; it may differ from rank to rank."""

    def train(rank: int) -> list[float]:
        one = KerasVectors([1], lambda _: keras.optimizers.SGD(1.0, loss_scale_factor=2.0 ** (rank + 1)), quorum="all")
        one.take(float(one.opt.scale_loss(3.0 + rank)))
        one.opt.drain()
        return one.weights().tolist()

    assert Cluster(2).run(train) == [[-3.5]] * 2


def test_a_model_with_loss_scaling_is_saved_and_resumed_with_its_scale(tmp_path):
    def train(rank: int) -> Any:
        opt = hvd.EagerOptimizer(scaling(64.0, growth=1)(None))
        model = compiled(opt, half_model())
        model.fit(*batch(rank, 0), verbose=0)
        opt.drain()
        path = tmp_path / f"{rank}.keras"
        model.save(path)
        state = opt.get_state()
        again = hvd.EagerOptimizer(scaling(1.0)(None))
        again.build(model.trainable_variables)
        again.set_state(state)
        return str(path), float(opt.dynamic_scale.numpy()), float(again.dynamic_scale.numpy())

    for path, scale, again in Cluster(2).run(train):
        assert scale == again == 128.0
        loaded = keras.models.load_model(path)
        assert type(loaded.optimizer) is keras.optimizers.LossScaleOptimizer
        assert type(loaded.optimizer.inner_optimizer) is keras.optimizers.SGD
        assert float(loaded.optimizer.dynamic_scale.numpy()) == 128.0
