"""``EagerOptimizer(quorum="all")`` in ``fit()`` next to a float64 NumPy replay of every rank's recorded gradients.

Horovod's own wrapper is no yardstick on Keras 3, where it does not average.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common import Part, Report
from horovod.tensorflow.functions import allgather_object
from table import keras_equalities
from tf_common import batches, compiled, crc, values

import hvd_async.tensorflow.keras as hvd
from tests.conformance.cases import Case
from tests.conformance.reference import Applied, replay

STEPS = 30
CASES: dict[str, tuple[Any, Case]] = {
    "nesterov": (
        keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        Case("nesterov", "sgd", lr=0.05, momentum=0.9, nesterov=True),
    ),
    "adam": (keras.optimizers.Adam(1e-3), Case("adam", "adam", lr=1e-3)),
}


class Recording(keras.Model):
    """A model that keeps the gradients of its own batches: ``recorded`` has one flat array a step."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.recorded: list[np.ndarray[Any, Any]] = []

    def call(self, x: Any, training: bool = False) -> Any:
        return self.network(x, training=training)

    def _record(self, flat: Any) -> Any:
        self.recorded.append(flat.numpy().astype(np.float64))
        return np.int32(0)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        flat = tf.concat([tf.reshape(g, [-1]) for g in gradients], axis=0)
        with tf.control_dependencies([tf.py_function(self._record, [flat], tf.int32)]):
            self.optimizer.apply(gradients, self.trainable_variables)
        return dict(self.compute_metrics(x, y, predicted))


def network() -> Recording:
    """Two convolutions with batch norm, for 8 x 8 x 1 images."""
    keras.utils.set_random_seed(7)
    layers = keras.layers
    model = Recording(
        keras.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Conv2D(4, 3, padding="same", use_bias=False),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Conv2D(8, 3, strides=2, use_bias=False),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Flatten(),
                layers.Dense(10),
            ]
        )
    )
    model.build((None, 8, 8, 1))
    return model


def flat(variables: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All of them as one float64 array."""
    return np.concatenate([array.astype(np.float64).ravel() for array in values(variables)])


def run(_: Any, report: Report, part: Part) -> None:
    """All cases, or a few."""
    for name in keras_equalities(part.share):
        plain, case = CASES[name]
        model = network()
        start = flat(model.trainable_variables)
        optimizer = hvd.EagerOptimizer(plain, quorum="all")
        data = batches(hvd.rank(), STEPS, (8, 8, 1), classes=10)
        compiled(model, optimizer).fit(data, verbose=0, shuffle=False)
        optimizer.drain()
        everyone = allgather_object(list(model.recorded), name="recorded")
        sums = [np.append(sum(step), hvd.size()) for step in zip(*everyone, strict=True)]
        expected = replay("keras", case, start, [Applied(s, case.lr) for s in sums], hvd.size())
        trained = flat(model.trainable_variables)
        report.put(
            name,
            difference=float(np.abs(trained - expected).max()),
            moved=float(np.abs(trained - start).max()),
            alone=float(np.abs(np.array(everyone[0]) - np.array(everyone[-1])).max()),
            weights=crc(model.trainable_variables),
            rounds=optimizer.stats().rounds_applied,
        )
