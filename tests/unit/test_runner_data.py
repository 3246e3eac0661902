"""Where images come from, and how they are varied, skipped and prefetched."""

import shutil
import warnings

import numpy as np
import pytest
from PIL import Image

from hvd_async.runner.data import DEVIATION, MEAN, Batch, Digits, Folder, evaluation_data, open_source, training_data


class Numbered:
    """A source whose image i has label i; `unreadable` indices are left out."""

    def __init__(self, unreadable=()):
        self.unreadable, self.keys = set(unreadable), []

    def batch(self, split, indices, key):
        self.keys.append(tuple(key))
        kept = np.array([index for index in indices if index not in self.unreadable], np.int64)
        return Batch(np.zeros((len(kept), 2, 2, 3), np.float32), kept)


def plan_of(*batches):
    return [np.array(batch, np.int64) for batch in batches]


def labels_of(batches):
    return [batch.labels.tolist() for batch in batches]


# -- digits and random images -----------------------------------------------------------------------------------------


def test_digits_are_split_by_class_and_fixed():
    source = Digits(16, vary=False)
    assert (source.sizes, source.classes) == ({"train": 1438, "test": 359}, 10)
    everything = source.batch("test", np.arange(359), ())
    assert np.bincount(everything.labels).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert everything.labels[:8].tolist() == [2, 6, 8, 5, 6, 5, 7, 0], (
        "accuracies of all versions are about the same images"
    )
    assert (everything.images.shape, everything.images.dtype) == ((359, 16, 16, 3), np.float32)
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


# -- a folder ---------------------------------------------------------------------------------------------------------

COLOURS = {"ant": (200, 30, 30), "bee": (30, 200, 30), "cat": (30, 30, 200)}


@pytest.fixture
def root(tmp_path):
    """Three classes of plain colour: 4 JPEGs each for training, 2 each (a .JPG and a .png) for validation."""
    for name, colour in COLOURS.items():
        for split in ("train", "val"):
            (tmp_path / split / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (60 + 10 * number, 50), colour).save(tmp_path / "train" / name / f"{number}.jpeg")
        Image.new("RGB", (64, 64), colour).save(tmp_path / "val" / name / "a.JPG")
        Image.new("RGBA", (64, 64), (*colour, 255)).save(tmp_path / "val" / name / "b.png")
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".cache").mkdir()
    return tmp_path


def check_colours(batch):
    found = (batch.images.mean(axis=(1, 2)) * DEVIATION + MEAN) * 255
    np.testing.assert_allclose(found, np.array(list(COLOURS.values()))[batch.labels], atol=4)


def test_labels_and_pixels(root):
    source = open_source(str(root), 32, vary=True, workers=2)
    assert (source.classes, source.sizes) == (3, {"train": 12, "test": 6})
    for split, key in (("train", (0, 0)), ("test", ())):
        batch = source.batch(split, np.arange(source.sizes[split]), key)
        assert batch.images.shape == (source.sizes[split], 32, 32, 3)
        assert (batch.images.dtype, batch.labels.dtype) == (np.float32, np.int64)
        assert np.bincount(batch.labels).tolist() == [source.sizes[split] // 3] * 3
        check_colours(batch)
    assert source.batch("train", np.array([11, 0, 5]), (0, 0)).labels.tolist() == [2, 0, 1]


@pytest.mark.parametrize("damage", ["no image", "cut off"])
def test_a_corrupt_file_is_named_once_and_skipped(root, damage):
    path = root / "train" / "bee" / "1.jpeg"
    whole = path.read_bytes()
    path.write_bytes({"no image": b"no image at all", "cut off": whole[: len(whole) // 2]}[damage])
    source = Folder(root, 16, vary=True)
    with pytest.warns(RuntimeWarning, match="cannot be read as an image") as warned:
        batch = source.batch("train", np.arange(12), (0, 0))
    assert [str(path) in str(warning.message) for warning in warned] == [True]
    assert np.bincount(batch.labels).tolist() == [4, 3, 4]
    check_colours(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(source.batch("train", np.array([5]), (0, 1))) == 0


def test_a_folder_without_the_layout_is_an_error(root, tmp_path_factory):
    shutil.rmtree(root / "val" / "cat")
    with pytest.raises(ValueError, match="must have the same class folders, got only in one of them: cat"):
        Folder(root, 16, vary=False)
    (root / "val" / "cat").mkdir()
    with pytest.raises(ValueError, match=r"val/cat holds no .*: put images there, or remove the class"):
        Folder(root, 16, vary=False)
    with pytest.raises(ValueError, match=r"train must have a folder for each class, got none"):
        Folder(tmp_path_factory.mktemp("empty"), 16, vary=False)


def test_random_crops_depend_on_key_and_image_not_on_threads(root):
    for path in (root / "train").glob("*/*.jpeg"):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 80, 3), np.uint8)).save(path)
    one, other = Folder(root, 16, vary=True, workers=1), Folder(root, 16, vary=True, workers=4)
    first = one.batch("train", np.arange(8), (0, 1)).images
    np.testing.assert_array_equal(first, other.batch("train", np.arange(8), (0, 1)).images)
    assert not np.array_equal(first, one.batch("train", np.arange(8), (0, 2)).images)
    assert not np.array_equal(first[0], first[1]), "equal pictures, different crops"
    plain = Folder(root, 16, vary=False).batch("train", np.arange(8), (0, 1)).images
    np.testing.assert_array_equal(plain[0], plain[1])


# -- batches ----------------------------------------------------------------------------------------------------------


def test_batches_come_in_order_each_with_its_own_key_also_from_the_middle_of_a_plan():
    source = Numbered()
    plan = plan_of([3, 1], [2], [9, 8], [7], [5])
    assert labels_of(training_data(source, plan, (4, 2), lockstep=False)) == [[3, 1], [2], [9, 8], [7], [5]]
    assert labels_of(training_data(source, plan, (4, 2), lockstep=False, first=3)) == [[7], [5]]
    assert source.keys == [(4, 2, place) for place in (0, 1, 2, 3, 4, 3, 4)]
    assert labels_of(evaluation_data(source, plan)) == [[3, 1], [2], [9, 8], [7], [5]]


def test_unreadable_images_make_smaller_batches_and_in_lockstep_not_fewer():
    source = Numbered(unreadable=[1, 2])
    assert labels_of(training_data(source, plan_of([3, 1], [2], [4]), (0,), lockstep=False)) == [[3], [4]]
    assert labels_of(evaluation_data(source, plan_of([2], [1, 4]))) == [[4]]
    assert labels_of(training_data(source, plan_of([1], [2], [3, 4]), (0,), lockstep=True)) == [[3], [3], [3, 4]]
    with pytest.raises(ValueError, match="none of this rank's training images"):
        list(training_data(Numbered(unreadable=[1]), plan_of([1]), (0,), lockstep=True))


@pytest.mark.parametrize(("images", "passes"), [(8, 2), (7, 3), (1, 4)])
def test_the_passes_of_a_step_add_up_to_its_batch(images, passes):
    batch = Batch(np.arange(images, dtype=np.float32).reshape(images, 1, 1, 1), np.arange(images))
    found = batch.parts(passes)
    assert len(found) == passes, "Horovod counts the backward passes"
    assert all(len(part) for _, part in found)
    assert sum(share * part.images.mean() for share, part in found) == pytest.approx(batch.images.mean())
    assert sorted(label for share, part in found if share for label in part.labels) == list(range(images))
