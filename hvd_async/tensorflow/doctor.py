"""The part of ``hvd_async doctor`` that needs TensorFlow: a tiny training."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

from hvd_async.tensorflow.keras import EagerOptimizer, callbacks

EPOCHS = 5


def train() -> dict[str, Any] | None:
    """Fit a line on every rank's own samples, and drain; rank 0 returns losses, rounds and how replicas differ."""
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    inputs = np.random.default_rng(hvd.rank()).standard_normal((64, 8)).astype("float32")
    targets = inputs.sum(1, keepdims=True)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    optimizer = EagerOptimizer(keras.optimizers.SGD(0.05), quorum="majority")
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    before = float(model.evaluate(inputs, targets, verbose=0))
    broadcast = [callbacks.BroadcastGlobalVariablesCallback(0)]  # (drains at the end of each epoch)
    model.fit(inputs, targets, batch_size=16, epochs=EPOCHS, verbose=0, callbacks=broadcast)
    after = float(model.evaluate(inputs, targets, verbose=0))
    distance = float(optimizer.consensus_distance())
    result = {"loss_before": before, "loss_after": after, "distance": distance, "rounds": int(optimizer.rounds)}
    return None if hvd.rank() else result
