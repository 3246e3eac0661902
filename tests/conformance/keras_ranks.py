"""A small convolutional model in Keras, the same on all ranks, and optimizers by case.

Ranks are threads of one process here, and each may wait in a py_function that holds one of TensorFlow's inter-op
threads; so there must be more of these than ranks. Import this module before anything has run in TensorFlow.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from tests.conformance.cases import Case
from tests.conformance.reference import Array

tf.config.threading.set_inter_op_parallelism_threads(16)
tf.config.threading.set_intra_op_parallelism_threads(1)
# A process whose first operators run in several threads at once crashes now and then: TensorFlow sets them up so.
tf.reshape(tf.Variable([1.0]) * tf.constant(2.0), [-1])


def conv_model(seed: int = 0) -> keras.Model:
    """5x5 images, three classes; the weights by NumPy."""
    model = keras.Sequential(
        [
            keras.Input((5, 5, 1)),
            keras.layers.Conv2D(2, 3, activation="relu", name="conv"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(3, name="dense"),
        ],
        name="model",
    )
    random = np.random.default_rng(seed)
    model.set_weights([random.normal(size=w.shape).astype(np.float32) * 0.3 for w in model.get_weights()])
    return model


def batch(rank: int, step: int) -> tuple[Any, Any]:
    """Each rank's own data."""
    random = np.random.default_rng([rank, step])
    return random.normal(size=(4, 5, 5, 1)).astype(np.float32), random.integers(0, 3, 4)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def plain(case: Case, **options: Any) -> Any:
    """Keras' optimizer for a case."""
    decay = case.weight_decay or None
    if case.kind == "adam":
        return keras.optimizers.Adam(case.lr, weight_decay=decay, **options)
    return keras.optimizers.SGD(case.lr, momentum=case.momentum, nesterov=case.nesterov, weight_decay=decay, **options)


def flat(tensors: Any) -> Array:
    """Tensors or variables as one NumPy vector."""
    return np.concatenate([np.asarray(t).reshape(-1) for t in tensors]).astype(np.float64)


class ranks(tuple[int, ...]):  # noqa: N801  used like a function
    """A process set: ``ranks(0, 2)``, as Horovod describes one and as in-memory collectives take it."""

    def __new__(cls, *members: int) -> ranks:
        return super().__new__(cls, members)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members."""
        return tuple(self)

    @property
    def process_set_id(self) -> int:
        """A number of its own, not 0."""
        return sum(1 << rank for rank in self)


class KerasTrainer:
    """One rank, with a custom ``GradientTape`` loop.

    Args:
        graph: whether a step is a ``tf.function``.
    """

    def __init__(self, case: Case, graph: bool = False, **options: Any) -> None:
        self.model = conv_model()
        self.opt = hvd.EagerOptimizer(plain(case), **options)
        self.opt.build(self.model.trainable_variables)
        self._apply = tf.function(self._take) if graph else self._take
        self._gradients: list[tf.Tensor] = []

    def _take(self, gradients: list[tf.Tensor]) -> None:
        self.opt.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))

    def gradient(self, rank: int, step: int) -> Array:
        images, labels = batch(rank, step)
        with tf.GradientTape() as tape:
            loss = LOSS(labels, self.model(images, training=True))
        self._gradients = tape.gradient(loss, self.model.trainable_variables)
        return flat(self._gradients)

    def step(self) -> None:
        self._apply(self._gradients)

    def train(self, rank: int, steps: range) -> None:
        """Several steps."""
        for step in steps:
            self.gradient(rank, step)
            self.step()

    def weights(self) -> Array:
        return flat(self.model.trainable_variables)


class Scalar:
    """A rank with one weight, from ``start``; its gradients are given.

    Args:
        opt: wrapped.
        graph: whether a step is a ``tf.function``.
    """

    def __init__(self, opt: Any, graph: bool = False, start: float = 0.0) -> None:
        self.weight, self.opt = keras.Variable(start, name="weight"), opt
        opt.build([self.weight])
        self._apply = tf.function(self._take) if graph else self._take

    def _take(self, gradient: tf.Tensor) -> None:
        self.opt.apply([gradient], [self.weight])

    def step(self, gradient: float, loss: float | None = None) -> float:
        """The weight after it."""
        if loss is not None:
            self.opt.record_loss(loss)
        self._apply(tf.constant(gradient, self.weight.dtype))
        return float(self.weight.numpy())


class Watch(keras.callbacks.Callback):
    """What the model holds while it is evaluated, and at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluated: list[Array] = []
        self.ended: list[Array] = []

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.evaluated.append(flat(self.model.weights))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ended.append(flat(self.model.weights))
