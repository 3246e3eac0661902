"""The names of ``hvd_async.tensorflow`` that are ours: the part of ``names.py`` that only Keras has."""

from __future__ import annotations

import warnings
from typing import Any

import horovod.tensorflow.keras as horovod  # before ours, as in a script half migrated: its callbacks are not ours
import keras
import tensorflow as tf
from common import Report, raised
from tf_common import batches, compiled, crc, mlp

import hvd_async.tensorflow as hvd_tf
import hvd_async.tensorflow.keras as hvd
from hvd_async.tensorflow import functions

callbacks = hvd.callbacks


def fit(model: Any, optimizer: Any, steps: int, *used: Any) -> Any:
    """A silent ``fit()`` on this rank's own data."""
    return compiled(model, optimizer).fit(batches(hvd.rank(), steps), verbose=0, shuffle=False, callbacks=list(used))


def different_weights(report: Report) -> None:
    """Refused on every rank, in ``fit()``."""
    model = mlp(seed=hvd.rank())
    optimizer = hvd.EagerOptimizer(keras.optimizers.SGD(0.1))
    report.put("different weights", **raised(lambda: fit(model, optimizer, 2)))


def broadcast_callback(report: Report) -> None:
    """Different seeds and rates become rank 0's; twice, so that the second ``fit()`` meets an optimizer in use."""
    model = mlp(seed=10 + hvd.rank())
    optimizer = hvd.EagerOptimizer(keras.optimizers.SGD(0.1 + 0.1 * hvd.rank(), momentum=0.9), quorum="solo")
    start = crc(model.variables)
    fit(model, optimizer, 3 + hvd.rank(), callbacks.BroadcastGlobalVariablesCallback(0))
    once = crc(model.variables)
    fit(model, optimizer, 3 - hvd.rank(), callbacks.BroadcastGlobalVariablesCallback(0))
    report.put(
        "broadcast callback",
        start=start,
        once=once,
        twice=crc(model.variables),
        lr=float(optimizer.learning_rate.numpy()),
        distance=optimizer.consensus_distance(),
    )


class Held(keras.layers.Layer):
    """A variable of each dtype that is sent."""

    def build(self, shape: Any) -> None:
        kinds = (*functions.HOROVODS, *functions.AS_BYTES)
        self.held = [
            self.add_weight(shape=(2,), dtype=kind, name=kind, trainable=False, initializer="zeros") for kind in kinds
        ]

    def call(self, inputs: Any) -> Any:
        return inputs


def any_kind(report: Report) -> None:
    """Broadcast by name, by the callback, and in an elastic job's ``sync()``."""
    rank = hvd.rank()
    different: list[str] = []
    seeds: list[int] = []
    for how in ("broadcast_variables", "callback", "sync"):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), Held(), keras.layers.Dense(1)])
        held = model.layers[1].held
        for variable in held:
            variable.assign(tf.cast([rank == 0, rank == 1], variable.dtype))
        seed = model.layers[0].seed_generator.state
        seed.assign([rank, 0])
        if how == "broadcast_variables":
            hvd_tf.broadcast_variables([*model.variables, tf.Variable(tf.cast(rank, tf.bfloat16))], root_rank=0)
        elif how == "callback":
            model.compile(hvd.EagerOptimizer(keras.optimizers.SGD(0.1), quorum="all"), "mse")
            callback = callbacks.BroadcastGlobalVariablesCallback(0)
            callback.set_model(model)
            callback.on_train_begin()  # (no step: the callback alone)
        else:
            model.compile(hvd.EagerOptimizer(keras.optimizers.SGD(0.1), quorum="all"), "mse")
            hvd_tf.elastic.TensorFlowKerasState(model).sync()
        seeds.append(int(seed.numpy()[0]))
        for variable in held:
            values = tf.cast(variable.value, tf.complex128).numpy().tolist()
            if values != [1, 0]:
                different.append(f"{how}: {variable.name} is {values}")
    report.put("any kind", different=different, seeds=seeds)


def distributed_optimizer(report: Report) -> None:
    """Ours averages. Horovod's does not on Keras 3: if it ever does, we want to know."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = mlp(seed=6)
    fit(model, ours, 4)
    ours.drain()
    control = mlp(seed=6)
    start = crc(control.variables)
    fit(control, horovod.DistributedOptimizer(keras.optimizers.SGD(0.1)), 4)
    report.put(
        "distributed optimizer",
        ours=crc(model.variables),
        theirs=crc(control.variables),
        start=start,
        warned=[str(w.message) for w in caught],
    )


def run(report: Report) -> None:
    """All cases."""
    different_weights(report)
    broadcast_callback(report)
    any_kind(report)
    distributed_optimizer(report)
