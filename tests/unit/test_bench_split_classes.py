"""What the case ``split_classes`` asks of its job, and makes of the blocks that come home."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from scripts.benchmarks.cases import split_classes
from scripts.benchmarks.support import digits, plot, trainings
from scripts.benchmarks.support.arms import FOLLOWING, LEADERS, MUTANT

RANKS = 4
EVERY = f"horovod,solo,sgp,lsgd,lsgd-close,lsgd-common,lsgd-common-close,easgd,easgd-close,{MUTANT}"
SCORES = {"horovod": 0.97, "solo": 0.97, MUTANT: 0.8, "sgp": 0.96}
"""Of others: 0.2."""


def options(**more):
    given = {"ranks": RANKS, "arms": EVERY, "folds": 2, "repetitions": 2, "epochs": 12, "lr": 0.05}
    given |= {"compute": 0.006, "delay": 0.006, "quick": False, "limit": None}
    return argparse.Namespace(**given | more)


def trained(block):
    """What a job makes of a block: each later fold and seed is a thousandth better, but for the baseline."""
    arm = block["arm"]
    better = 0.0 if arm == "horovod" else (2 * block["fold"] + block["seed"]) / 1000
    own = {"elapsed": 1.0, "accuracy": SCORES.get(arm, 0.2) + better, "identical": True, "staleness": {}, "skipped": 0}
    own |= {"distance": 0.1, "norm": 2.0, "averagings": 10}
    pulls = 100 if block["mean"] else None
    ranks = [{**own, "steps": steps, "pulls": pulls, "of_mean": 0.5 + better} for steps in block["steps"]]
    return {**block, "by_rank": ranks}


def report_of(monkeypatch, **more):
    monkeypatch.setattr(split_classes, "measure", lambda args, blocks, say: [trained(block) for block in blocks])
    return split_classes.run(options(**more), lambda _: None)


def test_the_cases_own_arms_come_last():
    ordered = ["horovod", "lsgd", MUTANT, "lsgd-close"]
    assert split_classes.arms_of(f"lsgd-close, {MUTANT},horovod,lsgd", RANKS) == ordered
    with pytest.raises(ValueError, match="no arm 'lsgd-far'"):
        split_classes.arms_of("horovod,lsgd-far", RANKS)
    with pytest.raises(ValueError, match="no arm was named"):
        split_classes.arms_of("lsgd-close", RANKS)  # (what to compare it with?)


def test_leaders_train_as_the_optimizers_defaults_have_it_but_where_the_arm_says_otherwise():
    blocks = split_classes.blocks_of(options(), split_classes.arms_of(EVERY, RANKS))
    assert len({(block["arm"], block["fold"], block["seed"]) for block in blocks}) == len(blocks) == 40
    said = {block["arm"]: {name for name in block if name in sum(FOLLOWING.values(), ())} for block in blocks}
    assert said["lsgd"] == said["lsgd-common"] == said["easgd"] == set()
    assert said["lsgd-close"] == said["lsgd-common-close"] == {"global_period", "global_pull"}
    assert said["easgd-close"] == {"global_period", "alpha", "beta"}
    assert {block["arm"] for block in blocks if "common" in block} == {"lsgd-common", "lsgd-common-close"}
    assert {block["algorithm"] for block in blocks if block["mean"]} == set(LEADERS)


@pytest.mark.parametrize("arm", split_classes.OWN)
def test_nothing_that_an_arm_says_is_left_out(arm):
    own = split_classes.OWN[arm]
    assert own.keys() - {"algorithm", "common"} <= {*FOLLOWING.get(own["algorithm"], ())}


def test_where_nobody_waits_the_late_rank_takes_fewer_steps():
    blocks = split_classes.blocks_of(options(), split_classes.arms_of(EVERY, RANKS))
    steps = {block["arm"]: block["steps"] for block in blocks}
    assert steps["horovod"] == steps[MUTANT] == steps["sgp"] == [264] * RANKS
    assert steps["lsgd-common-close"] == steps["lsgd"] == steps["easgd-close"] == [302, 302, 302, 151]


def test_of_arms_whose_weights_differ_the_accuracy_is_told_not_judged(monkeypatch):
    report = report_of(monkeypatch)
    whats = [goal.what for goal in report.goals]
    assert [what.split("'s")[0] for what in whats[:2]] == ["horovod", "solo"]
    assert (len(whats), whats[2].startswith("accuracy that the mutant loses")) == (3, True)
    assert all(goal.met for goal in report.goals)
    rows = {each["arm"]: each for each in report.rows}
    assert rows["lsgd-close"]["scores"] == pytest.approx([0.2, 0.201, 0.202, 0.203])
    assert rows["lsgd-close"]["difference"] == pytest.approx(-0.7685)


def test_rows_of_leaders_tell_pulls_and_what_the_mean_would_be(monkeypatch):
    rows = {each["arm"]: each for each in report_of(monkeypatch).rows}
    assert rows["lsgd-common"]["pulls_per_step"] == pytest.approx(400 / (3 * 302 + 151))
    assert rows["lsgd-common"]["pulls"] == pytest.approx([400 / (3 * 302 + 151)] * 4)
    assert rows["easgd"]["of_mean"] == pytest.approx(0.5015)
    assert {arm for arm, each in rows.items() if "of_mean" in each} == {arm for arm in rows if "sgd" in arm}
    setting = rows["lsgd"]["setting"]
    assert setting["own"]["lsgd-common-close"] == {"algorithm": "lsgd", "global_period": 1, "global_pull": 0.3} | {
        "common": split_classes.COMMON
    }


def test_its_arms_look_different(monkeypatch, tmp_path):
    arms = split_classes.arms_of(EVERY, RANKS)
    assert len({plot.colour(arm, arms) for arm in arms}) == len(arms)
    report = report_of(monkeypatch)
    assert "of mean" in report.text()
    plot.save(report, tmp_path / "hard.png")
    assert (tmp_path / "hard.png").read_bytes().startswith(b"\x89PNG")


def test_arms_are_judged_by_name(monkeypatch):
    report = report_of(monkeypatch, arms="horovod,solo")
    report.goals.clear()
    trainings.judge(report, "horovod", [])
    assert len(report.goals) == 1
    trainings.judge(report, "horovod")
    assert len(report.goals) == 3


def test_common_images_are_of_the_training_part_and_the_same_everywhere():
    train, test = digits.fold(3)
    found = digits.common(3, split_classes.COMMON, seed=1)
    assert np.array_equal(found, digits.common(3, split_classes.COMMON, seed=1))
    assert len({*found.tolist()}) == split_classes.COMMON
    assert {*found.tolist()} <= {*train.tolist()}
    assert not {*found.tolist()} & {*test.tolist()}
    assert {*digits.images()[1][found].tolist()} == set(range(10))
    assert not np.array_equal(found, digits.common(3, split_classes.COMMON, seed=2))
