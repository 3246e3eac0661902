"""The runners' loop in every family, with trainers that only count: uneven ranks, stops, resumes by another family."""

from __future__ import annotations

import json

import pytest

from hvd_async.runner.loop import start
from hvd_async.runner.options import parse
from tests.unit.counting import Job, run_all

LOCKSTEP = ("allreduce",)
APART = ("sgp", "osgp", "dpsgd", "adpsgd", "lsgd", "easgd")
FAMILIES = ("eager", *LOCKSTEP, *APART)
DIGITS = ("--epochs", "3", "--batch-size", "60", "--lr", "0.1", "--cosine")
"""At 3 ranks: 480, 479 and 479 images in batches of 60, 8 steps an epoch (7 in lockstep)."""
NEVER = 10**6


@pytest.mark.parametrize("algorithm", FAMILIES)
def test_ranks_that_stop_at_different_steps_lose_and_repeat_nothing(tmp_path, capsys, algorithm):
    line = (*DIGITS, "--algorithm", algorithm)
    kept = (*line, "--checkpoint-dir", str(tmp_path), "--resume")
    runs = []
    for stops in ([3, 5, 8], [2, 0, 1], [NEVER] * 3):
        summaries, trainers = run_all(3, *kept, stops=stops)
        assert (summaries[0] is None) == (stops[0] != NEVER)
        runs.append(trainers)
    whole = run_all(3, *line)[1]
    for rank in range(3):
        assert [seen for run in runs for seen in run[rank].seen] == whole[rank].seen, "the same images"
    if algorithm in LOCKSTEP:
        assert [len(trainer.seen) for trainer in runs[0]] == [3, 3, 3]
    assert all("drain" in trainer.calls for run in runs for trainer in run), "before a checkpoint all are the same"
    assert capsys.readouterr().out.count("resumed after epoch 0 and ") == 2


@pytest.mark.parametrize("algorithm", APART)
def test_fewer_batches_on_some_ranks_and_uneven_ones(algorithm):
    # 480, 479 and 479 images in batches of 479: rank 0 has two batches an epoch, the others one.
    summaries, trainers = run_all(
        3, "--algorithm", algorithm, "--epochs", "2", "--batch-size", "479", distances=(0.5, 0.25)
    )
    assert [len(trainer.rates) for trainer in trainers] == [4, 2, 2]
    assert {trainer.drains for trainer in trainers} == {2}
    assert summaries[0]["steps"] == 4
    assert summaries[0]["consensus_distance"] == 0.25, "before the last drain"


def test_a_run_goes_on_with_fewer_ranks_and_other_algorithms(tmp_path, capsys):
    # An epoch has 24 steps of 20 images at 3 ranks, 36 at 2.
    line = ("--batch-size", "20", "--checkpoint-dir", str(tmp_path), "--resume")
    run_all(3, *line, "--algorithm", "sgp", "--epochs", "3")
    _, trainers = run_all(2, *line, "--algorithm", "eager", "--epochs", "5", "--steps", "154")
    assert [len(trainer.rates) for trainer in trainers] == [154 - 3 * 36] * 2
    assert json.loads((tmp_path / "last.txt").read_text()) == [4, 1.0, 10, 36, []]
    _, trainers = run_all(2, *line, "--algorithm", "lsgd", "--epochs", "5")
    assert [len(trainer.rates) for trainer in trainers] == [26, 26]
    text = capsys.readouterr().out
    assert "resumed after epoch 3\n" in text
    assert "resumed after epoch 4 and 10 of 36 steps" in text


def test_a_class_without_images_ends_the_run_without_a_traceback(tmp_path, capsys):
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            (tmp_path / split / name).mkdir(parents=True)
    line = ["--data", str(tmp_path), "--image-size", "32"]
    for rank in range(2):
        with pytest.raises(SystemExit) as stopped:
            start(parse("torch", line), Job(2).world(rank))
        assert stopped.value.code == 2
        text = capsys.readouterr().err
        assert f"error (rank {rank})" in text
        assert "put images there, or remove the class" in text
