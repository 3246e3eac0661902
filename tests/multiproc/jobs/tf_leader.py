"""``LeaderOptimizer`` for Keras under ``horovodrun``: both algorithms, ``fit()``, a rank that sleeps, errors."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_gossip
from common import Report
from leader_common import asleep, refused, resumed, train
from leader_table import cases

import hvd_async.tensorflow.keras as hvd


class KerasTrainer(tf_gossip.KerasTrainer):
    """One rank's, which tells its losses."""

    wrapper = staticmethod(hvd.LeaderOptimizer)

    def __init__(self, told: Callable[..., float | None], **options: Any) -> None:
        super().__init__(**options)
        self._told = told

    def step(self, rank: int, step: int) -> None:
        loss = self._told(np.array(self.weights()), rank, step)
        if loss is not None:
            self.optimizer.record_loss(tf.constant(loss, tf.float64))
        super().step(rank, step)


def state(trainer: Any) -> Any:
    """What a script would save."""
    return trainer.variable.numpy().copy(), trainer.optimizer.get_state()


def load(trainer: KerasTrainer, saved: Any) -> None:
    """Take it up again."""
    trainer.variable.assign(saved[0])
    trainer.optimizer.set_state(saved[1])


def fitted(report: Report, rank: int, algorithm: str) -> None:
    """``fit()`` with batch norm and evaluation between epochs, on each rank's own data; losses find their way."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6), keras.layers.BatchNormalization(),
                              keras.layers.Dense(1)])  # fmt: skip
    random = np.random.default_rng(rank)
    inputs = random.normal(size=(64, 8)).astype(np.float32)
    targets = inputs.sum(axis=1, keepdims=True)
    optimizer = hvd.LeaderOptimizer(keras.optimizers.Adam(0.05), algorithm=algorithm, global_period=4, model=model)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(
        inputs, targets, batch_size=8, epochs=4, verbose=0, callbacks=callbacks, validation_data=(inputs, targets)
    ).history
    ends = [float(np.abs(v.numpy().astype(np.float64)).sum()) for v in model.variables]
    stats = optimizer.stats()
    report.put(f"fitted {algorithm}", loss=history["loss"], val=history["val_loss"], ends=ends, steps=stats.steps,
               pulls=stats.pulls, mean_loss=stats.mean_loss)  # fmt: skip


def main() -> None:
    """All cases, or a few."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", choices=("all", "few"), default="all")
    few = parser.parse_args().cases == "few"
    pairs = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])]  # (known before the job starts: nothing has to be made)
    hvd.init(process_sets=None if few else pairs)
    rank, size = hvd.rank(), hvd.size()
    report = Report(rank)
    for name, following in cases(size).items():
        train(report, rank, name, following, KerasTrainer)
    for algorithm in ("lsgd", "easgd"):
        fitted(report, rank, algorithm)
    if not few:
        asleep(report, rank, size, KerasTrainer)
        resumed(report, rank, KerasTrainer, state, load)
        refused(report, rank, size, KerasTrainer)
    report.put("end")


if __name__ == "__main__":
    main()
