"""Keras: the py_functions in the graph of a training step, by optimizer: how many run a step, and on which devices they
can run.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance.keras_host_counts import crossings, nodes
from tests.conformance.keras_ranks import batch, compiled
from tests.conftest import LONG_RUN

ONE_BUCKET, BUCKET_EACH = 25.0, 1e-9
"""MiB at which a bucket is full."""
VARIABLES = 6
"""Number of variables of the model; with ``BUCKET_EACH`` each has a bucket of its own."""


def sgd(**options: Any) -> keras.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def scaled(optimizer: keras.Optimizer) -> keras.Optimizer:
    return keras.optimizers.LossScaleOptimizer(optimizer)


def step_of(optimizer: Any) -> Any:
    """Return the training step of a small model with batch norm as a ``tf.function`` of a batch."""
    layers = keras.layers
    parts = [layers.Conv2D(2, 3), layers.BatchNormalization(), layers.Flatten(), layers.Dense(3)]
    model = compiled(optimizer, keras.Sequential([keras.Input((5, 5, 1)), *parts]))
    ours = getattr(optimizer, "inner_optimizer", optimizer)
    ours._async.replica.model = model
    ours.build(model.trainable_variables)
    assert len(model.trainable_variables) == VARIABLES

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        if getattr(ours._async, "weighted", False):
            ours.record_samples(tf.shape(x)[0])
        model.train_step((x, y))

    return tf.function(step)


def dtypes_on_accelerators() -> dict[str, set[int]]:
    """Return the dtypes that the py_function kernel for accelerators takes ("Tin") and returns ("Tout")."""
    registered = kernels.get_registered_kernels_for_op("EagerPyFunc").kernel
    (kernel,) = [one for one in registered if one.device_type == "DEFAULT"]
    return {one.name: set(one.allowed_values.list.type) for one in kernel.constraint}


OPTIMIZERS = {
    "all": (lambda: hvd.EagerOptimizer(sgd(), quorum="all", bucket_cap_mb=BUCKET_EACH), 3),
    "solo": (lambda: hvd.EagerOptimizer(sgd(), bucket_cap_mb=ONE_BUCKET), 2),
    "fp16": (lambda: hvd.EagerOptimizer(sgd(), compression=hvd.Compression.fp16), 2),
    "samples": (lambda: hvd.EagerOptimizer(sgd(), weighting="samples", bucket_cap_mb=BUCKET_EACH), VARIABLES + 2),
    "raise": (lambda: hvd.EagerOptimizer(sgd(), nonfinite="raise", bucket_cap_mb=BUCKET_EACH), 2),
    "loss scale": (lambda: hvd.EagerOptimizer(scaled(sgd()), bucket_cap_mb=BUCKET_EACH), 2),
    "schedule": (lambda: hvd.EagerOptimizer(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 9))), 2),
    "sgp": (lambda: hvd.GossipOptimizer(sgd(), algorithm="sgp"), 2),
    "quasi_global": (lambda: hvd.GossipOptimizer(sgd(), algorithm="dpsgd", quasi_global=True), 2),
    "adpsgd": (lambda: hvd.GossipOptimizer(scaled(sgd()), algorithm="adpsgd"), 2),
    "local": (lambda: hvd.GossipOptimizer(sgd(use_ema=True), algorithm="local", average_every=2), 2),
    "lsgd": (lambda: hvd.LeaderOptimizer(sgd(), algorithm="lsgd", group=1), 3),
    "easgd": (lambda: hvd.LeaderOptimizer(scaled(sgd()), algorithm="easgd"), 3),
}
"""Optimizers, and the number of py_functions in a step of each (``take_step`` of ``eager_methods`` and ``methods``).
Those of "all" come with a ``PyFuncStateless`` for each bucket, which stands for Horovod's op here."""


FEW = ("all", "samples", "loss scale", "sgp", "lsgd")
"""One of each kind of step, for an ordinary run: tracing takes long."""


@pytest.mark.parametrize("name", OPTIMIZERS if LONG_RUN else FEW)
def test_a_step_has_the_expected_py_functions_and_they_can_run_on_a_gpu(name):
    make, expected = OPTIMIZERS[name]

    def train(rank: int) -> tuple[list[Any], list[int]]:
        optimizer = make()
        step, counts = step_of(optimizer), []
        for number in range(4):
            with crossings() as counted:
                step(*map(tf.constant, batch(rank, number)))
            counts.append(counted[0])
        optimizer.drain()
        x, y = map(tf.constant, batch(rank, 0))
        return nodes(step.get_concrete_function(x, y).graph), counts

    ((found, counts),) = Cluster(1).run(train)
    assert counts == [expected] * 4
    ops = [node for node in found if node.op in ("EagerPyFunc", "PyFunc")]
    assert len(ops) >= expected
    allowed = dtypes_on_accelerators()
    for op in ops:
        assert op.op == "EagerPyFunc", f"{op.name}: {op.op} has a kernel for CPUs only"
        for way, dtypes in allowed.items():
            used = set(op.attr[way].list.type)
            assert used <= dtypes, f"{op.name}: {way} has {[tf.as_dtype(one).name for one in used - dtypes]}"


def test_an_int32_would_keep_a_py_function_off_a_gpu():
    """(The test above relies on this.)"""
    step = tf.function(lambda: tf.py_function(lambda: np.int32(0), [], tf.int32))
    (op,) = [node for node in nodes(step.get_concrete_function().graph) if node.op == "EagerPyFunc"]
    assert not set(op.attr["Tout"].list.type) <= dtypes_on_accelerators()["Tout"]
