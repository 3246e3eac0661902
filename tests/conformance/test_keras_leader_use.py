"""Keras: LeaderOptimizer's arguments, callbacks in fit(), saved models."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from typing import Any

import horovod.tensorflow
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async
import hvd_async.tensorflow.keras as hvd
from hvd_async.errors import NotInitializedError
from hvd_async.runtime.lifecycle import local_engine, use_engine
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.keras_ranks import LOSS, Watch, batch, conv_model, flat, ranks
from tests.conformance.leader_cases import DEFAULT, REFUSED
from tests.conformance.leader_drive import wait_for_pulls

sgd = keras.optimizers.SGD
NEVER = {"group": 1, "global_period": 1000}


# -- arguments ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        *REFUSED,
        ({"group": [ranks(0, 1), ranks(2)]}, r"must be in one group"),
        ({"compression": hvd.Compression.fp16}, r"compression: a leader's weights travel as they are; leave it out"),
        ({"compression": hvd.Compression.int8}, r"compression: a leader's weights travel as they are"),
        ({"op": horovod.tensorflow.Sum}, r"leave op out, or take hvd\.Average"),
        ({"op": horovod.tensorflow.Adasum}, r"leave op out"),
        ({"process_set": horovod.tensorflow.ProcessSet([0, 1])}, r"pass it to hvd.init\(process_sets"),
    ],
)
def test_wrong_arguments_are_refused_with_a_hint_on_every_rank(options, hint):
    """Without a word of gossip: who uses this wrapper need not know the other."""
    lsgd = options.get("algorithm") != "easgd"
    for rank in range(4):
        with scripted_engine(4, rank), pytest.raises(ValueError, match=hint) as caught:
            hvd.LeaderOptimizer(sgd(0.1), **({"group": 2} if lsgd else {}) | options)
        assert "gossip" not in str(caught.value)


def test_what_has_no_meaning_or_horovods_is_accepted():
    with scripted_engine(4):
        made = [
            hvd.LeaderOptimizer(sgd(), group=4, sparse_as_dense=True, backward_passes_per_step=4),
            hvd.LeaderOptimizer(sgd(), group=4, compression=horovod.tensorflow.Compression.none, op=hvd.Average),
            hvd.LeaderOptimizer(sgd(), algorithm="easgd", compression=hvd.Compression.none, device_dense="/cpu:0"),
            hvd.LeaderOptimizer(sgd(), group=1, local_pull=lambda step: 0.5 / step, global_prox=0),
            hvd.LeaderOptimizer(sgd(), group=[ranks(0, 3), ranks(1, 2)]),
        ]
    everyone, alone = [[0, 1, 2, 3]], [[0], [1], [2], [3]]
    assert [one.settings["groups"] for one in made] == [everyone, everyone, everyone, alone, [[0, 3], [1, 2]]]


@pytest.mark.parametrize(("options", "config"), DEFAULT)
def test_defaults_by_horovods_hosts(options, config, monkeypatch):
    for name, value in {"size": 4, "local_size": 2, "cross_size": 2}.items():
        monkeypatch.setattr(horovod.tensorflow, name, lambda value=value: value)
    for name, value in {"rank": lambda r: r, "local_rank": lambda r: r % 2, "cross_rank": lambda r: r // 2}.items():
        monkeypatch.setattr(horovod.tensorflow, name, lambda value=value: value(local_engine().rank))  # type: ignore[union-attr]
    for rank in range(4):
        with use_engine(SimpleNamespace(rank=rank, size=4)):  # type: ignore[arg-type]
            settings = hvd.LeaderOptimizer(sgd(), **options)._async
        own = settings.config
        assert (own.algorithm, own.groups, own.local_period, own.global_period) == config
        assert settings.window == (1 if options.get("algorithm") else 10)
        assert (settings.strengths.alpha, settings.strengths.beta) == (0.43 / 4 if "algorithm" in options else 0, 0.43)


def test_optimizers_that_cannot_be_wrapped():
    scaled = keras.optimizers.LossScaleOptimizer
    with scripted_engine(2):
        leader, gossip = hvd.LeaderOptimizer(sgd(), group=1), hvd.GossipOptimizer(sgd())
        around = hvd.LeaderOptimizer(scaled(sgd()), group=1)
        for wrap in (hvd.LeaderOptimizer, hvd.GossipOptimizer, hvd.EagerOptimizer):
            for wrapped in (leader, gossip, around):
                with pytest.raises(ValueError, match="already: wrap the plain one"):
                    wrap(wrapped)
        with pytest.raises(ValueError, match="already: wrap the plain one"):
            hvd.LeaderOptimizer(scaled(leader), group=1)
        with pytest.raises(ValueError, match="no Keras 3 optimizer"):
            hvd.LeaderOptimizer(object(), group=1)
    with pytest.raises(NotInitializedError, match=r"call hvd.init\(\) first"):
        hvd.LeaderOptimizer(sgd())


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


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("validate", [False, True])
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
def test_evaluation_in_fit_sees_the_centre(drain):
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
        centre = np.asarray(opt._async.worker_now().receiver.consensus, np.float64)
        assert flat(model.weights).tobytes() == centre.tobytes()
        if drain:
            assert watch.evaluated[-1].tobytes() == centre.tobytes()

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
        assert worker.receiver._statistics is not None
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
