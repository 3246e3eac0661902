"""The runners as a user starts them: on digits and on a folder, with stragglers, stopped and resumed."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import REPOSITORY, Job, run_job
from PIL import Image

pytestmark = pytest.mark.multiproc

RUNNERS = TORCH, TF = ["torch_models/resnet50.py", "tf_models/resnet50.py"]
"""(Both share all but the model's own code: what they share is tried with one of them.)"""
QUICK = ("--model", "small", "--threads", "1", "--optimizer", "adam", "--lr", "0.003")


def train(runner: str, folder: Path, *line: str, ranks: int = 2, plain: bool = False) -> tuple[Job, dict[str, Any]]:
    """The job and its summary ({} if it wrote none)."""
    summary = folder / "summary.json"
    summary.unlink(missing_ok=True)
    job = run_job(str(REPOSITORY / runner), ranks, args=(*QUICK, "--summary", str(summary), *line), plain=plain)
    return job, json.loads(summary.read_text()) if summary.exists() else {}


def check_kept(summary: dict[str, Any]) -> None:
    assert summary["replicas_identical"]
    assert summary["max_replica_diff"] == summary["consensus_distance"] == 0.0
    assert summary["gradients_produced"] == summary["gradients_applied"] > 0


STRAGGLER = "--algorithm eager --quorum solo --inject random:1:0.02"


@pytest.mark.parametrize(("runner", "line"), [(TORCH, STRAGGLER), (TF, STRAGGLER), (TORCH, "--algorithm allreduce")])
def test_digits_are_learned(tmp_path: Path, runner: str, line: str) -> None:
    job, summary = train(
        runner, tmp_path, *line.split(), "--epochs", "4", "--log-dir", str(tmp_path), plain=line == STRAGGLER
    )
    job.check()
    check_kept(summary)
    assert summary["test_accuracy"] > 0.75, "guessing gets 0.1"
    assert summary["train_loss"] < 1.2
    assert summary["algorithm"] == line.split()[1]
    assert "no gradient was lost" in job.output
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 5


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


def resumed(runner: str, folder: Path, line: tuple[str, ...], stop: int, after: str) -> dict[str, bytes]:
    """What a run keeps that was stopped after so many of its 180 steps and then resumed."""
    kept = (*line, "--checkpoint-dir", str(folder / str(stop)), "--resume")
    job, summary = train(runner, folder, *kept, "--steps", str(stop))
    assert "starting afresh" in job.check().output
    assert summary["steps"] == stop
    job, summary = train(runner, folder, *kept)
    assert f"resumed after {after}\n" in job.check().output
    check_kept(summary)
    assert summary["steps"] == 180 - stop
    return kept_in(folder / str(stop))


@pytest.mark.parametrize(("runner", "stop", "after"), [(TORCH, 90, "epoch 2"), (TF, 100, "epoch 2 and 10 of 45 steps")])
def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_bits(
    tmp_path: Path, runner: str, stop: int, after: str
) -> None:
    # quorum all, so that two runs are the same numbers; an epoch is 45 steps
    line = ("--quorum", "all", "--optimizer", "sgd", "--momentum", "0.9", "--seed", "3", "--epochs", "4", "--cosine")
    train(runner, tmp_path, *line, "--checkpoint-dir", str(tmp_path / "whole"))[0].check()
    whole = kept_in(tmp_path / "whole")
    assert len(whole) > 10
    again = resumed(runner, tmp_path, line, stop, after)
    differing = {name for name, value in again.items() if whole[name] != value}
    if stop % 45:  # where a run stops batch-norm statistics are averaged, which rounds; they do not touch the weights
        assert all(name.startswith("model/") for name in differing)
        assert len(differing) <= 4, f"the model has four statistics: {differing}"
    else:
        assert not differing


def test_a_run_that_was_killed_goes_on_from_its_last_epoch_with_the_same_bits(tmp_path: Path) -> None:
    line = ("--quorum", "all", "--optimizer", "sgd", "--epochs", "2", "--checkpoint-dir", str(tmp_path / "whole"))
    train(TORCH, tmp_path, *line)[0].check()
    line = (*line, "--checkpoint-dir", str(tmp_path / "killed"), "--resume")
    job = run_job("killed_runner.py", 2, args=("70", *QUICK, *line))
    assert job.returncode not in (0, None), str(job)
    assert "epoch 1/2" in job.check_clean().output
    assert "epoch 2/2" not in job.output, "the kill came too late to be of use"
    job, summary = train(TORCH, tmp_path, *line)
    assert "resumed after epoch 1\n" in job.check().output
    assert summary["steps"] == 45
    assert kept_in(tmp_path / "killed") == kept_in(tmp_path / "whole")


@pytest.mark.parametrize("runner", [TORCH])
def test_a_checkpoint_of_other_options_is_refused(tmp_path: Path, runner: str) -> None:
    line = ("--checkpoint-dir", str(tmp_path), "--resume", "--epochs", "1", "--steps", "2")
    train(runner, tmp_path, *line)[0].check()
    job, _ = train(runner, tmp_path, *line, "--optimizer", "adamw")
    assert job.returncode != 0
    assert "give the same options, or another --checkpoint-dir" in job.check_clean().output
    damaged = bytearray((tmp_path / "last.pt").read_bytes())
    middle = len(damaged) // 2
    damaged[middle : middle + 4] = bytes(255 - byte for byte in damaged[middle : middle + 4])
    (tmp_path / "last.pt").write_bytes(damaged)
    job, _ = train(runner, tmp_path, *line)
    assert job.returncode != 0
    assert "last.pt is damaged, its part " in job.check_clean().output
    assert "<stderr>:Traceback" not in job.output


@pytest.mark.parametrize("runner", [TF])
def test_a_run_is_resumed_by_more_ranks(tmp_path: Path, runner: str) -> None:
    line = ("--checkpoint-dir", str(tmp_path), "--resume", "--inject", "random:1:0.01")
    job, summary = train(runner, tmp_path, *line, "--epochs", "2")
    check_kept(summary)
    before = summary["test_accuracy"]
    job, summary = train(runner, tmp_path, *line, "--epochs", "4", ranks=3)
    assert "resumed after epoch 2" in job.check().output
    check_kept(summary)
    assert summary["world_size"] == 3
    assert summary["steps"] == 2 * 30
    assert min(before, summary["test_accuracy"]) > 0.7, "it went on from what was learned"


WAYS = [
    (TORCH, "--fp16 --backward-passes-per-step 2 --compression fp16"),
    (TORCH, "--bf16 --compression bf16 --quorum auto --optimizer lars --lr 2 --weight-decay 0.0001"),
    (TF, "--algorithm allreduce --fp16 --backward-passes-per-step 2 --compression fp16"),
]


@pytest.mark.parametrize(("runner", "line"), WAYS)
def test_ways_to_compute_and_to_send(tmp_path: Path, runner: str, line: str) -> None:
    job, summary = train(runner, tmp_path, *line.split(), "--epochs", "3")
    job.check()
    check_kept(summary)
    assert summary["test_accuracy"] > 0.5, "guessing gets 0.1"


@pytest.mark.parametrize("runner", [TORCH])
def test_in_pace_rounds_a_rank_that_is_slow_for_good_holds_nobody_up(tmp_path: Path, runner: str) -> None:
    line = ("--pace", "rounds", "--max-staleness", "8", "--inject", "rank:1:0.2", "--epochs", "2")
    job, summary = train(runner, tmp_path, *line, "--log-dir", str(tmp_path))
    job.check()
    check_kept(summary)
    assert 90 <= summary["rounds"] <= 94, "45 an epoch, and what a drain adds"
    produced, steps = summary["gradients_produced"], summary["steps"]
    assert steps <= produced < 1.6 * steps, "the slow rank gave fewer"
    assert summary["staleness"]["max"] <= 8
    assert summary["held_s_by_rank"][1] >= 0
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["rounds"]) for row in rows) == summary["rounds"]
    assert sum(int(row["bytes_sent"]) for row in rows) == summary["bytes_sent"]
    assert [len(row["wait_s"].split()) for row in rows] == [2, 2]


