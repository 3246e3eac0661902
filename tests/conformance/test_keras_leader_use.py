"""Keras: what LeaderOptimizer makes of an optimizer, its callbacks in fit(), batch norm of a model, saved models."""

from __future__ import annotations

import contextlib
import inspect
import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async
import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.keras_ranks import LOSS, Scalar, Watch, batch, conv_model, flat
from tests.conformance.leader_drive import TIMEOUT, wait_for_pulls
from tests.conformance.leader_ranks import KerasGraphRank, KerasRank
from tests.conformance.leader_reference import Following, several

sgd = keras.optimizers.SGD
NEVER = {"group": 1, "global_period": 1000}


@pytest.mark.parametrize("kind", [sgd, keras.optimizers.Adam, keras.optimizers.AdamW])
def test_the_result_is_an_instance_of_the_wrapped_class(kind):
    with scripted_engine(2):
        plain = kind(0.25, name="mine")
        wrapped = hvd_async.LeaderOptimizer(plain, group=1)
        named = hvd.LeaderOptimizer(plain, name="other", group=1)
    assert isinstance(wrapped, kind)
    assert (wrapped.name, named.name) == ("mine", "other")
    assert type(plain) is kind
    assert wrapped.get_config() == plain.get_config()
    assert wrapped.stats().steps == 0
    assert type(keras.optimizers.deserialize(keras.optimizers.serialize(wrapped))) is kind


def test_horovods_parameters_come_first_as_in_the_other_wrappers():
    wrappers = (hvd.EagerOptimizer, hvd.LeaderOptimizer)
    eager, leader = (list(inspect.signature(one).parameters.values()) for one in wrappers)
    positional = [[p for p in one if p.kind is p.POSITIONAL_OR_KEYWORD] for one in (eager, leader)]
    assert [str(p) for p in positional[0]] == [str(p) for p in positional[1]]


def test_weights_in_half_precision_and_steps_without_gradients_are_refused_with_a_hint():
    with scripted_engine(2):
        opt = hvd.LeaderOptimizer(sgd(0.1), group=1)
        opt.build([half := keras.Variable(0.0, dtype="bfloat16")])
        with pytest.raises(ValueError, match="'mixed_float16' and 'mixed_bfloat16'"):
            opt.apply([tf.constant(1.0, tf.bfloat16)], [half])
        opt = hvd.LeaderOptimizer(sgd(0.1), group=1)
        opt.build([weight := keras.Variable(0.0)])
        with pytest.raises(ValueError, match="no variable has a gradient"):
            opt.apply([None], [weight])


def test_states_of_another_optimizer_or_with_gradients_pending_are_refused():
    with scripted_engine(2):
        one = KerasRank(KerasRank.least_squares(2), 0, Following(groups=several(2, 1)))
        state = one.state()
        one.load(state)
        with pytest.raises(ValueError, match="gradients pending"):
            one.load(state | {"hvd_async.versions.0": np.ones(2)})
        with pytest.raises(ValueError, match="of another optimizer"):
            KerasRank(one.problem, 0, one.following, make=lambda variables: keras.optimizers.Adam()).load(state)


def test_an_optimizer_that_is_not_built_says_so_and_goes_on_once_it_is():
    def train(rank: int) -> float:
        opt = hvd.LeaderOptimizer(sgd(0.5), group=1)
        for call in (opt.get_state, lambda: opt.set_state({}), opt.drain, opt.cut, opt.consensus_distance):
            with pytest.raises(ValueError, match=r"optimizer.build\(model.trainable_variables\)"):
                call()
        one = Scalar(opt)
        one.step(1.0, 1.0)
        opt.drain()
        return float(one.weight)

    assert Cluster(2).run(train) == [-0.5] * 2


def test_a_scale_is_saved_and_loaded_with_the_rest():
    def train(rank: int) -> list[float]:
        def scaled() -> Scalar:
            optimizer = keras.optimizers.LossScaleOptimizer(sgd(1.0, momentum=0.5), initial_scale=16.0)
            return Scalar(hvd.LeaderOptimizer(optimizer, **NEVER), graph=True)

        one = scaled()
        for gradient in (16.0, np.inf, 8.0):
            one.step(gradient, 1.0)
        one.opt.cut()
        state, held = one.opt.get_state(), float(one.weight)
        other = scaled()
        other.weight.assign(held)
        other.opt.set_state(state)
        return [one.step(8.0, 1.0) - other.step(8.0, 1.0), float(other.opt.dynamic_scale.numpy()), held]

    assert Cluster(1).run(train) == [[0.0, 8.0, -2.5]]


# -- fit() ----------------------------------------------------------------------------------------------------


def data(steps: int) -> tuple[Any, Any]:
    """Of rank 0."""
    parts = [batch(0, step) for step in range(steps)]
    images, labels = (np.concatenate([one[i] for one in parts]) for i in (0, 1))
    return images, labels


