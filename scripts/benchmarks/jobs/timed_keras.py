"""The timed job of Keras: blocks as in ``timed``; and the counters of what a step of Keras' ``fit()`` costs the host.

A block with ``fit`` trains by ``fit()``; the others by a loop, whose gradients and updates are graphs. The arm
``horovod`` is Horovod's plain allreduce of the gradients: its own optimizer does not average on Keras 3.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import script_ops

import hvd_async.tensorflow.keras as hvd_keras
from hvd_async import tensorflow as hvd
from hvd_async.simulation.names import LEADERS, gossip_of, quorum_of
from hvd_async.simulation.network import CLASSES, INPUTS, widths
from hvd_async.testing import stop_engine

from ..support import data
from ..support.arms import PLAIN, WARM_UP, is_eager
from .rank import Block, Job, conclude, counted, rate, timed

HIDDEN = 48
"""Units of the LSTM."""
FRAMES, CLIPS = tf.TensorSpec([None, None, data.PIXELS]), tf.TensorSpec([None], tf.int64)
VARIABLES, ELEMENTS = 40, 8
"""Number of variables of ``SmallVariables``, and elements of each. (Fewer than ResNet-50 has: Keras makes operators for
each variable, and tracing them takes long.)"""
BUCKET_MB = VARIABLES * ELEMENTS * 4 / 5 / 2**20
"""``bucket_cap_mb`` for five buckets."""
STEPS = 16
"""Steps that are counted, after as many: a multiple of every period."""
PY_FUNCTIONS = ("EagerPyFunc", "PyFunc", "PyFuncStateless")
"""Types of operators that call Python."""


# -- ranks and arms ----------------------------------------------------------------------------------------------------


def run(work: Callable[[Job], None]) -> None:
    """Run a TensorFlow job's program: ``work`` on this rank, between Horovod's start and its end."""
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    job = Job(hvd, lambda: hvd.allreduce(tf.zeros(1), name="bench.barrier"))
    work(job)
    job.finish()
    hvd.shutdown()


def averaged(gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return gradients averaged over the ranks by Horovod's plain allreduce."""
    return [hvd.allreduce(g, name=f"bench.{i}", op=hvd.Average) for i, g in enumerate(gradients)]


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


def identical(job: Job, model: Any) -> bool:
    """Return whether all ranks' models have the same weights, bit for bit. Collective."""
    return job.same(b"".join(weights.tobytes() for weights in model.get_weights()))


# -- models ------------------------------------------------------------------------------------------------------------


class Lstm(keras.layers.Layer):
    """TensorFlow's LSTM of all steps as one operator; on a CPU Keras' own is a loop of many small ones.

    (``BlockLSTM``: the gradient of ``BlockLSTMV2`` is not that of what it computes, in TensorFlow 2.21 on a CPU.)
    """

    def build(self, shape: tuple[int | None, ...]) -> None:
        """Make the weights."""
        inputs = (data.PIXELS + HIDDEN, 4 * HIDDEN)
        self.kernel = self.add_weight(shape=inputs, initializer="glorot_uniform", name="kernel")
        self.bias = self.add_weight(shape=(4 * HIDDEN,), initializer="zeros", name="bias")

    def call(self, frames: tf.Tensor) -> tf.Tensor:
        """Return [clips, frames, units] of [clips, frames, pixels]."""
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


def made(task: Mapping[str, Any]) -> tuple[Any, int]:
    """Return a model of random data by its task, and the samples of a batch for it."""
    big = task["name"] == "network"
    inputs, *hidden, classes = widths(task["megabytes"]) if big else (INPUTS, 64, CLASSES)
    dense = keras.layers.Dense
    layers = [keras.Input((inputs,)), *(dense(units, activation="relu") for units in hidden), dense(classes)]
    return keras.Sequential(layers), 1 if big else 8


class Clips:
    """An LSTM on clips of different lengths."""

    def __init__(self, task: Mapping[str, Any], rank: int, size: int) -> None:
        self.model: Any = keras.Sequential([keras.Input((None, data.PIXELS)), Lstm(), keras.layers.Dense(data.CLASSES)])
        self._train, self._test = data.clips_of(task["seed"], task["median"])
        self._order = data.dealt_to(task, self._train.lengths, size)[:, rank]
        self.signature = [FRAMES, CLIPS, CLIPS]

    def batch(self, step: int) -> Sequence[Any]:
        return data.padded(self._train, self._order[step])

    def logits(self, frames: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.model(frames), lengths - 1, batch_dims=1)

    def score(self) -> float:
        batch = data.padded(self._test, np.arange(len(self._test.labels)))
        found = self.logits(tf.constant(batch.frames), tf.constant(batch.lengths)).numpy().argmax(1)
        return float((found == batch.labels).mean())


