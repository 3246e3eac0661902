"""``time_to_accuracy``: data of known difficulty, kinds of imbalance, tuned rates, and what is recommended."""

from __future__ import annotations

import math
import types

import numpy as np
import pytest
import torch

from hvd_async.simulation.names import waits_for_nobody
from scripts.benchmarks.cases import time_to_accuracy as case
from scripts.benchmarks.jobs import time_to_accuracy as job_module
from scripts.benchmarks.jobs.shared import arm as arms_of_jobs
from scripts.benchmarks.jobs.shared.tasks import task_of, values_of
from scripts.benchmarks.support import gratings
from scripts.benchmarks.support.arms import own_weights
from scripts.benchmarks.support.data_sets import images_of
from scripts.benchmarks.support.imbalance import KINDS, block_of
from scripts.benchmarks.support.intervals import Interval
from scripts.benchmarks.support.launch import repetitions
from scripts.benchmarks.support.recommendation import Candidate, best_rate, choose, level, on_edge, reached_at
from tests.unit.bench_jobs import options

RANKS = 4


# -- data -----------------------------------------------------------------------------------------------------


def test_the_ideal_observer_has_bayes_accuracy():
    """Against the posterior, written out for each image, class and phase; without noise it is never wrong."""
    known = gratings.patterns()

    def posterior_of(pixels):
        flat = pixels.reshape(len(pixels), 1, 1, -1).astype(np.float64)
        return np.exp(-((flat - known) ** 2).sum(axis=3) / 2).sum(axis=2)

    pixels, labels = gratings.draw(200, np.random.default_rng(0))
    posterior = posterior_of(pixels)
    assert np.array_equal(gratings.observe(pixels), posterior.argmax(axis=1))
    noise = np.random.default_rng(1).standard_normal((300, 8, 8)).astype(np.float32)  # here it is hardest
    assert np.array_equal(gratings.observe(noise), posterior_of(noise).argmax(axis=1))
    clean = known.reshape(-1, 8, 8).astype(np.float32)
    assert np.array_equal(gratings.observe(clean), np.repeat(np.arange(10), gratings.PHASES))
    expected = (posterior.max(axis=1) / posterior.sum(axis=1)).mean()  # what it expects of itself
    assert (gratings.observe(pixels) == labels).mean() == pytest.approx(expected, abs=0.04)
    assert gratings.best_accuracy() == pytest.approx(0.978, abs=0.003)


@pytest.mark.parametrize("name", ["digits", "gratings"])
def test_rates_are_tuned_on_data_that_are_not_the_test_data(name):
    counts, tunes = images_of(name, tuning=False), images_of(name, tuning=True)
    assert not set(counts.scored) & {*counts.train, *tunes.train, *tunes.scored}
    assert not set(tunes.scored) & set(tunes.train)
    assert {*tunes.train, *tunes.scored} == set(counts.train)
    assert len(tunes.scored) == round(0.2 * len(counts.train))
    assert set(counts.labels[tunes.scored]) == set(range(10))


# -- plans ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_arms_of_a_kind_are_trained_alike(kind):
    blocks = {arm: block_of(kind, arm, 3, 0.1, 40, RANKS, tuning=False) for arm in ("horovod", "solo", "sgp", "adpsgd")}
    first = blocks["horovod"]
    times = np.array(first["times"])
    assert times.shape == (40, RANKS)
    for arm, block in blocks.items():
        assert block["times"] == first["times"]
        assert sum(block["own_steps"]) == pytest.approx(RANKS * 40, abs=2)
        own = waits_for_nobody(arm) or (KINDS[kind].paced and arm == "solo")
        assert own or block["own_steps"] == [40] * RANKS
        assert (block["own_steps"][-1] < 30) == (own and KINDS[kind].who == "last")
    assert [blocks[arm]["pace"] for arm in ("horovod", "sgp")] == [None, None]
    assert blocks["solo"]["pace"] == ("rounds" if kind == "slow-rank" else "steps")
    assert block_of(kind, "all", 3, 0.1, 40, RANKS, tuning=False)["pace"] == "steps"
    late = times - times.min()
    wanted = {
        "none": not late.any(),
        "stragglers": ((late > 0.01).sum(axis=1) == 1).all() and len({*late.argmax(axis=1)}) == RANKS,
        "slow-rank": (times[:, -1] == pytest.approx(3 * times[:, 0])) and not late[:, :-1].any(),
        "lengths": (late.std(axis=1) > 0).mean() > 0.9,
        "network": not late.any() and KINDS[kind].mbit == 50.0,
        "classes": first["split"] == "classes" and (late[:, -1] > 0).all(),
    }
    assert wanted[kind]
    other = block_of(kind, "horovod", 4, 0.1, 40, RANKS, tuning=False)
    assert (other["times"] != first["times"]) == (kind in ("stragglers", "lengths"))


