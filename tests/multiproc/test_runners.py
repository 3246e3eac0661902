"""The runners as a user starts them: on digits and on a folder, with stragglers, stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import REPOSITORY, Job, run_job
from PIL import Image

pytestmark = pytest.mark.multiproc

RUNNERS = ["torch_models/resnet50.py", "tf_models/resnet50.py"]
QUICK = ("--model", "small", "--threads", "1", "--optimizer", "adam", "--lr", "0.003")


def train(runner: str, folder: Path, *line: str, ranks: int = 2) -> tuple[Job, dict[str, Any]]:
    """The job and its summary ({} if it wrote none)."""
    summary = folder / "summary.json"
    summary.unlink(missing_ok=True)
    job = run_job(str(REPOSITORY / runner), ranks, args=(*QUICK, "--summary", str(summary), *line))
    return job, json.loads(summary.read_text()) if summary.exists() else {}


def check_kept(summary: dict[str, Any]) -> None:
    assert summary["replicas_identical"]
    assert summary["max_replica_diff"] == summary["consensus_distance"] == 0.0
    assert summary["gradients_produced"] == summary["gradients_applied"] > 0


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("line", ["--algorithm eager --quorum solo --inject random:1:0.02", "--algorithm allreduce"])
def test_digits_are_learned(tmp_path: Path, runner: str, line: str) -> None:
    job, summary = train(runner, tmp_path, *line.split(), "--epochs", "4", "--log-dir", str(tmp_path))
    job.check()
    check_kept(summary)
    assert summary["test_accuracy"] > 0.75, "guessing gets 0.1"
    assert summary["train_loss"] < 1.2
    assert summary["algorithm"] == line.split()[1]
    assert "no gradient was lost" in job.output
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 5


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, runner: str) -> None:
    # quorum all, so that two runs are the same numbers
    line = ("--quorum", "all", "--steps", "180", "--optimizer", "sgd", "--seed", "3")
    _, whole = train(runner, tmp_path, *line, "--epochs", "4")
    kept = (*line, "--checkpoint-dir", str(tmp_path / "kept"), "--resume")
    job, _ = train(runner, tmp_path, *kept, "--epochs", "2")
    assert "starting afresh" in job.check().output
    job, resumed = train(runner, tmp_path, *kept, "--epochs", "4")
    assert "resumed after epoch 2" in job.check().output
    check_kept(resumed)
    assert resumed["steps"] == whole["steps"] // 2
    assert resumed["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-4)
    assert resumed["test_accuracy"] == pytest.approx(whole["test_accuracy"], abs=0.006), "two images at most"
    job, _ = train(runner, tmp_path, *kept, "--optimizer", "adam")
    assert job.returncode != 0
    assert "give the same options, or another --checkpoint-dir" in job.check_clean().output


@pytest.mark.parametrize("runner", RUNNERS[:1])
def test_a_folder_with_a_corrupt_file_and_fewer_batches_than_ranks(tmp_path: Path, runner: str) -> None:
    random = np.random.default_rng(0)
    for split, count in (("train", 5), ("val", 2)):
        for name in ("ant", "bee"):
            place = tmp_path / "images" / split / name
            place.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(random.integers(0, 255, (40, 50, 3), np.uint8)).save(place / f"{number}.jpeg")
    corrupt = tmp_path / "images" / "train" / "bee" / "3.jpeg"
    corrupt.write_bytes(b"no image")
    line = ("--data", str(tmp_path / "images"), "--image-size", "32", "--batch-size", "4", "--epochs", "2")
    job, summary = train(runner, tmp_path, *line, ranks=3)
    assert f"skipped {corrupt}" in job.check().output
    check_kept(summary)
    assert summary["gradients_produced"] == 6
    for path in corrupt.parent.iterdir():
        path.unlink()
    job, _ = train(runner, tmp_path, *line)
    assert job.returncode != 0
    assert "put images there, or remove the class" in job.check_clean().output
    assert "Traceback" not in job.output.partition("put images there")[0]


@pytest.mark.parametrize("runner", RUNNERS[:1])
def test_batches_of_one_image(tmp_path: Path, runner: str) -> None:
    """ResNet-50 at 32 x 32 ends in one pixel: batch norm has a single value per channel."""
    job, summary = train(
        runner, tmp_path, "--model", "resnet50", "--batch-size", "1", "--steps", "3", "--quorum", "2", "--epochs", "1"
    )
    job.check()
    check_kept(summary)
    assert summary["gradients_produced"] == 6
