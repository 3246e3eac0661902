"""``MonitorCallback`` where a model has several optimizers: each has files and ports of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvd_async.tensorflow.keras import monitor
from hvd_async.tensorflow.keras.monitor import MonitorCallback


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
    monkeypatch.setattr(monitor, "Monitor", Made)
    monkeypatch.setattr(monitor, "our_optimizers", lambda model: model)
    monkeypatch.setattr(monitor, "size", lambda: 4)
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


def test_one_optimizer_has_those_that_were_named(made):
    begun(["adam"], prometheus="runs/m.prom", prometheus_port=9000)
    assert made.made[0].options == {"every": 3, "prometheus": "runs/m.prom", "prometheus_port": 9000}


def test_where_one_cannot_be_made_none_is_left(made, monkeypatch):
    monkeypatch.setattr(made, "taken", 9001)
    with pytest.raises(OSError, match="in use"):
        begun(["generator", "critic"], prometheus_port=9000)
    assert [one.closed for one in made.made] == [True]
