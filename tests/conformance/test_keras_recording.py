"""Keras: ``fit()`` is recorded step by step, without what lies between epochs; else it is refused."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from hvd_async.traces.format import read_trace
from tests.conformance.keras_ranks import compiled, data

STEPS = 4
LATE, PAUSE = 0.1, 0.2
"""Seconds, which are what is measured here: recordings have the times of a real clock."""


class Late(keras.callbacks.Callback):
    """Sleeps in each step of rank 1, and long after each epoch of all."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        time.sleep(LATE * self.rank)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        time.sleep(PAUSE)


class Breaks(keras.callbacks.Callback):
    """Raises at the end of the first epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise RuntimeError("broken")


def fit(opt: Any, rank: int, folder: Path, more: Sequence[Any] = (), **options: Any) -> keras.Model:
    """Train a model for two epochs, recorded; the first batch builds it."""
    layers = [keras.layers.Flatten(), keras.layers.Dense(3, kernel_initializer="zeros")]
    model = compiled(opt, keras.Sequential(layers), **options)
    callbacks = [hvd.RecordCallback(folder), Late(rank), *more]
    model.fit(*data(rank, STEPS), batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
    return model


def test_fit_is_recorded(tmp_path):
    def train(rank: int) -> int:
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(0.05), quorum="all")
        return sum(int(np.prod(v.shape)) for v in fit(opt, rank, tmp_path).trainable_variables)

    size, _ = Cluster(2).run(train)
    trace = read_trace(tmp_path, skip=1, least=1)
    assert (trace.ranks, trace.steps) == (2, 2 * STEPS - 1)
    assert {(header.framework, header.algorithm) for header in trace.headers} == {("keras", "eager")}
    assert trace.headers[0].options["quorum"] == "all"
    assert trace.headers[0].parameter_bytes == 4 * size
    assert trace.synchronous
    assert trace.work[:, 1].min() >= LATE
    assert trace.waits[:, 0].max() > LATE / 2  # it is no work of the rank that waits (a loaded machine may hide some)
    pause = trace.begin[STEPS - 1] - trace.done[STEPS - 2]  # it is in no step
    assert pause.min() >= PAUSE


def test_what_was_recorded_of_a_fit_that_raised_is_written(tmp_path):
    def train(rank: int) -> None:
        with contextlib.suppress(RuntimeError):
            fit(hvd.EagerOptimizer(keras.optimizers.SGD(0.05)), rank, tmp_path, [Breaks()])

    Cluster(1).run(train)
    gc.collect()  # (or the process's end)
    assert read_trace(tmp_path, skip=0, least=1).steps == STEPS


def test_what_cannot_be_recorded_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not say how long it waits"):
        fit(keras.optimizers.SGD(0.05), 0, tmp_path)

    def train(rank: int) -> None:
        with pytest.raises(ValueError, match="several steps at once"):
            fit(hvd.EagerOptimizer(keras.optimizers.SGD(0.05)), rank, tmp_path, steps_per_execution=2)

    Cluster(1).run(train)
