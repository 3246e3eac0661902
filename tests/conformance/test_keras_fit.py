"""Keras: ``fit()`` under partial allreduce: uneven data, moving averages, frozen layers, saving."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance.cases import Case
from tests.conformance.drive import scripted_engine
from tests.conformance.keras_ranks import batch, compiled, conv_model, data, flat
from tests.conformance.reference import replay

MOMENTUM = Case("momentum", "sgd", 0.05, momentum=0.9)
sgd = keras.optimizers.SGD


@pytest.mark.parametrize(
    ("quorum", "batches", "run_eagerly"), [("all", (3, 3), False), ("solo", (4, 1), False), (2, (2, 3, 1), True)]
)
def test_fit_ends_with_identical_replicas(quorum, batches, run_eagerly, tapes):
    """Also with uneven data: the callback drains where fit() ends."""

    def train(rank: int) -> tuple[Any, Any, Any]:
        opt = hvd.EagerOptimizer(sgd(0.05, momentum=0.9), quorum=quorum, max_staleness=2)
        model = compiled(opt, metrics=["accuracy"], run_eagerly=run_eagerly)
        before = flat(model.trainable_variables)
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.05, 0.5, momentum_correction=False)
        own, held_out = data(rank, batches[rank]), batch(9, 9)
        history = model.fit(
            *own, batch_size=4, epochs=2, verbose=0, callbacks=[schedule], validation_data=held_out
        ).history
        assert model.optimizer is opt
        assert len(history["loss"]) == 2
        stats = opt.stats()
        assert stats.steps == 2 * batches[rank]
        assert stats.gradients_applied == stats.total_produced == 2 * sum(batches)
        return before, flat(model.trainable_variables), history

    outcomes = Cluster(len(batches)).run(train)
    for rank, (before, after, history) in enumerate(outcomes):
        assert after.tobytes() == outcomes[0][1].tobytes()
        expected = replay("keras", MOMENTUM, before, tapes[rank].applied, len(batches), 0 if quorum == "all" else 2)
        np.testing.assert_allclose(after, expected, atol=1e-5)
        assert history["lr"] == pytest.approx([0.05, 0.025])
        assert history["val_loss"] == outcomes[0][2]["val_loss"], "drained before"


WRAPPERS = {
    "eager": (hvd.EagerOptimizer, {"quorum": "all"}, {"quorum": "all"}),
    "gossip": (hvd.GossipOptimizer, {}, {"algorithm": "dpsgd"}),
    "leader": (hvd.LeaderOptimizer, {"group": 1}, {"algorithm": "easgd"}),
}
"""A wrapper, its options, and others with which a saved model is loaded."""


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
def test_a_saved_model_loads_with_a_plain_optimizer_and_with_a_wrapped_one(tmp_path: pathlib.Path, wrapper: str):
    wrap, options, others = WRAPPERS[wrapper]

    def train(rank: int) -> tuple[Any, Any, int]:
        model = conv_model()
        compiled(opt := wrap(sgd(0.05, momentum=0.9), model=model, **options), model)
        model.fit(*batch(rank, 0), batch_size=2, epochs=1, verbose=0)
        opt.drain()
        with opt.consensus():
            model.save(tmp_path / f"{rank}.keras")
        return flat(model.trainable_variables), flat(opt.momentums), int(opt.iterations)

    (weights, momentums, steps), (same, _, _) = Cluster(2).run(train)
    assert same.tobytes() == weights.tobytes()
    loaded = keras.models.load_model(tmp_path / "0.keras")
    assert type(loaded.optimizer) is sgd
    assert loaded.optimizer.momentum == 0.9
    assert flat(loaded.trainable_variables).tolist() == weights.tolist()
    assert flat(loaded.optimizer.momentums).tolist() == momentums.tolist()
    with scripted_engine(2):
        again = hvd.load_model(tmp_path / "0.keras", **({} if wrapper == "eager" else {"wrapper": wrap}), **others)
    assert isinstance(again.optimizer, sgd)
    assert others.items() <= again.optimizer.settings.items()
    assert again.optimizer._async.replica.model is again
    assert flat(again.optimizer.momentums).tolist() == momentums.tolist()
    assert int(again.optimizer.iterations) == steps


@keras.saving.register_keras_serializable("tests")
class Registered(sgd):  # type: ignore[misc,valid-type]
    """An optimizer of a script's own."""


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_saved_model_loads_with_a_registered_optimizer(tmp_path: pathlib.Path, wrapper: str, scaled: bool):
    wrap, options, _ = WRAPPERS[wrapper]
    with scripted_engine(2):
        given = Registered(0.05)
        opt = wrap(keras.optimizers.LossScaleOptimizer(given) if scaled else given, **options)
        opt.build((model := conv_model()).trainable_variables)
        compiled(opt, model).save(tmp_path / "0.keras")
    loaded = keras.models.load_model(tmp_path / "0.keras").optimizer
    assert type(loaded.inner_optimizer if scaled else loaded) is Registered


