"""``MonitorCallback`` where a model has several optimizers: each has files and ports of its own."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import keras
import pytest

import hvd_async.tensorflow.keras as hvd
from hvd_async.tensorflow.keras import fit
from hvd_async.tensorflow.keras.fit import MonitorCallback
from hvd_async.testing import Cluster
from tests.conformance.keras_ranks import compiled, data


class Made:
    """A monitor that notes how it was made; the one at ``taken`` is not made, as its port is taken."""

    made: list[Made] = []  # noqa: RUF012
    taken: int | None = None

    def __init__(self, optimizer: Any, **options: Any) -> None:
        if options.get("prometheus_port") == self.taken and self.taken is not None:
            raise OSError("Address already in use")
        self.options, self.closed = options, False
        Made.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def made(monkeypatch) -> type[Made]:
    monkeypatch.setattr(Made, "made", [])
    monkeypatch.setattr(fit, "_OPEN", fit._Open())
    monkeypatch.setattr(fit, "Monitor", Made)
    monkeypatch.setattr(fit, "our_optimizers", lambda model: model)
    monkeypatch.setattr(fit, "size", lambda: 4)
    return Made


def begun(optimizers: list[str], **options: Any) -> MonitorCallback:
    callback = MonitorCallback(every=3, **options)
    callback._model = optimizers
    callback.on_train_batch_begin(0)
    return callback


def test_several_optimizers_have_files_and_ports_of_their_own(made):
    begun(["generator", "critic"], prometheus="runs/m.prom", prometheus_port=9000, all_ranks=True)
    found = [(one.options["name"], one.options["prometheus"], one.options["prometheus_port"]) for one in made.made]
    assert found == [("0", Path("runs/m.0.prom"), 9000), ("1", Path("runs/m.1.prom"), 9004)]


def test_where_one_cannot_be_made_none_is_left(made, monkeypatch):
    monkeypatch.setattr(made, "taken", 9001)
    with pytest.raises(OSError, match="in use"):
        begun(["generator", "critic"], prometheus_port=9000)
    assert [one.closed for one in made.made] == [True]


def test_a_fit_around_another_one_opens_its_own_again(made):
    outer = begun(["adam"])
    inner = MonitorCallback()
    inner.on_train_begin()
    inner.on_train_end()
    outer.on_train_batch_begin(1)
    assert [one.closed for one in made.made] == [True, False]
    outer.on_train_end()
    assert made.made[1].closed


class Breaks(keras.callbacks.Callback):
    """Raises in the third batch."""

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        if step == 2:
            raise RuntimeError("broken")


def test_a_port_is_free_for_the_fit_after_one_that_raised(monkeypatch):
    monkeypatch.undo()  # (with real monitors)
    with socket.socket() as one:
        one.bind(("", 0))
        port = one.getsockname()[1]

    def train(rank: int) -> list[str]:
        errors = []
        for others in ([Breaks()], []):
            model = compiled(hvd.EagerOptimizer(keras.optimizers.SGD(0.05)))
            callbacks = [MonitorCallback(prometheus_port=port), *others]
            try:
                model.fit(*data(rank, 4), batch_size=4, verbose=0, callbacks=callbacks)
            except RuntimeError as error:
                errors.append(str(error))
        return errors

    assert Cluster(1).run(train) == [["broken"]]
