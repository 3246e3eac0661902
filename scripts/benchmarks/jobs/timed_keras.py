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
from hvd_async.simulation.names import LEADERS, gossip_of, quorum_of
from hvd_async.testing import stop_engine

from ..support.arms import PLAIN
from .rank import Block, Job, conclude, counted, timed


def run(work: Callable[[Job], None]) -> None:
    """Run a TensorFlow job's program: ``work`` on this rank, between Horovod's start and its end."""
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    job = Job(hvd, lambda: hvd.allreduce(tf.zeros(1), name="bench.barrier"))
    work(job)
    job.finish()
    hvd.shutdown()


def wrapped(arm: str, optimizer: Any, model: Any, **own: Any) -> Any:
    """Return a model's optimizer, wrapped as an arm says; that of ``horovod``, whose averages a job makes, as it is.

    Args:
        arm: its name.
        optimizer: Keras' own.
        model: that it trains.
        own: further arguments of ``EagerOptimizer``, ``GossipOptimizer`` or ``LeaderOptimizer``.
    """
    own, gossip = {**own, "model": model}, gossip_of(arm)
    if arm in (PLAIN, "horovod"):
        return optimizer
    if arm in LEADERS:
        return hvd.LeaderOptimizer(optimizer, algorithm=arm, **own)
    if gossip is not None:
        reduced = getattr(hvd.Compression, gossip.compression)
        return hvd.GossipOptimizer(optimizer, **{**gossip._asdict(), "compression": reduced}, **own)
    return hvd.EagerOptimizer(optimizer, quorum=quorum_of(arm), **own)


class KerasTrainer:
    """ResNet-50 on random images under an arm, trained by a loop.

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
        plain = keras.optimizers.SGD(block["lr"], momentum=block["momentum"])
        self.optimizer: Any = wrapped(block["arm"], plain, self.model, **block.get("own", {}))
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
