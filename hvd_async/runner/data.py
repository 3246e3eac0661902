"""Image batches as NumPy arrays: handwritten digits, random images or a folder, with prefetching."""

from __future__ import annotations

import abc
import itertools
import math
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

Indices = NDArray[np.int64]
Pixels = NDArray[np.float32]
Split = Literal["train", "test"]


@dataclass(frozen=True)
class Batch:
    """Labelled images.

    Attributes:
        images: [n, height, width, 3] float32, normalised.
        labels: [n] int64.
    """

    images: Pixels
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def parts(self, passes: int) -> list[tuple[float, Batch]]:
        """Return (share of the batch, images) of each of ``passes`` backward passes.

        Losses weighted by the shares add up to the batch's mean. If there are fewer images than passes, the
        remaining passes have the first image, with a share of 0.
        """
        bounds = [len(self) * i // passes for i in range(passes + 1)]
        found = []
        for start, end in itertools.pairwise(bounds):
            where = slice(start, end) if end > start else slice(0, 1)
            found.append(((end - start) / len(self), Batch(self.images[where], self.labels[where])))
        return found


class Source(abc.ABC):
    """A set of labelled images.

    Attributes:
        classes: number of labels.
        sizes: number of images of each split.
    """

    classes: int
    sizes: Mapping[Split, int]

    @abc.abstractmethod
    def batch(self, split: Split, indices: Indices, key: Sequence[int]) -> Batch:
        """Return the readable images at these indices. ``key`` seeds the variation of training images."""


def open_source(data: str, image_size: int, *, vary: bool, workers: int) -> Source:
    """Return the source that --data names.

    Raises:
        ValueError: the folder does not have the required layout.
    """
    if data == "digits":
        return Digits(image_size, vary=vary)
    if data == "synthetic":
        return Synthetic(image_size)
    return Folder(Path(data), image_size, vary=vary, workers=workers)


# -- digits and random images ------------------------------------------------------------------------------------------

SPLIT_SEED = 20
"""Seed of the digits' split into train and test: all runs are tested on the same images."""
SHIFT, ROTATION, ZOOM = 0.08, 10.0, 0.1
"""Largest variations of digits: share of the side, degrees, share of the scale."""


class Digits(Source):
    """scikit-learn's 1,797 handwritten digits, 8 x 8 grey, upscaled; a fifth of each class is the test split."""

    classes = 10

    def __init__(self, image_size: int, *, vary: bool) -> None:
        from sklearn.datasets import load_digits

        raw = load_digits()
        size, bicubic = (image_size, image_size), Image.Resampling.BICUBIC
        small = np.asarray(raw.images, np.float32) / 16
        large = [np.asarray(Image.fromarray(image).resize(size, bicubic)) for image in small]
        # Mean and standard deviation of all pixels.
        self._images: Pixels = ((np.stack(large) - 0.305) / 0.376).astype(np.float32)
        self._labels = raw.target.astype(np.int64)
        train, test = stratified_split(self._labels, 0.2, SPLIT_SEED)
        self._where = {"train": train, "test": test}
        self.sizes = {"train": len(train), "test": len(test)}
        self._vary = vary

    def batch(self, split: Split, indices: Indices, key: Sequence[int]) -> Batch:
        where = self._where[split][indices]
        images = self._images[where]
        if self._vary and split == "train":
            images = augment(images, np.random.default_rng(key))
        return Batch(np.repeat(images[..., None], 3, axis=3), self._labels[where])


def stratified_split(labels: NDArray[np.int64], share: float, seed: int) -> tuple[Indices, Indices]:
    """Return the sorted indices of the train and the test split; the latter has a random ``share`` of each class."""
    generator = np.random.default_rng(seed)
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        test[generator.permutation(members)[: round(share * len(members))]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def augment(images: Pixels, rng: np.random.Generator) -> Pixels:
    """Return the grey images [n, height, width], each shifted, rotated and scaled a little; the edge is repeated."""
    from scipy.ndimage import affine_transform

    count, *sides = images.shape
    angles, zooms = np.deg2rad(rng.uniform(-ROTATION, ROTATION, count)), rng.uniform(1 - ZOOM, 1 + ZOOM, count)
    shifts = rng.uniform(-SHIFT, SHIFT, (count, 2)) * sides
    center, varied = (np.array(sides) - 1) / 2, np.empty_like(images)
    cosines, sines = np.cos(angles) / zooms, np.sin(angles) / zooms
    for place, image in enumerate(images):
        turn = np.array([[cosines[place], -sines[place]], [sines[place], cosines[place]]])
        offset = center + shifts[place] - turn @ center
        affine_transform(image, turn, offset, output=varied[place], order=1, mode="nearest")
    return varied


class Synthetic(Source):
    """A few repeated random images with random labels, for measurements of speed: they cannot be learned."""

    classes = 1000
    _DISTINCT = 64

    def __init__(self, image_size: int, images: int = 1280) -> None:
        self.sizes = {"train": images, "test": images // 10}
        generator = np.random.default_rng(SPLIT_SEED)
        self._images = generator.standard_normal((self._DISTINCT, image_size, image_size, 3), np.float32)
        self._labels = generator.integers(self.classes, size=self._DISTINCT)

    def batch(self, split: Split, indices: Indices, key: Sequence[int]) -> Batch:
        where = indices % self._DISTINCT
        return Batch(self._images[where], self._labels[where])


# -- a folder ----------------------------------------------------------------------------------------------------------

SUFFIXES = {".jpeg", ".jpg", ".png"}
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
BORDER = (1 - 224 / 256) / 2
"""Share of a validation image that is cut off at each edge."""
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
"""Errors of Pillow on files that are not images, are truncated, or are far too large."""


class Folder(Source):
    """Images of an ImageNet-style folder, decoded by a pool of threads, normalised by ImageNet's mean and deviation.

    Training images are random crops, scaled and flipped (Szegedy et al. 2015), if ``vary``; all others are center
    crops. A file that cannot be read is skipped, with one warning.

    Raises:
        ValueError: a split is missing or has no classes, classes differ, or a class is empty.
    """

    def __init__(self, root: Path, image_size: int, *, vary: bool, workers: int = 4) -> None:
        folders: dict[Split, Path] = {"train": root / "train", "test": root / "val"}
        names, others = (_class_names(folder, root) for folder in folders.values())
        if names != others:
            raise ValueError(
                f"{root}/train and {root}/val must have the same class folders, got only in one of them: "
                f"{', '.join(sorted(names ^ others)[:5])}"
            )
        self.classes = len(names)
        self._samples = {split: _labelled_files(folder, sorted(names)) for split, folder in folders.items()}
        self.sizes = {split: len(samples) for split, samples in self._samples.items()}
        self._size, self._vary = image_size, vary
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="hvd_async-decode")
        self._reported: set[Path] = set()

    def batch(self, split: Split, indices: Indices, key: Sequence[int]) -> Batch:
        samples = [self._samples[split][index] for index in indices]
        vary = self._vary and split == "train"
        # A generator per image, seeded by its index, so that the variation does not depend on the decoding thread.
        generators = [np.random.default_rng([*key, int(index)]) if vary else None for index in indices]
        decoded = list(self._pool.map(self._decode, [path for path, _ in samples], generators))
        found = [(pixels, label) for pixels, (_, label) in zip(decoded, samples, strict=True) if pixels is not None]
        images = np.array([pixels for pixels, _ in found], np.float32).reshape(-1, self._size, self._size, 3)
        return Batch(images, np.array([label for _, label in found], np.int64))

    def _decode(self, path: Path, rng: np.random.Generator | None) -> Pixels | None:
        try:
            with Image.open(path) as opened:
                image = opened.convert("RGB")
        except UNREADABLE as error:
            if path not in self._reported:
                self._reported.add(path)
                warnings.warn(f"skipped {path}: it cannot be read as an image ({error})", RuntimeWarning, stacklevel=1)
            return None
        cropped = center_crop(image, self._size) if rng is None else random_crop(image, self._size, rng)
        pixels = (np.asarray(cropped, np.float32) / 255 - MEAN) / DEVIATION
        return pixels.astype(np.float32, copy=False)


def _class_names(folder: Path, root: Path) -> set[str]:
    names = {path.name for path in folder.glob("[!.]*") if path.is_dir()}
    if not names:
        raise ValueError(
            f"{folder} must have a folder for each class, got none: images are expected as {root}/train/<class>/*.jpeg "
            f"and {root}/val/<class>/*.jpeg"
        )
    return names


def _labelled_files(folder: Path, names: Sequence[str]) -> list[tuple[Path, int]]:
    samples = []
    for label, name in enumerate(names):
        paths = sorted(path for path in (folder / name).glob("[!.]*") if path.suffix.lower() in SUFFIXES)
        if not paths:
            raise ValueError(
                f"the class folder {folder / name} holds no .jpeg, .jpg or .png file: put images there, or remove the "
                "class from train/ and val/"
            )
        samples += [(path, label) for path in paths]
    return samples


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """Return the center of an image as ``size`` x ``size`` pixels, without a border."""
    return ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR, bleed=BORDER)


def random_crop(image: Image.Image, size: int, rng: np.random.Generator) -> Image.Image:
    """Return a random crop, 8% to 100% of the area, aspect 3/4 to 4/3, maybe flipped, of ``size`` x ``size`` pixels."""
    area = image.width * image.height
    for _ in range(10):
        part = area * rng.uniform(0.08, 1.0)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        width, height = math.sqrt(part * aspect), math.sqrt(part / aspect)
        if width <= image.width and height <= image.height:
            break
    else:  # hardly any such crop fits into a long, narrow image: take a square of its shorter side
        width = height = min(image.width, image.height)
    left, top = rng.uniform(0, image.width - width), rng.uniform(0, image.height - height)
    box = (left, top, left + width, top + height)
    cropped = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return ImageOps.mirror(cropped) if rng.integers(2) else cropped


# -- prefetching -------------------------------------------------------------------------------------------------------

AHEAD = 2
"""Number of batches that are prefetched while the model computes."""


def training_data(
    source: Source, plan: Sequence[Indices], key: Sequence[int], *, lockstep: bool, first: int = 0
) -> Generator[Batch, None, None]:
    """Yield the batches of a plan, prefetched, each varied by ``key`` and its place in the plan.

    Starts at place ``first``. A batch without a readable image is left out; in lockstep, where all ranks must take the
    same number of steps, a readable image of the plan replaces it: ValueError if there is none.
    """
    work = ((plan[place], (*key, place)) for place in range(first, len(plan)))
    for place, batch in enumerate(_prefetched(source, "train", work), first):
        if len(batch):
            yield batch
        elif lockstep:
            found = (source.batch("train", np.array([index]), (*key, place)) for index in np.concatenate(plan))
            readable = next((one for one in found if len(one)), None)
            if readable is None:
                raise ValueError(
                    "none of this rank's training images can be read: see the warnings above, and repair or remove the "
                    "files"
                )
            yield readable


def evaluation_data(source: Source, plan: Sequence[Indices]) -> Iterator[Batch]:
    """Yield the test batches of a plan, prefetched, without unreadable images."""
    return (batch for batch in _prefetched(source, "test", ((indices, ()) for indices in plan)) if len(batch))


def _prefetched(source: Source, split: Split, work: Iterable[tuple[Indices, Sequence[int]]]) -> Iterator[Batch]:
    # One thread keeps the batches in order and calls a source once at a time; a folder decodes with its own pool.
    with ThreadPoolExecutor(1, thread_name_prefix="hvd_async-data") as pool:
        ready: deque[Future[Batch]] = deque()
        for indices, key in work:
            ready.append(pool.submit(source.batch, split, indices, key))
            if len(ready) > AHEAD:
                yield ready.popleft().result()
        while ready:
            yield ready.popleft().result()
