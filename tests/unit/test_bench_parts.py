"""Parts of the benchmarks: medians and intervals, arms, data, what bytes allow, whom to take."""

from __future__ import annotations

import importlib.util
import math
import sys

import numpy as np
import pytest

from scripts.benchmarks.cases import CASES, imbalance, network, trainings
from scripts.benchmarks.support import data, plot
from scripts.benchmarks.support.arms import MUTANT, has_own_weights, installed, is_eager, parse_arms
from scripts.benchmarks.support.figures import Interval, Ratios, mean_interval, median_interval, slope, spread
from scripts.benchmarks.support.names import RIVALS
from scripts.benchmarks.support.report import Goal, columns, finite, row, table
from tests.unit.bench_jobs import options

RANKS = 4
WIRE = 8 * 8.0 / 50.0 / network.PAYLOAD
"""Seconds that 8 MB take at 50 Mbit/s."""

# -- statistics -------------------------------------------------------------------------------------------------------


def test_medians_and_intervals():
    assert spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    found = mean_interval([1.0, 2.0, 3.0, 4.0])
    assert found == pytest.approx((2.5, 0.44574, 4.55426), abs=1e-4)  # t = 3.182, s = 1.291
    assert mean_interval([1.0])[1:] == (-math.inf, math.inf)
    assert median_interval(list(range(10))) == (4.5, 1, 8)  # 97.9%; between the third and the eighth 89%
    assert median_interval(range(5))[1:] == (-math.inf, math.inf)
    assert Interval(2.0, 1.0, 4.0).width == 2.0
    assert Interval(0.0, -1.0, 0.5).within(-1.0, 1.0)
    assert slope([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]) == 2.0
    assert slope([1.0, 1.0], [0.0, 5.0]) == 0.0


def test_ratios_are_within_a_repetition_and_leave_out_one_that_is_not_complete():
    def block(arm, repetition, seconds):
        return {"arm": arm, "repetition": repetition, "by_rank": [{"ends": [seconds, 2 * seconds]}] * 2}

    blocks = [block(arm, i, (1 + i) * pace) for i in range(8) for arm, pace in (("horovod", 1.0), ("all", 1.25))]
    found = Ratios("horovod", [*blocks, block("all", 8, 99.0)])
    assert len(found.cycles) == 8
    assert found.median("all") == found.mean("all") == (1.25, 1.25, 1.25)
    assert found.width(["all"]) == 0.0
    assert Ratios("horovod", []).width(["all"]) == math.inf


def test_tables_and_goals_read_well():
    rows = [row("solo", {"delay": 0.5}, Interval(1.0, 0.5, 2.0), "s", ok=True), row("horovod", {}, 12.0, "s", ok=False)]
    found = table(rows, columns("delay = setting.delay g | arm | s = value .1f ~ | ok"))
    assert found.splitlines() == [
        "delay  arm         s   low  high   ok",
        "  0.5  solo      1.0   0.5   2.0  yes",
        "    -  horovod  12.0  12.0  12.0   no",
    ]
    assert str(Goal("x", 1.23456, "<= 2", True)) == "met     x: 1.235 (<= 2)"
    assert str(Goal("x", "3", "<= 2", False)) == "MISSED  x: 3 (<= 2)"
    assert str(Goal("x", 3, "<= 2", False, judged=False)).startswith("open")
    assert finite({1: [math.inf, 1.0, (math.nan,)]}) == {"1": [None, 1.0, [None]]}


# -- arms -------------------------------------------------------------------------------------------------------------

EVERY = {"gossip": True, "leaders": True, "compressed": True}


def test_a_list_has_each_arm_once_in_its_order(monkeypatch):
    assert parse_arms("horovod, solo,k2,solo", 4) == ["horovod", "solo", "k2"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    named = "horovod-fp16,ddp-bf16,ddp-powersgd,solo-fp16,decent-dp,post-local-sgd,torchft,torchft-diloco,dpsgd-avg4"
    assert parse_arms(named, 4, RIVALS, **EVERY) == named.split(",")
    hosts = ["solo-hosts", "sgp-hosts", "adpsgd-bf16-hosts", "local-hosts"]
    assert parse_arms(",".join(hosts), 4, local_size=2, **EVERY) == hosts
    assert [arm for arm in ("solo", "0.75", "sgp", "lsgd", "ddp", "plain") if is_eager(arm)] == ["solo", "0.75"]
    own = ["sgp", "lsgd", "torchft"]
    assert [arm for arm in (*own, "solo", "ddp") if has_own_weights(arm)] == own
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchft" else name)
    assert installed(["horovod", "torchft", "sgp"]) == ["horovod", "sgp"]


@pytest.mark.parametrize(
    ("text", "case", "hint"),
    [
        ("", EVERY, "no arm was named"),
        ("k5", EVERY, "5 of 4 ranks"),
        ("most", EVERY, "no arm 'most'"),
        ("1.5", EVERY, "no arm"),
        ("sgp-int4", EVERY, "messages of sgp may be fp16, bf16, int8"),
        ("adpsgd-avg4", EVERY, "adpsgd does not average all ranks"),
        ("horovod-avg4", EVERY, "is for gossip"),
        ("horovod-bf16", EVERY, "is not compressed so"),
        ("decent-dp", {}, "'decent-dp' is not there in this case"),
        ("lsgd", {"gossip": True}, "is not there in this case"),
        ("sgp-hosts", EVERY, "-hosts is for partial allreduce and gossip, --per-host 2"),
        ("sgp-hosts", {**EVERY, "local_size": 3}, "3 ranks per host do not divide 4 ranks"),
        ("decent-dp", {"ranks": 6, "rivals": RIVALS}, "decent-dp wants 2, 4, 8"),
        ("torchft-diloco", {"rivals": RIVALS}, "pip install torchft"),
    ],
)
def test_arms_that_cannot_be_are_refused(monkeypatch, text, case, hint):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=hint):
        parse_arms(text, **{"ranks": 4, **case})