def fit(model: keras.Model, callbacks: list[Any], steps: int = 3, epochs: int = 2, validate: bool = True) -> Watch:
    """With an evaluation at the end of each epoch."""
    watch, (images, labels) = Watch(), data(steps)
    held_out = (images[:4], labels[:4]) if validate else None
    model.fit(
        images, labels, batch_size=4, epochs=epochs, verbose=0, validation_data=held_out, callbacks=[*callbacks, watch]
    )
    return watch


def callbacks_that_meet(drain: bool) -> list[Any]:
    """Several: all have the ranks meet, once."""
    return [hvd.callbacks.LearningRateScheduleCallback(0.1, 1.0), hvd.callbacks.GossipEpochCallback(drain=drain)]


@pytest.mark.parametrize(("drain", "validate"), [(False, False), (False, True), (True, True)])
def test_evaluation_in_fit_sees_the_leader_and_own_weights_come_back(drain, validate):
    """Rank 1 leads always, with a loop of its own; rank 0 fits."""

    def fits() -> tuple[Any, ...]:
        model = conv_model()
        opt = hvd.LeaderOptimizer(sgd(0.1), **NEVER)
        model.compile(optimizer=opt, loss=LOSS, jit_compile=False)
        watch = fit(model, callbacks_that_meet(drain), validate=validate)
        return watch.evaluated, watch.ended, flat(model.weights), opt.stats().steps

    def leads() -> tuple[Any, ...]:
        model = conv_model()
        opt, seen = hvd.LeaderOptimizer(sgd(0.1), **NEVER, model=model), []
        for _ in range(2):
            opt.record_loss(-1.0)
            opt.apply([tf.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)
            seen.append(flat(model.weights))
            if drain:
                opt.drain()
            with contextlib.nullcontext() if drain else opt.consensus():  # where the other rank evaluates
                assert flat(model.weights).tobytes() == seen[-1].tobytes()
        opt.drain()
        return seen, [], flat(model.weights), opt.stats().steps

    (evaluated, ended, final, steps), (leader, _, other, _) = Cluster(2).run(lambda rank: leads() if rank else fits())
    assert [one.tobytes() for one in evaluated] == [one.tobytes() for one in leader] * validate
    assert [one.tobytes() == best.tobytes() for one, best in zip(ended, leader, strict=True)] == [drain] * 2
    assert final.tobytes() == other.tobytes() == leader[-1].tobytes()
    assert steps == 6


@pytest.mark.parametrize("drain", [False, True])
def test_evaluation_in_fit_sees_the_center(drain):
    def train(rank: int) -> None:
        model = conv_model()
        opt = hvd.LeaderOptimizer(sgd(0.1), algorithm="easgd", global_period=1, alpha=0.0, beta=0.5)
        model.compile(optimizer=opt, loss=LOSS, jit_compile=False)
        start = flat(model.weights)
        watch = fit(model, callbacks_that_meet(drain))
        for evaluated, ended in zip(watch.evaluated, watch.ended, strict=True):
            assert (evaluated.tobytes() == ended.tobytes()) is drain
            assert np.abs(evaluated - start).max() > 1e-3
        assert opt.stats().pulls == opt.stats().steps == 6
        center = np.asarray(opt._async.worker_now().executor.consensus, np.float64)
        assert flat(model.weights).tobytes() == center.tobytes()
        if drain:
            assert watch.evaluated[-1].tobytes() == center.tobytes()

    Cluster(1).run(train)


def test_momentum_follows_the_learning_rate():
    """The velocity of Keras has the rate inside."""

    def train(rank: int) -> float:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        opt = hvd.LeaderOptimizer(sgd(0.1, momentum=0.5), **NEVER, lr_spread="linear")
        model.compile(optimizer=opt, loss=lambda y, z: z, jit_compile=False, run_eagerly=True)
        model.layers[0].kernel.assign([[0.0]])
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 10.0**epoch)
        model.fit(np.ones((1, 1)), np.ones((1, 1)), epochs=2, verbose=0, callbacks=[schedule])
        return float(opt.momentums[0].numpy()[0, 0])

    assert Cluster(1).run(train) == [pytest.approx(0.5 * -1.0 - 1.0)]


def test_fit_ends_after_so_many_pulls():
    def train(rank: int) -> None:
        model = conv_model()
        opt = hvd.LeaderOptimizer(sgd(0.1), algorithm="easgd", global_period=1)
        model.compile(optimizer=opt, loss=LOSS, jit_compile=False)
        images, labels = batch(0, 0)
        endless = tf.data.Dataset.from_tensors((images, labels)).repeat()
        waits = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda step, logs: wait_for_pulls(opt._async.worker_now(), step + 1)
        )
        model.fit(
            endless, steps_per_epoch=1000, shuffle=False, verbose=0, callbacks=[waits, hvd.callbacks.StopAtRounds(4)]
        )
        assert opt.rounds == opt.stats().steps == 4

    Cluster(1).run(train)