@pytest.mark.parametrize("kind", [keras.optimizers.Adafactor, functools.partial(sgd, momentum=0.5)])
def test_variables_of_one_name_are_not_mixed_up(kind: Any):
    """In states, and when one of them is frozen."""

    def make(wrap: Any) -> tuple[Any, list[Any]]:
        opt, variables = wrap(kind(0.5)), [keras.Variable(np.ones((2, 3)), name="same") for _ in range(2)]
        opt.build(variables)
        return opt, variables

    def train(wrap: Any) -> tuple[Any, list[Any]]:
        opt, variables = make(wrap)
        for there in (2, 1, 1):
            variables[1].trainable = there == 2
            opt.apply([tf.fill((2, 3), 1.0 + place) for place in range(there)], variables[:there])
        return opt, [variable.numpy() for variable in (*variables, *opt.variables)]

    def wrapped(rank: int) -> Any:
        opt, trained = train(wrap := functools.partial(hvd.EagerOptimizer, quorum="all", weight_prediction=0))
        opt.drain()
        again, _ = make(wrap)
        again.set_state(opt.get_state())
        return trained, [variable.numpy() for variable in again.variables]

    _, plainly = train(lambda inner: inner)
    ((trained, again),) = Cluster(1).run(wrapped)
    for one, other in zip([*trained, *again], [*plainly, *plainly[2:]], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_rank_with_no_batch_only_drains(wrapper: str):
    """Its optimizer is built by then, from the model."""
    wrap, options, _ = WRAPPERS[wrapper]

    def train(rank: int) -> Any:
        model = conv_model()
        opt = wrap(sgd(0.1), model=model, **options)
        if rank == 0:
            compiled(opt, model, run_eagerly=True).fit(*batch(0, 0), verbose=0)
        opt.drain()
        return flat(model.trainable_variables).tobytes()

    one, other = Cluster(2).run(train)
    assert one == other


def test_a_model_is_compiled_again_with_a_layer_frozen():
    """Keras' way: fit, freeze, compile with the same optimizer, fit. Its momentum follows
    the rates of rounds, where ranks fall to others at other times."""

    def train(rank: int) -> Any:
        opt = hvd.EagerOptimizer(sgd(0.1, momentum=0.9, weight_decay=0.1))
        model, ends = conv_model(), []
        conv = model.get_layer("conv")
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch, staircase=False)
        for trainable in (True, False, True):
            conv.trainable = trainable
            compiled(opt, model).fit(*batch(rank, 0), batch_size=1 + rank, verbose=0, callbacks=[schedule])
            opt.drain()
            ends.append((flat(conv.variables), flat([*model.variables, *opt.momentums])))
        return ends

    one, other = Cluster(2).run(train)
    for (_, mine), (_, theirs) in zip(one, other, strict=True):
        assert mine.tobytes() == theirs.tobytes()
    assert np.array_equal(one[0][0], one[1][0])
    assert not np.array_equal(one[1][0], one[2][0])


@pytest.mark.parametrize(
    ("dtype", "passes"),
    [("float32", None), ("float32", 2), ("bfloat16", None)],
    ids=["plain", "accumulated", "bfloat16"],
)
def test_averages_of_frozen_variables_are_those_of_plain_keras(dtype: str, passes: int | None):
    """Keras averages and overwrites them too, in each update; a round moves no frozen variable."""

    def train(wrap: Any) -> list[float]:
        variables = [keras.Variable(1.0, dtype=dtype, name=name) for name in ("moving", "frozen")]
        averaged = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
        opt = wrap(sgd(0.25, momentum=0.5, gradient_accumulation_steps=passes, **averaged))
        opt.build(variables)
        gradients = [tf.constant(gradient, dtype) for gradient in (1.0, 2.0)]
        for step in range(12):
            variables[1].trainable = not 4 <= step < 8
            there = 1 if 4 <= step < 8 else 2
            opt.apply(gradients[:there], variables[:there])
        averages = opt._model_variables_moving_average
        return [float(keras.ops.cast(one, "float32")) for one in (*variables, *averages)]

    def wrapped(rank: int) -> list[float]:
        return train(lambda inner: hvd.EagerOptimizer(inner, quorum="all", weight_prediction=0))

    assert Cluster(1).run(wrapped) == [train(lambda inner: inner)]