def test_every_rate_is_tried_once_and_the_best_one_counts():
    args = options(case, "--grid", "0.5", "1", "2")
    arms, middle = ["horovod", "sgp"], KINDS["none"].lr
    low, high = middle / 2, middle * 2
    tuning = case.tuning_blocks(args, "none", arms)
    assert {(b["arm"], b["lr"]) for b in tuning} == {(arm, lr) for arm in arms for lr in (low, middle, high)}
    assert {(b["seed"], b["tuning"], b["looks"]) for b in tuning} == {(case.TUNING_SEED, True, 1)}
    score = {low: 0.5, middle: 0.7, high: 0.68}
    found = [b | {"by_rank": [{"curve": [[1.0, score[b["lr"]] + (b["arm"] == "sgp") * b["lr"]]]}]} for b in tuning]
    rates = case.rates_of(args, "none", found, arms)
    assert rates == {"horovod": middle, "sgp": high}
    counting = case.counting_blocks(args, "none", arms, rates)
    assert [(b["seed"], b["arm"], b["lr"]) for b in counting] == [(s, a, rates[a]) for s, a in repetitions(arms, 5)]
    assert not any(b["tuning"] for b in counting)
    assert case.rates_of(options(case, "--grid", "2"), "none", [], arms) == dict.fromkeys(arms, high)


def test_some_arms_are_for_one_kind():
    arms = ["horovod", "osgp-bf16", "dpsgd-qg", "dpsgd-bf16-qg"]
    found = {kind: case.arms_of(kind, arms) for kind in KINDS}
    assert found.pop("network") == ["horovod", "osgp-bf16"]
    assert found.pop("classes") == ["horovod", "dpsgd-qg"]
    assert set(map(tuple, found.values())) == {("horovod",)}


@pytest.mark.parametrize("kind", KINDS)
def test_all_arms_begin_with_the_same_weights_and_see_the_same_batches(tmp_path, kind):
    def begun(arm, rank=1):
        block = block_of(kind, arm, 3, 0.1, 40, RANKS, tuning=False)
        task = task_of(job_of(tmp_path, rank, RANKS), block)
        weights = [value.clone() for value in values_of(task.model)]
        return weights, [task.loss(step)(task.model).item() for step in range(3)]

    weights, losses = begun("horovod")
    for arm in ("torchft-diloco", "solo", "adpsgd", "lsgd"):
        mine, seen = begun(arm)
        assert all(map(torch.equal, mine, weights))
        assert seen == losses
    mine, seen = begun("horovod", rank=2)
    assert all(map(torch.equal, mine, weights))
    assert not set(seen) & set(losses)


def test_arms_whose_ranks_have_weights_of_their_own():
    own = ["post-local-sgd", "decent-dp", "torchft", "torchft-diloco", "sgp", "dpsgd-bf16", "local-sgd", "lsgd"]
    shared = ["horovod", "ddp", "all", "solo", "solo-bf16", "k3", "auto"]
    assert [arm for arm in [*own, *shared] if own_weights(arm)] == own


# -- figures --------------------------------------------------------------------------------------------------


def test_targets_are_reached_between_looks():
    curve = [[1.0, 0.5], [2.0, 0.7], [3.0, 0.6], [4.0, 0.8]]
    assert reached_at(curve, 0.6) == pytest.approx(1.5)
    assert reached_at(curve, 0.75) == pytest.approx(3.75)
    assert reached_at(curve, 0.4) == 1.0
    assert reached_at(curve, 0.9) == math.inf


def test_the_best_rate_is_the_lowest_of_the_best():
    assert best_rate({0.3: 0.9, 0.1: 0.9, 0.03: 0.8}) == 0.1
    assert [on_edge(rate, (0.03, 0.1, 0.3)) for rate in (0.03, 0.1, 0.3)] == [True, False, True]
    assert not on_edge(0.1, (0.1,))


def arm(name, seconds, low=-0.004, rival=False):
    return Candidate(name, seconds, Interval(0.0, low, 0.004), rival)


def test_the_soonest_that_loses_no_accuracy_is_taken():
    horovod = arm("horovod", [4.0, 4.1, 4.2], rival=True)
    quick = arm("solo", [1.0, 1.1, 1.2], low=-0.02)
    never = arm("lsgd", [0.5, math.inf, math.inf])
    good, near = arm("sgp", [2.0, 2.5, 3.0]), arm("dpsgd", [2.1, 2.4, 3.3])
    found = choose([horovod, quick, never, near, good])
    assert (found.taken.arm, [each.arm for each in found.level]) == ("dpsgd", ["sgp"])
    assert (found.rival.arm, found.ours.arm) == ("horovod", "dpsgd")
    assert "take dpsgd, 2.40 s to both targets (3 of 3 seeds)" in case.words(found)
    assert "soonest rival horovod, 4.10 s; not told apart: sgp" in case.words(found)
    rival = choose([horovod, arm("sgp", [5.0, 5.0, 5.2])])
    assert (rival.taken.arm, rival.ours.arm, rival.level) == ("horovod", "sgp", [])
    assert "soonest of ours sgp" in case.words(rival)
    assert choose([quick, never]) is None
    assert choose([good]).rival is None


