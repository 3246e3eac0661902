"""The benchmark on sequences of different lengths: clips, who has which of them when, and what is made of blocks."""

from __future__ import annotations

import argparse
import math
import sys

import numpy as np
import pytest

from scripts.benchmarks.cases import sequence_lengths
from scripts.benchmarks.support import clips, digits, plot
from scripts.benchmarks.support.report import Report
from scripts.benchmarks.support.schedule import replay, synchronous_seconds

RANKS, STEPS, MS = 4, 12, 5.0
SETTING = {"framework": "torch", "seed": "the run's number"}


# -- clips ----------------------------------------------------------------------------------------------------


def test_images_to_test_on_are_in_no_clip_to_train_on():
    train, test = (np.unique(np.concatenate(part.frames)) for part in clips.clips_of(0, 20))
    assert len(train) > 1000
    assert len(test) > 300
    assert not np.intersect1d(train, test).size


def test_folds_part_all_images():
    train, test = digits.fold(0)
    assert sorted([*train, *test]) == list(range(len(digits.images()[1])))


def test_ranks_find_the_same_images_and_folds_without_scikit_learn(monkeypatch, tmp_path):
    pixels, labels = digits.images()
    tests = [digits.fold(number)[1] for number in range(digits.FOLDS)]
    digits.leave(tmp_path)
    monkeypatch.setenv(digits.FOLDER, str(tmp_path))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setattr(digits, "_all", digits._all.__wrapped__)
    assert np.array_equal(digits.images()[0], pixels)
    assert np.array_equal(digits.images()[1], labels)
    assert all(np.array_equal(digits.fold(number)[1], test) for number, test in enumerate(tests))
    assert np.array_equal(np.sort(np.concatenate(tests)), np.arange(len(labels)))
    for test in tests:  # each has its share of each class
        assert np.ptp(np.bincount(labels[test]) - np.bincount(labels) / digits.FOLDS) < 2


def test_lengths_are_distributed_like_the_videos():
    drawn = clips.draw_lengths(20_000, clips.MEDIAN, np.random.default_rng(0))
    assert np.median(drawn) == pytest.approx(clips.MEDIAN, rel=0.02)
    assert drawn.mean() == pytest.approx(188, rel=0.02)
    assert drawn.std() == pytest.approx(98, rel=0.04)
    assert drawn.min() == clips.SHORTEST
    assert drawn.max() <= clips.LONGEST
    small = clips.draw_lengths(20_000, 20, np.random.default_rng(0))
    assert np.median(small) == 20
    assert small.min() == 3


def test_there_is_most_of_a_clips_own_digit():
    train, _ = clips.clips_of(1, 20)
    labels = digits.images()[1]
    own = np.array([(labels[one] == label).sum() for one, label in zip(train.frames, train.labels, strict=True)])
    assert np.array_equal(own, np.minimum((clips.SHARE * train.lengths).astype(int) + 1, train.lengths))
    most = [np.bincount(labels[one]).argmax() for one in train.frames]
    assert (most == train.labels).mean() > 0.99


def test_a_seeds_clips_are_the_same_whoever_asks():
    once, again, other = clips.clips_of(3, 20), clips.clips_of(3, 20), clips.clips_of(4, 20)
    for one, two in zip(once, again, strict=True):
        assert np.array_equal(np.concatenate(one.frames), np.concatenate(two.frames))
        assert np.array_equal(one.labels, two.labels)
    assert not np.array_equal(once[0].labels, other[0].labels)
    for part in range(2):
        assert np.array_equal(once[part].lengths, clips.lengths_of(3, 20, part))


def test_a_batch_is_padded_after_each_clips_end():
    train, _ = clips.clips_of(0, 20)
    chosen = np.array([5, 2, 9])
    batch = clips.padded(train, chosen)
    assert batch.frames.shape == (3, train.lengths[chosen].max(), clips.PIXELS)
    assert np.array_equal(batch.labels, train.labels[chosen])
    for place, number in enumerate(chosen):
        end = batch.lengths[place]
        images = digits.images()[0][train.frames[number]].reshape(-1, clips.PIXELS)
        assert np.array_equal(batch.frames[place, :end], images)
        assert not batch.frames[place, end:].any()


# -- who has what when ----------------------------------------------------------------------------------------


def dealt(bucketed, steps=16, batch=8):
    drawn = clips.draw_lengths(RANKS * steps * batch + 3, 20, np.random.default_rng(0))
    how = {"steps": steps, "ranks": RANKS, "batch": batch, "bucketed": bucketed}
    return drawn, clips.deal(drawn, random=np.random.default_rng(1), **how)


