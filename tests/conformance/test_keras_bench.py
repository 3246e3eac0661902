"""The LSTM that the benchmark ``lengths`` trains under TensorFlow, and the Keras job of ``advice``."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from hvd_async.traces.format import read_trace
from scripts.benchmarks.jobs import timed_keras
from tests.conformance import keras_ranks  # noqa: F401  before anything has run in TensorFlow

STEPS = 8


ALGORITHMS = {"all": "eager", "majority": "eager", "adpsgd": "adpsgd"}


def alike(made):
    """Have models the same weights: here ranks are threads, which share the random numbers of one seed."""

    def made_alike(task):
        model, samples = made(task)
        model.set_weights([np.full_like(weights, 0.01) for weights in model.get_weights()])
        return model, samples

    return made_alike


@pytest.mark.parametrize("arm", ALGORITHMS)
def test_the_recorded_job_sleeps_as_its_schedule_says(monkeypatch, tmp_path, arm):
    """Each rank's sleep is its work in the trace, warm-up and compilation are in no step of it, and all end alike."""
    monkeypatch.setattr(hvd.callbacks, "broadcast_variables", lambda *_, **__: None)  # needs Horovod
    monkeypatch.setattr(timed_keras, "stop_engine", lambda optimizer: optimizer.drain())
    monkeypatch.setattr(timed_keras, "identical", lambda job, model: True)
    monkeypatch.setattr(timed_keras, "made", alike(timed_keras.made))
    times, together = [[0.01, 0.04]] * STEPS, threading.Barrier(2, timeout=60)

    def train(rank):
        own = []
        record = lambda block, found: own.append(found)  # noqa: E731
        job = SimpleNamespace(rank=rank, barrier=together.wait, record=record)
        block = {"arm": arm, "fit": True, "task": {"name": "small"}, "times": times, "trace": str(tmp_path)}
        timed_keras.run_block(job, block)
        return own[0]["ends"][-1]

    seconds = Cluster(2).run(train)
    trace = read_trace(tmp_path, skip=0, least=1)
    assert trace.steps == STEPS
    assert [header.algorithm for header in trace.headers] == [ALGORITHMS[arm]] * 2
    assert trace.headers[0].parameter_bytes == 4 * (64 * 64 + 64 + 64 * 10 + 10)
    assert np.all(trace.work >= times)
    assert trace.work[1:, 0].mean() < trace.work[1:, 1].mean(), "waiting is no work"
    assert seconds[1] >= 0.04 * STEPS
    assert seconds == pytest.approx((trace.done[-1] - trace.begin[0]).tolist(), abs=0.5)


def test_the_job_on_slow_links_has_as_many_megabytes_as_its_plan_says():
    model, samples = timed_keras.made({"name": "network", "megabytes": 2.0})
    assert 4 * model.count_params() == pytest.approx(2e6, rel=0.01)
    assert samples == 1