@pytest.mark.parametrize("algorithm", ["lsgd", "easgd"])
def test_fit_again_with_moving_averages_and_batch_norm(algorithm):
    """Rank 1 takes its steps by a loop of its own. What is in place at the end of each is the same on both."""
    options = {"group": 2, "local_period": 1} if algorithm == "lsgd" else {"algorithm": "easgd"}

    def train(rank: int) -> list[Any]:
        layers = [keras.Input((5, 5, 1)), keras.layers.Flatten(), keras.layers.BatchNormalization(name="norm")]
        model = keras.Sequential([*layers, keras.layers.Dense(3, name="dense")])
        model.set_weights([np.full(w.shape, 0.5, np.float32) for w in model.get_weights()])
        optimizer = sgd(0.1, use_ema=True, ema_momentum=0.5)
        opt = hvd.LeaderOptimizer(optimizer, global_period=1, model=model, **options)
        model.compile(optimizer=opt, loss=LOSS, jit_compile=False)
        ends = []
        for _ in range(3):
            if rank == 0:
                model.fit(*data(3), batch_size=4, verbose=0, callbacks=[hvd.callbacks.GossipEpochCallback()])
            else:
                for step in range(5):
                    images, labels = batch(rank, step)
                    with tf.GradientTape() as tape:
                        loss = LOSS(labels, model(images, training=True))
                    opt.record_loss(loss)
                    opt.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
                with opt.consensus():  # at the end of an epoch
                    pass
                opt.finalize_variable_values(model.trainable_variables)
                opt.drain()
            ends.append(flat(model.weights).tobytes())
        worker = opt._async.worker_now()
        assert worker.executor._statistics is not None
        return ends

    one, other = Cluster(2).run(train)
    assert one == other
    assert len(set(one)) == 3


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
def test_a_saved_model_loads_with_a_plain_optimizer_and_is_wrapped_again(tmp_path):
    path = tmp_path / "model.keras"

    def train(rank: int) -> Any:
        model = conv_model()
        opt = hvd.LeaderOptimizer(sgd(0.05, momentum=0.9), model=model, group=1)
        model.compile(optimizer=opt, loss=LOSS, jit_compile=False)
        model.fit(*batch(rank, 0), verbose=0)
        with opt.consensus():
            model.save(path)
            return flat(model.trainable_variables)

    (weights,) = Cluster(1).run(train)
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is sgd
    assert flat(loaded.trainable_variables).tobytes() == weights.tobytes()
    with scripted_engine(2):
        again = hvd.load_model(path, wrapper=hvd.LeaderOptimizer, algorithm="easgd")
    assert again.optimizer._async.config.algorithm == "easgd"
    assert again.optimizer._async.replica.model is again


# -- batch norm -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["by a callback", "to the optimizer"])
def test_a_rank_that_has_not_stepped_when_a_pull_comes_holds_nobody(given):
    """Its statistics travel from the meeting on, as the others' do."""
    met = threading.Barrier(2)

    def train(rank: int) -> list[float]:
        one = KerasGraphRank(KerasRank.least_squares(2), rank, Following("easgd", global_period=1), normed=True,
                             **{"model": None} if given == "by a callback" else {})  # fmt: skip
        one.set_statistics(1.0, 10.0)
        if given == "by a callback":
            callback = hvd.callbacks.GossipEpochCallback()
            one.model.compile(optimizer=one.opt, jit_compile=False)
            callback.set_model(one.model)
            callback.on_train_begin()
        worker = one.worker()
        met.wait(TIMEOUT)
        for _ in range(2 - 2 * rank):
            one.step(mean=5.0)
        wait_for_pulls(worker, 1)
        one.step(mean=1.0 if rank else 5.0)  # (it learns nothing new)
        return one.statistics()[:2].tolist()

    assert Cluster(2).run(train, timeout=40) == [[3.0, 3.0]] * 2  # of 5, and of 1 at the start


def test_statistics_travel_on_where_keras_puts_moving_averages_in_place():
    """At the end of ``fit()``, with ``use_ema``."""

    def train(rank: int) -> list[float]:
        one = KerasGraphRank(KerasRank.least_squares(2), rank, Following("easgd", global_period=1), normed=True,
                             make=lambda variables: sgd(0.1, use_ema=True))  # fmt: skip
        one.step(mean=1.0 + rank)
        one.opt.finalize_variable_values(one.variables)
        before = one.opt.stats().pulls
        one.step(mean=5.0 + 2 * rank)
        wait_for_pulls(one.worker(), before + 1)
        one.step(mean=5.0 + 2 * rank)
        return one.statistics()[:2].tolist()

    assert Cluster(2).run(train) == [[6.0, 6.0]] * 2


def test_weights_of_frozen_layers_are_no_statistics():
    """They would travel with every pull, though they never move."""

    def train(rank: int) -> int:
        layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.layers[0].trainable = False
        opt = hvd.LeaderOptimizer(sgd(0.1), model=model, group=1)
        opt.build(model.trainable_variables)
        opt.drain()
        elements: int = opt._async.replica.averaged.elements
        return elements

    assert Cluster(1).run(train) == [16]
