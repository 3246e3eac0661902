"""``bench.py scale``, in small: state machines, real connections with and without relays, simulated trainings."""

from __future__ import annotations

import csv
from typing import Any

import pytest
from matplotlib.figure import Figure

from scripts.benchmarks.cases import CASES
from scripts.benchmarks.support import connections, plot, simulated
from tests.conftest import LONG_RUN
from tests.unit.bench_jobs import options


def report_of(*parts: str, **more: Any) -> Any:
    return CASES["scale"].run(options(CASES["scale"], "--parts", *parts, **more), lambda _: None)


def test_machines_and_jobs_are_measured_judged_and_drawn():
    found = report_of("machines", "jobs", sizes=[8, 16], jobs=[8], arms="horovod,solo,adpsgd")
    assert {row["part"] for row in found.rows} == {"machines", "jobs"}
    assert {row["arm"] for row in found.rows if row["part"] == "jobs"} == {"horovod", "solo", "adpsgd"}
    assert all(row["value"] > 0 for row in found.rows)
    assert {"solo", "sgp", "adpsgd", "lsgd", "easgd"} <= {row["arm"] for row in found.rows if row["part"] == "machines"}
    assert any("s for all ends of 16 ranks" in goal.what for goal in found.goals)
    plot.draw(figure := Figure(layout="constrained"), CASES["scale"], found.rows)
    assert all(axes.has_data() for axes in figure.axes)
    assert "jobs" in found.text()


def test_simulations_are_judged_by_what_was_measured(monkeypatch, tmp_path):
    """(Of an ordinary run: one figure of each table.)"""
    with simulated.MEASURED.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = {}
        for row in reader:
            is_baseline = row["arm"] == simulated.TABLES[row["table"]].baseline
            if row["setting"] == rows.get((row["table"], not is_baseline), row)["setting"]:
                rows.setdefault((row["table"], is_baseline), row)
    with (tmp_path / "measured.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, reader.fieldnames or ())
        writer.writeheader()
        writer.writerows(rows.values())
    if not LONG_RUN:
        monkeypatch.setattr(simulated, "MEASURED", tmp_path / "measured.csv")
    (goal,) = report_of("tables").goals
    assert goal.exact
    assert goal.value.split(" of ")[0].isdecimal()


@pytest.mark.parametrize("relays", [False, True])
def test_real_connections_come_and_go(monkeypatch, relays):
    """The coordinator and relays in processes of their own; ranks that are connections, in two."""
    monkeypatch.setattr(connections, "SETTLE", 0.0)
    found = connections.measure(6, relays, per_host=2, rounds=2)
    assert found.relays == (2 if relays else 0)
    assert len(found.solo_ms) == len(found.all_ms) == len(found.cpu_ms) == 2
    assert all(0 < value < 10_000 for value in (*found.solo_ms, *found.all_ms))
    assert found.files > 0