@pytest.mark.parametrize("bucketed", [False, True])
def test_an_epoch_has_each_clip_once(bucketed):
    _, order = dealt(bucketed)
    assert order.shape == (16, RANKS, 8)
    assert len(np.unique(order)) == order.size


@pytest.mark.parametrize("bucketed", [False, True])
def test_steps_beyond_an_epoch_are_of_the_next_in_other_batches(bucketed):
    drawn = clips.draw_lengths(64, 20, np.random.default_rng(0))
    order = clips.deal(drawn, steps=4, ranks=4, batch=8, bucketed=bucketed, random=np.random.default_rng(1))
    first, second = order[:2], order[2:]
    assert sorted(first.ravel()) == sorted(second.ravel()) == list(range(64))
    assert {frozenset(one) for one in first.reshape(-1, 8)} != {frozenset(one) for one in second.reshape(-1, 8)}


def test_buckets_set_ranks_further_apart():
    apart = {}
    for bucketed in (False, True):
        drawn, order = dealt(bucketed)
        longest = drawn[order].max(axis=2)
        apart[bucketed] = (longest.std(axis=1) / longest.mean(axis=1)).mean()
    drawn, order = dealt(True)
    assert apart[True] > 1.3 * apart[False]
    assert np.median(np.ptp(drawn[order], axis=2)) <= 2


def test_no_rank_is_the_slow_one():
    drawn, order = dealt(True, steps=200)
    slowest = drawn[order].max(axis=2).argmax(axis=1)
    assert np.bincount(slowest, minlength=RANKS).min() > 20


def options(**more):
    given = {"ranks": RANKS, "arms": "horovod,majority,solo", "repetitions": 2, "quick": False, "limit": None}
    given |= {"framework": "torch", "steps": STEPS, "ms": MS, "frames": 20, "bucketed": True, "batch_size": 8}
    return argparse.Namespace(**given | {"lr": 0.1, "momentum": 0.9} | more)


