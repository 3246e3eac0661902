"""The Keras half of the jobs that are for both frameworks: models, data, checksums, training of three kinds."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common import WHOLE_DTYPES, Straggler, integers, whole_start
from table import Promise

import hvd_async.tensorflow.keras as hvd
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import batch, least_squares

tf.config.threading.set_intra_op_parallelism_threads(1)
# The hardest setting: a step that waits for its round holds the only thread that ops can run in. (elastic.py has more.)
tf.config.threading.set_inter_op_parallelism_threads(1)
CASE = next(case for case in CASES if case.name == "nesterov")


def values(variables: Iterable[Any]) -> list[np.ndarray[Any, Any]]:
    """The variables as arrays."""
    return [np.asarray(v.numpy()) for v in variables]


def crc(variables: Iterable[Any]) -> int:
    """CRC-32 over the bytes of all variables, in order."""
    checksum = 0
    for array in values(variables):
        checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
    return checksum


def mlp(seed: int) -> Any:
    """8 -> 16 -> 4, built."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(4)]
    )


def compiled(model: Any, optimizer: Any) -> Any:
    """The model with a classification loss and ``optimizer``."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=False)
    return model


def batches(rank: int, steps: int, shape: tuple[int, ...] = (8,), classes: int = 4, batch: int = 16) -> tf.data.Dataset:
    """A rank's own random batches."""
    generator = np.random.default_rng(1000 + rank)
    x = generator.standard_normal((steps * batch, *shape)).astype(np.float32)
    y = generator.integers(0, classes, steps * batch)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)


class WholeTraining:
    """Variables of whole numbers, trained by an EagerOptimizer with these options and SGD of learning rate 1."""

    def __init__(self, **options: Any) -> None:
        self.variables = [
            keras.Variable(start, dtype=dtype, name=f"whole{index}")
            for index, (start, dtype) in enumerate(zip(whole_start(), WHOLE_DTYPES, strict=True))
        ]
        plain = keras.optimizers.SGD(1.0)
        plain.build(self.variables)
        self.optimizer = hvd.EagerOptimizer(plain, **{"quorum": "solo", **options})

    def step(self, rank: int, step: int) -> None:
        """A step with that rank's gradient of that step, without a graph."""
        gradients = [
            tf.constant(integers(tuple(v.shape), rank, step, index), v.dtype) for index, v in enumerate(self.variables)
        ]
        self.optimizer.apply(gradients, self.variables)

    def weights(self) -> list[list[float]]:
        """The weights now."""
        return [array.astype(np.float64).ravel().tolist() for array in values(self.variables)]


class LeastSquares:
    """One rank's model of ``gossip_reference``, trained by a wrapped optimizer; ``loss_of``: its losses."""

    def __init__(self, wrapper: Any, loss_of: Any = None, **options: Any) -> None:
        start = least_squares(1, CASE).start[0]
        self.variable = keras.Variable(start.astype(np.float32), name="w")
        plain = keras.optimizers.SGD(CASE.lr, momentum=CASE.momentum, nesterov=CASE.nesterov)
        self.optimizer = wrapper(plain, **options)
        self.optimizer.build([self.variable])
        self._loss_of = loss_of

    def step(self, rank: int, step: int) -> None:
        """A step on that rank's batch of that step."""
        weights = self.variable.numpy().astype(np.float64)
        if self._loss_of is not None and (loss := self._loss_of(weights, rank, step)) is not None:
            self.optimizer.record_loss(tf.constant(loss, tf.float64))
        inputs, targets = (tf.constant(part, tf.float32) for part in batch(rank, step))
        with tf.GradientTape() as tape:
            missed = tf.linalg.matvec(inputs, self.variable.value) - targets
            loss = 0.5 * tf.reduce_mean(missed**2)
        self.optimizer.apply([tape.gradient(loss, self.variable.value)], [self.variable])

    def weights(self) -> list[float]:
        """The weights now."""
        values: list[float] = self.variable.numpy().astype(np.float64).tolist()
        return values


class Observer(keras.callbacks.Callback):
    """Sets this rank's own learning rate before every batch, and looks at the replica after it.

    Args:
        rate: by batch.
        before: called with the number of each batch before it.
    """

    def __init__(self, rate: Callable[[int], float], before: Callable[[int], None]) -> None:
        super().__init__()
        self._rate, self._before = rate, before
        self.history: list[tuple[int, int]] = []

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._before(batch)
        self.model.optimizer.learning_rate.assign(self._rate(batch))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        optimizer = self.model.optimizer
        self.history.append((optimizer.rounds, crc([*self.model.variables, *state(optimizer)])))


def state(optimizer: Any) -> list[Any]:
    """The optimizer's variables except for the learning rate, which is each rank's own between rounds, and those of a
    loss scale, which is too."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [v for v in inner.variables if v is not inner.learning_rate]


def promise(case: Promise) -> tuple[Any, dict[str, Any]]:
    """Momentum, decay and a rate by every rank's own count, in ``fit()`` with stragglers: the optimizer, checksums."""
    model = mlp(seed=1)
    optimizer = hvd.EagerOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=1e-3), quorum=case.quorum, max_staleness=case.max_staleness
    )
    straggler = Straggler(case.inject, hvd.rank(), hvd.size(), seed=3)
    observer = Observer(lambda batch: 0.1 * 0.9**batch, lambda batch: straggler.compute())
    compiled(model, optimizer).fit(batches(hvd.rank(), case.steps), verbose=0, shuffle=False, callbacks=[observer])
    optimizer.drain()
    return optimizer, {"history": observer.history, "weights": crc(model.variables), "state": crc(state(optimizer))}