def test_drawn_in_colour_are_what_to_take_and_the_soonest_rivals_and_ours():
    until = {"horovod": 2.2, "ddp": 3.0, "torchft": None, "decent-dp": 2.5, "solo": 3.5, "sgp": 2.0, "lsgd": None}
    until |= {"dpsgd": 1.9, "osgp": 1.8, "adpsgd": 1.0}
    rows = [{"arm": name, "both_s": both, "take": "take" * (name == "dpsgd")} for name, both in until.items()]
    assert case.highlighted(rows) == ["horovod", "decent-dp", "ddp", "dpsgd", "adpsgd", "osgp"]


def test_what_the_seeds_leave_open_is_level():
    assert level([1.0, 2.0, 1.5], [1.1, 1.9, 1.5])
    assert not level([1.0, 2.0, 3.0], [2.0, 3.1, 4.0])
    assert level([1.0, 1.0, math.inf], [2.0, math.inf, math.inf])  # one seed in which both are there, or none
    assert level([1.0, math.inf], [math.inf, 1.0])
    assert not level([1.0, 1.1, 1.0, math.inf], [2.0, 2.0, 2.1, 2.0])


# -- the job --------------------------------------------------------------------------------------------------


def job_of(folder, rank=0, size=1):
    own = types.SimpleNamespace(rank=rank, size=size, folder=folder, plan={}, recorded=[])
    own.barrier = lambda: None
    own.gather = lambda value: [value]
    own.conclude = lambda arm, block, found: own.recorded.append(found)
    return own


@pytest.mark.parametrize("kind", ["none", "lengths", "network", "classes"])
def test_a_training_is_scored_at_each_look_without_being_changed(tmp_path, kind, monkeypatch):
    """One rank alone, with torch's own optimizer: as good as a loop that is written out, and above chance."""
    block = block_of(kind, "plain", 2, 0.1, 30, 1, tuning=False) | {"looks": 4}
    block["times"] = [[0.0]] * 30
    job = job_of(tmp_path)
    monkeypatch.setattr(arms_of_jobs.hvd, "allreduce_", lambda tensor, name: tensor)
    models = []
    monkeypatch.setattr(job_module, "task_of", lambda *asked: models.append(task_of(*asked)) or models[-1])
    job_module.run_block(job, block)
    (found,) = job.recorded
    seconds, scores = zip(*found["curve"], strict=True)
    assert list(seconds) == sorted(seconds)
    assert len(scores) == 4
    assert scores[-1] == pytest.approx(models[0].score())
    task = task_of(job, block)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    task.model.train()
    for step in range(30):
        optimizer.param_groups[0]["lr"] = job_module.rate(0.1, step, 30)
        optimizer.zero_grad()
        task.loss(step)(task.model).backward()
        optimizer.step()
    for one, other in zip(values_of(task.model), values_of(models[0].model), strict=True):
        assert torch.equal(one, other)
    assert scores[-1] > 0.15


@pytest.mark.parametrize("name", ["sgp", "solo"])
def test_a_look_is_at_the_mean_or_at_rank_0(tmp_path, name):
    block = block_of("none", name, 0, 0.1, 30, 1, tuning=True) | {"looks": 2}
    job = job_of(tmp_path, size=2)
    task = task_of(job_of(tmp_path), block)
    before = [value.clone() for value in values_of(task.model)]
    copies = np.stack([np.full(sum(value.numel() for value in before), look, np.float32) for look in (1, 2)])
    np.save(tmp_path / "copies.1.npy", 3 * copies)
    seen = []
    task.score = lambda: seen.append([float(value.unique()) for value in values_of(task.model)]) or 0.5
    job.gather = lambda mine: [mine, {1: 0.25}]
    assert job_module.look_back(job, block, task, copies) == [0.5, 0.25]
    weights = len(list(task.model.parameters()))
    assert seen == [[2.0 if name == "sgp" else 1.0] * weights + [2.0] * (len(before) - weights)]
    assert all(map(torch.equal, before, values_of(task.model)))
    job.gather = lambda value: [value, [each + 5 for each in value] if isinstance(value, list) else value + 1]
    seconds = [second for second, _ in job_module.curve(job, name, [10.0, 11.0], 2.0, [0.1, 0.2])]
    assert seconds == ([12.0, 13.0] if name == "sgp" else [7.0, 8.0])
