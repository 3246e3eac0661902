"""What the case ``convergence`` makes of the blocks that its job brings home."""

from __future__ import annotations

import argparse
import math

import numpy as np
import pytest

from scripts.benchmarks.cases import convergence, time_to_accuracy
from scripts.benchmarks.support import plot
from scripts.benchmarks.support.report import Report
from scripts.benchmarks.support.trainings import block_of

RANKS = 4
SETTING = {"epochs": 2}


def trained(arm, fold, seed, delay, score, seconds=4.0):
    """A training of 2 epochs; all ranks tell the same time, only rank 0 has evaluated."""
    own = {"elapsed": seconds, "identical": True, "staleness": {}, "skipped": 0, "steps": 44, "averagings": 44}
    own |= {"distance": 0.5, "norm": 2.0}
    curve = [[seconds / 2, 1.0, score / 2], [seconds, 0.25, score]]
    ranks = [own | {"accuracy": score, "curve": curve}, *([own | {"accuracy": None, "curve": []}] * (RANKS - 1))]
    return {"arm": arm, "fold": fold, "seed": seed, "delay": delay, "epochs": 2, "by_rank": ranks}


def trainings(less, delays=(0.0, 2.0), folds=2, seeds=2):
    """Horovod's arm at 0.96 on fold 0 and 0.98 on fold 1, the others so much less; with a delay twice as slow."""
    return [
        trained(arm, fold, seed, delay, 0.96 + 0.02 * fold - gap, 4.0 + 2 * delay)
        for fold in range(folds)
        for seed in range(seeds)
        for delay in delays
        for arm, gap in {"horovod": 0.0, **less}.items()
    ]


def test_rows_are_of_a_delay_and_an_arm():
    rows = convergence.rows_of(trainings({"sgp": 0.004}), SETTING)
    assert [(each["setting"]["delay"], each["arm"]) for each in rows] == [
        *((0.0, "horovod"), (0.0, "sgp")),
        *((2.0, "horovod"), (2.0, "sgp")),
    ]
    horovod, sgp = rows[:2]
    assert horovod["value"] == pytest.approx(0.97)
    reach = 3.182 * np.std([0.96, 0.96, 0.98, 0.98], ddof=1) / 2  # Student's t of 3 degrees of freedom
    assert (horovod["low"], horovod["high"]) == pytest.approx((0.97 - reach, 0.97 + reach), abs=1e-5)
    assert sgp["difference"] == pytest.approx(-0.004)  # pairs differ by that much, whatever the fold
    assert (sgp["difference_low"], sgp["difference_high"]) == pytest.approx((-0.004, -0.004))
    assert (sgp["train_loss"], sgp["apart_percent"], sgp["runs"]) == (0.25, 25.0, 4)
    assert [row["step_s"] for row in rows] == pytest.approx([4 / 44, 4 / 44, 8 / 44, 8 / 44])


def test_curves_are_those_of_the_arm_with_the_delay():
    rows = convergence.rows_of(trainings({"solo": 0.01}), SETTING)
    assert rows[3]["curves"] == [
        [[4.0, 1.0, pytest.approx(score / 2)], [8.0, 0.25, pytest.approx(score)]] for score in (0.95, 0.95, 0.97, 0.97)
    ]


@pytest.mark.parametrize(("gap", "met"), [(0.009, True), (0.011, False), (-0.02, True)])
def test_none_may_be_more_than_a_point_below(gap, met):
    rows = convergence.rows_of(trainings({"dpsgd": gap}), SETTING)
    report = Report("convergence", RANKS, rows, convergence.COLUMNS)
    convergence.judge(report)
    assert [goal.met for goal in report.goals] == [True, met, True, met]
    assert report.goals[1].what == "dpsgd's mean accuracy less horovod's, delay 0"
    points = f"{-100 * gap:+.2f}"
    assert report.goals[1].value == f"{points} points (95%: {points} to {points})"
    assert report.text().startswith("delay  arm")