LATE = "--algorithm osgp --max-staleness 2 --schedule 0:allreduce,1:osgp --fp16 --backward-passes-per-step 2"
PAIRS = "--algorithm adpsgd --topology ring --max-local-steps 3 --compression bf16 --inject linear:0.01"
GOSSIP = [
    (TORCH, "--algorithm sgp --peers 0:1,2:2 --inject random:1:0.02"),
    (TF, LATE),
    (TORCH, "--algorithm dpsgd --topology star --mixing metropolis --compression int8"),
    (TORCH, PAIRS),
    (TF, PAIRS),
]


def check_gossiped(summary: dict[str, Any], algorithm: str) -> None:
    assert (summary["algorithm"], summary["quorum"]) == (algorithm, None)
    assert summary["replicas_identical"], "after the last drain"
    assert summary["max_replica_diff"] == 0.0
    assert summary["consensus_distance"] > 0.0, "before it"
    assert summary["gradients_produced"] is summary["gradients_applied"] is None
    assert summary["rounds"] > 0


@pytest.mark.parametrize(("runner", "line"), GOSSIP)
def test_digits_are_learned_by_gossip(tmp_path: Path, runner: str, line: str) -> None:
    job, summary = train(runner, tmp_path, *line.split(), "--epochs", "5", "--log-dir", str(tmp_path), ranks=3)
    assert "before the last drain" in job.check().output
    algorithm = line.split()[1]
    check_gossiped(summary, algorithm)
    assert summary["test_accuracy"] > 0.75, "guessing gets 0.1"
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    distances = [float(row["consensus_distance"]) for row in rows]
    assert distances[-1] == summary["consensus_distance"]
    assert distances[0] == pytest.approx(0.0, abs=1e-5) if "allreduce" in line else distances[0] > 0.0
    assert sum(int(row["rounds"]) for row in rows) == summary["rounds"]
    if algorithm != "adpsgd":
        assert summary["staleness"]["max"] <= (2 if algorithm == "osgp" else 0)
        assert max(summary["held_s_by_rank"]) > 0.0


