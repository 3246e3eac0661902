"""``GossipOptimizer`` for Keras under ``horovodrun``: every algorithm, ``fit()``, ends and ranks that are stuck."""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common import Report
from gossip_common import held, stuck, train
from gossip_table import COMPRESSED, FEW, HOSTS, ON_A_RING, UNEVEN

import hvd_async.tensorflow.keras as hvd
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import batch, least_squares

CASE = next(case for case in CASES if case.name == "nesterov")


class KerasTrainer:
    """One rank's."""

    wrapper = staticmethod(hvd.GossipOptimizer)

    def __init__(self, **options: Any) -> None:
        start = least_squares(1, CASE).start[0]
        self.variable = keras.Variable(start.astype(np.float32), name="w")
        plain = keras.optimizers.SGD(CASE.lr, momentum=CASE.momentum, nesterov=CASE.nesterov)
        self.optimizer = self.wrapper(plain, **options)
        self.optimizer.build([self.variable])

    def step(self, rank: int, step: int) -> None:
        inputs, targets = (tf.constant(part, tf.float32) for part in batch(rank, step))
        with tf.GradientTape() as tape:
            missed = tf.linalg.matvec(inputs, self.variable.value) - targets
            loss = 0.5 * tf.reduce_mean(missed**2)
        self.optimizer.apply([tape.gradient(loss, self.variable.value)], [self.variable])

    def weights(self) -> list[float]:
        values: list[float] = self.variable.numpy().astype(np.float64).tolist()
        return values


def fitted(report: Report, rank: int) -> None:
    """``fit()`` with batch norm, evaluation between epochs and peers that change, on each rank's own data."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6), keras.layers.BatchNormalization(),
                              keras.layers.Dense(1)])  # fmt: skip
    random = np.random.default_rng(rank)
    inputs = random.normal(size=(32, 8)).astype(np.float32)
    targets = inputs.sum(axis=1, keepdims=True)
    peers = {0: 1, 1: min(2, hvd.size() - 1)}
    optimizer = hvd.GossipOptimizer(keras.optimizers.Adam(0.05), algorithm="sgp", peers=peers, model=model)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(inputs, targets, batch_size=8, epochs=4, verbose=0, callbacks=callbacks).history["loss"]
    distance = optimizer.consensus_distance()
    optimizer.drain()
    ends = [float(np.abs(v.numpy().astype(np.float64)).sum()) for v in model.variables]
    report.put("fitted", history=history, distance=distance, ends=ends, steps=optimizer.stats().steps)


def main() -> None:
    """All cases, or a few."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", choices=("all", "few"), default="all")
    few = parser.parse_args().cases == "few"
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    report = Report(rank)
    for case in FEW if few else (*ON_A_RING, *(HOSTS if size == 4 else ()), *COMPRESSED, *UNEVEN):
        train(report, rank, case, KerasTrainer)
    fitted(report, rank)
    if not few:
        stuck(report, rank, size, KerasTrainer)
        held(report, rank, size, KerasTrainer)
    report.put("end")


if __name__ == "__main__":
    main()
