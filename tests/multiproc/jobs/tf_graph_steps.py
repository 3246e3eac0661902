"""``fit()`` under ``quorum="all"``, whose gradients Horovod's ops sum in the graph, and the same without a graph's ops.

``--killed RANK``: that rank dies in its fourth step instead.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as horovod
import keras
import numpy as np
import tensorflow as tf
from common import Report
from tf_common import crc, mlp, state, values

import hvd_async.tensorflow.keras as hvd

BATCH = 4
BATCHES = (6, 4, 5)
"""Number of batches of each rank."""
ONE_NAN = 2
"""Number of the batch in which rank 1 has no gradient."""
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data(rank: int, batches: int) -> tuple[Any, Any]:
    """Return a rank's inputs and labels."""
    random = np.random.default_rng(rank)
    inputs = random.normal(size=(batches * BATCH, 8)).astype(np.float32)
    return inputs, random.integers(0, 4, batches * BATCH)


def shared(optimizer: Any) -> list[Any]:
    """Return the optimizer's variables without those of a loss scale, which is each rank's own."""
    return state(getattr(optimizer, "inner_optimizer", optimizer))


class Batches(keras.callbacks.Callback):
    """Callback that changes the learning rate in each batch, drains after the second, and keeps checksums.

    Args:
        rate: learning rate by batch.
        at_batch: called with the number of each batch before it.
    """

    def __init__(self, rate: Callable[[int], float], at_batch: Callable[[int], None] = lambda _: None) -> None:
        super().__init__()
        self._rate, self._at_batch = rate, at_batch
        self.history: list[tuple[int, int]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = self._rate(batch)
        self._at_batch(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        if batch == 1:
            optimizer.drain()
        self.history.append((optimizer.rounds, crc([*self.model.variables, *shared(optimizer)])))


def fitted(
    plain: Any, rate: Callable[[int], float], at_batch: Callable[[int], None] = lambda _: None, **options: Any
) -> dict[str, Any]:
    """Train a model on this rank's batches; return its end and what its optimizer counted."""
    model, rank = mlp(seed=5), hvd.rank()
    optimizer = hvd.EagerOptimizer(plain, quorum="all", bucket_cap_mb=1e-9, **options)
    model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False)
    inputs, labels = data(rank, BATCHES[rank])
    if rank == 1:
        inputs[ONE_NAN * BATCH] = np.nan
    watch = Batches(rate, at_batch)
    model.fit(inputs, labels, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[watch])
    optimizer.drain()
    stats = optimizer.stats()
    return {
        "batches": BATCHES[rank],
        "weights": np.concatenate([array.ravel() for array in values(model.trainable_variables)]).tolist(),
        "history": watch.history,
        "end": crc([*model.variables, *shared(optimizer)]),
        "in_graph": optimizer._async.worker._in_flight._promised,
        "rounds": stats.rounds_applied,
        "produced": stats.total_produced,
        "applied": stats.gradients_applied,
        "skipped": stats.gradients_skipped,
        "staleness": stats.staleness,
    }


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=1e-3)


def equal_rates(batch: int) -> float:
    return 0.1 * 0.9**batch


def with_horovods_tape(report: Report) -> None:
    """Train on equal numbers of batches with Horovod's own tape, and with ours."""
    model, plain = mlp(seed=5), keras.optimizers.SGD(0.1, momentum=0.9)
    ours, wrapped = mlp(seed=5), hvd.EagerOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), quorum="all")
    inputs, labels = data(hvd.rank(), 4)
    ours.compile(optimizer=wrapped, loss=LOSS, jit_compile=False)
    ours.fit(inputs, labels, batch_size=BATCH, shuffle=False, verbose=0)
    for start in range(0, len(inputs), BATCH):
        with horovod.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = LOSS(labels[start : start + BATCH], model(inputs[start : start + BATCH], training=True))
        plain.apply(tape.gradient(loss, [v.value for v in model.trainable_variables]), model.trainable_variables)
    wrapped.drain()
    pairs = zip(values(ours.trainable_variables), values(model.trainable_variables), strict=True)
    report.put("horovod", difference=max(float(np.abs(a - b).max()) for a, b in pairs))


def killed(victim: int, report: Report) -> None:
    """Train until a rank dies, and report the errors of ``fit()`` and of the next call."""

    def at_batch(batch: int) -> None:
        if batch == 3 and hvd.rank() == victim:
            report.put("death")
            os.kill(os.getpid(), signal.SIGKILL)

    errors = []
    model = mlp(seed=5)
    optimizer = hvd.EagerOptimizer(sgd(), quorum="all", bucket_cap_mb=1e-9)
    model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False)
    inputs, labels = data(hvd.rank(), 100)
    for call in (
        lambda: model.fit(
            inputs, labels, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[Batches(equal_rates, at_batch)]
        ),
        optimizer.drain,
    ):
        try:
            call()
        except Exception as error:  # noqa: BLE001  any: the test looks at it
            errors.append([type(error).__name__, str(error)])
    report.put("errors", errors=errors)
    raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--killed", type=int)
    options = parser.parse_args()
    hvd.init()
    report = Report(hvd.rank())
    if options.killed is not None:
        killed(options.killed, report)
    report.put("graph", **fitted(sgd(), equal_rates))
    report.put("own rates", **fitted(sgd(), lambda batch: equal_rates(batch) * (1 + hvd.rank())))
    report.put("fp16", **fitted(sgd(), equal_rates, compression=hvd.Compression.fp16))
    report.put("bf16", **fitted(sgd(), equal_rates, compression=hvd.Compression.bf16))
    report.put("loss scale", **fitted(keras.optimizers.LossScaleOptimizer(sgd()), equal_rates))
    with_horovods_tape(report)
    os.environ["HVD_ASYNC_CONFIRM"] = "1"
    report.put("confirmed", **fitted(sgd(), equal_rates))
    hvd.shutdown()
    report.put("end")


if __name__ == "__main__":
    main()
