"""The table of ends in Keras: a covering part of torch's, with steps in eager mode."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from tests.conformance import keras_ranks as _threads  # noqa: F401  enough of TensorFlow's, before anything has run
from tests.conformance.ends_table import RANKS, SOME, Cell, cells, check, run

WRAPPERS: dict[str, Any] = {
    "solo": lambda opt, **o: hvd.EagerOptimizer(opt, quorum="solo", **o),
    "sgp": lambda opt, **o: hvd.GossipOptimizer(opt, algorithm="sgp", **o),
    "lsgd": lambda opt, **o: hvd.LeaderOptimizer(opt, algorithm="lsgd", group=RANKS, global_period=4, **o),
}
MOST = cells(
    ("normal", "exception", "death"),
    ((0, 1, 2), (0,), ()),
    ((1, 1, 1), (2, 1, 1)),
    ("drain",),
    (True,),
    (1,),
)


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection() -> Iterator[None]:
    """What was there before these tests is looked at no more: both frameworks are many objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def make(wrapper: str, buffers: bool, seed: int) -> tuple[keras.Model, Any]:
    """A model and its optimizer, the same on all ranks."""
    layers = [keras.Input((2,)), keras.layers.Dense(3, name="first")]
    layers += [keras.layers.BatchNormalization(name="norm")] if buffers else []
    model = keras.Sequential([*layers, keras.layers.Dense(1, name="last")], name="model")
    for variable in model.trainable_variables:
        size = int(np.prod(variable.shape))
        variable.assign(np.linspace(-1, 1, size).reshape(variable.shape) + 0.1 * seed)
    optimizer = WRAPPERS[wrapper](keras.optimizers.SGD(0.01, momentum=0.9), model=model)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def step(model: keras.Model, optimizer: Any, rank: int, number: int) -> None:
    """One step on this rank's own data."""
    inputs = tf.constant([[rank + number * 0.1, 1.0], [0.5, -rank], [number, 0.3]], tf.float32)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True)))
    gradients = tape.gradient(loss, model.trainable_variables)
    if hasattr(optimizer, "record_loss"):
        optimizer.record_loss(loss)
    optimizer.apply(gradients, model.trainable_variables)


def state(model: keras.Model) -> np.ndarray[Any, Any]:
    """Weights and buffers."""
    return np.concatenate([np.asarray(v, np.float64).reshape(-1) for v in model.variables])


@pytest.mark.parametrize("cell", MOST)
def test_partial_allreduce(cell: Cell):
    check(cell, run(cell, lambda seed: make("solo", cell.buffers, seed), step, state))


@pytest.mark.parametrize("cell", SOME)
@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "solo"])
def test_other_algorithms(wrapper: str, cell: Cell):
    check(cell, run(cell, lambda seed: make(wrapper, cell.buffers, seed), step, state))
