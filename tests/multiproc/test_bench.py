"""The benchmarks' timed job under ``horovodrun``, in small: arms of each family in one job."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from launch import ForkServer, forking

from scripts.benchmarks.support import launch
from scripts.benchmarks.support.arms import MUTANT

pytestmark = pytest.mark.multiproc
ARMS = ("horovod", "ddp", "solo", MUTANT, "sgp", "lsgd")
STEPS = 6


def test_arms_of_each_family_are_timed_in_one_job(
    server: Callable[[str], ForkServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All take their steps, one arm after the other, and the ranks end with the same weights."""
    monkeypatch.setattr(launch.subprocess, "Popen", forking(subprocess.Popen, server("torch")))
    times = [[0.0, 0.05]] * STEPS
    how = {"steps": STEPS, "times": times, "exact": True, "scored": True, "lr": 0.05}
    task = {"name": "images", "data": "digits", "model": "plain", "batch": 16}
    blocks = [launch.block_of(arm, 0, task, **how) for arm in ARMS]
    found = launch.run("timed", 2, {"blocks": blocks}, limit=240.0)
    assert [block["arm"] for block in found] == list(ARMS)
    for block in found:
        first, last = block["by_rank"]
        assert len(first["ends"]) == len(last["ends"]) == STEPS
        assert last["ends"][-1] >= 0.05 * STEPS
        assert first["identical"]
        assert last["identical"]
        assert 0 < first["accuracy"] <= 1
        assert bool(first["stats"]) == (block["arm"] not in ("horovod", "ddp"))
    by_arm = {block["arm"]: block["by_rank"][0]["stats"] for block in found}
    assert by_arm["solo"]["rounds"] >= STEPS - 1
    assert by_arm["lsgd"]["steps"] == by_arm["sgp"]["steps"] == STEPS