def test_all_arms_have_the_same_batches():
    blocks = sequence_lengths.blocks_of(options(), ["horovod", "majority", "solo"])
    assert len(blocks) == 6
    by_seed = {seed: [sequence_lengths.planned(b, RANKS) for b in blocks if b["seed"] == seed] for seed in (0, 1)}
    for first, *others in by_seed.values():
        assert first.shape == (STEPS, RANKS)
        assert all(np.array_equal(first, other) for other in others)
        assert (first.std(axis=1) > 0).mean() > 0.9
    assert not np.array_equal(by_seed[0][0], by_seed[1][0])


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"arms": "majority,solo"}, "needs the arm 'horovod'"),
        ({"arms": "horovod,ddp", "framework": "tensorflow"}, "'ddp' is not there in this case"),
        ({"arms": "horovod,sgp"}, "'sgp' is not there in this case"),
        ({"batch_size": 0}, "there are 2048 clips"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        sequence_lengths.run(options(**wrong), lambda _: None)


# -- what is made of blocks -----------------------------------------------------------------------------------

FRAMES = np.tile([[10, 10, 10, 30], [10, 30, 10, 10], [30, 10, 10, 10], [10, 10, 30, 10]], (3, 1))
"""Frames of the longest clip, [steps, ranks]: 30 a step for all together, 15 a step for each."""


def trained(arm, seed, seconds_a_step, accuracy=0.9, ms=MS):
    """A block in which the last rank took so long and the others half of it."""
    stats = {} if arm == "horovod" else {"staleness": {"0": 9, "2": 3}, "contributors": {"1": 6, "3": 6}}

    def own(rank):
        longest = FRAMES[:, rank].tolist()
        elapsed = STEPS * seconds_a_step * (1.0 if rank == RANKS - 1 else 0.5)
        known = {"elapsed": elapsed, "longest": longest, "computed": [n * MS / 1e3 for n in longest]}
        return known | {"stats": stats, "rounds_before": 2, "accuracy": None if rank else accuracy, "identical": True}

    return {"arm": arm, "seed": seed, "ms": ms, "by_rank": [own(rank) for rank in range(RANKS)]}


def rows(solo=(0.08, 0.08, 0.08), scores=(0.951, 0.949, 0.95), horovod=0.16, ms=MS):
    blocks = [trained("horovod", seed, horovod * (1 + seed), 0.95, ms) for seed in range(3)]
    blocks += [trained("solo", seed, solo[seed] * (1 + seed), scores[seed], ms) for seed in range(3)]
    blocks += [trained("auto", seed, 0.12 * (1 + seed), 0.95, ms) for seed in range(3)]
    return sequence_lengths.rows_of(blocks, SETTING)


def test_the_last_rank_ends_the_clock():
    block = trained("horovod", 0, 0.2)
    assert sequence_lengths.steps_per_second(block) == pytest.approx(RANKS / 0.2)


def test_bounds_are_those_of_the_lengths():
    assert sequence_lengths.bound_of(trained("horovod", 0, 1.0)) == pytest.approx(1.0)
    assert sequence_lengths.bound_of(trained("solo", 0, 1.0)) == pytest.approx(30 / 15)
    majority = replay(FRAMES.astype(float), "majority", seed=7, first_round=3).seconds
    assert sequence_lengths.bound_of(trained("majority", 7, 1.0)) == pytest.approx(
        synchronous_seconds(FRAMES) / majority
    )
    assert sequence_lengths.bound_of(trained("auto", 0, 1.0)) is None


def test_variation_is_that_over_the_ranks():
    assert sequence_lengths.variation(trained("solo", 0, 1.0)) == pytest.approx(np.std([10, 10, 10, 30]) / 15)


def test_rows_pair_seeds():
    horovod, solo, auto = rows(solo=(0.08, 0.1, 0.064))
    assert (horovod["speedup"], horovod["difference"]) == (1.0, None)
    assert (solo["speedup"], solo["speedup_low"], solo["speedup_high"]) == pytest.approx((2.0, 1.6, 2.5))
    assert solo["value"] == pytest.approx(RANKS / 0.192)
    assert solo["accuracy"] == pytest.approx(0.95)
    reach = 4.303 * 0.001 / math.sqrt(3)  # (Student's for three seeds)
    assert solo["difference"] == pytest.approx(0.0, abs=1e-9)
    assert solo["difference_high"] == pytest.approx(reach, rel=1e-3)
    assert solo["difference_low"] == pytest.approx(-reach, rel=1e-3)
    assert solo["staleness"] == 0.5
    assert solo["contributors"] == 2.0
    assert auto["bound"] is None
    assert horovod["staleness"] is None


def test_over_ideal_is_over_the_longest_clips_alone():
    horovod, solo, _ = rows()
    assert horovod["over_ideal"] == pytest.approx(0.15 / 0.32)  # (the median seed has twice the first one's time)
    assert solo["over_ideal"] == pytest.approx(0.15 / 0.16)
    assert all(each["over_ideal"] is None for each in rows(ms=0.0))


def judged(found):
    report = Report("lengths", RANKS, found, sequence_lengths.COLUMNS)
    sequence_lengths.judge(report)
    return report, {goal.what: goal for goal in report.goals}


def test_goals_are_met():
    found = rows(horovod=0.08, solo=(0.06,) * 3)
    report, by_what = judged(found)
    assert by_what["solo's steps a second over Horovod's"].met
    assert by_what["solo's accuracy less horovod's, 95% interval"].met
    assert by_what["auto's accuracy less horovod's, 95% interval"].met
    assert "the lengths allow 2.00" in by_what["solo's steps a second over Horovod's"].wanted
    assert "horovod" in report.text()


def test_goals_are_missed():
    _, by_what = judged(rows(solo=(0.13,) * 3, scores=(0.95, 0.95, 0.93)))
    assert not by_what["solo's steps a second over Horovod's"].met
    assert not by_what["solo's accuracy less horovod's, 95% interval"].met


def test_it_says_when_the_machine_was_too_busy():
    report, by_what = judged(rows())
    assert by_what["Horovod's step over its own bound"].value == pytest.approx(0.32 / 0.15)
    assert "too busy" in report.notes[0]
    calm = [trained("horovod", seed, 0.155, 0.95) for seed in range(2)]
    report, by_what = judged(sequence_lengths.rows_of(calm, SETTING))
    assert by_what["Horovod's step over its own bound"].met
    assert not report.notes
    report, by_what = judged(rows(ms=0.0))
    assert not report.notes
    assert "Horovod's step over its own bound" not in by_what


@pytest.mark.parametrize("seeds", [1, 3])
def test_rows_are_drawn(seeds, tmp_path):
    blocks = [trained(arm, seed, 0.16) for seed in range(seeds) for arm in ("horovod", "solo", "auto")]
    found = sequence_lengths.rows_of(blocks, SETTING)
    plot.save(
        Report("lengths", RANKS, found, sequence_lengths.COLUMNS, draw=sequence_lengths.draw), tmp_path / "lengths.png"
    )
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
