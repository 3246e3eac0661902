"""Runs that a scheduler stops: SIGUSR1, a checkpoint, status 75, and on with --resume where each rank was."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import Job, run_job, start_ranks_without_launcher
from test_runners import QUICK, TF, TORCH, check_kept, kept_in, train

pytestmark = pytest.mark.multiproc

EPOCHS = ("--epochs", "2", "--optimizer", "sgd")
"""Of 45 steps on each of two ranks."""


def check_stopped(job: Job, after: str) -> None:
    assert f"stopped after {after}, as asked: --resume goes on from there\n" in job.check_clean().output
    assert "<stderr>:Traceback" not in job.output


def test_a_run_that_was_stopped_under_horovodrun_ends_with_the_same_bits(tmp_path: Path) -> None:
    line = (*EPOCHS, "--quorum", "all", "--cosine", "--checkpoint-dir")
    train(TORCH, tmp_path, *line, str(tmp_path / "whole"))[0].check()
    line = (*line, str(tmp_path / "stopped"), "--resume")
    job = run_job("stopped_runner.py", 2, args=("torch", "45,45", *QUICK, *line))
    assert "exit with status code 75" in job.output, str(job)
    check_stopped(job, "epoch 1")
    job, summary = train(TORCH, tmp_path, *line)
    assert "resumed after epoch 1\n" in job.check().output
    assert summary["steps"] == 45
    assert kept_in(tmp_path / "stopped") == kept_in(tmp_path / "whole")


@pytest.mark.parametrize(
    ("runner", "line", "steps", "after", "left"),
    [
        (TORCH, "--algorithm eager --quorum solo", "20,31", "epoch 0 and 26 of 45 steps", 70),
        (TORCH, "--algorithm allreduce", "20,31", "epoch 0 and 20 of 44 steps", 68),
        (TF, "--algorithm eager --quorum majority", "50,55", "epoch 1 and 8 of 45 steps", 40),
        (TORCH, "--algorithm adpsgd", "12,8", "epoch 0 and 10 of 45 steps", 82),
    ],
)
def test_every_rank_stops_where_the_signal_meets_it_and_goes_on_from_there(
    tmp_path: Path, runner: str, line: str, steps: str, after: str, left: int
) -> None:
    kept = (*EPOCHS, *line.split(), "--checkpoint-dir", str(tmp_path), "--resume")
    framework = runner.partition("_")[0]
    job = start_ranks_without_launcher("stopped_runner.py", 2, args=(framework, steps, *QUICK, *kept))
    assert job.returncodes == [75, 75], str(job)
    check_stopped(job, after)
    job, summary = train(runner, tmp_path, *kept)
    assert f"resumed after {after}\n" in job.check().output
    assert summary["steps"] == left, "those of the rank with the most"
    if "adpsgd" in line:
        assert summary["replicas_identical"]
    else:
        check_kept(summary)
    if "eager" in line:
        assert summary["gradients_produced"] == 180 - sum(map(int, steps.split(",")))
