"""An ImageNet-style folder as a data source: `train/<class>/*.jpeg` and `val/<class>/*.jpeg`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .batches import Batch, Split
from .sharding import Indices

SUFFIXES = {".jpeg", ".jpg", ".png"}
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
RESIZE = 256 / 224
"""Validation images are scaled to this many times the image size (shorter side) before the centre is cut out."""
# What Pillow raises on files that are no image, are cut off, or are far too large. OSError covers most.
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)

Pixels = NDArray[np.float32]


class Folder:
    """Images of a folder, decoded by a pool of threads, normalised by ImageNet's mean and deviation.

    Training images are cut out at random, scaled and flipped (Szegedy et al. 2015) if `vary`; all others are scaled
    and cut out of the centre. A file that cannot be read is named once, in a warning, and left out.
    """

    def __init__(self, root: str | Path, image_size: int, *, vary: bool, workers: int = 4) -> None:
        """Raises ValueError, with what to do: a missing split, no classes, an empty class, classes that differ."""
        self._names = class_names(Path(root))
        self.classes = len(self._names)
        self._samples = {
            "train": list_images(Path(root, "train"), self._names),
            "test": list_images(Path(root, "val"), self._names),
        }
        self._size, self._vary = image_size, vary
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="hvd_async-decode")
        self._reported: set[Path] = set()

    def count(self, split: Split) -> int:
        """Return the number of image files in a split."""
        return len(self._samples[split])

    def batch(self, split: Split, indices: Indices, key: Sequence[int]) -> Batch:
        """Images of these indices, as many as can be read; see `Source`."""
        samples = [self._samples[split][index] for index in indices]
        vary = self._vary and split == "train"
        # One generator for each image, from its index: which thread decodes it makes no difference.
        generators = [np.random.default_rng([*key, int(index)]) if vary else None for index in indices]
        decoded = list(self._pool.map(self._decode, [path for path, _ in samples], generators))
        kept = [(pixels, label) for pixels, (_, label) in zip(decoded, samples, strict=True) if pixels is not None]
        images = (
            np.stack([pixels for pixels, _ in kept]) if kept else np.empty((0, self._size, self._size, 3), np.float32)
        )
        return Batch(images, np.array([label for _, label in kept], np.int64))

    def _decode(self, path: Path, rng: np.random.Generator | None) -> Pixels | None:
        try:
            with Image.open(path) as opened:
                image = opened.convert("RGB")
        except UNREADABLE as error:
            if path not in self._reported:
                self._reported.add(path)
                warnings.warn(f"skipped {path}: it cannot be read as an image ({error})", RuntimeWarning, stacklevel=1)
            return None
        return centre_crop(image, self._size) if rng is None else random_crop(image, self._size, rng)


def class_names(root: Path) -> list[str]:
    """The sorted class names, the folders under train/, which must be those under val/. ValueError if not."""
    found = {split: _folders(root / split, root) for split in ("train", "val")}
    for split, other in (("val", "train"), ("train", "val")):
        missing = sorted(found[other] - found[split])
        if missing:
            raise ValueError(
                f"{root / split} lacks the classes {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''} "
                f"that {root / other} has: both need the same class folders; add or remove them"
            )
    return sorted(found["train"])


def list_images(split: Path, names: Sequence[str]) -> list[tuple[Path, int]]:
    """(path, label) of every image under the class folders of a split, sorted. ValueError for an empty class folder."""
    samples: list[tuple[Path, int]] = []
    for label, name in enumerate(names):
        paths = sorted(
            path
            for path in (split / name).iterdir()
            if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
        )
        if not paths:
            raise ValueError(
                f"the class folder {split / name} holds no .jpeg, .jpg or .png file: put images there, or "
                "remove the class from train/ and val/"
            )
        samples += [(path, label) for path in paths]
    return samples


def _folders(split: Path, root: Path) -> set[str]:
    if not split.is_dir():
        raise ValueError(
            f"{root} has no folder {split.name}: images are expected as {root}/train/<class>/*.jpeg and "
            f"{root}/val/<class>/*.jpeg"
        )
    names = {path.name for path in split.iterdir() if path.is_dir() and not path.name.startswith(".")}
    if not names:
        raise ValueError(f"{split} has no class folders: put the images of each class into {split}/<class>/")
    return names


def centre_crop(image: Image.Image, size: int) -> Pixels:
    """The centre of the image, its shorter side scaled to size x 256/224 first: [size, size, 3] float32, normalised."""
    scale = size * RESIZE / min(image.size)
    # The cut is made by the resampling itself: the same pixels, without scaling what is thrown away.
    width, height = size / scale, size / scale
    left, top = (image.width - width) / 2, (image.height - height) / 2
    return _normalised(image, size, (left, top, left + width, top + height), flip=False)


def random_crop(image: Image.Image, size: int, rng: np.random.Generator) -> Pixels:
    """A random part of 8% to 100% of the area and aspect 3/4 to 4/3, perhaps flipped: [size, size, 3] float32."""
    area = image.width * image.height
    for _ in range(10):
        part = area * rng.uniform(0.08, 1.0)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = math.sqrt(part * aspect), math.sqrt(part / aspect)
        if width <= image.width and height <= image.height:
            break
    else:  # a long, narrow image, in which hardly any such part fits: its whole middle
        width = height = min(image.width, image.height)
    left, top = rng.uniform(0, image.width - width), rng.uniform(0, image.height - height)
    return _normalised(image, size, (left, top, left + width, top + height), flip=bool(rng.integers(2)))


def _normalised(image: Image.Image, size: int, box: tuple[float, float, float, float], *, flip: bool) -> Pixels:
    scaled = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    pixels: Pixels = ((np.asarray(scaled, np.float32) / 255 - MEAN) / DEVIATION).astype(np.float32, copy=False)
    return np.ascontiguousarray(pixels[:, ::-1]) if flip else pixels
