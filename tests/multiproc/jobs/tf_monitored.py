"""``fit()`` by gossip with a MonitorCallback: ranks compare their waits; rank 1 is slow."""

from __future__ import annotations

import keras
import numpy as np
from common import Report, begin_last

import hvd_async.tensorflow.keras as hvd

SLOW, SECONDS = 1, 0.03


def main() -> None:
    """Train a small model for three epochs of 30 steps."""
    hvd.init()
    x = np.random.default_rng(hvd.rank()).normal(size=(240, 4)).astype("float32")
    steps = iter(range(90))
    late = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs=None: begin_last(
            str(next(steps)), hvd.rank(), hvd.size(), SLOW, SECONDS
        )
    )
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    optimizer = hvd.GossipOptimizer(keras.optimizers.SGD(0.01), algorithm="dpsgd", topology="ring")
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    monitor = hvd.MonitorCallback(compare=True)
    meets = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, x[:, :3], batch_size=8, epochs=3, verbose=0, callbacks=[meets, monitor, late])
    Report(hvd.rank()).put("fit", left=len(monitor.monitors))
    hvd.shutdown()


if __name__ == "__main__":
    main()
