"""Digits and clips of them that benchmarks train on: who has which of them when."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from scripts.benchmarks.support import clips, digits

RANKS = 4


def test_folds_part_all_images_and_ranks_find_the_same_without_scikit_learn(monkeypatch, tmp_path):
    pixels, labels = digits.images()
    folds = [digits.fold(number) for number in range(digits.FOLDS)]
    assert all(sorted([*train, *test]) == list(range(len(labels))) for train, test in folds)
    assert np.array_equal(np.sort(np.concatenate([test for _, test in folds])), np.arange(len(labels)))
    for _, test in folds:  # each has its share of each class
        assert np.ptp(np.bincount(labels[test]) - np.bincount(labels) / digits.FOLDS) < 2
    digits.leave(tmp_path)
    monkeypatch.setenv(digits.FOLDER, str(tmp_path))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setattr(digits, "_all", digits._all.__wrapped__)
    assert np.array_equal(digits.images()[0], pixels)
    assert np.array_equal(digits.images()[1], labels)
    assert all(np.array_equal(digits.fold(number)[1], test) for number, (_, test) in enumerate(folds))


def test_common_images_are_of_the_training_part_and_the_same_everywhere():
    train, _ = digits.fold(3)
    found = digits.common(3, 64, seed=1)
    assert np.array_equal(found, digits.common(3, 64, seed=1))
    assert len(set(found.tolist()) & set(train.tolist())) == 64
    assert {*digits.images()[1][found].tolist()} == set(range(10))
    assert not np.array_equal(found, digits.common(3, 64, seed=2))


# -- clips ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn():
    """(Train, test) of a seed."""
    return clips.clips_of(3, 20)


def test_images_to_test_on_are_in_no_clip_to_train_on(drawn):
    train, test = (np.unique(np.concatenate(part.frames)) for part in drawn)
    assert len(train) > 1000
    assert len(test) > 300
    assert not np.intersect1d(train, test).size


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


def test_there_is_most_of_a_clips_own_digit(drawn):
    train, labels = drawn[0], digits.images()[1]
    own = np.array([(labels[one] == label).sum() for one, label in zip(train.frames, train.labels, strict=True)])
    assert np.array_equal(own, np.minimum((clips.SHARE * train.lengths).astype(int) + 1, train.lengths))
    most = [np.bincount(labels[one]).argmax() for one in train.frames]
    assert (most == train.labels).mean() > 0.99


def test_a_seeds_clips_are_the_same_whoever_asks(drawn):
    again, other = clips.clips_of(3, 20), clips.clips_of(4, 20)
    for part, (one, two) in enumerate(zip(drawn, again, strict=True)):
        assert np.array_equal(np.concatenate(one.frames), np.concatenate(two.frames))
        assert np.array_equal(one.labels, two.labels)
        assert np.array_equal(one.lengths, clips.lengths_of(3, 20, part))
    assert not np.array_equal(drawn[0].labels, other[0].labels)


def test_a_batch_is_padded_after_each_clips_end(drawn):
    train, chosen = drawn[0], np.array([5, 2, 9])
    batch = clips.padded(train, chosen)
    assert batch.frames.shape == (3, train.lengths[chosen].max(), clips.PIXELS)
    assert np.array_equal(batch.labels, train.labels[chosen])
    for place, number in enumerate(chosen):
        end = batch.lengths[place]
        images = digits.images()[0][train.frames[number]].reshape(-1, clips.PIXELS)
        assert np.array_equal(batch.frames[place, :end], images)
        assert not batch.frames[place, end:].any()


# -- who has what when ----------------------------------------------------------------------------------------


def dealt(bucketed, count=515, steps=16, batch=8):
    lengths = clips.draw_lengths(count, 20, np.random.default_rng(0))
    how = {"steps": steps, "ranks": RANKS, "batch": batch, "bucketed": bucketed}
    return lengths, clips.deal(lengths, random=np.random.default_rng(1), **how)


@pytest.mark.parametrize("bucketed", [False, True])
def test_an_epoch_has_each_clip_once_and_the_next_has_other_batches(bucketed):
    _, order = dealt(bucketed)
    assert order.shape == (16, RANKS, 8)
    assert len(np.unique(order)) == order.size
    _, order = dealt(bucketed, count=64, steps=4)
    first, second = order[:2], order[2:]
    assert sorted(first.ravel()) == sorted(second.ravel()) == list(range(64))
    assert {frozenset(one) for one in first.reshape(-1, 8)} != {frozenset(one) for one in second.reshape(-1, 8)}


def test_buckets_set_ranks_further_apart_and_none_is_the_slow_one():
    apart = {}
    for bucketed in (False, True):
        lengths, order = dealt(bucketed)
        longest = lengths[order].max(axis=2)
        apart[bucketed] = (longest.std(axis=1) / longest.mean(axis=1)).mean()
    assert apart[True] > 1.3 * apart[False]
    assert np.median(np.ptp(lengths[order], axis=2)) <= 2
    lengths, order = dealt(True, count=6403, steps=200)
    assert np.bincount(lengths[order].max(axis=2).argmax(axis=1), minlength=RANKS).min() > 20
