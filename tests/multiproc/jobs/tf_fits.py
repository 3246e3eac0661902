"""``fit()`` on real ranks: gossip and leaders with batch norm, tests, callbacks; batches of different sizes."""

from __future__ import annotations

import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common import Part, Report
from tf_common import compiled, crc, mlp, values

import hvd_async.tensorflow.keras as hvd


def network() -> Any:
    """The same on all ranks."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,)), keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def gossip(report: Report) -> None:
    """``fit()`` with batch norm, evaluation between epochs and peers that change, on each rank's own data."""
    model = network()
    random = np.random.default_rng(hvd.rank())
    inputs = random.normal(size=(32, 8)).astype(np.float32)
    targets = inputs.sum(axis=1, keepdims=True)
    peers = {0: 1, 1: min(2, hvd.size() - 1)}
    optimizer = hvd.GossipOptimizer(keras.optimizers.Adam(0.05), algorithm="sgp", peers=peers, model=model)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(inputs, targets, batch_size=8, epochs=4, verbose=0, callbacks=callbacks).history["loss"]
    distance = optimizer.consensus_distance()
    optimizer.drain()
    ends = [float(np.abs(v.numpy().astype(np.float64)).sum()) for v in model.variables]
    report.put("fitted", history=history, distance=distance, ends=ends, steps=optimizer.stats().steps)


def leaders(report: Report) -> None:
    """``fit()`` with batch norm and evaluation between epochs, on each rank's own data; losses find their way."""
    model = network()
    random = np.random.default_rng(hvd.rank())
    inputs = random.normal(size=(64, 8)).astype(np.float32)
    targets = inputs.sum(axis=1, keepdims=True)
    optimizer = hvd.LeaderOptimizer(keras.optimizers.Adam(0.05), algorithm="lsgd", global_period=4, model=model)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(
        inputs, targets, batch_size=8, epochs=4, verbose=0, callbacks=callbacks, validation_data=(inputs, targets)
    ).history
    ends = [float(np.abs(v.numpy().astype(np.float64)).sum()) for v in model.variables]
    stats = optimizer.stats()
    report.put("fitted lsgd", loss=history["loss"], val=history["val_loss"], ends=ends, steps=stats.steps,
               pulls=stats.pulls, mean_loss=stats.mean_loss)  # fmt: skip


BATCH, LONG = (5, 2, 3), (28, 7, 12)
"""Samples of a rank's batches, and in all: 6 batches, 4 and 4, of which the last ones are smaller."""


def samples(rank: int) -> list[tuple[Any, Any]]:
    """A rank's batches."""
    random = np.random.default_rng(100 + rank)
    inputs = random.normal(size=(LONG[rank], 8)).astype(np.float32)
    targets = random.integers(0, 4, LONG[rank])
    starts = range(0, LONG[rank], BATCH[rank])
    return [(inputs[at : at + BATCH[rank]], targets[at : at + BATCH[rank]]) for at in starts]


def by_samples(report: Report) -> None:
    """Batches of different sizes and numbers, which ``fit()`` records; next to a plain optimizer on large batches."""
    model, plain, size = mlp(seed=3), keras.optimizers.SGD(0.1, momentum=0.9), hvd.size()
    optimizer = hvd.EagerOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), quorum="all", weighting="samples")
    own = samples(hvd.rank())
    data = tuple(np.concatenate(part) for part in zip(*own, strict=True))
    compiled(model, optimizer).fit(
        *data,
        batch_size=BATCH[hvd.rank()],
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[hvd.callbacks.GossipEpochCallback()],
    )
    alone, loss = mlp(seed=3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    start = np.concatenate([array.ravel() for array in values(alone.variables)])
    plain.build(alone.trainable_variables)
    everyone = [samples(rank) for rank in range(size)]
    for _ in range(2):
        for step in range(max(map(len, everyone))):
            large = [batches[step] for batches in everyone if step < len(batches)]
            inputs, targets = (np.concatenate(part) for part in zip(*large, strict=True))
            with tf.GradientTape() as tape:
                value = loss(targets, alone(inputs, training=True)) * len(large) / size
            plain.apply(tape.gradient(value, alone.trainable_variables), alone.trainable_variables)
    ours, theirs = (np.concatenate([array.ravel() for array in values(one.variables)]) for one in (model, alone))
    report.put(
        "fitted by samples",
        difference=float(np.abs(ours - theirs).max()),
        moved=float(np.abs(ours - start).max()),
        weights=crc(model.variables),
        steps=optimizer.stats().steps,
        applied=optimizer.stats().gradients_applied,
    )


def by_rounds(report: Report) -> None:
    """``fit()`` ends after 12 rounds, however many steps this rank took, with validation and averaged metrics."""
    model = network()
    optimizer = hvd.EagerOptimizer(keras.optimizers.SGD(0.05), quorum="solo", pace="rounds")
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    inputs = np.random.default_rng(hvd.rank()).normal(size=(16, 8)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((inputs, inputs.sum(axis=1, keepdims=True))).batch(4 + 2 * hvd.rank())
    meeting = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    callbacks = [*meeting, hvd.callbacks.StopAtRounds(12)]
    history = model.fit(
        data.repeat(), steps_per_epoch=1000, verbose=0, callbacks=callbacks, validation_data=(inputs, inputs[:, :1])
    ).history
    stats = optimizer.stats()
    report.put(
        "fitted by rounds",
        end=[history["loss"], history["val_loss"]],
        rounds=optimizer.rounds,
        weights=crc(model.trainable_variables),
        applied=stats.gradients_applied,
        produced=stats.total_produced,
    )


def resumed(report: Report) -> None:
    """``BackupAndRestore`` on rank 0 alone, whose state goes to all; next to an undisturbed ``fit()``."""
    random = np.random.default_rng(hvd.rank())
    inputs = random.normal(size=(16, 8)).astype(np.float32)

    def fit(model: Any, first: int, last: int, *callbacks: Any) -> Any:
        meeting = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.GossipEpochCallback(drain=True)]
        model.fit(
            inputs, inputs[:, :1], batch_size=8, initial_epoch=first, epochs=last, shuffle=False, verbose=0,
            callbacks=[*meeting, *callbacks],
        )  # fmt: skip
        return model

    def make() -> Any:
        outer = {"algorithm": "diloco", "average_every": 2, "outer_momentum": 0.5}
        model = network()
        optimizer = hvd.GossipOptimizer(keras.optimizers.SGD(0.02), model=model, **outer)
        model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
        return model

    whole = fit(make(), 0, 4)
    with tempfile.TemporaryDirectory() as folder:
        backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        fit(make(), 0, 2, *([backup] if hvd.rank() == 0 else []))
        again = make()
        if hvd.rank() == 0:
            backup.set_model(again)
            backup.on_train_begin()
    fit(again, 2, 4)
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
    by_samples(report)
    by_rounds(report)
    leaders(report)
