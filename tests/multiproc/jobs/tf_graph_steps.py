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
from common import Report, raised
from tf_common import Observer, compiled, crc, mlp, state, values

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


def made(plain: Any, **options: Any) -> Any:
    """A model, and its optimizer with a bucket for each variable."""
    return compiled(mlp(seed=5), hvd.EagerOptimizer(plain, quorum="all", bucket_cap_mb=1e-9, **options))


def fit(
    model: Any, batches: tuple[Any, Any], rate: Callable[[int], float], before: Callable[[int], None] = lambda _: None
) -> list[tuple[int, int]]:
    """Train, with a drain before the third batch; return what an observer has seen."""

    def drain_once(batch: int) -> None:
        if batch == 2:
            model.optimizer.drain()
        before(batch)

    observer = Observer(rate, drain_once)
    model.fit(*batches, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[observer])
    return observer.history


def fitted(plain: Any, rate: Callable[[int], float], **options: Any) -> dict[str, Any]:
    """Train a model on this rank's batches; return its end and what its optimizer counted."""
    model, rank = made(plain, **options), hvd.rank()
    inputs, labels = data(rank, BATCHES[rank])
    if rank == 1:
        inputs[ONE_NAN * BATCH] = np.nan
    history, optimizer = fit(model, (inputs, labels), rate), model.optimizer
    optimizer.drain()
    stats = optimizer.stats()
    return {
        "batches": BATCHES[rank],
        "weights": np.concatenate([array.ravel() for array in values(model.trainable_variables)]).tolist(),
        "history": history,
        "end": crc([*model.variables, *state(optimizer)]),
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
    wrapped = hvd.EagerOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), quorum="all")
    ours = compiled(mlp(seed=5), wrapped)
    inputs, labels = data(hvd.rank(), 4)
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

    def die(batch: int) -> None:
        if batch == 3 and hvd.rank() == victim:
            report.put("death")
            os.kill(os.getpid(), signal.SIGKILL)

    model = made(sgd())
    calls = (lambda: fit(model, data(hvd.rank(), 100), equal_rates, die), model.optimizer.drain)
    report.put("errors", errors=[raised(call) for call in calls])
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
