"""Train ResNet-50 in TensorFlow by partial allreduce: `horovodrun -np 2 --gloo python tf_models/resnet50.py`."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
import vision

import hvd_async.tensorflow as hvd
from hvd_async.runner.batches import Batch
from hvd_async.runner.options import Options, parse
from hvd_async.runner.run import Position, World, start
from hvd_async.runner.summary import Outcome, Replicas


class TensorFlowTrainer:
    """The model, its optimizer and the device of one rank; what `hvd_async.runner.run` asks of a trainer."""

    checkpoint_suffix = ".npz"

    def __init__(self, options: Options, classes: int) -> None:
        keras.utils.set_random_seed(options.seed)
        self._options, self._classes = options, classes
        self._model = vision.build(options.model, classes, options.image_size, options.bn_momentum)
        self._optimizer = wrapped(options, self._model)
        self._optimizer.build(self._model.trainable_variables)
        images = tf.TensorSpec([None, options.image_size, options.image_size, 3], tf.float32)
        labels = tf.TensorSpec([None], tf.int64)
        self._train = tf.function(self._forward_backward, input_signature=[images, labels])
        self._correct = tf.function(self._count_correct, input_signature=[images, labels])
        hvd.broadcast_variables(self._model.variables, root_rank=0)

    def train_step(self, batch: Batch, rate: float) -> float:
        """One optimizer step at this learning rate; returns the batch's mean loss."""
        self._optimizer.learning_rate.assign(rate)
        return float(self._train(batch.images, batch.labels))

    def _forward_backward(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        targets = tf.one_hot(labels, self._classes)
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            losses = keras.losses.categorical_crossentropy(
                targets,
                self._model(images, training=True),
                from_logits=True,
                label_smoothing=self._options.label_smoothing,
            )
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, variables)
        if self._options.optimizer == "sgd" and self._options.weight_decay:
            # Keras' own weight_decay bypasses momentum; torch's, which the flag means, is part of the gradient.
            gradients = [g + self._options.weight_decay * v if decays(v) else g
                         for g, v in zip(gradients, variables, strict=True)]  # fmt: skip
        self._optimizer.apply(gradients, variables)
        return loss

    def drain(self) -> None:
        """Collective: apply every gradient everywhere and make batch-norm statistics agree."""
        self._optimizer.drain()

    def correct(self, batch: Batch) -> int:
        """How many images of the batch the model classifies correctly."""
        return int(self._correct(batch.images, batch.labels))

    def _count_correct(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        found = tf.argmax(self._model(images, training=False), axis=1)
        return tf.reduce_sum(tf.cast(found == labels, tf.int32))

    def save(self, path: Path, position: Position) -> None:
        """Write a complete checkpoint."""
        best = np.nan if position.best_accuracy is None else position.best_accuracy
        np.savez(path, made_by=self._made_by(), epoch=position.epoch, best_accuracy=best, **self._arrays())

    def restore(self, path: Path) -> Position | None:
        """Collective: give every rank rank 0's checkpoint, None if there is none; ValueError if it does not fit."""
        content: dict[str, Any] | str | None = None
        if hvd.rank() == 0 and path.exists():
            content = self._read(path)
        # Errors travel too: a rank that raised alone would leave the others waiting.
        content = hvd.broadcast_object(content, root_rank=0, name="runner.checkpoint")
        if isinstance(content, str):
            raise ValueError(content)
        if content is None:
            return None
        for index, variable in enumerate(self._model.variables):
            variable.assign(content[f"model/{index}"])
        self._optimizer.set_state({path: content[f"optimizer/{path}"] for path in self._optimizer.get_state()})
        best = float(content["best_accuracy"])
        return Position(int(content["epoch"]), None if np.isnan(best) else best)

    def outcome(self) -> Outcome:
        """What this rank's optimizer has counted."""
        stats = self._optimizer.stats()
        return Outcome(stats.rounds, stats.gradients_produced, stats.gradients_applied, stats.wait_s, stats.staleness)

    def replicas(self) -> Replicas:
        """Collective: compare the ranks' weights."""
        weights = tf.concat([tf.reshape(v, [-1]) for v in self._model.trainable_variables], axis=0)
        highest = hvd.allreduce(weights, op=hvd.Max, name="runner.highest")
        lowest = hvd.allreduce(weights, op=hvd.Min, name="runner.lowest")
        own = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
        digests = hvd.allgather_object(own, name="runner.digest")
        distance = self._optimizer.consensus_distance()
        return Replicas(len(set(digests)) == 1, float(tf.reduce_max(highest - lowest)), distance)

    def _arrays(self) -> dict[str, Any]:
        """Every variable of the model, by place, and of the optimizer, by path."""
        model = {f"model/{index}": v.numpy() for index, v in enumerate(self._model.variables)}
        return model | {f"optimizer/{path}": value for path, value in self._optimizer.get_state().items()}

    def _made_by(self) -> str:
        """What a checkpoint must agree on with the run that goes on from it."""
        return f"model {self._options.model}, {self._classes} classes, optimizer {self._options.optimizer}"

    def _read(self, path: Path) -> dict[str, Any] | str:
        """The checkpoint, or what is wrong with it."""
        try:
            with np.load(path) as file:
                content = dict(file)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            return f"{path} cannot be read as a checkpoint ({error}): remove it, or start without --resume"
        if str(content["made_by"]) != self._made_by():
            return (
                f"{path} was written by a run with {content['made_by']}, this one has {self._made_by()}: give the same "
                "options, or another --checkpoint-dir"
            )
        return content


def decays(variable: Any) -> bool:
    """Weight decay is for kernels: it would pull batch norm's scales and the biases, of one dimension, to nothing."""
    return len(variable.shape) > 1


def wrapped(options: Options, model: Any) -> Any:
    """The Keras optimizer of the options, wrapped."""
    optimizer: Any
    if options.optimizer == "sgd":
        optimizer = keras.optimizers.SGD(options.lr, momentum=options.momentum, nesterov=options.nesterov)
    elif options.optimizer == "adam":
        optimizer = keras.optimizers.Adam(options.lr)
    else:
        optimizer = keras.optimizers.AdamW(options.lr, weight_decay=options.weight_decay)
        optimizer.exclude_from_weight_decay([v for v in model.trainable_variables if not decays(v)])
    # Horovod's DistributedOptimizer does not average on Keras 3, so plain allreduce is quorum="all" here.
    quorum = "all" if options.algorithm == "allreduce" else options.quorum
    return hvd.EagerOptimizer(
        optimizer,
        quorum=quorum,
        max_staleness=options.max_staleness,
        grace=options.grace,
        seed=options.seed,
        model=model,
    )


def use_device(options: Options) -> None:
    """This rank's GPU where there is one, else its share of the host's cores."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(2)


def main() -> None:
    """Train as the command line says."""
    options = parse("tensorflow")
    hvd.init()
    use_device(options)
    world = World(hvd.rank(), hvd.size(), lambda value, name: hvd.allgather_object(value, name=name))
    run = start(options, world)
    run.fit(TensorFlowTrainer(options, run.source.classes))
    hvd.shutdown()


if __name__ == "__main__":
    main()