class ResNet50:
    """The real ResNet-50 on random images."""

    def __init__(self, task: Mapping[str, Any], rank: int, size: int) -> None:
        sys.path.append(str(Path(__file__).resolve().parents[3] / "tf_models"))
        import vision

        side, batch = task["image_size"], task["batch"]
        self.model: Any = vision.build("resnet50", 1000, side, 0.9)
        images = tf.random.stateless_normal([batch, side, side, 3], [rank, 0])
        self._batch = (images, tf.random.stateless_uniform([batch], [rank, 1], 0, 1000, tf.int32))
        self.signature = None

    def batch(self, step: int) -> Sequence[Any]:
        return self._batch

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        return self.model(images, training=True)

    def score(self) -> float | None:
        return None


TASKS = {"clips": Clips, "resnet50": ResNet50}


class KerasTrainer:
    """A model under an arm, trained by a loop.

    Args:
        job: this rank.
        block: see ``timed``.

    Attributes:
        task: what is learned.
        optimizer: as the arm has it.
        computed: seconds of each step until its gradients were there, with a block that is ``exact``.
    """

    def __init__(self, job: Job, block: Block) -> None:
        keras.utils.set_random_seed(block["seed"])
        self.task: Any = TASKS[block["task"]["name"]]({**block["task"], "seed": block["seed"]}, job.rank, job.size)
        self._ours, self._job, self._block = block["arm"] != "horovod", job, block
        plain = keras.optimizers.SGD(block["lr"], momentum=block["momentum"])
        own = block.get("own", {}) if self._ours else {}
        self.optimizer: Any = wrapped(block["arm"], plain, self.task.model, **own)
        self.optimizer.build(self.task.model.trainable_variables)
        self.computed: list[float] = []
        self._steps = 0
        self._compute = tf.function(self._gradients, input_signature=self.task.signature)
        self._update = tf.function(self._apply)
        self._train = tf.function(lambda *batch: self._apply(self._gradients(*batch)))

    @property
    def waited(self) -> float:
        return float(self.optimizer.stats().wait_s) if self._ours else 0.0

    def step(self, seconds: float) -> None:
        """Take a step: of a block that is ``exact``, gradients are handed over after these seconds."""
        batch, began = self.task.batch(self._steps), time.perf_counter()
        if self._block.get("exact"):
            steps = self._block["untimed"] + self._block["steps"]
            self.optimizer.learning_rate = rate(self._block["lr"], self._steps, steps)
            gradients = self._compute(*batch)
            time.sleep(max(0.0, seconds - (time.perf_counter() - began)))
            self.computed.append(time.perf_counter() - began)
            self._update(gradients)
        else:
            self._train(*batch)
        self._steps += 1

    def _gradients(self, *batch: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = self.task.logits(*batch[:-1])
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(batch[-1], logits, from_logits=True))
        gradients: list[tf.Tensor] = tape.gradient(loss, self.task.model.trainable_variables)
        return gradients

    def _apply(self, gradients: list[tf.Tensor]) -> None:
        if not self._ours:
            gradients = averaged(gradients)
        self.optimizer.apply(gradients, self.task.model.trainable_variables)

    def stats(self) -> dict[str, Any]:
        return counted(self.optimizer.stats()) if self._ours else {}

    def drain(self) -> None:
        if self._ours:
            self.optimizer.drain()

    def identical(self) -> bool:
        return identical(self._job, self.task.model)

    def close(self) -> None:
        if self._ours:
            stop_engine(self.optimizer)


# -- blocks ------------------------------------------------------------------------------------------------------------

kept: dict[str, KerasTrainer] = {}
"""Models that stay for later blocks, by arm."""


def run_block(job: Job, block: Block) -> None:
    """Run one block."""
    if block.get("fit"):
        fit(job, block)
    elif block.get("count"):
        count(job, block)
    else:
        trainer = kept.get(block["arm"]) or KerasTrainer(job, block)
        if block.get("keep"):
            kept[block["arm"]] = trainer
        own = timed(job, block, trainer)
        if block.get("scored"):
            own["accuracy"] = trainer.task.score() if job.rank == 0 else None
        conclude(job, block, trainer, own)