@pytest.mark.parametrize("case", ["network", "time_to_accuracy", "nemesis", "scale"])
def test_arms_that_are_drawn_together_look_different(case):
    arms = CASES[case].arms.split(",")
    assert len({plot.look_of(arm, arms) for arm in arms}) == len(arms)
    assert plot.look_of("solo", ["solo"])[0] == plot.look_of("solo", arms)[0]


# -- data -------------------------------------------------------------------------------------------------------------


def test_folds_part_all_images_and_ranks_find_the_same_without_scikit_learn(monkeypatch, tmp_path):
    pixels, labels = data.digits()
    folds = [data.fold(number) for number in range(data.FOLDS)]
    assert all(sorted([*train, *test]) == list(range(len(labels))) for train, test in folds)
    assert np.array_equal(np.sort(np.concatenate([test for _, test in folds])), np.arange(len(labels)))
    data.leave(tmp_path)
    monkeypatch.setenv(data.FOLDER, str(tmp_path))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setattr(data, "_all", data._all.__wrapped__)
    assert np.array_equal(data.digits()[0], pixels)
    assert all(np.array_equal(data.fold(number)[1], test) for number, (_, test) in enumerate(folds))


def test_ranks_have_shares_of_the_images_or_of_their_classes():
    found = data.images_of("digits", number=1)
    task = {"batch": 16, "seed": 3}
    even = [np.concatenate(data.batches(task, found, rank, RANKS, 0)) for rank in range(RANKS)]
    assert len(np.unique(np.concatenate(even))) == sum(map(len, even)) > 1300
    split = [data.batches(task | {"split": "classes"}, found, rank, RANKS, 0) for rank in range(RANKS)]
    classes = [{*found.labels[np.concatenate(own)].tolist()} for own in split]
    assert classes == [{0, 3, 6}, {1, 4, 7}, {2, 5}, {8, 9}]
    assert len({len(own) for own in split}) == 1


def test_clips_are_like_the_videos_and_have_most_of_their_own_digit():
    drawn = data.draw_lengths(20_000, data.MEDIAN, np.random.default_rng(0))
    assert (np.median(drawn), drawn.mean(), drawn.std()) == pytest.approx((167, 188, 98), rel=0.04)
    assert (drawn.min(), drawn.max() <= data.LONGEST) == (data.SHORTEST, True)
    train, test = data.clips_of(3, 20)
    images = [np.unique(np.concatenate(part.frames)) for part in (train, test)]
    assert not np.intersect1d(*images).size, "an image to test on is trained on"
    most = [np.bincount(data.digits()[1][one]).argmax() for one in train.frames]
    assert (most == train.labels).mean() > 0.99
    batch = data.padded(train, np.array([5, 2]))
    assert batch.frames.shape == (2, train.lengths[[5, 2]].max(), data.PIXELS)
    assert not batch.frames[0, batch.lengths[0] :].any()


def test_buckets_set_ranks_further_apart_and_an_epoch_has_each_clip_once():
    apart = {}
    lengths = data.draw_lengths(515, 20, np.random.default_rng(0))
    for bucketed in (False, True):
        order = data.deal({"steps": 16, "batch": 8, "bucketed": bucketed, "seed": 1}, lengths, RANKS)
        assert len(np.unique(order)) == order.size == 16 * RANKS * 8
        longest = lengths[order].max(axis=2)
        apart[bucketed] = (longest.std(axis=1) / longest.mean(axis=1)).mean()
    assert apart[True] > 1.3 * apart[False]


# -- plans and bounds -------------------------------------------------------------------------------------------------


def test_split_classes_gives_ranks_that_wait_for_none_as_many_steps_together():
    args = options(CASES["split_classes"], "--folds", "2", ranks=RANKS, repetitions=2)
    blocks = trainings.split_blocks(args, ["horovod", "sgp", "lsgd", MUTANT], 264)
    assert len({(b["arm"], b["task"]["fold"], b["seed"]) for b in blocks}) == len(blocks) == 16
    steps = {block["arm"]: block["steps"] for block in blocks}  # where no rank waits, the late rank takes fewer
    assert steps["horovod"] == steps[MUTANT] == steps["sgp"] == [264] * RANKS
    assert steps["lsgd"] == [302, 302, 302, 151]


