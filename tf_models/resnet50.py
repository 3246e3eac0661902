"""Train ResNet-50 in TensorFlow, by any of the algorithms: `horovodrun -np 2 --gloo python tf_models/resnet50.py`."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# TensorFlow leaves oneDNN off on x86 CPUs without AVX-512 or AMX, where ResNet-50 is several times slower without it.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

from hvd_async.runner.options import Options, parse

if __name__ == "__main__":
    parse("tensorflow")  # before the imports below, which take seconds: for --help, and for flags that are wrong

import keras
import numpy as np
import tensorflow as tf
import vision
from lars import LARS

import hvd_async.tensorflow as hvd
from hvd_async.runner.course import Position
from hvd_async.runner.data import Batch
from hvd_async.runner.loop import UNFINISHED, Trainer, World, errors_reported, start
from hvd_async.runner.report import Replicas

POLICIES = {"fp32": "float32", "fp16": "mixed_float16", "bf16": "mixed_bfloat16"}


class TensorFlowTrainer(Trainer):
    """The model, its optimizer and the device of one rank."""

    checkpoint_suffix = ".npz"
    opening = "the first step traces the model, which takes TensorFlow a minute or so for ResNet-50; later ones do not"

    def __init__(self, options: Options, classes: int) -> None:
        super().__init__(options)
        keras.utils.set_random_seed(options.seed)
        keras.config.set_dtype_policy(POLICIES[options.precision])
        self._classes = classes
        self._model = vision.build(options.model, classes, options.image_size, options.bn_momentum)
        self.optimizer = wrapped(options, self._model)
        self.optimizer.build(self._model.trainable_variables)
        images = tf.TensorSpec([None, options.image_size, options.image_size, 3], tf.float32)
        labels = tf.TensorSpec([None], tf.int64)
        self._train = tf.function(
            self._forward_backward, input_signature=[images, labels, tf.TensorSpec([], tf.float32)]
        )
        self._correct = tf.function(self._count_correct, input_signature=[images, labels])
        hvd.broadcast_variables(self._model.variables, root_rank=0)

    def train_step(self, batch: Batch, rate: float) -> float:
        """Take one optimizer step at this learning rate; return the batch's mean loss."""
        self.optimizer.learning_rate.assign(rate)
        before = self._scale()
        losses = []
        for share, part in batch.parts(self.options.backward_passes_per_step):
            if self.options.weighted:
                self.optimizer.record_samples(round(share * len(batch)))
            losses.append(self._train(part.images, part.labels, np.float32(share)))
        self.skipped += self._scale() < before
        return float(sum(losses))

    def _scale(self) -> float:
        """Of the loss; it falls when a gradient overflows."""
        return float(self.optimizer.dynamic_scale) if self.options.precision == "fp16" else 1.0

    def _forward_backward(self, images: tf.Tensor, labels: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        """One backward pass, of a share of the step's images; the optimizer takes the step at the last. The loss."""
        targets = tf.one_hot(labels, self._classes)
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            losses = keras.losses.categorical_crossentropy(
                targets,
                tf.cast(self._model(images, training=True), tf.float32),
                from_logits=True,
                label_smoothing=self.options.label_smoothing,
            )
            loss = share * tf.reduce_mean(losses)
            whole = self.optimizer.scale_loss(loss + share * self._penalty(variables))
        self.optimizer.apply(tape.gradient(whole, variables), variables)
        return loss

    def _penalty(self, variables: list[Any]) -> Any:
        """Return a penalty of the weights, so that weight decay is part of the gradient, as in torch; that of Keras'
        SGD bypasses momentum."""
        if self.options.optimizer != "sgd" or not self.options.weight_decay:
            return 0.0
        return self.options.weight_decay * tf.add_n([tf.nn.l2_loss(v) for v in variables if decays(v)])

    def correct(self, batch: Batch) -> int:
        """Return the number of images that are classified correctly."""
        return int(self._correct(batch.images, batch.labels))

    def _count_correct(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        found = tf.argmax(self._model(images, training=False), axis=1)
        return tf.reduce_sum(tf.cast(found == labels, tf.int32))

    def save(self, path: Path, position: Position) -> None:
        """Write a complete checkpoint."""
        best = np.nan if position.best_accuracy is None else position.best_accuracy
        by_rank = np.array(position.steps_by_rank, np.int64)
        place = dataclasses.asdict(position) | {"best_accuracy": best, "steps_by_rank": by_rank}
        np.savez(path, made_by=self.fingerprint(), **place, **self._arrays())

    def read(self, path: Path) -> dict[str, Any]:
        """Return a checkpoint's content, by name."""
        with np.load(path) as file:
            content = dict(file)
        return content | {"made_by": str(content.get("made_by"))}

    def load(self, content: dict[str, Any]) -> Position:
        """Load the content of a checkpoint; return its position."""
        for index, variable in enumerate(self._model.variables):
            variable.assign(content[f"model/{index}"])
        own = {path: value for path, value in content.items() if path.startswith("optimizer/")}
        self.optimizer.set_state({path.removeprefix("optimizer/"): value for path, value in own.items()})
        best = float(content["best_accuracy"])
        place = {name: int(content[name]) for name in ("epoch", "step", "steps_per_epoch")}
        by_rank = tuple(int(steps) for steps in content.get("steps_by_rank", ()))
        return Position(**place, best_accuracy=None if np.isnan(best) else best, steps_by_rank=by_rank)

    def replicas(self) -> Replicas:
        """Compare the ranks' weights. A collective."""
        weights = tf.concat([tf.reshape(v, [-1]) for v in self._model.trainable_variables], axis=0)
        highest = hvd.allreduce(weights, op=hvd.Max, name="runner.highest")
        lowest = hvd.allreduce(weights, op=hvd.Min, name="runner.lowest")
        own = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
        digests = hvd.allgather_object(own, name="runner.digest")
        distance = self.optimizer.consensus_distance()
        return Replicas(len(set(digests)) == 1, float(tf.reduce_max(highest - lowest)), distance)

    def _arrays(self) -> dict[str, Any]:
        """Every variable of the model, by place, and of the optimizer, by path."""
        model = {f"model/{index}": v.numpy() for index, v in enumerate(self._model.variables)}
        return model | {f"optimizer/{path}": value for path, value in self.optimizer.get_state().items()}

    def fingerprint(self) -> str:
        """Return what a checkpoint and the run that resumes it must have in common."""
        scaled = ", loss scaling" if self.options.precision == "fp16" else ""
        return f"model {self.options.model}, {self._classes} classes, optimizer {self.options.optimizer}{scaled}, v2"


def decays(variable: Any) -> bool:
    """Weight decay is for kernels: it would pull batch norm's scales and the biases, of one dimension, to nothing."""
    return len(variable.shape) > 1


def plain(options: Options, model: Any) -> Any:
    """The Keras optimizer of the options."""
    if options.optimizer == "lars":
        return LARS(options.lr, momentum=options.momentum, decay=options.weight_decay)
    if options.optimizer == "sgd":
        return keras.optimizers.SGD(options.lr, momentum=options.momentum, nesterov=options.nesterov)
    if options.optimizer == "adam":
        return keras.optimizers.Adam(options.lr)
    optimizer = keras.optimizers.AdamW(options.lr, weight_decay=options.weight_decay)
    optimizer.exclude_from_weight_decay([v for v in model.trainable_variables if not decays(v)])
    return optimizer


def wrapped(options: Options, model: Any) -> Any:
    """The optimizer of the options, wrapped."""
    optimizer = plain(options, model)
    if options.precision == "fp16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    shared: dict[str, Any] = {
        "compression": getattr(hvd.Compression, options.compression),
        "backward_passes_per_step": options.backward_passes_per_step,
        "model": model,
    }
    if options.gossips:
        return hvd.GossipOptimizer(optimizer, **shared, **options.settings)
    if options.follows:
        return hvd.LeaderOptimizer(optimizer, **shared, **options.settings)
    if options.lockstep:
        # Horovod's DistributedOptimizer does not average on Keras 3.
        return hvd.EagerOptimizer(optimizer, **shared, quorum="all", seed=options.seed)
    return hvd.EagerOptimizer(optimizer, **shared, **options.settings)


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
    hvd.init(**options.init_settings)
    use_device(options)
    world = World(hvd.rank(), hvd.size(), lambda value, name: hvd.allgather_object(value, name=name))
    run = start(options, world)
    with errors_reported(world):
        trainer = TensorFlowTrainer(run.options, run.source.classes)
    finished = run.fit(trainer) is not None
    hvd.shutdown()
    sys.exit(0 if finished else UNFINISHED)


if __name__ == "__main__":
    main()
