import threading

import numpy as np
import pytest

from hvd_async.runner import data, sharding
from hvd_async.runner.augment import augment
from hvd_async.runner.batches import Batch, parts
from hvd_async.runner.data import Digits, Synthetic, evaluation_data, stratified_split, training_data


class Numbered:
    """A source whose image i has label i; `unreadable` indices are left out."""

    classes = 100

    def __init__(self, unreadable=()):
        self.unreadable, self.keys = set(unreadable), []

    def count(self, split):
        return 100

    def batch(self, split, indices, key):
        self.keys.append(tuple(key))
        kept = np.array([index for index in indices if index not in self.unreadable], np.int64)
        return Batch(np.zeros((len(kept), 2, 2, 3), np.float32), kept)


def plan_of(*batches):
    return [np.array(batch, np.int64) for batch in batches]


def labels_of(batches):
    return [batch.labels.tolist() for batch in batches]


def test_digits_are_split_by_class_and_fixed():
    one, other = Digits(16, vary=False), Digits(16, vary=False)
    assert (one.count("train"), one.count("test"), one.classes) == (1438, 359, 10)
    everything = one.batch("test", np.arange(359), ())
    np.testing.assert_array_equal(everything.images, other.batch("test", np.arange(359), ()).images)
    counts = np.bincount(everything.labels)
    assert counts.min() >= 34
    assert counts.max() <= 37
    assert everything.images.shape == (359, 16, 16, 3)
    assert (everything.images.dtype, everything.labels.dtype) == (np.float32, np.int64)
    assert abs(float(everything.images.mean())) < 0.1
    assert 0.7 < float(everything.images.std()) < 1.1


def test_only_training_digits_are_varied_and_by_their_key():
    source, plain = Digits(16, vary=True), Digits(16, vary=False)
    where = np.arange(4)
    first = source.batch("train", where, (0, 1)).images
    np.testing.assert_array_equal(first, source.batch("train", where, (0, 1)).images)
    assert not np.array_equal(first, source.batch("train", where, (0, 2)).images)
    assert not np.array_equal(first, plain.batch("train", where, (0, 1)).images)
    np.testing.assert_array_equal(source.batch("test", where, (0, 1)).images, plain.batch("test", where, ()).images)


def test_stratified_split_takes_the_share_of_each_class():
    labels = np.array([0] * 10 + [1] * 50 + [2] * 5)
    train, test = stratified_split(labels, 0.2, 1)
    assert np.bincount(labels[test]).tolist() == [2, 10, 1]
    assert sorted([*train, *test]) == list(range(65))


def test_synthetic_has_the_shape_of_imagenet():
    source = Synthetic(24, images=100)
    batch = source.batch("train", np.arange(90, 100), ())
    assert (batch.images.shape, batch.images.dtype, batch.labels.dtype) == ((10, 24, 24, 3), np.float32, np.int64)
    assert (source.count("train"), source.count("test"), source.classes) == (100, 10, 1000)


def test_augment_keeps_the_picture():
    image = np.zeros((1, 32, 32, 1), np.float32)
    image[0, 12:20, 2:30] = 1
    varied = augment(np.repeat(image, 50, axis=0), np.random.default_rng(0))
    assert varied.shape == (50, 32, 32, 1)
    assert varied.dtype == np.float32
    assert varied.min() >= 0
    assert varied.max() <= 1
    overlap = (varied * image).sum(axis=(1, 2, 3)) / image.sum()
    assert overlap.min() > 0.4
    assert len({one.tobytes() for one in varied}) == 50


def test_batches_come_in_order_each_with_its_own_key():
    source = Numbered()
    plan = plan_of([3, 1], [2], [9, 8], [7], [5])
    assert labels_of(training_data(source, plan, (4, 2), lockstep=False)) == [[3, 1], [2], [9, 8], [7], [5]]
    assert source.keys == [(4, 2, place) for place in range(5)]
    assert labels_of(evaluation_data(source, plan)) == [[3, 1], [2], [9, 8], [7], [5]]
    assert list(training_data(source, [], (0,), lockstep=False)) == []


def test_unreadable_images_leave_a_smaller_batch_and_no_empty_one():
    source = Numbered(unreadable=[1, 2])
    assert labels_of(training_data(source, plan_of([3, 1], [2], [4]), (0,), lockstep=False)) == [[3], [4]]
    assert labels_of(evaluation_data(source, plan_of([2], [1, 4]))) == [[4]]


def test_in_lockstep_the_number_of_batches_stays():
    source = Numbered(unreadable=[1, 2])
    assert labels_of(training_data(source, plan_of([1], [2], [3, 4]), (0,), lockstep=True)) == [[3], [3], [3, 4]]
    with pytest.raises(ValueError, match="none of this rank's training images"):
        list(training_data(Numbered(unreadable=[1]), plan_of([1]), (0,), lockstep=True))


def test_prefetching_is_bounded_and_its_thread_ends_early_too():
    class Plan(list):
        """Notes how far it was read, which is what has been asked of the source."""

        read = 0

        def __getitem__(self, place):
            self.read = max(self.read, place + 1)
            return super().__getitem__(place)

    plan = Plan(plan_of(*([i] for i in range(50))))
    batches = training_data(Numbered(), plan, (0,), lockstep=False)
    for taken in range(1, 6):
        next(batches)
        assert plan.read == taken + data.AHEAD
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hvd_async-data")]


def test_an_error_of_the_source_reaches_the_loop():
    class Broken(Numbered):
        def batch(self, split, indices, key):
            raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        list(training_data(Broken(), plan_of([1], [2]), (0,), lockstep=False))


@pytest.mark.parametrize(("images", "passes"), [(8, 1), (8, 2), (7, 3), (2, 3), (1, 4)])
def test_the_passes_of_a_step_add_up_to_its_batch(images, passes):
    batch = Batch(np.arange(images, dtype=np.float32).reshape(images, 1, 1, 1), np.arange(images))
    found = parts(batch, passes)
    assert len(found) == passes, "Horovod counts the backward passes"
    assert all(len(part) for _, part in found)
    assert sum(share * part.images.mean() for share, part in found) == pytest.approx(batch.images.mean())
    assert sorted(label for share, part in found if share for label in part.labels) == list(range(images))
    sizes = [len(part) for share, part in found if share]
    assert max(sizes) - min(sizes) <= 1


def test_a_plan_from_its_middle_is_the_same_batches():
    source = Digits(8, vary=True)
    plan = sharding.training_batches(90, 0, 1, 20, seed=1, epoch=2, lockstep=False)
    whole = [batch.images.tobytes() for batch in training_data(source, plan, (1, 2), lockstep=False)]
    rest = [batch.images.tobytes() for batch in training_data(source, plan, (1, 2), lockstep=False, first=3)]
    assert len(whole) == 5
    assert rest == whole[3:]
