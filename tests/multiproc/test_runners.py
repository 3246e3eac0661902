"""The runners as a user starts them: on digits and on a folder, with stragglers, stopped, killed and resumed.

Their loop and its flags are tested in ``tests/unit/test_runner_*`` with trainers that only count; here is what shows
only with real frameworks, processes and signals.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import REPOSITORY, Job, RunJob
from PIL import Image

from tests.conftest import LONG_RUN

pytestmark = pytest.mark.multiproc
LONG = pytest.mark.skipif(not LONG_RUN, reason="tried in a long run: HVD_ASYNC_TEST_LONG=1")

TORCH, TF = "torch", "tf"
"""(Both share all but the model's own code: what they share is tried with one of them.)"""
FRAMEWORKS = {TORCH: "torch", TF: "tensorflow"}
QUICK = ("--model", "small", "--threads", "1", "--optimizer", "adam", "--lr", "0.003")
SAME = ("--quorum", "all", "--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.02", "--seed", "3")
"""Two runs of it are the same numbers. An epoch is 45 steps at 2 ranks."""
Train = Callable[..., tuple[Job, dict[str, Any]]]


@pytest.fixture
def train(forked: RunJob, tmp_path: Path) -> Train:
    """Runs a runner with flags; the job, which ends well, and its summary."""

    def run(runner: str, *line: str, ranks: int = 2, by: RunJob = forked) -> tuple[Job, dict[str, Any]]:
        script = str(REPOSITORY / f"{runner}_models" / "resnet50.py")
        args = (*QUICK, "--summary", str(tmp_path / "summary.json"), *line)
        job = by(FRAMEWORKS[runner], script, ranks, args=args, timeout=240.0).check()
        return job, json.loads((tmp_path / "summary.json").read_text())

    return run


def check_kept(summary: dict[str, Any]) -> None:
    assert summary["replicas_identical"]
    assert summary["max_replica_diff"] == summary["consensus_distance"] == 0.0
    assert summary["gradients_produced"] == summary["gradients_applied"] > 0


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The epochs, as they were logged."""
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("runner", [TORCH, TF])
def test_digits_are_learned_and_the_run_is_reported(
    launched: RunJob, forked: RunJob, train: Train, tmp_path: Path, runner: str
) -> None:
    line = ["--algorithm", "eager", "--quorum", "solo", "--inject", "random:1:0.01", "--epochs", "4"]
    logs, by = tmp_path / "logs", launched if runner == TORCH else forked
    job, summary = train(runner, *line, "--log-dir", str(logs), "--monitor", "10", by=by)
    check_kept(summary)
    assert summary["test_accuracy"] > 0.75, "guessing gets 0.1"
    assert summary["train_loss"] < 1.2
    assert summary["algorithm"] == "eager"
    assert "no gradient was lost" in job.output
    assert "epoch 4/4" in job.output
    assert json.loads((logs / "summary.json").read_text()) == summary
    assert [row["epoch"] for row in rows_of(logs)] == ["1", "2", "3", "4"]
    assert len((logs / "step_times.csv").read_text().splitlines()) > 2
    for folder in (logs, logs / "monitor"):
        assert list(folder.glob("events.out.tfevents.*")), "for TensorBoard"
    steps = summary["gradients_produced"] / 2
    assert f'hvd_async_steps_total{{rank="0"}} {steps:.1f}' in (logs / "metrics.prom").read_text()


def kept_in(folder: Path) -> dict[str, bytes]:
    """Every tensor of the last checkpoint: weights, batch-norm statistics, optimizer state."""
    if (folder / "last.npz").exists():
        with np.load(folder / "last.npz") as file:
            return {name: file[name].tobytes() for name in file.files if "/" in name}
    content = torch.load(folder / "last.pt", map_location="cpu", weights_only=True)
    tensors = {f"model/{name}": tensor for name, tensor in content["model"].items()}
    for index, state in content["optimizer"]["state"].items():
        tensors |= {f"optimizer/{index}/{name}": torch.as_tensor(value) for name, value in state.items()}
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def check_stopped(job: Job, after: str) -> None:
    assert f"stopped after {after}, as asked: --resume continues from there\n" in job.check_clean().output
    assert "<stderr>:Traceback" not in job.output
    assert "\nTraceback" not in "\n".join(job.outputs), str(job)


def check_resumed(train: Train, runner: str, line: tuple[str, ...], after: str, steps: int) -> dict[str, Any]:
    job, summary = train(runner, *line)
    assert f"resumed after {after}\n" in job.output
    check_kept(summary)
    assert summary["steps"] == steps, "those of the rank with the most"
    return summary


def test_a_run_that_was_killed_continues_from_its_last_epoch_with_the_same_bits(
    forked: RunJob, train: Train, tmp_path: Path
) -> None:
    twice = (*SAME, "--cosine", "--epochs", "2", "--checkpoint-dir")
    line = (*twice, str(tmp_path / "killed"), "--resume")
    job = forked("torch", "signalled_runner.py", 2, args=(TORCH, "SIGKILL", "0,70", *QUICK, *line)).check_clean()
    assert job.returncodes == [1, -9], str(job)
    assert "rank 1 on host localhost died" in job.outputs[0]
    assert "epoch 1/2" in job.output
    assert "epoch 2/2" not in job.output, "the kill came too late to be of use"
    check_resumed(train, TORCH, line, "epoch 1", 45)
    train(TORCH, *twice, str(tmp_path / "whole"))
    assert len(kept_in(tmp_path / "killed")) > 10
    assert kept_in(tmp_path / "killed") == kept_in(tmp_path / "whole")


def test_a_run_that_was_stopped_in_mid_epoch_ends_with_the_same_bits(
    forked: RunJob, train: Train, tmp_path: Path
) -> None:
    once = (*SAME, "--cosine", "--epochs", "1", "--checkpoint-dir")
    line = (*once, str(tmp_path / "stopped"), "--resume")
    job = forked("tensorflow", "signalled_runner.py", 2, args=(TF, "SIGUSR1", "20,20", *QUICK, *line))
    assert job.returncodes == [75, 75], str(job)
    assert "starting afresh" in job.output
    check_stopped(job, "epoch 0 and 20 of 45 steps")
    check_resumed(train, TF, line, "epoch 0 and 20 of 45 steps", 25)
    train(TF, *once, str(tmp_path / "whole"))
    expected, again = kept_in(tmp_path / "whole"), kept_in(tmp_path / "stopped")
    assert len(expected) > 10
    # where a run stops batch-norm statistics are averaged, which rounds; they do not touch the weights
    differing = {name for name, value in again.items() if expected[name] != value}
    assert all(name.startswith("model/") for name in differing)
    assert len(differing) <= 4, f"the model has four statistics: {differing}"


def test_every_rank_stops_where_the_signal_meets_it_and_continues_from_there(
    launched: RunJob, train: Train, tmp_path: Path
) -> None:
    line = ("--epochs", "2", "--optimizer", "sgd", "--quorum", "solo", "--checkpoint-dir", str(tmp_path), "--resume")
    job = launched("torch", "signalled_runner.py", 2, args=(TORCH, "SIGUSR1", "20,31", *QUICK, *line))
    assert "exit with status code 75" in job.output, str(job)
    check_stopped(job, "epoch 0 and 26 of 45 steps")
    summary = check_resumed(train, TORCH, line, "epoch 0 and 26 of 45 steps", 70)
    assert summary["gradients_produced"] == 180 - 20 - 31


@pytest.mark.parametrize(
    ("runner", "line", "least"),
    [
        (
            TORCH,
            "--bf16 --compression bf16 --quorum auto --optimizer lars --lr 2 --weight-decay 0.0001 --epochs 2",
            0.5,
        ),
        pytest.param(TORCH, "--algorithm allreduce --epochs 1", 0.3, marks=LONG),
        pytest.param(TORCH, "--fp16 --backward-passes-per-step 2 --compression fp16 --epochs 1", 0.3, marks=LONG),
        pytest.param(
            TF,
            "--algorithm allreduce --fp16 --backward-passes-per-step 2 --compression fp16 --epochs 1",
            0.3,
            marks=LONG,
        ),
    ],
)
def test_ways_to_compute_and_to_send(train: Train, runner: str, line: str, least: float) -> None:
    _, summary = train(runner, *line.split())
    check_kept(summary)
    assert summary["algorithm"] == ("allreduce" if "allreduce" in line else "eager")
    assert summary["test_accuracy"] > least, "guessing gets 0.1"


LATE = "--algorithm osgp --max-staleness 2 --schedule 0:allreduce,1:osgp --fp16 --backward-passes-per-step 2"
PAIRS = "--algorithm adpsgd --topology ring --max-local-steps 3 --compression bf16 --inject linear:0.01"


@LONG
@pytest.mark.parametrize(("runner", "line", "epochs"), [(TF, LATE, 3), (TORCH, PAIRS, 5)])
def test_digits_are_learned_by_gossip(train: Train, tmp_path: Path, runner: str, line: str, epochs: int) -> None:
    job, summary = train(runner, *line.split(), "--epochs", str(epochs), "--log-dir", str(tmp_path), ranks=3)
    assert "Before the last drain" in job.output
    assert (summary["algorithm"], summary["quorum"]) == (line.split()[1], None)
    assert summary["replicas_identical"], "after the last drain"
    assert summary["max_replica_diff"] == 0.0
    assert summary["gradients_produced"] is summary["gradients_applied"] is None
    assert summary["test_accuracy"] > (0.75 if epochs > 3 else 0.5), "guessing gets 0.1"
    rows = rows_of(tmp_path)
    distances = [float(row["consensus_distance"]) for row in rows]
    assert distances[-1] == summary["consensus_distance"] > 0.0, "before it"
    assert distances[0] == pytest.approx(0.0, abs=1e-5) if "allreduce" in line else distances[0] > 0.0
    # (a row tells those of the rank with most, which may be another one in each epoch)
    assert sum(int(row["rounds"]) for row in rows) >= summary["rounds"] > 0
    if "osgp" in line:
        assert summary["staleness"]["max"] <= 2
        held = summary["held_s_by_rank"]  # (None where no message was waited for, as on a busy machine)
        assert held is None or max(held) > 0.0


@LONG
def test_a_gossiping_run_is_resumed_by_fewer_ranks_and_another_algorithm(train: Train, tmp_path: Path) -> None:
    kept = ("--checkpoint-dir", str(tmp_path), "--resume")
    _, summary = train(TORCH, *kept, "--algorithm", "sgp", "--peers", "0:1,2:2", "--epochs", "2", ranks=3)
    assert summary["test_accuracy"] > 0.7
    after = check_resumed(train, TORCH, (*kept, "--epochs", "3", "--steps", "110"), "epoch 2", 110 - 2 * 45)
    assert after["test_accuracy"] > 0.5, "it starts from what was learned; how far it comes depends on late gradients"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of nine images in two classes, and one that is none."""
    random = np.random.default_rng(0)
    for split, count in (("train", 5), ("val", 2)):
        for name in ("ant", "bee"):
            place = tmp_path / "images" / split / name
            place.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(random.integers(0, 255, (40, 50, 3), np.uint8)).save(place / f"{number}.jpeg")
    (tmp_path / "images" / "train" / "bee" / "3.jpeg").write_bytes(b"no image")
    return tmp_path / "images"


def test_a_folder_with_a_corrupt_file(train: Train, images: Path) -> None:
    line = ("--data", str(images), "--image-size", "32", "--batch-size", "4", "--epochs", "2")
    job, summary = train(TORCH, *line, ranks=3)
    assert f"skipped {images / 'train' / 'bee' / '3.jpeg'}" in job.output
    check_kept(summary)
    assert summary["gradients_produced"] == 6


@LONG
def test_batches_of_one_image(train: Train, images: Path) -> None:
    """ResNet-50 at 32 x 32 ends in one pixel: batch norm has a single value per channel."""
    few = ("--data", str(images), "--image-size", "32", "--batch-size", "1", "--steps", "1", "--epochs", "1")
    _, summary = train(TORCH, "--model", "resnet50", "--quorum", "2", *few)
    check_kept(summary)
    assert summary["gradients_produced"] == 2
