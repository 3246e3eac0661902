"""Keras: callbacks under ``steps_per_execution`` and ``steps_per_epoch``, in epochs longer or shorter than stated."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.tensorflow.keras import fit
from hvd_async.tensorflow.keras.fit import BatchCount, MonitorCallback
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine, wait_for_rounds
from tests.conformance.keras_ranks import flat

BATCHES, FULL, EPOCHS = 8, 0.1, 6
pytestmark = pytest.mark.usefixtures("rank_of_two")


def model_of_rates(executed: int) -> keras.Model:
    """A model whose only weight moves by minus the rate in each step."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    loss = lambda _, predicted: tf.reduce_mean(predicted)  # noqa: E731
    model.compile(keras.optimizers.SGD(1.0), loss, jit_compile=False, steps_per_execution=executed)
    return model


def ones(batches: int) -> Any:
    return np.ones((batches, 1), np.float32), np.ones((batches, 1), np.float32)


def unsized(batches: int) -> Any:
    def examples() -> Any:
        yield from zip(*ones(batches), strict=True)

    kinds = (tf.TensorSpec((1,)), tf.TensorSpec((1,)))
    return tf.data.Dataset.from_generator(examples, output_signature=kinds).batch(1)


class Seen(keras.callbacks.Callback):
    """Notes how far the weight moves in each execution."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[list[float]] = []

    def weight(self) -> float:
        return float(self.model.trainable_variables[0].numpy()[0, 0])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.moved.append([])

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.before = self.weight()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.moved[-1].append(self.before - self.weight())


def rate(epoch: int, batch: int) -> float:
    """Return the rate of an execution that begins with ``batch``."""
    within = min(batch, BATCHES - 1) / BATCHES
    if epoch < 2:
        return FULL * (2 if epoch else 1 + within + 1 / BATCHES) / 2
    if epoch < 4:
        return FULL * (1 - (within if epoch == 2 else 1 - 1 / BATCHES) / 2)
    return FULL / 4


# What fit() gets, and how many batches an epoch then has; what the callbacks are given if they cannot know.
DATA: dict[str, tuple[Any, int, int | None]] = {
    "arrays": (lambda: {"x": ones(8)[0], "y": ones(8)[1], "batch_size": 1}, 8, None),
    "steps_per_epoch": (lambda: {"x": unsized(8).repeat(), "steps_per_epoch": 8}, 8, None),
    "unsized": (lambda: {"x": unsized(8)}, 8, 8),
    "short": (lambda: {"x": unsized(6)}, 6, 8),
    "long": (lambda: {"x": unsized(10)}, 10, 8),
}


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("executed", [1, 3, 4, 8, 16])
def test_each_execution_has_the_rate_of_its_first_batch_and_what_follows_that_of_the_last(executed):
    """A warm-up, a schedule by batches and one by epochs, each of one epoch with an epoch after it; in one fit after
    another of a model, which is traced once for all."""
    with scripted_engine(1):
        model = model_of_rates(executed)
        for data in DATA:
            model.set_weights([np.zeros((1, 1))])
            check_rates(model, data, executed)


def check_rates(model: keras.Model, data: str, executed: int) -> None:
    options, batches, given = DATA[data]
    schedules = [
        hvd.callbacks.LearningRateWarmupCallback(FULL, 1, steps_per_epoch=given),
        hvd.callbacks.LearningRateScheduleCallback(
            FULL, lambda epoch: 1 - (epoch - 2) / 2, 2, 3, staircase=False, steps_per_epoch=given
        ),
        hvd.callbacks.LearningRateScheduleCallback(FULL, lambda epoch: 1 / epoch, 4, 5),
    ]
    seen = Seen()
    history = model.fit(**options(), epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[*schedules, seen]).history
    begins = range(0, batches, executed)
    # (a data set that repeats continues where the epoch's last batch was)
    sizes = [executed if data == "steps_per_epoch" else min(executed, batches - begin) for begin in begins]
    for epoch, moved in enumerate(seen.moved):
        expected = [rate(epoch, begin) * size for begin, size in zip(begins, sizes, strict=True)]
        assert moved == pytest.approx(expected, rel=1e-4), (data, epoch)
        # (Keras announces one more where it does not know the size)
        lasts = (begins[-1], begins[-1] + executed)
        assert history["lr"][epoch] in [pytest.approx(rate(epoch, last)) for last in lasts], (data, epoch)


def test_a_callback_of_two_fits_counts_the_steps_of_each():
    warm = hvd.callbacks.LearningRateWarmupCallback(FULL, 1)
    with scripted_engine(1):
        for batches in (8, 4):
            seen, model = Seen(), model_of_rates(1)
            model.fit(*ones(batches), batch_size=1, verbose=0, callbacks=[warm, seen])
            rates = [FULL / 2 * (1 + (1 + b) / batches) for b in range(batches)]
            assert seen.moved[0] == pytest.approx(rates, rel=1e-4)


class Sampled:
    """A monitor that notes the steps that it is given."""

    given: list[int] = []  # noqa: RUF012

    def __init__(self, optimizer: Any, **options: Any) -> None:
        Sampled.given = []

    def step(self, steps: int) -> None:
        Sampled.given.append(steps)

    def close(self) -> None: ...


@pytest.mark.parametrize(("executed", "commits"), [(1, [3, 6, 0, 1, 4, 7, 0]), (2, [4, 8, 0] * 2), (8, [8, 0] * 2)])
def test_monitors_and_elastic_states_count_batches_not_executions(monkeypatch, executed, commits):
    state = SimpleNamespace(batch=0, at=[])
    state.commit = lambda: state.at.append(state.batch)
    monkeypatch.setattr(fit, "Monitor", Sampled)
    monkeypatch.setattr(fit, "our_optimizers", lambda model: [model.optimizer])
    elastic = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
    ]
    with scripted_engine(1):
        model = model_of_rates(executed)
        model.fit(*ones(8), batch_size=1, epochs=2, verbose=0, callbacks=[*elastic, MonitorCallback()])
    assert Sampled.given == [executed] * (16 // executed)
    assert state.at == commits


@pytest.mark.parametrize(("executed", "steps"), [(1, 5), (4, 8)])
def test_a_job_of_rounds_ends_with_the_execution_that_reaches_them(executed, steps):
    """However few steps a rank takes: rank 1 begins when rank 0 has seen them, and ends with its first execution."""
    seen = threading.Event()

    def train(rank: int) -> Any:
        model = model_of_rates(executed)
        model.optimizer = opt = hvd.EagerOptimizer(model.optimizer, quorum="solo", pace="rounds")
        opt.build(model.trainable_variables)
        worker = opt._async.worker_now()
        if rank:
            assert seen.wait(60)
            wait_for_rounds(worker, steps)
        ended = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.set())
        callbacks = [hvd.callbacks.StopAtRounds(5), ended]
        model.fit(unsized(8).repeat(), steps_per_epoch=100, verbose=0, callbacks=callbacks)
        stats = opt.stats()
        return stats.steps, [flat(model.weights).tolist(), opt.rounds, stats.gradients_applied, stats.total_produced]

    (own, end), (other, same) = Cluster(2).run(train)
    assert (own, other) == (steps, executed)
    assert end == same
    assert end[-2:] == [own + other] * 2


def test_an_execution_may_hold_more_batches_than_are_left():
    count = BatchCount()
    assert [count.since(batch) for batch in (2, 5, 8, 2, 2, 0)] == [3, 3, 3, 3, 3, 1]
