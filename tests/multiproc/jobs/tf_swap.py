"""Horovod scripts for Keras in which the wrapper alone became ours, and what only several processes show."""

from __future__ import annotations

import os
import time
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from common import Report
from tf_common import batches, compiled, crc, mlp

import hvd_async


def speed(report: Report) -> None:
    """Images a second on random data, as Horovod's benchmarks tell them: warm up, then some rounds of batches, whose
    mean over the ranks Horovod's allreduce finds."""
    keras.utils.set_random_seed(hvd.rank())
    shape = (16, 16, 3)
    layers = [keras.Input(shape), keras.layers.Conv2D(4, 3, strides=2), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(10)])
    optimizer = hvd_async.EagerOptimizer(keras.optimizers.SGD(0.01 * hvd.size()), model=model)
    optimizer.build(model.trainable_variables)
    images, labels = tf.random.uniform((8, *shape)), tf.random.uniform((8,), 0, 10, tf.int32)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    speeds = []
    for repetition in range(4):
        began = time.perf_counter()
        for _ in range(3):
            step()
        if repetition:
            speeds.append(24 / (time.perf_counter() - began))
    mean = float(hvd.allreduce(tf.constant(float(np.mean(speeds))), name="speed"))
    everyone = hvd.allgather_object(float(np.mean(speeds)), name="speeds")
    for _ in range(hvd.rank()):  # (uneven, as with hvd.join())
        step()
    last = hvd.join()
    stats = optimizer.stats()
    report.put(
        "speed",
        mean=mean,
        everyone=everyone,
        last=last,
        weights=crc(model.variables),
        applied=stats.gradients_applied,
        received=hvd.broadcast_object(["from", hvd.rank()], root_rank=2, name="received"),
    )


def numbered_names(report: Report) -> None:
    """Rank 0 alone has made optimizers that were refused: Keras names its next one differently."""
    optimizer = hvd_async.EagerOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), quorum="solo")
    model = compiled(mlp(seed=hvd.rank()), optimizer)
    callback = ours().BroadcastGlobalVariablesCallback(0)
    model.fit(batches(hvd.rank(), 4), verbose=0, callbacks=[callback])
    report.put("numbered names", name=optimizer.name, weights=crc(model.variables))


def different_variables(report: Report) -> None:
    """Broadcast of a model that rank 1 has built otherwise."""
    layers = [keras.layers.Dense(3 if hvd.rank() == 1 else 2), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    try:
        hvd.broadcast_variables(model.variables, root_rank=0)
    except Exception as error:  # noqa: BLE001  it is the result
        report.put("different variables", kind=type(error).__name__, text=str(error))


def ours() -> Any:
    """Our callbacks, as the error names their import."""
    import hvd_async.tensorflow.keras

    return hvd_async.tensorflow.keras.callbacks


def main() -> None:
    for _ in range(2 * (os.environ["HOROVOD_RANK"] == "0")):
        try:
            hvd_async.EagerOptimizer(keras.optimizers.SGD(0.1))
        except Exception:  # noqa: BLE001  hvd.init() comes later
            continue
    hvd.init()
    report = Report(hvd.rank())
    numbered_names(report)
    speed(report)
    different_variables(report)
    hvd.shutdown()
    report.put("end")


if __name__ == "__main__":
    main()
