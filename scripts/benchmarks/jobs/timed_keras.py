"""The timed job of Keras: blocks as in ``timed``, of ResNet-50, whose step is a graph.

The arm ``horovod`` is Horovod's plain allreduce of the gradients: its own optimizer does not average on Keras 3.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvd_async import tensorflow as hvd
from hvd_async.testing import stop_engine
from scripts.benchmarks.support.names import quorum_of

from .rank import Block, Job, conclude, counted, timed


def begin() -> tuple[Any, Callable[[], None]]:
    """Initialize Horovod; return the binding's module, and a barrier."""
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    return hvd, lambda: hvd.allreduce(tf.zeros(1), name="bench.barrier")


class KerasTrainer:
    """ResNet-50 on random images under ``horovod`` or a quorum, trained by a loop.

    Args:
        job: this rank.
        block: see ``timed``.

    Attributes:
        model, optimizer: as the arm has them.
        computed: nothing: a step is one graph.
    """

    def __init__(self, job: Job, block: Block) -> None:
        sys.path.append(str(Path(__file__).resolve().parents[3] / "tf_models"))
        import vision

        keras.utils.set_random_seed(block["seed"])
        side, batch = block["task"]["image_size"], block["task"]["batch"]
        self.model: Any = vision.build("resnet50", 1000, side, 0.9)
        self._images = tf.random.stateless_normal([batch, side, side, 3], [job.rank, 0])
        self._labels = tf.random.stateless_uniform([batch], [job.rank, 1], 0, 1000, tf.int32)
        self._ours, self._job = block["arm"] != "horovod", job
        self.optimizer: Any = keras.optimizers.SGD(block["lr"], momentum=block["momentum"])
        if self._ours:
            quorum = quorum_of(block["arm"])
            self.optimizer = hvd.EagerOptimizer(self.optimizer, quorum=quorum, model=self.model)
        self.optimizer.build(self.model.trainable_variables)
        self.computed: list[float] = []
        self._train = tf.function(self._graph)

    def _graph(self) -> None:
        with tf.GradientTape() as tape:
            logits = self.model(self._images, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(self._labels, logits, from_logits=True)
            loss = tf.reduce_mean(losses)
        gradients: Sequence[tf.Tensor] = tape.gradient(loss, self.model.trainable_variables)
        if not self._ours:
            named = enumerate(gradients)
            gradients = [hvd.allreduce(one, name=f"bench.{number}", op=hvd.Average) for number, one in named]
        self.optimizer.apply(gradients, self.model.trainable_variables)

    @property
    def waited(self) -> float:
        return float(self.optimizer.stats().wait_s) if self._ours else 0.0

    def step(self, seconds: float) -> None:
        """Take a step."""
        self._train()

    def stats(self) -> dict[str, Any]:
        return counted(self.optimizer.stats()) if self._ours else {}

    def drain(self) -> None:
        if self._ours:
            self.optimizer.drain()

    def identical(self) -> bool:
        return self._job.same(b"".join(weights.tobytes() for weights in self.model.get_weights()))

    def close(self) -> None:
        if self._ours:
            stop_engine(self.optimizer)


kept: dict[str, KerasTrainer] = {}
"""Models that stay for later blocks, by arm."""


def run_block(job: Job, block: Block) -> None:
    """Run one block."""
    trainer = kept.get(block["arm"]) or KerasTrainer(job, block)
    if block.get("keep"):
        kept[block["arm"]] = trainer
    conclude(job, block, trainer, timed(job, block, trainer))
