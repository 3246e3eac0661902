"""Keras: what a user of the wrapper can rely on: learning rates and schedules, fit(), saving, one round at a time."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conformance.cases import CASES, SCHEDULES, SCRIPTS, Case
from tests.conformance.drive import ScriptedWorker, attach, scripted_engine, with_late_rank
from tests.conformance.keras_ranks import LOSS, KerasTrainer, batch, conv_model, flat
from tests.conformance.reference import Applied, replay

SGD = Case("sgd", "sgd", 0.1)
MOMENTUM = Case("momentum", "sgd", 0.05, momentum=0.9)
both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


# -- learning rates -------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_round_has_its_leaders_learning_rate(schedule, graph, tapes):
    def make(rank: int) -> KerasTrainer:
        trainer = KerasTrainer(MOMENTUM, graph, quorum=schedule.quorum)
        done, factor = trainer.step, 0.5 + 0.1 * rank
        trainer.opt.learning_rate = 0.01 * (rank + 1)

        def step() -> None:
            done()
            own = float(trainer.opt.learning_rate)
            assert own == pytest.approx(0.01 * (rank + 1) * factor ** taken[rank])  # its own again
            taken[rank] += 1
            trainer.opt.learning_rate = own * factor

        trainer.step = step  # type: ignore[method-assign]
        return trainer

    taken = [0] * schedule.size
    outcomes = with_late_rank(schedule, make)
    for rank, outcome in enumerate(outcomes):
        assert outcome.after.tobytes() == outcomes[0].after.tobytes()
        expected = replay("keras", MOMENTUM, outcome.before, tapes[rank].applied, schedule.size)
        np.testing.assert_allclose(outcome.after, expected, atol=1e-5)
        for index, one in enumerate(tapes[rank].applied[:3]):
            leaders = [0.01 * (r + 1) * (0.5 + 0.1 * r) ** index for r in range(schedule.size - 1)]
            assert any(one.lr == pytest.approx(lr) for lr in leaders)


@both_modes
def test_a_learning_rate_schedule_is_evaluated_at_the_version(graph, tapes):
    def make(rank: int) -> KerasTrainer:
        trainer = KerasTrainer(SGD, graph)
        decay = keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.5)
        trainer.opt = hvd.EagerOptimizer(keras.optimizers.SGD(decay))
        trainer.opt.build(trainer.model.trainable_variables)
        return trainer

    outcomes = with_late_rank(SCHEDULES[0], make)
    for rank, outcome in enumerate(outcomes):
        carried = [a for a in tapes[rank].applied if a.sums[-1]]
        at_version = [Applied(a.sums, 0.2 * 0.5**index) for index, a in enumerate(carried)]
        np.testing.assert_allclose(outcome.after, replay("keras", SGD, outcome.before, at_version, 2), atol=1e-5)
        assert outcome.after.tobytes() == outcomes[0].after.tobytes()


@both_modes
def test_momentum_correction_follows_the_rounds_rate(graph):
    """With it Keras' velocity, which has the rate inside, moves as torch's, which has not."""
    with scripted_engine(4):
        trainer = KerasTrainer(MOMENTUM, graph)
        worker = attach(trainer.opt, ScriptedWorker(SCRIPTS[0], 4, trainer.weights().size, 0.05, tf.constant))
        trainer.opt._async.replica.momentum_correction = True
        before = trainer.weights()
        for step, lr in enumerate([0.05, 0.1, 0.1, 0.02]):
            worker.lr = lr
            trainer.train(0, range(step, step + 1))
    np.testing.assert_allclose(trainer.weights(), replay("torch", MOMENTUM, before, worker.applied, 4), atol=1e-5)


# -- round by round -------------------------------------------------------------------------------------------


@both_modes
def test_round_transform_sees_every_round(graph):
    seen = []

    def clip(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        tf.py_function(lambda: seen.append(1), [], [])
        return [tf.zeros_like(g) for g in gradients]

    with scripted_engine(4):
        trainer = KerasTrainer(SGD, graph, round_transform=clip)
        attach(trainer.opt, ScriptedWorker(SCRIPTS[1], 4, trainer.weights().size, 0.1, tf.constant))
        before = trainer.weights()
        trainer.train(0, range(len(SCRIPTS[1].steps)))
    assert len(seen) == sum(map(len, SCRIPTS[1].steps))
    assert trainer.weights().tolist() == before.tolist()


def test_round_transform_runs_in_drain_too(tapes):
    seen = [tf.Variable(0), tf.Variable(0)]

    def make(rank: int) -> KerasTrainer:
        def note(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
            seen[rank].assign_add(1)  # it is traced: Python's own side effects would show once
            return gradients

        return KerasTrainer(SGD, round_transform=note)

    outcomes = with_late_rank(SCHEDULES[0], make)
    assert [int(s) for s in seen] == [outcome.stats.rounds_applied for outcome in outcomes]


def test_a_variable_without_gradient_counts_as_zero():
    def train(rank: int) -> list[float]:
        used, other = keras.Variable(1.0, name="used"), keras.Variable(1.0, name="other")
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(1.0), quorum="all")
        opt.build([used, other])
        opt.apply([tf.constant(1.0), tf.constant(1.0) if rank == 0 else None], [used, other])
        opt.drain()
        return [float(used), float(other)]

    assert Cluster(2).run(train) == [[0.0, 0.5]] * 2


def test_a_frozen_layer_is_not_moved():
    def train(rank: int) -> tuple[list[Any], list[Any]]:
        model = conv_model()
        model.get_layer("conv").trainable = False
        before = [w.copy() for w in model.get_layer("conv").get_weights()]
        images, labels = batch(rank, 0)
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1))
        model.compile(optimizer=opt, loss=LOSS, run_eagerly=True, jit_compile=False)
        model.fit(images, labels, epochs=2, verbose=0)
        opt.drain()
        return before, model.get_layer("conv").get_weights()

    for before, after in Cluster(2).run(train):
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}])
def test_sparse_gradients_are_made_dense(options):
    table = keras.Variable(np.zeros((4, 2), np.float32))
    with scripted_engine(2):
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(0.1), **options)
        opt.build([table])
    attach(opt, ScriptedWorker(SCRIPTS[0], 2, 8, 0.1, tf.constant))
    slices = tf.IndexedSlices(tf.ones((3, 2)), tf.constant([1, 1, 3]), tf.constant([4, 2]))
    opt.apply([slices])
    assert opt._async.worker.handed[0].tolist() == [0, 0, 2, 2, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_dtypes(dtype):
    def train(rank: int) -> tuple[float, float]:
        one, two = keras.Variable(0.0), keras.Variable(0.0, dtype=dtype)
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(1.0), quorum=1, max_staleness=1)
        opt.build([one, two])
        for _ in range(3):
            opt.apply([tf.constant(1.0 + rank), tf.constant(2.0**-6, dtype)])
        opt.drain()
        return float(one), float(two)

    for one, two in Cluster(2).run(train):
        assert one == -4.5
        assert two == -3 * 2.0**-6


# -- fit() and saving -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(("quorum", "batches"), [("all", (3, 3)), ("solo", (4, 1)), (2, (2, 3, 1))])
def test_fit_ends_with_identical_replicas(quorum, batches, run_eagerly, tapes):
    """Also with uneven data: the callback drains where fit() ends."""

    def train(rank: int) -> tuple[Any, Any, Any]:
        model = conv_model()
        before = flat(model.trainable_variables)
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), quorum=quorum, max_staleness=2)
        model.compile(optimizer=opt, loss=LOSS, metrics=["accuracy"], run_eagerly=run_eagerly, jit_compile=False)
        data = [batch(rank, step) for step in range(batches[rank])]
        images, labels = np.concatenate([d[0] for d in data]), np.concatenate([d[1] for d in data])
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.05, 0.5, momentum_correction=False)
        history = model.fit(images, labels, batch_size=4, epochs=2, verbose=0, callbacks=[schedule])
        assert model.optimizer is opt
        assert len(history.history["loss"]) == 2
        stats = opt.stats()
        assert stats.steps == 2 * batches[rank]
        assert stats.gradients_applied == stats.total_produced == 2 * sum(batches)
        return before, flat(model.trainable_variables), history.history["lr"]

    outcomes = Cluster(len(batches)).run(train)
    for rank, (before, after, rates) in enumerate(outcomes):
        assert after.tobytes() == outcomes[0][1].tobytes()
        expected = replay("keras", MOMENTUM, before, tapes[rank].applied, len(batches))
        np.testing.assert_allclose(after, expected, atol=1e-5)
        assert rates == pytest.approx([0.05, 0.025])


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
def test_a_saved_model_loads_with_a_plain_optimizer(tmp_path: pathlib.Path):
    def train(rank: int) -> tuple[Any, Any, str]:
        model = conv_model()
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
        model.compile(optimizer=opt, loss=LOSS, jit_compile=False)
        images, labels = batch(rank, 0)
        model.fit(images, labels, batch_size=2, epochs=1, verbose=0)
        opt.drain()
        path = tmp_path / f"{rank}.keras"
        model.save(path)
        return flat(model.trainable_variables), flat(opt.momentums), str(path)

    for weights, momentums, path in Cluster(2).run(train):
        loaded = keras.models.load_model(path)
        assert type(loaded.optimizer) is keras.optimizers.SGD
        assert loaded.optimizer.momentum == 0.9
        assert flat(loaded.trainable_variables).tolist() == weights.tolist()
        assert flat(loaded.optimizer.momentums).tolist() == momentums.tolist()
        with scripted_engine(2):
            again = hvd.load_model(path, quorum="all")
        assert isinstance(again.optimizer, keras.optimizers.SGD)
        assert again.optimizer.settings["quorum"] == "all"
        assert again.optimizer._async.replica.model is again
        assert flat(again.optimizer.momentums).tolist() == momentums.tolist()


@pytest.mark.parametrize("case", [CASES[1], CASES[6]], ids=lambda case: case.name)
def test_training_goes_on_from_get_state(case):
    script = SCRIPTS[1]
    with scripted_engine(2):
        first, second = KerasTrainer(case), KerasTrainer(case)
        before = first.weights()
        worker = ScriptedWorker(script, 2, before.size, case.lr, tf.constant)
        attach(first.opt, worker)
        attach(second.opt, worker)
        first.train(0, range(3))
        second.model.set_weights(first.model.get_weights())
        second.opt.set_state(first.opt.get_state())
        second.train(0, range(3, 7))
    np.testing.assert_allclose(second.weights(), replay("keras", case, before, worker.applied, 2), atol=1e-5)


def test_state_of_another_optimizer_is_refused():
    with scripted_engine(2):
        momentum, adam = KerasTrainer(MOMENTUM), KerasTrainer(CASES[6])
    with pytest.raises(ValueError, match="of another optimizer"):
        adam.opt.set_state(momentum.opt.get_state())


@both_modes
def test_different_weights_name_the_variable_and_the_call_that_mends_it(graph):
    def train(rank: int) -> None:
        trainer = KerasTrainer(SGD, graph)
        trainer.model.get_layer("dense").bias.assign([float(rank)] * 3)
        trainer.train(rank, range(1))

    for outcome in Cluster(2).outcomes(train):
        assert isinstance(outcome, Exception)
        assert "dense/bias" in str(outcome)
        assert "rank 1 from rank 0" in str(outcome)
        assert "hvd.broadcast_variables(model.variables, root_rank=0)" in str(outcome)


def test_a_rank_with_no_batch_only_drains():
    def train(rank: int) -> Any:
        model = conv_model()
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(0.1), model=model)
        if rank == 0:
            images, labels = batch(0, 0)
            model.compile(optimizer=opt, loss=LOSS, run_eagerly=True, jit_compile=False)
            model.fit(images, labels, verbose=0)
        opt.drain()
        return flat(model.trainable_variables).tobytes()

    one, other = Cluster(2).run(train)
    assert one == other


def test_the_engine_of_the_thread_is_used_in_tensorflows_threads_too():
    def train(rank: int) -> bool:
        trainer = KerasTrainer(SGD, graph=True)
        trainer.train(rank, range(2))
        trainer.opt.drain()
        return trainer.opt._async.worker.engine is local_engine()

    assert Cluster(2).run(train) == [True, True]
