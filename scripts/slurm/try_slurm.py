"""Jobs of train.sbatch on a real SLURM: see try.sh. Two nodes, with ranks that are stopped and continue."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cluster import Slurm, missing, slurm, until

SCRIPT = Path(__file__).resolve().parent / "train.sbatch"
QUICK = ("--model", "small", "--threads", "1", "--optimizer", "adam", "--lr", "0.003")
"""An epoch is 45 steps on each of two ranks."""
LIMIT = 180.0
"""Seconds that a job may take, requeued or not."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")

WHY_NOT = missing()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.timeout(2 * LIMIT),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    """A SLURM of two nodes; also a run that is ended by SIGTERM leaves nothing of it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with slurm(nodes=2) as up:
            own = {"HVD_ASYNC_VENV": sys.prefix, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            up.env.update(own)
            yield up
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class Submitted:
    """A job of train.sbatch, in a folder of its own.

    Attributes:
        up: the SLURM that it is a job of.
        folder: where its output and its summary are.
        number: the job's.
    """

    up: Slurm
    folder: Path
    number: str

    @property
    def output(self) -> str:
        """Its output so far."""
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def field(self, name: str) -> str:
        """One of its fields in SLURM, such as JobState."""
        found = re.search(rf"\b{name}=(\S*)", self.up.do("scontrol", "show", "job", self.number))
        assert found, name
        return found[1]

    def wait_for(self, text: str) -> None:
        """Until its output has the text."""
        until(lambda: text in self.output or self.field("JobState") in ENDED, f"no {text!r} in {self.output}", LIMIT)
        assert text in self.output, self.output

    def end(self, restarts: int = 0) -> dict[str, Any]:
        """Wait for its good end; its summary."""
        until(lambda: self.field("JobState") in ENDED, f"it has not ended:\n{self.output}", LIMIT)
        assert self.field("JobState") == "COMPLETED", self.output
        assert self.field("Restarts") == str(restarts), self.output
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        assert summary["replicas_identical"]
        return summary


def submit(up: Slurm, folder: Path, *line: str, env: dict[str, str] | None = None, tasks: int = 1) -> Submitted:
    """Submit a job of two nodes.

    Args:
        line: flags of the script and the runner.
        env: added to the job's environment.
        tasks: on each node.
    """
    given = "ALL" + "".join(f",{name}={value}" for name, value in (env or {}).items())
    options = (f"--chdir={folder}", "--output=output", "--nodes=2", f"--ntasks-per-node={tasks}", f"--export={given}")
    summary = ("--summary", str(folder / "summary.json"))
    said = up.do("sbatch", "--parsable", *options, str(SCRIPT), *QUICK, *summary, *line)
    return Submitted(up, folder, said.strip())


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_few_steps_of_two_nodes(cluster: Slurm, tmp_path: Path, framework: str) -> None:
    """Gloo and nothing but srun; no ssh is there."""
    job = submit(cluster, tmp_path, "--framework", framework, "--steps", "10")
    summary = job.end()
    assert (summary["world_size"], summary["steps"], summary["framework"]) == (2, 10, framework)
    assert "2 ranks on 2 nodes by srun" in job.output


def test_two_ranks_a_node_and_another_algorithm(cluster: Slurm, tmp_path: Path) -> None:
    """Ranks of a node know each other, as gossip in hierarchies needs."""
    line = ("--algorithm", "sgp", "--hierarchical-gossip", "--steps", "10")
    summary = submit(cluster, tmp_path, *line, tasks=2).end()
    assert (summary["world_size"], summary["algorithm"]) == (4, "sgp")


LAUNCHERS = [{}, {"LAUNCHER": "mpirun"}, {"MPI": "pmix"}]


@pytest.mark.parametrize("env", LAUNCHERS, ids=lambda env: "-".join(env.values()) or "srun")
def test_a_signal_has_it_requeued_and_it_continues(cluster: Slurm, tmp_path: Path, env: dict[str, str]) -> None:
    """As SLURM itself sends it before a job's time is up."""
    kept = ("--epochs", "6", "--inject", "linear:0.05", "--checkpoint-dir", str(tmp_path / "kept"))
    job = submit(cluster, tmp_path, *kept, env=env)
    job.wait_for("epoch 1/6")
    cluster.do("scancel", "--batch", "--signal=USR1", job.number)
    summary = job.end(restarts=1)
    found = re.search(r"stopped after (epoch \d.*), as asked", job.output)
    assert found, job.output
    assert f"resumed after {found[1]}" in job.output
    assert f"requeueing job {job.number}" in job.output
    assert 0 < summary["steps"] < 6 * 45
    assert summary["gradients_produced"] == summary["gradients_applied"]
    assert summary["test_accuracy"] > 0.75, "guessing gets 0.1"


def test_a_signal_before_there_are_ranks_loses_nothing(cluster: Slurm, tmp_path: Path) -> None:
    """It is requeued at once, or as soon as they have looked."""
    job = submit(cluster, tmp_path, "--steps", "5", "--checkpoint-dir", str(tmp_path / "kept"))
    until(
        lambda: f"{job.number}.0" in cluster.do("squeue", "--steps", "--noheader"), "the ranks' server does not start"
    )
    cluster.do("scancel", "--batch", "--signal=USR1", job.number)
    assert job.end(restarts=1)["steps"] == 5
    assert "SIGUSR1: stopping" in job.output


def test_what_is_wrong_is_said_and_not_tried_again(cluster: Slurm, tmp_path: Path) -> None:
    """The runner's status is the job's."""
    job = submit(cluster, tmp_path, "--quorum", "7")
    until(lambda: job.field("JobState") in ENDED, f"it has not ended:\n{job.output}", LIMIT)
    assert job.field("JobState") == "FAILED"
    assert job.field("ExitCode") == "2:0", job.output
    assert "error (rank 1): " in job.output
