"""Keras: NaN, infinities and loss scaling: what one rank cannot use reaches no other."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.algorithms.eager.worker import EagerWorker
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.keras_ranks import LOSS, batch, flat

both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
NAN, INF = float("nan"), float("inf")


def applier(opt: Any, variables: list[Any], graph: bool) -> Any:
    """``opt.apply`` with gradients of these variables, in a ``tf.function`` or not."""
    call: Any = lambda *gradients: opt.apply(gradients, variables)  # noqa: E731
    return tf.function(call) if graph else call


# -- NaN ------------------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bucket_that_is_not_finite_is_left_out_and_the_others_are_not(bad, graph):
    def train(rank: int) -> Any:
        variables = [keras.Variable(np.zeros(2, np.float32), name=name) for name in ("one", "two")]
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(1.0), quorum="all", bucket_cap_mb=1e-6)
        opt.build(variables)
        step = applier(opt, variables, graph)
        for number in range(3):
            spoilt = rank == 1 and number == 1
            step(tf.constant([1.0, bad if spoilt else 1.0]), tf.constant([2.0, 2.0]))
        opt.drain()
        return [v.numpy().tolist() for v in variables], opt.stats()

    for rank, (weights, stats) in enumerate(Cluster(2).run(train)):
        assert weights == [[-2.5, -2.5], [-6.0, -6.0]]
        assert stats.gradients_skipped == rank
        assert stats.steps == 3


def test_large_gradients_are_finite():
    def train(rank: int) -> Any:
        weight = keras.Variable(np.zeros(2, np.float32))
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(1.0))
        opt.build([weight])
        opt.apply([tf.constant([1e30, -1e30])])
        opt.drain()
        assert opt.stats().gradients_skipped == 0
        return weight.numpy()

    np.testing.assert_allclose(Cluster(1).run(train)[0], [-1e30, 1e30])


@both_modes
def test_nonfinite_raise_raises_before_anything_is_handed_over(graph, monkeypatch):
    handed: list[int] = []
    original = EagerWorker.hand_over
    monkeypatch.setattr(EagerWorker, "hand_over", lambda *args: handed.append(args[1]) or original(*args))

    def train(rank: int) -> Any:
        variables = [keras.Variable(0.0, name=name) for name in ("one", "two")]
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(1.0), bucket_cap_mb=1e-6, nonfinite="raise")
        opt.build(variables)
        opt._async.worker_now()
        step = applier(opt, variables, graph)
        expected = tf.errors.UnknownError if graph else FloatingPointError
        with pytest.raises(expected, match="NaN or infinity in this rank's gradients"):
            step(tf.constant(NAN), tf.constant(1.0))
        assert opt.stats().steps == 0
        step(tf.constant(1.0), tf.constant(1.0))
        opt.drain()
        return [float(v) for v in variables], opt.stats().gradients_produced

    assert Cluster(1).run(train) == [([-1.0, -1.0], 1)]
    assert handed == []


# -- loss scaling ---------------------------------------------------------------------------------------------


def scaling(scale: float, growth: int = 2, **options: Any) -> Any:
    inner = keras.optimizers.SGD(1.0, momentum=0.5)
    return hvd.EagerOptimizer(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale, dynamic_growth_steps=growth), **options
    )


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
        variables = [keras.Variable(0.0, name=name) for name in ("one", "two")]
        opt = scaling(2.0 ** (4 + rank), quorum="all", bucket_cap_mb=1e-6)
        opt.build(variables)
        assert isinstance(opt, keras.optimizers.LossScaleOptimizer)
        step = applier(opt, variables, graph)
        scales = []
        for number in range(4):
            scale = float(opt.scale_loss(1.0))
            scales.append(scale)
            spoilt = rank == 1 and number == 1
            step(tf.constant(INF if spoilt else 3.0 * scale), tf.constant((1.0 + rank) * scale))
        opt.drain()
        return [float(v) for v in variables], scales, opt.stats(), int(opt.iterations)

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

    def scales(opt: Any, variable: Any) -> list[float]:
        step, found = applier(opt, [variable], graph), []
        for spoilt in bad:
            step(tf.constant(INF if spoilt else 1.0))
            found.append((float(opt.dynamic_scale.numpy()), int(opt.step_counter.numpy())))
        return found

    def train(rank: int) -> Any:
        opt = scaling(8.0)
        opt.build([weight := keras.Variable(0.0)])
        found = scales(opt, weight)
        opt.drain()
        return found

    plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0, 2)
    plain.build([weight := keras.Variable(0.0)])
    assert Cluster(1).run(train) == [scales(plain, weight)]


def half_model() -> Any:
    """In mixed precision: float16 inside, float32 weights."""
    policy = keras.DTypePolicy("mixed_float16")
    layers = [keras.Input((5, 5, 1)), keras.layers.Flatten(), keras.layers.Dense(3, dtype=policy, name="dense")]
    model = keras.Sequential(layers)
    random = np.random.default_rng(0)
    model.set_weights([random.normal(size=w.shape).astype(np.float32) * 0.3 for w in model.get_weights()])
    model.dtype_policy = policy
    return model


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_fit_in_mixed_float16(run_eagerly):
    """The scale begins far too high on rank 1, so that its first steps overflow."""

    def train(rank: int) -> Any:
        model = half_model()
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        opt = hvd.EagerOptimizer(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0 ** (10 + 15 * rank)))
        model.compile(optimizer=opt, loss=LOSS, run_eagerly=run_eagerly, jit_compile=False)
        assert model.optimizer is opt
        data = [batch(rank, step) for step in range(12)]
        images, labels = np.concatenate([d[0] for d in data]), np.concatenate([d[1] for d in data])
        before = flat(model.trainable_variables)
        averaged = hvd.callbacks.LearningRateScheduleCallback(0.05, 1.0, momentum_correction=False)
        model.fit(images, labels, batch_size=4, epochs=2, verbose=0, callbacks=[averaged])
        after = flat(model.trainable_variables)
        return after, opt.stats(), float(opt.dynamic_scale.numpy()), float(np.abs(after - before).max())

    outcomes = Cluster(2).run(train)
    for rank, (weights, stats, scale, moved) in enumerate(outcomes):
        assert weights.tobytes() == outcomes[0][0].tobytes()
        assert np.isfinite(weights).all()
        assert moved > 0.01
        assert stats.steps == 24
        skipped = stats.gradients_skipped
        assert (skipped > 4) if rank else (skipped == 0)
        assert stats.gradients_produced == 24 - skipped
        assert stats.gradients_applied == stats.total_produced == 48 - outcomes[1][1].gradients_skipped
        assert scale == 2.0 ** (10 + 15 * rank - skipped)


def test_loss_scaling_around_the_wrapper_is_refused_with_a_hint():
    """Where ``compile()`` puts it there."""
    hint = r"Write EagerOptimizer\(keras.optimizers.LossScaleOptimizer\(optimizer\)\)"
    with scripted_engine(2):
        model, opt = half_model(), hvd.EagerOptimizer(keras.optimizers.SGD(0.1))
        with pytest.raises(ReplicaStateError, match=hint):
            model.compile(optimizer=opt, loss=LOSS, jit_compile=False)


def test_a_fixed_scale_is_taken_out_before_gradients_are_pending():
    """``loss_scale_factor=`` of any Keras optimizer; it may differ from rank to rank."""

    def train(rank: int) -> float:
        weight = keras.Variable(0.0)
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(1.0, loss_scale_factor=2.0 ** (rank + 1)), quorum="all")
        opt.build([weight])
        with tf.GradientTape() as tape:
            loss = opt.scale_loss(weight.value * (3.0 + rank))
        opt.apply(tape.gradient(loss, [weight.value]), [weight])
        opt.drain()
        return float(weight)

    assert Cluster(2).run(train) == [-3.5, -3.5]


def test_an_overflow_in_one_of_several_backward_passes():
    def train(rank: int) -> Any:
        weight = keras.Variable(0.0)
        opt = scaling(4.0, growth=100, quorum="all", backward_passes_per_step=2)
        opt.build([weight])
        for spoilt in (rank == 1, False, rank == 1, rank == 1):
            scale = float(opt.scale_loss(1.0))
            opt.apply([tf.constant(INF if spoilt else scale)], [weight])
        opt.drain()
        return float(weight), opt.stats().gradients_skipped

    expected = momentum([(2.0 + 1.0) / 2, (2.0 + 0.0) / 2])
    assert Cluster(2).run(train) == [(expected, 0), (expected, 1)]


def test_a_model_with_loss_scaling_is_saved_and_resumed_with_its_scale(tmp_path):
    def train(rank: int) -> Any:
        model = half_model()
        opt = scaling(64.0, growth=1)
        model.compile(optimizer=opt, loss=LOSS, jit_compile=False)
        model.fit(*batch(rank, 0), verbose=0)
        opt.drain()
        path = tmp_path / f"{rank}.keras"
        model.save(path)
        state = opt.get_state()
        again = scaling(1.0)
        again.build(model.trainable_variables)
        again.set_state(state)
        return str(path), float(opt.dynamic_scale.numpy()), float(again.dynamic_scale.numpy())

    for path, scale, again in Cluster(2).run(train):
        assert scale == again == 128.0
        loaded = keras.models.load_model(path)
        assert type(loaded.optimizer) is keras.optimizers.LossScaleOptimizer
        assert type(loaded.optimizer.inner_optimizer) is keras.optimizers.SGD
        assert float(loaded.optimizer.dynamic_scale.numpy()) == 128.0
