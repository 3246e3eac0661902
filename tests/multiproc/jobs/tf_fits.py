"""``fit()`` on real ranks: gossip and leaders with batch norm, tests, callbacks; an end by rounds; a resumed job."""

from __future__ import annotations

import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common import Part, Report
from tf_common import crc, values

import hvd_async.tensorflow.keras as hvd


def made(wrap: Any, plain: Any, **options: Any) -> Any:
    """The same model with batch norm on all ranks, and its optimizer."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,)), keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer=wrap(plain, model=model, **options), loss="mse", jit_compile=False)
    return model


def data(samples: int, batch: int) -> tf.data.Dataset:
    """A rank's own."""
    inputs = np.random.default_rng(hvd.rank()).normal(size=(samples, 8)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((inputs, inputs.sum(axis=1, keepdims=True))).batch(batch)


def fit(model: Any, inputs: tf.data.Dataset, *callbacks: Any, **options: Any) -> Any:
    """Train from rank 0's weights; return the history."""
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    return model.fit(inputs, verbose=0, callbacks=[first, *callbacks], **options).history


def gossip(report: Report) -> None:
    """Peers that change, and epochs that are longer on later ranks."""
    peers = {0: 1, 1: min(2, hvd.size() - 1)}
    model = made(hvd.GossipOptimizer, keras.optimizers.Adam(0.05), algorithm="sgp", peers=peers)
    history = fit(model, data(32 + 8 * hvd.rank(), 8), hvd.callbacks.MetricAverageCallback(), epochs=4)
    report.put("fitted", history=history["loss"], weights=crc(model.variables), steps=model.optimizer.stats().steps)


def leaders(report: Report) -> None:
    """Evaluation between epochs; losses find their way."""
    model = made(hvd.LeaderOptimizer, keras.optimizers.Adam(0.05), algorithm="lsgd", global_period=4)
    own = data(64, 8)
    history = fit(model, own, hvd.callbacks.MetricAverageCallback(), epochs=4, validation_data=own)
    stats = model.optimizer.stats()
    counts = {"steps": stats.steps, "pulls": stats.pulls, "mean_loss": stats.mean_loss}
    report.put("fitted lsgd", loss=history["loss"], val=history["val_loss"], weights=crc(model.variables), **counts)


def by_rounds(report: Report) -> None:
    """``fit()`` ends after 12 rounds, however many steps this rank took, with validation and averaged metrics."""
    model = made(hvd.EagerOptimizer, keras.optimizers.SGD(0.05), quorum="solo", pace="rounds")
    callbacks = [hvd.callbacks.MetricAverageCallback(), hvd.callbacks.StopAtRounds(12)]
    endless = data(16, 4 + 2 * hvd.rank()).repeat()
    history = fit(model, endless, *callbacks, steps_per_epoch=1000, validation_data=data(16, 8))
    stats = model.optimizer.stats()
    report.put(
        "fitted by rounds",
        end=[history["loss"], history["val_loss"]],
        rounds=model.optimizer.rounds,
        weights=crc(model.trainable_variables),
        applied=stats.gradients_applied,
        produced=stats.total_produced,
    )


def resumed(report: Report) -> None:
    """``BackupAndRestore`` on rank 0 alone, whose state goes to all; next to an undisturbed ``fit()``."""

    def make() -> Any:
        outer = {"algorithm": "diloco", "average_every": 2, "outer_momentum": 0.5}
        return made(hvd.GossipOptimizer, keras.optimizers.SGD(0.02), **outer)

    def trained(model: Any, first: int, last: int, *callbacks: Any) -> Any:
        fit(model, data(16, 8), hvd.callbacks.GossipEpochCallback(drain=True), *callbacks, initial_epoch=first,
            epochs=last)  # fmt: skip
        return model

    whole = trained(make(), 0, 4)
    with tempfile.TemporaryDirectory() as folder:
        backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        trained(make(), 0, 2, *([backup] if hvd.rank() == 0 else []))
        again = make()
        if hvd.rank() == 0:
            backup.set_model(again)
            backup.on_train_begin()
    trained(again, 2, 4)
    ends, other = (np.concatenate([array.ravel() for array in values(one.weights)]) for one in (whole, again))
    report.put(
        "resumed",
        difference=float(np.abs(ends - other).max()),
        rounds=(whole.optimizer.rounds, again.optimizer.rounds),
    )


def run(_: Any, report: Report, _part: Part) -> None:
    """All cases."""
    resumed(report)
    gossip(report)
    by_rounds(report)
    leaders(report)