def test_sequence_lengths_gives_all_arms_the_same_batches():
    args = options(CASES["sequence_lengths"], "--steps", "12", ranks=RANKS, repetitions=2)
    blocks = trainings.length_blocks(args, ["horovod", "majority", "solo"])
    by_seed = [[block["times"] for block in blocks if block["seed"] == seed] for seed in (0, 1)]
    assert all(times == first for first, *others in by_seed for times in others)
    assert by_seed[0][0] != by_seed[1][0]
    frames = trainings.frames_of(blocks[0], RANKS)
    assert np.allclose(np.array(blocks[0]["times"]), 0.005 * frames)
    assert frames.shape == (10, RANKS)


@pytest.mark.parametrize(
    ("arm", "need"),
    [
        ("horovod", (0.0, 14.0)),
        ("ddp-fp16", (0.0, 7.0)),
        ("post-local-sgd", (0.0, 3.5)),
        ("local-sgd-avg7", (0.0, 2.0)),
        ("diloco-bf16-avg7", (1.0, 0.0)),
        ("decent-dp", (8.0, 0.0)),
        ("sgp-avg4", (0.0, 11.5)),
        ("dpsgd-bf16-avg4", (4.0, 3.5)),
        ("dpsgd-int8", (2.0 + 8 / 2048, 0.0)),  # with a scale for every 2,048 elements
        ("adpsgd", None),
        ("lsgd", None),
    ],
)
def test_what_a_step_must_send(arm, need):
    assert network.need_of(arm, 8, 8.0) == need


def test_messages_go_after_the_computation_or_under_it():
    block = {"compute": 0.5, "megabytes": 8.0, "bandwidth_mbit": 50.0}
    leasts = {"horovod": 0.5 + 1.75 * WIRE, "sgp": 0.5 + WIRE, "dpsgd": WIRE, "easgd": 0.5, "dpsgd-int8": 0.5}
    for arm, least in leasts.items():
        assert network.least_seconds(arm, 8, block) == pytest.approx(least)
    assert network.crossing([(50.0, 0.5), (200.0, 2.0), (800.0, 0.5)]) == pytest.approx([100.0, 400.0])
    assert network.baseline(["ddp-fp16", "horovod-fp16"]) == "horovod-fp16"
    assert imbalance.best_speedup("adpsgd-bf16", 8, 10.0) == pytest.approx(71 / 8)
    assert imbalance.best_speedup("dpsgd", 8, 10.0) == 1.0


# -- time to accuracy -------------------------------------------------------------------------------------------------


def test_an_arm_has_its_best_rate_and_a_kind_its_arms():
    scores = [("horovod", 0.6, 0.8), ("sgp", 0.2, 0.7), ("horovod", 0.2, 0.8), ("sgp", 0.6, 0.9)]
    found = [{"arm": arm, "lr": lr, "by_rank": [{"curve": [[1.0, score]]}]} for arm, lr, score in scores]
    assert trainings.best_rates(found) == {"horovod": 0.2, "sgp": 0.6}
    assert trainings.arms_of("network", ["horovod", "osgp-bf16", "dpsgd-qg"]) == ["horovod", "osgp-bf16"]
    assert trainings.arms_of("classes", ["horovod", "osgp-bf16", "dpsgd-qg"]) == ["horovod", "dpsgd-qg"]


def test_rates_are_tuned_on_held_out_data_from_another_seed():
    args = options(CASES["time_to_accuracy"], ranks=RANKS, repetitions=5)
    tuning, counting = (trainings.kind_block(args, "none", "sgp", 1, 0.1, tuning=tuning) for tuning in (True, False))
    assert (tuning["task"]["tuning"], tuning["looks"]) == (True, 1)
    assert (counting["task"]["tuning"], counting["looks"]) == (False, trainings.LOOKS)


def test_targets_are_reached_between_looks():
    curve = [[1.0, 0.5], [2.0, 0.7], [3.0, 0.6], [4.0, 0.8]]
    reached = [trainings.reached_at(curve, target) for target in (0.6, 0.75, 0.4, 0.9)]
    assert reached == pytest.approx([1.5, 3.75, 1.0, math.inf])


def test_the_soonest_that_loses_no_accuracy_is_taken():
    until = {
        "horovod": [4.0, 4.1, 4.2],
        "solo": [1.0, 1.1, 1.2],
        "lsgd": [0.5, math.inf, math.inf],
        "dpsgd": [2.1, 2.4, 3.3],
        "sgp": [2.0, 2.5, 3.0],
    }
    rows = [
        {"arm": arm, "until": s, "both_s": float(np.median(s)), "difference_low": -0.02 if arm == "solo" else -0.004}
        for arm, s in until.items()
    ]
    assert [each["arm"] for each in trainings.choose(rows)] == ["dpsgd", "sgp", "horovod"]
    assert trainings.is_level(until["dpsgd"], until["sgp"])
    assert not trainings.is_level(until["dpsgd"], until["horovod"])
