"""``fit()`` with a MonitorCallback: partial allreduce, then gossip whose ranks compare their waits; rank 1 is slow."""

from __future__ import annotations

import os
import time
from pathlib import Path

import keras
import numpy as np
from common import Baton, Report

import hvd_async.tensorflow.keras as hvd

SLOW, SECONDS = 1, 0.03


class Slow(keras.callbacks.Callback):
    """Begins each step of the slow rank a while after the others have begun theirs."""

    def __init__(self, name) -> None:
        super().__init__()
        self._name, self._steps = name, 0

    def on_train_batch_begin(self, batch, logs=None) -> None:
        self._steps += 1
        ready = [Baton(f"{self._name}.{self._steps}.{rank}") for rank in range(hvd.size())]
        ready[hvd.rank()].lay()
        if hvd.rank() == SLOW:
            for other in ready:
                other.wait()
            time.sleep(SECONDS)


def fit(name: str, optimizer, monitor, epochs: int) -> None:
    """Train a small model for this many epochs of 30 steps."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    x = np.random.default_rng(hvd.rank()).normal(size=(240, 4)).astype("float32")
    meets = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, x[:, :3], batch_size=8, epochs=epochs, verbose=0, callbacks=[meets, monitor, Slow(name)])


def main() -> None:
    """Both, with files of rank 0."""
    hvd.init()
    report, files = Report(hvd.rank()), Path(os.environ["HVD_ASYNC_TEST_OUT"])
    watched = hvd.MonitorCallback(every=10, window=10, prometheus=files / "keep.m.prom")
    fit("eager", hvd.EagerOptimizer(keras.optimizers.SGD(0.01), quorum="all"), watched, 2)
    compared = hvd.MonitorCallback(compare=True)
    fit("gossip", hvd.GossipOptimizer(keras.optimizers.SGD(0.01), algorithm="dpsgd", topology="ring"), compared, 3)
    report.put("fits", left=len(watched.monitors) + len(compared.monitors))
    hvd.shutdown()


if __name__ == "__main__":
    main()
