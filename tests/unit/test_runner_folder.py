import warnings

import numpy as np
import pytest
from PIL import Image

from hvd_async.runner.data import open_source
from hvd_async.runner.image_folder import DEVIATION, MEAN, Folder, centre_crop, random_crop

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
        Image.new("RGB", (64, 64), colour).save(tmp_path / "val" / name / "b.png")
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".cache").mkdir()
    return tmp_path


def colours_of(batch):
    return (batch.images.mean(axis=(1, 2)) * DEVIATION + MEAN) * 255


def test_labels_and_pixels(root):
    source = Folder(root, 32, vary=True, workers=2)
    assert (source.classes, source.count("train"), source.count("test")) == (3, 12, 6)
    for split, vary in (("train", (0, 0)), ("test", ())):
        batch = source.batch(split, np.arange(source.count(split)), vary)
        assert batch.images.shape == (source.count(split), 32, 32, 3)
        assert (batch.images.dtype, batch.labels.dtype) == (np.float32, np.int64)
        assert np.bincount(batch.labels).tolist() == [source.count(split) // 3] * 3
        wanted = np.array(list(COLOURS.values()))[batch.labels]
        np.testing.assert_allclose(colours_of(batch), wanted, atol=4)


def test_the_order_of_the_indices_is_kept(root):
    source = open_source(str(root), 16, vary=False, workers=3)
    assert source.batch("train", np.array([11, 0, 5]), ()).labels.tolist() == [2, 0, 1]


def test_grey_and_transparent_images_become_rgb(root):
    Image.new("L", (20, 30), 128).save(root / "val" / "ant" / "a.JPG")
    Image.new("RGBA", (20, 30), (1, 2, 3, 4)).save(root / "val" / "ant" / "b.png")
    assert Folder(root, 16, vary=False).batch("test", np.arange(2), ()).images.shape == (2, 16, 16, 3)


@pytest.mark.parametrize("damage", ["no image", "cut off", "empty"])
def test_a_corrupt_file_is_named_once_and_skipped(root, damage):
    path = root / "train" / "bee" / "1.jpeg"
    whole = path.read_bytes()
    path.write_bytes({"no image": b"no image at all", "cut off": whole[: len(whole) // 2], "empty": b""}[damage])
    source = Folder(root, 16, vary=True)
    with pytest.warns(RuntimeWarning, match="cannot be read as an image") as told:
        batch = source.batch("train", np.arange(12), (0, 0))
    assert [str(path) in str(warning.message) for warning in told] == [True]
    assert np.bincount(batch.labels).tolist() == [4, 3, 4]
    np.testing.assert_allclose(colours_of(batch), np.array(list(COLOURS.values()))[batch.labels], atol=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(source.batch("train", np.array([5]), (0, 1))) == 0


def remove_all(folder):
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_empty_class_is_an_error(root, split):
    remove_all(root / split / "bee")
    with pytest.raises(ValueError, match=rf"{split}/bee holds no .*: put images there, or remove the class"):
        Folder(root, 16, vary=False)


def test_classes_that_differ_are_an_error(root):
    remove_all(root / "val" / "cat")
    (root / "val" / "cat").rmdir()
    with pytest.raises(ValueError, match=r"val lacks the classes cat that .*train has"):
        Folder(root, 16, vary=False)
    (root / "val" / "dog").mkdir()
    (root / "val" / "cat").mkdir()
    with pytest.raises(ValueError, match=r"train lacks the classes dog that .*val has"):
        Folder(root, 16, vary=False)


def test_missing_splits_and_no_classes_are_errors(tmp_path):
    with pytest.raises(ValueError, match="has no folder train: images are expected as"):
        Folder(tmp_path, 16, vary=False)
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match="train has no class folders"):
        Folder(tmp_path, 16, vary=False)


def test_random_crops_depend_on_key_and_image_not_on_threads(root):
    for path in (root / "train").glob("*/*.jpeg"):
        noise = np.random.default_rng(0).integers(0, 255, (50, 80, 3), np.uint8)
        Image.fromarray(noise).save(path)
    one, other = Folder(root, 16, vary=True, workers=1), Folder(root, 16, vary=True, workers=4)
    first = one.batch("train", np.arange(8), (0, 1))
    np.testing.assert_array_equal(first.images, other.batch("train", np.arange(8), (0, 1)).images)
    assert not np.array_equal(first.images, one.batch("train", np.arange(8), (0, 2)).images)
    assert not np.array_equal(first.images[0], first.images[1]), "equal pictures, different crops"
    plain = Folder(root, 16, vary=False).batch("train", np.arange(8), (0, 1)).images
    np.testing.assert_array_equal(plain[0], plain[1])


def test_the_centre_crop_is_the_middle():
    pixels = np.zeros((100, 140, 3), np.uint8)
    pixels[10:90, 30:110] = 255  # a little less than the 87.5 of 100 pixels that are kept
    found = centre_crop(Image.fromarray(pixels), 70) * DEVIATION + MEAN
    assert found.shape == (70, 70, 3)
    assert found[35, 35].min() > 0.99
    assert found[:2].max() < 0.01
    assert found[:, -2:].max() < 0.01
    assert found[5, 35].min() > 0.99


def test_random_crops_of_long_narrow_images_work():
    image = Image.new("RGB", (500, 4), (255, 255, 255))
    crops = {random_crop(image, 8, np.random.default_rng(seed)).shape for seed in range(20)}
    assert crops == {(8, 8, 3)}
