"""What ``gpu`` makes of a job's results, and that it says what it lacks; no job is started."""

from __future__ import annotations

import pytest
import torch

from scripts.benchmarks.cases import gpu
from scripts.benchmarks.jobs.shared import arm, torch_ranks
from scripts.benchmarks.support import plot
from scripts.benchmarks.support.launch import NotHereError
from scripts.benchmarks.support.report import Report

SETTING = {"dtype": "bf16", "image_size": 224, "batch_size": 128, "steps": 10, "baseline": "plain"}


def blocks(seconds, waits=0.0):
    """Three cycles of ten steps; the second is disturbed, all arms alike."""
    found = [
        {"arm": arm, "cycle": cycle, "by_rank": [{"elapsed": 10 * step * (1 + (cycle == 1)), "steps": 10}]}
        for cycle in range(3)
        for arm, step in seconds.items()
    ]
    traces = {"cudaDeviceSynchronize": waits, "cudaStreamSynchronize": 2.0}
    return found + [{"arm": arm, "cycle": None, "by_rank": [traces]} for arm in seconds]


@pytest.mark.parametrize("baseline", ["plain", "horovod"])
def test_images_a_second_over_the_baselines(baseline):
    rows = gpu.rows_of(blocks({baseline: 0.05, "all": 0.04}), {**SETTING, "baseline": baseline})
    rows = {each["arm"]: each for each in rows}
    assert rows[baseline]["value"] == pytest.approx(128 / 0.05)
    assert rows["all"]["ratio"] == rows["all"]["speedup"] == pytest.approx(1.25)
    assert (rows["all"]["cycles"], rows["all"]["cudaStreamSynchronize"]) == (3, 2.0)


@pytest.mark.parametrize(("slower", "waits", "met"), [(1.01, 0.0, True), (1.2, 0.0, False), (1.01, 1.0, False)])
def test_what_must_show(slower, waits, met):
    seconds = {"plain": 0.05, "horovod": 0.05} | dict.fromkeys(("all", "solo", "sgp", "lsgd"), 0.05 * slower)
    report = Report("gpu", 1, gpu.rows_of(blocks(seconds, waits), SETTING), gpu.COLUMNS, draw=gpu.draw)
    gpu.judge(report)
    assert len(report.goals) == 8  # (plain torch and Horovod are not judged)
    assert all(goal.met for goal in report.goals) == met


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_horovods_arm_sends_contiguous_copies_of_gradients_that_are_channels_last(compression):
    gradient = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    copies = arm.Contiguous(getattr(arm.hvd.Compression, compression))
    sent, context = copies.compress(gradient)
    assert sent.is_contiguous()
    assert not gradient.is_contiguous()
    assert torch.equal(copies.decompress(sent, context), gradient)


def test_ranks_share_cores_where_there_are_fewer(monkeypatch):
    monkeypatch.setattr(torch_ranks.os, "sched_getaffinity", lambda _: {0, 5}, raising=False)
    assert [torch_ranks.share_cores(ranks) for ranks in (1, 2, 3)] == [False, False, True]


def test_horovods_collectives_are_waited_for_asleep(monkeypatch):
    looks = {1: [True], 2: [False, False, True], 3: [True]}
    naps = []
    monkeypatch.setattr(torch_ranks.hvd, "poll", lambda handle: looks[handle].pop(0))
    monkeypatch.setattr(torch_ranks.time, "sleep", naps.append)
    torch_ranks.sleep_until_done(looks)
    assert naps == [torch_ranks.POLL] * 2
    assert not any(looks.values())


def test_it_is_drawn(tmp_path):
    rows = gpu.rows_of(blocks({"plain": 0.05, "horovod": 0.05, "all": 0.05}), SETTING)
    plot.save(Report("gpu", 1, rows, gpu.COLUMNS, draw=gpu.draw), tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(NotHereError, match="needs a GPU, and none is visible"):
        gpu.visible_devices()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotHereError, match="no nvidia-smi"):
        gpu.visible_devices()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert gpu.visible_devices() == ["1", "3"]