class Scheduled(keras.callbacks.Callback):
    """Sleeps before each step: what lies between two steps of ``fit()`` is computation to ``RecordCallback``.

    Args:
        job: this rank, which begins together with the others.
        times: seconds to sleep, by step.

    Attributes:
        ends: seconds until the end of each step. ``fit()`` drains later.
    """

    def __init__(self, job: Job, times: Sequence[float]) -> None:
        super().__init__()
        self._job, self._times, self._started = job, times, 0.0
        self.ends: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if batch == 0:
            self._job.barrier()
            self._started = time.perf_counter()
        time.sleep(self._times[batch])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.ends.append(time.perf_counter() - self._started)


def fit(job: Job, block: Block) -> None:
    """Train by ``fit()``, which may be recorded."""
    keras.utils.set_random_seed(0)
    model, samples = made(block["task"])
    optimizer = wrapped(block["arm"], keras.optimizers.SGD(0.001), model, **block.get("own", {}))
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    batch = tf.random.normal([samples, INPUTS]), tf.zeros([samples, CLASSES])

    def train(steps: int, *callbacks: Any) -> None:
        meeting = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
        repeated = tf.data.Dataset.from_tensors(batch).repeat(steps)
        model.fit(repeated, shuffle=False, verbose=0, callbacks=[meeting, *callbacks])

    train(WARM_UP)  # compiles the step, too: the next fit() takes the same one
    scheduled = Scheduled(job, [row[job.rank] for row in block["times"]])
    recorder = [hvd_keras.RecordCallback(block["trace"])] if "trace" in block else []
    train(len(block["times"]), scheduled, *recorder)
    same = identical(job, model)
    stop_engine(optimizer)
    job.record(block, {"ends": scheduled.ends, "identical": same})


# -- what a step costs the host ----------------------------------------------------------------------------------------


class SmallVariables(keras.Model):
    """A model of many variables that computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [self.add_weight(shape=(ELEMENTS,), initializer="ones") for _ in range(VARIABLES)]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        for factor in self.factors:
            inputs = inputs * factor
        return inputs


class SmallSteps:
    """The model under an arm, whose step is the graph that ``fit()`` makes of it.

    Args:
        arm: its name.
        own: further arguments of the wrapper.
    """

    def __init__(self, arm: str, **own: Any) -> None:
        self.model = SmallVariables()
        self.optimizer = wrapped(arm, keras.optimizers.SGD(1e-6, momentum=0.9), self.model, **own)
        self.model.compile(self.optimizer, loss="mse")
        self.optimizer.build(self.model.trainable_variables)
        self._step = tf.function(self.model.train_step)
        self._batch = tf.ones([1, ELEMENTS])

    def train(self, steps: int = 1) -> None:
        """Take steps."""
        for _ in range(steps):
            self._step((self._batch, self._batch))

    def operators(self) -> Counter[str]:
        """Return the operators of a step by type, those of the functions in its graph included."""
        concrete = self._step._list_all_concrete_functions()[-1]
        graph = concrete.graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        return Counter(node.op for node in nodes)


class Crossings:
    """Counter of calls of Python functions from graphs, in all threads, from ``begin`` to ``end``.

    Attributes:
        count: of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self._call = script_ops.EagerFunc.__call__

    def begin(self) -> None:
        lock = threading.Lock()

        def counted_call(function: Any, *args: Any) -> Any:
            with lock:
                self.count += 1
            return self._call(function, *args)

        script_ops.EagerFunc.__call__ = counted_call

    def end(self) -> None:
        script_ops.EagerFunc.__call__ = self._call

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which calls are counted."""
        self.begin()
        try:
            yield
        finally:
            self.end()


def count(job: Job, block: Block) -> None:
    """Count and time what a step costs the host."""
    arm, steps = block["arm"], block["steps"]
    own: dict[str, Any] = {"bucket_cap_mb": BUCKET_MB} if is_eager(arm) else {}
    trained = SmallSteps(arm, **own)
    job.barrier()
    first = time.process_time()
    trained.train()  # (traces)
    first = time.process_time() - first
    trained.train(STEPS)
    job.barrier()
    process, training = time.process_time(), time.thread_time()
    trained.train(steps)
    training, process = time.thread_time() - training, time.process_time() - process
    crossings = Crossings()
    with crossings.counting():
        trained.train(STEPS)
    if arm != PLAIN:
        trained.optimizer.drain()
        stop_engine(trained.optimizer)
    found = {"training_s": training, "cpu": process, "first_ms": 1e3 * first, "crossings": crossings.count / STEPS}
    found |= {"operators": trained.operators().total()}
    found |= {"buckets": len(trained.optimizer._async.replica.layout) if own else None}
    job.record(block, found)
