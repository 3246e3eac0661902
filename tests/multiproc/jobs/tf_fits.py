"""``fit()`` with ``GossipOptimizer`` and ``LeaderOptimizer`` on real ranks: batch norm, tests, callbacks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from common import Part, Report

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


def leaders(report: Report, algorithm: str) -> None:
    """``fit()`` with batch norm and evaluation between epochs, on each rank's own data; losses find their way."""
    model = network()
    random = np.random.default_rng(hvd.rank())
    inputs = random.normal(size=(64, 8)).astype(np.float32)
    targets = inputs.sum(axis=1, keepdims=True)
    optimizer = hvd.LeaderOptimizer(keras.optimizers.Adam(0.05), algorithm=algorithm, global_period=4, model=model)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(
        inputs, targets, batch_size=8, epochs=4, verbose=0, callbacks=callbacks, validation_data=(inputs, targets)
    ).history
    ends = [float(np.abs(v.numpy().astype(np.float64)).sum()) for v in model.variables]
    stats = optimizer.stats()
    report.put(f"fitted {algorithm}", loss=history["loss"], val=history["val_loss"], ends=ends, steps=stats.steps,
               pulls=stats.pulls, mean_loss=stats.mean_loss)  # fmt: skip


def run(_: Any, report: Report, _part: Part) -> None:
    """All cases."""
    gossip(report)
    for algorithm in ("lsgd", "easgd"):
        leaders(report, algorithm)
