"""Keras: callbacks on metrics that are no single number, on learning rates that cannot be set, in one fit() after
another; and Keras on another backend."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow as hvd_tensorflow
import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.elastic_board import Board, Exchange, keras_callbacks_over_a_board
from tests.conformance.keras_ranks import batch, compiled
from tests.conformance.torch_ranks import ProcessSet

SGD = keras.optimizers.SGD
pytestmark = pytest.mark.usefixtures("rank_of_two")


def one_epoch(monkeypatch: pytest.MonkeyPatch, logs: list[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """Return each rank's logs after the callback; ranks are threads."""
    monkeypatch.setattr(Exchange, "board", Board(len(logs)), raising=False)
    keras_callbacks_over_a_board(monkeypatch)

    def end(rank: int) -> dict[str, Any] | None:
        callback = hvd.callbacks.MetricAverageCallback()
        callback.set_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
        callback.on_epoch_begin(0)
        callback.on_epoch_end(0, logs[rank])
        return logs[rank]

    return Cluster(len(logs)).run(end)


def test_metrics_are_averaged_element_by_element_and_what_is_not_a_number_stays(monkeypatch):
    numbers = {
        "loss": (1.0, 2.0, 1.5),
        "count": (3, 4, 3.5),
        "f1": (np.array([0.0, 1.0], np.float32), np.array([1.0, 1.0], np.float32), [0.5, 1.0]),
        "tensor": (tf.constant([1.0, 3.0]), tf.constant([3.0, 5.0]), [2.0, 4.0]),
        "some": (4.0, None, 4.0),
    }
    others = [
        {"best": True, "note": "rank 0", "nothing": None, "shapes": np.ones(2), "first": "only here"},
        {"best": False, "note": "rank 1", "nothing": None, "shapes": np.ones(3)},
    ]
    one = {name: values[0] for name, values in numbers.items()} | others[0] | {"nested": {"a": 1.0, "b": [0.0, "x"]}}
    other = {name: values[1] for name, values in numbers.items()} | others[1] | {"nested": {"a": 2.0, "b": [1.0, "y"]}}
    *ends, nobodys = one_epoch(monkeypatch, [one, other | {"second": 7.0}, {}, None])
    assert nobodys is None
    for own, kept, end in zip(("x", "y", None), [*others, {}], ends, strict=True):
        means = {name: mean for name, (*_, mean) in numbers.items()}
        np.testing.assert_equal(end, means | kept | {"nested": {"a": 1.5, "b": [0.5, own]}, "second": 7.0})


@pytest.mark.parametrize(
    "callback",
    [
        lambda: hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2),
        lambda: hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1, multiplier=0.5),
    ],
)
def test_a_rate_that_is_a_schedule_is_refused_before_the_first_batch(callback):
    with scripted_engine(1):
        model = compiled(SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)))
        with pytest.raises(ValueError, match=r"must be a number, got a schedule.*warmup_steps="):
            model.fit(*batch(0, 0), verbose=0, callbacks=[callback()])
        assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("later", [False, True])
def test_the_best_model_is_saved(tmp_path, later):
    path = tmp_path / "best.keras"
    callback = hvd.callbacks.BestModelCheckpoint("loss", **({} if later else {"filepath": path}))
    if later:
        callback.filepath = str(path)
    with scripted_engine(1):
        model = compiled(SGD(0.0))
        model.fit(*batch(0, 0), verbose=0, callbacks=[callback])
    saved = keras.models.load_model(path)
    np.testing.assert_array_equal(saved.get_weights()[0], model.get_weights()[0])


def test_a_best_model_without_a_path_is_refused_with_a_hint():
    with scripted_engine(1), pytest.raises(ValueError, match="Pass filepath="):
        compiled(SGD(0.1)).fit(*batch(0, 0), verbose=0, callbacks=[hvd.callbacks.BestModelCheckpoint()])


def test_variables_are_broadcast_by_one_graph_for_models_alike(monkeypatch, caplog):
    """TensorFlow warned of a new graph in each of five fits of one model; of five models it says nothing either."""
    traced: list[str] = []

    def broadcast(tensor: Any, root_rank: int, name: str, process_set: Any) -> Any:
        traced.append(name)
        return tensor + tf.cast(root_rank, tensor.dtype)

    monkeypatch.setattr("horovod.tensorflow.broadcast", broadcast)
    monkeypatch.setattr("hvd_async.tensorflow.functions.allgather_object", lambda own, **_: [own, own])
    together = ProcessSet(0, 1)
    with caplog.at_level(logging.WARNING, logger="tensorflow"):
        for number in range(12):
            variables = [keras.Variable([0.0] * (1 + number // 6)), tf.Variable(number)]
            hvd_tensorflow.broadcast_variables(variables, root_rank=2, process_set=together)
            assert variables[0].numpy().tolist() == [2.0] * (1 + number // 6)
            assert int(variables[1]) == number + 2
        assert len(traced) == 2 * 2, "a graph for each of two shapes"
        for size in range(5, 12):
            hvd_tensorflow.broadcast_variables([tf.Variable([0.0] * size)], root_rank=1, process_set=together)
    assert not [record for record in caplog.records if "retracing" in record.getMessage()]


BACKEND = """
import keras, hvd_async, hvd_async.tensorflow
def message(call):
    try:
        call()
    except (ImportError, ValueError) as error:
        return f"{type(error).__name__} {error}"
wrappers = [hvd_async.EagerOptimizer, hvd_async.GossipOptimizer, hvd_async.LeaderOptimizer]
errors = [message(lambda: wrapper(keras.optimizers.SGD(0.1))) for wrapper in wrappers]
errors.append(message(lambda: __import__("hvd_async.tensorflow.keras")))
print("errors:", *errors, sep="\\n")
"""


def test_keras_on_another_backend_is_refused_on_import_and_by_wrappers():
    run = subprocess.run(
        [sys.executable, "-c", BACKEND],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    reported = run.stdout.partition("errors:\n")[2].splitlines()
    assert [line.split()[0] for line in reported] == ["ValueError"] * 3 + ["ImportError"], run.stderr
    assert all("got 'torch'. Set KERAS_BACKEND=tensorflow" in line for line in reported)
