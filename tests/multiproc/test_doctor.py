"""``hvd_async doctor`` as users call it, with real Horovod jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import REPOSITORY, ForkServer, RunJob, forking

from hvd_async.cli.main import main
from hvd_async.doctor import programs
from hvd_async.doctor.findings import Verdict
from hvd_async.doctor.programs import Outcome, launch_command, run_job
from hvd_async.doctor.software import judge_training
from tests.conftest import LONG_RUN

pytestmark = pytest.mark.multiproc


@pytest.mark.skipif(not LONG_RUN, reason="launchers' jobs are tried in a long run: HVD_ASYNC_TEST_LONG=1")
@pytest.mark.parametrize(("framework", "transport"), [("torch", "torch"), ("tensorflow", "gloo"), ("torch", "mpi")])
def test_the_self_test_passes(framework: str, transport: str) -> None:
    outcome = run_job(launch_command(transport, 2, ["train", framework]), 120.0)
    found = judge_training(framework, outcome, 120.0, transport)
    assert found.verdict is Verdict.OK, found.values.get("output", found.fact)
    assert found.values["rounds"] >= 20


def test_torch_trains_over_gloo_too(forked: RunJob) -> None:
    job = forked("torch", programs.__file__, 2, args=("train", "torch"))
    found = judge_training("torch", Outcome(job.returncode, job.output, job.seconds), 120.0, "gloo")
    assert found.verdict is Verdict.OK, found.values.get("output", found.fact)
    assert found.values["rounds"] >= 20


def test_the_command_measures_between_hosts_that_are_named(
    server: Callable[[str], ForkServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "network.json"
    monkeypatch.setattr(programs.subprocess, "Popen", forking(subprocess.Popen, server("torch alone")))
    assert main(["doctor", "--hosts", "localhost:2", "--network", str(file)]) == 0
    assert "localhost[0] -> localhost[1]" in capsys.readouterr().out
    value = json.loads(file.read_text())
    assert value["ranks"] == 2
    assert value["latency_s"] > 0
    assert value["bandwidth_bytes_s"] > 0


def test_ranks_measure_over_tensorflow_too(forked: RunJob) -> None:
    job = forked("tensorflow", "network.py", 2).check()
    first, second = (case["measured"] for case in job.case("network"))
    assert first == second
    assert first["framework"].startswith("tensorflow")
    assert len(first["links"]) == 2


@pytest.mark.skipif(not LONG_RUN, reason="virtual clusters are tried in a long run: HVD_ASYNC_TEST_LONG=1")
@pytest.mark.usefixtures("namespaces")
def test_a_link_of_200_megabits_is_found_to_be_one(tmp_path: Path) -> None:
    file = tmp_path / "network.json"
    cluster = [sys.executable, "scripts/virtual_cluster.py", "--hosts", "2", "--mbit", "200", "--"]
    command = [*cluster, sys.executable, "-m", "hvd_async", "doctor", "--network", str(file)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    value = json.loads(file.read_text())
    assert len(value["hosts"]) == 2
    for link in value["links"]:
        assert 170 <= 8e-6 * link["bandwidth_bytes_s"] <= 205
    assert 8e-6 * value["allreduce"][-1]["bandwidth_bytes_s"] <= 205