@pytest.mark.parametrize("runner", [TORCH])
def test_a_gossiping_run_is_resumed_by_fewer_ranks_and_other_algorithms(tmp_path: Path, runner: str) -> None:
    line = ("--checkpoint-dir", str(tmp_path), "--resume")
    job, summary = train(runner, tmp_path, *line, "--algorithm", "sgp", "--epochs", "3", ranks=3)
    job.check()
    before = summary["test_accuracy"]
    job, summary = train(runner, tmp_path, *line, "--algorithm", "eager", "--epochs", "5", "--steps", "200")
    assert "resumed after epoch 3\n" in job.check().output
    check_kept(summary)
    assert summary["steps"] == 200 - 3 * 45
    assert min(before, summary["test_accuracy"]) > 0.7, "it went on from what was learned"
    job, summary = train(runner, tmp_path, *line, "--algorithm", "adpsgd", "--epochs", "5")
    assert "resumed after epoch 4 and 20 of 45 steps" in job.check().output
    check_gossiped(summary, "adpsgd")


@pytest.mark.parametrize("runner", [TORCH])
def test_gossip_with_fewer_batches_than_ranks_and_uneven_ones(tmp_path: Path, runner: str) -> None:
    # 480, 479 and 479 images: rank 0 has two batches an epoch, the others one
    job, summary = train(runner, tmp_path, "--algorithm", "sgp", "--epochs", "2", "--batch-size", "479", ranks=3)
    job.check()
    check_gossiped(summary, "sgp")
    assert summary["steps"] == 4


@pytest.mark.parametrize("runner", [TF])
def test_a_graph_that_does_not_fit_is_refused_on_every_rank(tmp_path: Path, runner: str) -> None:
    job, _ = train(runner, tmp_path, "--algorithm", "sgp", "--peers", "0:1,3:2")
    assert job.returncode != 0
    assert "error (rank " in job.check_clean().output
    assert "peers=2 at 2 ranks: a rank has 1 others to send to" in job.output
    assert "Traceback" not in job.output.partition("peers=2 at 2 ranks")[0]


@pytest.mark.parametrize("runner", [TORCH])
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


@pytest.mark.parametrize("runner", [TORCH])
def test_batches_of_one_image(tmp_path: Path, runner: str) -> None:
    """ResNet-50 at 32 x 32 ends in one pixel: batch norm has a single value per channel."""
    job, summary = train(
        runner, tmp_path, "--model", "resnet50", "--batch-size", "1", "--steps", "3", "--quorum", "2", "--epochs", "1"
    )
    job.check()
    check_kept(summary)
    assert summary["gradients_produced"] == 6
