"""The timed job of the benchmarks, with one rank in this process and torch's own optimizer."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from scripts.benchmarks.cases import CASES, trainings
from scripts.benchmarks.jobs import arm as arms_of_jobs
from scripts.benchmarks.jobs import timed
from scripts.benchmarks.jobs.rank import Job, difference, latency, rate
from scripts.benchmarks.jobs.tasks import task_of
from scripts.benchmarks.support.launch import ENOUGH, block_of
from tests.unit.bench_jobs import options


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A rank that is alone, and what it has recorded."""
    monkeypatch.setattr(arms_of_jobs.hvd, "allreduce_", lambda tensor, name: tensor)
    own = types.SimpleNamespace(rank=0, size=1, folder=tmp_path, plan={}, recorded=[])
    own.barrier, own.gather, own.same = lambda: None, lambda value: [value], lambda content: True
    own.record = lambda block, found: own.recorded.append(found)
    return own


def test_a_block_is_timed_from_its_untimed_steps_on(job):
    block = block_of("plain", 0, {"name": "small"}, steps=4, times=[[0.02], [0.05]])
    timed.run_block(job, block)
    (found,) = job.recorded
    gaps = np.diff([0.0, *found["ends"]])
    assert (gaps > [0.02, 0.05, 0.02, 0.05]).all()
    assert len(found["computed"]) == 4
    assert found["identical"]
    assert {"waited", "sent", "cpu", "stats", "rounds_before", "latency_s"} <= found.keys()
    timed.run_block(job, block_of("plain", 0, {"name": "small"}, window=0.1, times=[[0.03]]))
    assert 2 <= len(job.recorded[1]["ends"]) <= 4


def test_exact_seconds_include_the_real_computation_and_gradients_are_the_same(job):
    """Ends as a training that is written out, to the bit; so the gradients that are handed over are the loss's."""
    task = {"name": "images", "data": "digits", "model": "plain", "batch": 16}
    more = {"lr": 0.1, "momentum": 0.9, "cosine": True, "exact": True, "times": [[0.01]], "scored": True, "keep": True}
    timed.run_block(job, block_of("plain", 0, task, steps=12, seed=2, **more))
    trained, (found,) = timed.kept.pop("plain").task, job.recorded
    assert min(found["computed"]) >= 0.0099
    own = task_of(task, 2, 0, 1)
    optimizer = torch.optim.SGD(own.model.parameters(), lr=0.1, momentum=0.9)
    for step in range(15):
        optimizer.param_groups[0]["lr"] = rate(0.1, step, 15)
        optimizer.zero_grad()
        own.loss(step)(own.model).backward()
        optimizer.step()
    assert all(map(torch.equal, own.model.parameters(), trained.model.parameters()))
    assert found["accuracy"] == own.score(own.model) > 0.15


@pytest.mark.parametrize("kind", ["none", "lengths"])
def test_a_training_is_scored_at_each_look_without_being_changed(job, kind):
    args = options(CASES["time_to_accuracy"], "--length", "0.2", ranks=1, repetitions=1)
    block = trainings.kind_block(args, kind, "plain", 2, 0.1, tuning=False) | {"looks": 4, "keep": True}
    timed.run_block(job, block | {"own": {}, "times": [[0.0]]})
    task = timed.kept.pop("plain").task
    seconds, scores = zip(*job.recorded[0]["curve"], strict=True)
    assert list(seconds) == sorted(seconds)
    assert len(scores) == 4
    assert scores[-1] == pytest.approx(task.score(task.model))


@pytest.mark.parametrize("name", ["sgp", "solo"])
def test_a_look_is_at_the_mean_or_at_rank_0(job, name):
    task = task_of({"name": "images", "data": "gratings", "model": "resnet", "batch": 16}, 0, 0, 2)
    before = timed.flat(task.model).copy()
    copies = np.stack([np.full(before.size, look, np.float32) for look in (1, 2)])
    np.save(job.folder / "copies.1.npy", 3 * copies)
    seen = []
    scored = task._replace(score=lambda model: seen.append(timed.flat(model)[[0, -1]].tolist()) or 0.5)
    job.size = 2
    looks = types.SimpleNamespace(copies=list(copies), seconds=[5.0, 6.0])
    job.gather = lambda mine: [[5.0, 6.0], [5.5, 6.5]] if isinstance(mine, list) else [mine, {1: 0.25}]
    late = 0.5 if name == "sgp" else 0.0
    assert timed.look_back(job, name, scored, looks, 4.0) == [[1.0 + late, 0.5], [2.0 + late, 0.25]]
    assert seen == [[2.0 if name == "sgp" else 1.0, 2.0]], "weights, then statistics of batches"
    assert np.array_equal(timed.flat(task.model), before)


def test_a_job_ends_when_a_file_says_that_it_is_enough(tmp_path, monkeypatch):
    (tmp_path / "plan.json").write_text(
        '{"may_end": true, "blocks": [{"repetition": 0}, {"repetition": 1}, {"repetition": 2, "always": true}]}'
    )
    monkeypatch.setenv("HVD_ASYNC_BENCH_FOLDER", str(tmp_path))
    job = Job(types.SimpleNamespace(rank=lambda: 0, size=lambda: 1), lambda: None)
    done = []

    def run_block(job, block):
        done.append(block["repetition"])
        (tmp_path / ENOUGH).touch()

    job.each_block(run_block)
    assert done == [0, 2]


def test_counts_are_those_since_the_block_began():
    after = {"a": 3, "b": [2, 5], "c": {"0": 1}}
    assert difference(after, {"a": 1, "b": [1, 1], "c": {}}) == {"a": 2, "b": [1, 4], "c": {"0": 1}}
    before, after = {"exchanges": 2, "latency_s": 1.0}, {"exchanges": 4, "latency_s": 2.0}
    assert latency(before, after) == 3.0
    assert latency(after, after) is None


# -- arms -------------------------------------------------------------------------------------------------------------


def test_an_arm_that_gossips_hands_its_options_over(monkeypatch):
    asked = {}
    monkeypatch.setattr(arms_of_jobs.hvd, "GossipOptimizer", lambda optimizer, **given: asked.update(given))
    arms_of_jobs.Arm("dpsgd-bf16-avg4", torch.nn.Linear(2, 2), job=None)
    wanted = ("dpsgd", arms_of_jobs.hvd.Compression.bf16, 4)
    assert (asked["algorithm"], asked["compression"], asked["average_every"]) == wanted
