"""The Keras job of ``advice``: ``fit()`` with every rank asleep before each step for as long as a schedule says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.simulation.network import CLASSES, INPUTS, widths
from hvd_async.testing import stop_engine

from ..support.arms import WARM_UP
from .shared.keras_arm import identical, wrapped
from .shared.rank import Block, Job


class Scheduled(keras.callbacks.Callback):
    """Sleeps before each step: what lies between two steps of ``fit()`` is computation to ``RecordCallback``.

    Args:
        job: this rank, which begins together with the others.
        times: seconds to sleep, by step.
        barrier: whether the ranks begin each step together.

    Attributes:
        elapsed: seconds of all steps; 0 before the last one has ended.
    """

    def __init__(self, job: Job, times: Sequence[float], barrier: bool = False) -> None:
        super().__init__()
        self._job, self._times, self._barrier = job, times, barrier
        self._started = self.elapsed = 0.0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sleep."""
        if batch == 0 or self._barrier:
            self._job.barrier()
        if batch == 0:
            self._started = time.perf_counter()
        time.sleep(self._times[batch])

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Look at the clock after the last step: before ``fit()`` drains, which was not done at the speed measured."""
        if batch == len(self._times) - 1:
            self.elapsed = time.perf_counter() - self._started


def made(plan: dict[str, Any]) -> tuple[Any, int]:
    """Return the plan's model, and the samples of a batch for it."""
    big = plan["model"] == "network"
    inputs, *hidden, classes = widths(plan["megabytes"]) if big else (INPUTS, 64, CLASSES)
    dense = keras.layers.Dense
    layers = [keras.Input((inputs,)), *(dense(units, activation="relu") for units in hidden), dense(classes)]
    return keras.Sequential(layers), 1 if big else 8


def run_block(job: Job, block: Block) -> None:
    """One arm through one schedule."""
    keras.utils.set_random_seed(0)
    model, samples = made(job.plan)
    own = {"seed": block["seed"]} if block["arm"] == "majority" else {}
    optimizer = wrapped(block["arm"], keras.optimizers.SGD(0.001), model, **own)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    batch = tf.random.normal([samples, INPUTS]), tf.zeros([samples, CLASSES])

    def fit(steps: int, *callbacks: Any) -> None:
        meeting = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        data = tf.data.Dataset.from_tensors(batch).repeat(steps)
        model.fit(data, shuffle=False, verbose=0, callbacks=[meeting, *callbacks])

    fit(WARM_UP)  # compiles the step, too: the next fit() takes the same one
    timed = Scheduled(job, [row[job.rank] for row in block["times"]], block["barrier"])
    fit(len(block["times"]), timed, *([hvd.RecordCallback(block["trace"])] if "trace" in block else []))
    same = identical(job, model)
    stop_engine(optimizer)
    job.record(block, {"elapsed": timed.elapsed, "identical": same})
