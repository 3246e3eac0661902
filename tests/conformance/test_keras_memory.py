"""Keras: vectors of weights that variables share memory with: nobody's changes reach anybody else."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.runtime.memory import ReusedBlocks
from hvd_async.tensorflow.variables import Flat
from hvd_async.testing import Cluster

ALIGNED = 32
"""Elements of a variable behind which the next one lies as kernels want it."""


def block(values: Any, kind: Any = np.float32, blocks: ReusedBlocks | None = None) -> Any:
    """Return an aligned vector of these values."""
    array = (blocks or ReusedBlocks(0)).take(len(values) * np.dtype(kind).itemsize).view(kind)
    array[:] = values
    return array


def flat_of(*sizes: int, kinds: str = "f") -> tuple[list[tf.Variable], Flat]:
    """Return variables of these sizes (f: float32, d: float64), which count up from 0."""
    starts = np.cumsum([0, *sizes])
    variables = [
        tf.Variable(np.arange(start, start + size).astype(kind))
        for start, size, kind in zip(starts, sizes, kinds * len(sizes), strict=False)
    ]
    return variables, Flat(variables, ReusedBlocks(most=4))


@pytest.mark.parametrize("sizes", [(ALIGNED, ALIGNED, 5), (3, 1, 2)])
def test_updates_of_variables_leave_the_vector_that_they_were_given(sizes):
    """An engine may still send it. Also the other way round: its memory serves again when no variable needs it."""
    variables, flat = flat_of(*sizes)
    vector = flat.read()
    expected = (vector * 2).tolist()
    vector *= 2
    flat.write(vector)
    for update in (lambda v: v.assign_add(tf.ones_like(v)), lambda v: v.assign_sub(v), lambda v: v.scatter_update(
        tf.IndexedSlices(tf.constant([9.0]), tf.constant([0])))):  # fmt: skip
        for variable in variables:
            update(variable)
        assert vector.tolist() == expected
    vector = flat.read()
    expected, where = vector.tolist(), vector.ctypes.data
    flat.write(vector)
    del vector
    others = [flat.read() for _ in range(3)]
    for one in others:
        one[:] = -1.0
    assert np.concatenate([v.numpy() for v in variables]).tolist() == expected
    if sizes[0] == ALIGNED:  # (else the variables have copies)
        assert where not in [one.ctypes.data for one in others]
    flat.write(flat.read())
    more = [flat.read() for _ in range(2)]
    assert where in [one.ctypes.data for one in [*others, *more]]


@pytest.mark.parametrize(
    ("algorithm", "graph"), [("sgp", True), ("osgp", False), ("dpsgd", False), ("adpsgd", False), ("local", False)]
)
def test_weights_that_a_user_has_read_do_not_change_in_later_steps(algorithm, graph):
    """A tensor read from a variable is a value, whoever has the memory."""

    def train(rank: int) -> list[list[float]]:
        weight = keras.Variable(np.zeros(ALIGNED, np.float32))
        opt = hvd.GossipOptimizer(keras.optimizers.SGD(1.0), algorithm=algorithm)
        opt.build([weight])
        step = tf.function(lambda g: opt.apply([g], [weight])) if graph else lambda g: opt.apply([g], [weight])
        seen, kept = [], []
        for number in range(12):
            step(tf.fill([ALIGNED], 1.0 + rank + number))
            seen.append(weight.value.read_value())
            kept.append(weight.numpy().tolist())
        opt.drain()
        return [one.numpy().tolist() for one in seen] == kept

    assert Cluster(2).run(train) == [True, True]
