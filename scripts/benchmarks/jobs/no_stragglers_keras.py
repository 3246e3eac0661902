"""The TensorFlow job of ``no_stragglers``: the real ResNet-50; ``horovod`` is plain allreduce of the gradients."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import hvd_async.tensorflow as hvd

from .shared import keras_ranks
from .shared.cycles import alternate
from .shared.rank import Job, counted


class KerasStepper:
    """A ResNet-50 of its own under one arm, trained by a ``tf.function``."""

    def __init__(self, name: str, job: Job) -> None:
        sys.path.append(str(Path(__file__).resolve().parents[3] / "tf_models"))
        import vision

        keras.utils.set_random_seed(0)
        size, batch = job.plan["image_size"], job.plan["batch_size"]
        self._model: Any = vision.build("resnet50", 1000, size, 0.9)
        self._optimizer: Any = keras.optimizers.SGD(0.001, momentum=0.9)
        self._ours = name != "horovod"
        self._name = name
        if self._ours:
            self._optimizer = hvd.EagerOptimizer(self._optimizer, quorum=job.plan["quorums"][name], model=self._model)
        self._optimizer.build(self._model.trainable_variables)
        self._images = tf.random.stateless_normal([batch, size, size, 3], [job.rank, 0])
        self._labels = tf.random.stateless_uniform([batch], [job.rank, 1], 0, 1000, tf.int32)
        self._train = tf.function(self._forward_backward)

    def step(self) -> None:
        """Forward, backward, update."""
        self._train(self._images, self._labels)

    def drain(self) -> None:
        """Leave nothing on its way."""
        if self._ours:
            self._optimizer.drain()

    def fresh(self) -> int | None:
        """Return how many gradients of staleness 0 were carried so far; None where all are."""
        return int(counted(self._optimizer.stats())["staleness"].get("0", 0)) if self._ours else None

    def _forward_backward(self, images: tf.Tensor, labels: tf.Tensor) -> None:
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            logits = self._model(images, training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
        gradients = tape.gradient(loss, variables)
        if not self._ours:
            gradients = keras_ranks.averaged(gradients)
        self._optimizer.apply(gradients, variables)


def work(job: Job) -> None:
    """Run the plan's cycles."""
    alternate(job, KerasStepper)
