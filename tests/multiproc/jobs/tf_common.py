"""What the TensorFlow jobs share: a small model and its data, checksums, whole-number training."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common import WHOLE_DTYPES, integers, whole_start

tf.config.threading.set_intra_op_parallelism_threads(1)
# The hardest setting: a step that waits for its round holds the only thread that ops can run in. (ends.py has more.)
tf.config.threading.set_inter_op_parallelism_threads(1)


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


class Whole:
    """Variables and gradients of whole numbers."""

    def __init__(self) -> None:
        self.variables = [
            keras.Variable(start, dtype=dtype, name=f"whole{index}")
            for index, (start, dtype) in enumerate(zip(whole_start(), WHOLE_DTYPES, strict=True))
        ]

    def gradients(self, rank: int, step: int) -> list[Any]:
        """Of this rank's step."""
        return [
            tf.constant(integers(tuple(v.shape), rank, step, index), v.dtype) for index, v in enumerate(self.variables)
        ]

    def weights(self) -> list[list[float]]:
        """The weights now."""
        return [array.astype(np.float64).ravel().tolist() for array in values(self.variables)]

    def sgd(self) -> Any:
        """Plain SGD with learning rate 1, built on the variables."""
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(self.variables)
        return optimizer
