"""The TensorFlow job of ``profile``: steps that compute next to nothing; ``horovod`` is plain allreduce."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from hvd_async.simulation.names import LEADERS
from hvd_async.testing import stop_engine

from ..support.arms import PLAIN, WARM_UP
from .shared import keras_ranks
from .shared.keras_arm import wrapped
from .shared.rank import Block, Job
from .shared.thread_usage import PARAMETERS, copy_ms, used_by


class Weights(keras.Model):
    """A model that is nothing but its weights.

    Args:
        elements: of each.
    """

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.parts = [self.add_weight(shape=(elements,), initializer="zeros") for _ in range(PARAMETERS)]

    def call(self, factors: tf.Tensor) -> tf.Tensor:
        """The sum of each, times a factor of its own. (TensorFlow would reduce gradients that are the same only once,
        and none that it knows while it makes the graph.)"""
        pairs = zip(self.parts, tf.unstack(factors), strict=True)
        return tf.add_n([factor * tf.reduce_sum(part) for part, factor in pairs])


def run_block(job: Job, block: Block) -> None:
    """One arm."""
    elements, arm = int(block["megabytes"] * 1e6 / 4 / PARAMETERS), block["arm"]
    model = Weights(elements)
    optimizer = wrapped(arm, keras.optimizers.SGD(0.0), model)
    optimizer.build(model.trainable_variables)

    @tf.function
    def train(factors: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = model(factors)
        gradients = tape.gradient(loss, model.trainable_variables)
        if arm in LEADERS:
            optimizer.record_loss(loss)
        if arm == "horovod":
            gradients = keras_ranks.averaged(gradients)
        optimizer.apply(gradients, model.trainable_variables)

    ones = tf.ones([PARAMETERS])
    ours = arm not in (PLAIN, "horovod")
    for _ in range(WARM_UP):
        train(ones)
    job.barrier()
    own = used_by(lambda: train(ones), block["steps"])
    if ours:
        optimizer.drain()
        stop_engine(optimizer)
    flat = np.zeros(elements * PARAMETERS, np.float32)
    there = np.zeros_like(flat)
    job.record(block, {"used": own, "copy_ms": copy_ms(lambda: np.copyto(there, flat))})
