"""The TensorFlow job of ``sequence_lengths``: an LSTM on clips; ``horovod`` is plain allreduce of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_async.testing import stop_engine

from ..support.clips import CLASSES, PIXELS, Batch
from .shared import keras_ranks
from .shared.keras_arm import identical, wrapped
from .shared.rank import Block, Job, counted
from .shared.recurrent import HIDDEN, training_of

FRAMES = tf.TensorSpec([None, None, PIXELS])
CLIPS = tf.TensorSpec([None], tf.int64)


class Lstm(keras.layers.Layer):
    """TensorFlow's LSTM of all steps as one operator; on a CPU Keras' own is a loop of many small ones.

    (``BlockLSTM``: the gradient of ``BlockLSTMV2`` is not that of what it computes, in TensorFlow 2.21 on a CPU.)
    """

    def build(self, shape: tuple[int | None, ...]) -> None:
        """Make the weights."""
        self.kernel = self.add_weight(shape=(PIXELS + HIDDEN, 4 * HIDDEN), initializer="glorot_uniform", name="kernel")
        self.bias = self.add_weight(shape=(4 * HIDDEN,), initializer="zeros", name="bias")

    def call(self, frames: tf.Tensor) -> tf.Tensor:
        """[clips, frames, pixels] to [clips, frames, units]."""
        by_time = tf.transpose(frames, [1, 0, 2])
        start, no_peephole = tf.zeros([tf.shape(frames)[0], HIDDEN]), tf.zeros([HIDDEN])
        outputs = tf.raw_ops.BlockLSTM(
            seq_len_max=tf.shape(frames, tf.int64)[1],
            x=by_time,
            cs_prev=start,
            h_prev=start,
            w=self.kernel,
            wci=no_peephole,
            wcf=no_peephole,
            wco=no_peephole,
            b=self.bias,
            use_peephole=False,
            cell_clip=0.0,
            forget_bias=1.0,
        )
        return tf.transpose(outputs.h, [1, 0, 2])


class KerasLearner:
    """A ``Learner`` of Keras."""

    def __init__(self, job: Job, block: Block) -> None:
        keras.utils.set_random_seed(block["seed"])
        self._model: Any = keras.Sequential([keras.Input((None, PIXELS)), Lstm(), keras.layers.Dense(CLASSES)])
        self._optimizer: Any = keras.optimizers.SGD(block["lr"], momentum=block["momentum"])
        self._ours, self._job = block["arm"] != "horovod", job
        if self._ours:
            self._optimizer = wrapped(block["arm"], self._optimizer, self._model, seed=block["seed"])
        self._optimizer.build(self._model.trainable_variables)
        self._compute = tf.function(self._gradients, input_signature=[FRAMES, CLIPS, CLIPS])
        self._update = tf.function(self._apply)

    def step(self, batch: Batch, rate: float, computed: Callable[[], None]) -> None:
        """Take a step."""
        self._optimizer.learning_rate = rate
        gradients = self._compute(batch.frames, batch.lengths, batch.labels)
        computed()
        self._update(gradients)

    def stats(self) -> dict[str, Any]:
        """Return ``stats()`` as JSON; nothing of Horovod's arm."""
        return counted(self._optimizer.stats()) if self._ours else {}

    def drain(self) -> None:
        """Apply every gradient everywhere."""
        if self._ours:
            self._optimizer.drain()

    def classify(self, batch: Batch) -> NDArray[np.int64]:
        """Return the clips' classes."""
        found: NDArray[np.int64] = self._logits(tf.constant(batch.frames), tf.constant(batch.lengths)).numpy().argmax(1)
        return found

    def identical(self) -> bool:
        """Collective: return whether all ranks have the same weights, bit for bit."""
        return identical(self._job, self._model)

    def close(self) -> None:
        """Collective: stop the engine."""
        if self._ours:
            stop_engine(self._optimizer)

    def _logits(self, frames: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
        return tf.gather(self._model(frames), lengths - 1, batch_dims=1)

    def _gradients(self, frames: tf.Tensor, lengths: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = self._logits(frames, lengths)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
        gradients: list[tf.Tensor] = tape.gradient(loss, self._model.trainable_variables)
        return gradients

    def _apply(self, gradients: list[tf.Tensor]) -> None:
        if not self._ours:
            gradients = keras_ranks.averaged(gradients)
        self._optimizer.apply(gradients, self._model.trainable_variables)


run_block = training_of(KerasLearner)