def test_of_one_training_there_is_no_interval():
    rows = convergence.rows_of(trainings({"lsgd": 0.0}, folds=1, seeds=1), SETTING)
    report = Report("convergence", RANKS, rows, convergence.COLUMNS)
    convergence.judge(report)
    assert math.isinf(rows[1]["difference_low"])
    assert report.goals[1].value == "+0.00 points (95%: -inf to +inf)"
    assert report.goals[1].met


def options(**more):
    given = {"ranks": RANKS, "arms": convergence.ALL, "delay": [0.0, 2.0], "folds": 2, "repetitions": 3, "epochs": 2}
    given |= {"compute": 0.01, "lr": 0.1, "groups": 2, "local_period": 1, "global_period": 4, "quick": False}
    return argparse.Namespace(**given | more)


def test_every_arm_is_trained_alike():
    blocks = convergence.blocks_of(options())
    assert len({(b["arm"], b["fold"], b["seed"], b["delay"]) for b in blocks}) == len(blocks) == 11 * 2 * 3 * 2
    for block in blocks:
        assert (block["evaluations"], block["group"], len(block["times"])) == (2, 2, 44)
        delays = np.array(block["times"]) - 0.01
        assert delays.sum(axis=1) == pytest.approx(44 * [0.01 * block["delay"]])  # of one rank in each step
        together = block["arm"] not in ("adpsgd", "lsgd", "easgd")
        assert sum(block["steps"]) == pytest.approx(4 * 44, abs=2)
        assert not together or block["steps"] == [44] * 4
    twins = [b["times"] for b in blocks if (b["fold"], b["seed"], b["delay"]) == (1, 2, 2.0)]
    assert len(twins) == 11
    assert all(each == twins[0] for each in twins)


def test_trainings_of_other_cases_are_evaluated_once():
    block = block_of(options(), "solo", 0, 1, "plain", "classes", np.zeros((3, RANKS)))
    assert (block["evaluations"], block["steps"]) == (1, [3] * RANKS)


def test_groups_must_fit():
    with pytest.raises(ValueError, match="--groups 3: 4 ranks cannot be parted into so many"):
        convergence.run(options(groups=3), lambda _: None)


@pytest.mark.parametrize("runs", [1, 2])
def test_curves_are_drawn(runs, tmp_path):
    rows = convergence.rows_of(trainings(dict.fromkeys(convergence.ALL.split(",")[1:], 0.0), folds=runs), SETTING)
    plot.save(Report("convergence", RANKS, rows, (), draw=convergence.draw), tmp_path / "new" / "convergence.png")
    assert (tmp_path / "new" / "convergence.png").read_bytes().startswith(b"\x89PNG")


def test_no_two_lines_look_alike():
    for arms in (convergence.ALL.split(","), ["horovod", "ddp", "k3", "0.75", "sgp", "sgp-int8", "sgp-fp16", "easgd"]):
        looks = {tuple(plot.line(arm, arms)[key] for key in ("color", "linestyle", "marker")) for arm in arms}
        assert len(looks) == len(arms)
    assert plot.line("sgp-int8", ["sgp-int8"])["linestyle"] == plot.line("dpsgd", ["dpsgd"])["linestyle"]


def test_shares_near_one_are_told_apart():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.plot([0.2, 0.9, 1.0])
    plot.near_one(axes)
    places = axes.transData.transform([(0, y) for y in (0.5, 0.9, 0.99, 1.0)])[:, 1]
    steps = np.diff(places)
    assert (steps > 0).all()
    assert steps.max() < 2 * steps.min()  # on a straight scale, 40 times
    low, high = axes.get_ylim()
    assert low < 0.2
    assert high > 1
    shown = [float(label.get_text()) for label in axes.get_yticklabels()]
    assert shown == axes.get_yticks().tolist()
    assert (shown[-2:], min(shown) >= low) == ([0.99, 1.0], True)


def test_cases_share_the_trainings_of_the_digits():
    given = options(ranks=8, arms="horovod,lsgd", seconds=1.0, every=1.0, groups=2)
    race_block = time_to_accuracy.blocks_of(given, 8)[0]
    for block in (race_block, convergence.blocks_of(options(folds=1))[0]):
        assert {"arm", "seed", "model", "fold", "lr", "batch", "split", "group", "global_period"} <= block.keys()
