"""HOROVOD_TIMELINE: our rounds and Horovod's events in one file, on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch import RunJob

pytestmark = pytest.mark.multiproc

PROCESS = "hvd_async rounds"


def traced(forked: RunJob, file: Path, end: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The timeline's events, and what rank 0 reports."""
    job = forked("torch", "timeline.py", 2, args=("--end", end), env={"HOROVOD_TIMELINE": str(file)})
    return json.loads(file.read_text()), job.check().case("training")[0]


@pytest.mark.parametrize("end", ["shutdown", "exit"])
def test_every_round_is_in_horovods_timeline_where_it_took_place(forked: RunJob, tmp_path: Path, end: str) -> None:
    events, report = traced(forked, tmp_path / "timeline.json", end)
    names = {e["pid"]: e["args"].get("name", "") for e in events if e.get("name") == "process_name"}
    (own,) = (pid for pid, name in names.items() if name == PROCESS)
    rows = {e["tid"]: e["args"]["name"] for e in events if e["pid"] == own and e["name"] == "thread_name"}
    began_us = next(e["args"] for e in events if e["pid"] == 0)["start_time_since_epoch_in_micros"]
    assert report["rounds"] >= 12
    for bucket in (0, 1):
        ours = [e for e in events if e["pid"] == own and e["ph"] == "X" and rows[e["tid"]].split(" (")[0]
                == f"bucket {bucket}"]  # fmt: skip
        rounds = [e for e in ours if e["name"].startswith("round ")]
        assert sorted(int(e["name"].split()[1]) for e in rounds) == list(range(1, report["rounds"] + 1))
        assert {e["args"]["arrived"] for e in rounds} == {2}
        assert all(e["args"]["staleness_rank0"] == [0] for e in rounds)
        assert all("2 of 2" in e["args"]["reason"] for e in rounds)
        # On Horovod's clock: after training began and before it ended, by the time of day.
        assert all(began_us + e["ts"] > 1e6 * report["began"] - 1e4 for e in rounds)
        assert all(began_us + e["ts"] + e["dur"] < 1e6 * report["ended"] + 1e4 for e in rounds)
        # And around what Horovod did for the same tensor.
        collectives = sorted((e["ts"], e["ts"] + e["dur"]) for e in ours if e["name"] == "collective")
        theirs = sorted(
            e["ts"]
            for e in events
            if f"eager.0.{bucket}." in names.get(e["pid"], "") and e.get("name") == "GLOO_ALLREDUCE"
        )
        assert 6 <= len(theirs) <= len(collectives) == report["rounds"]
        inside = sum(start <= at <= stop for (start, stop), at in zip(collectives, theirs, strict=False))
        assert inside == len(theirs)
