"""Data that benchmarks train on: real digits, gratings in noise, and clips of digits. No framework here.

*Digits*: scikit-learn's 1,797 images of 8 x 8. It takes 2 s of a core to import, so the ranks of a job find the images
in its folder.

*Gratings*: sinusoidal gratings of ten orientations, shifted by one of sixteen phases that says nothing of the class, in
Gaussian noise of deviation 1. Since all that images are made of is known, so is the classifier that no other can beat:
the ideal observer, which takes the class with the greatest likelihood, summed over the phases.

*Clips*: sequences of digits' images that differ in length as videos do. A clip has a class, one of ten. Two fifths of
its frames, and one more, are images of this digit, the others of any other digits, in random order. Lengths are
log-normal between limits, like those of the videos of UCF101 (29 to 1,776 frames, median 167), which Li et al. trained
an LSTM on (PPoPP 2020), on a smaller scale. Clips to test on are made of images that no clip to train on has.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Images = NDArray[np.float32]
CLASSES = 10
HELD_OUT, HELD_SEED = 0.2, 5
"""Share of the training data that learning rates are chosen by, and the seed of its draw: the test data have no say."""

# -- digits ------------------------------------------------------------------------------------------------------------

FOLDS, FOLD_SEED, TEST_FOLD = 5, 7, 0
"""``TEST_FOLD`` has the images to test on where there is one fold."""
MEAN, DEVIATION = 0.305, 0.376
"""Mean and deviation of the pixels, which are 0 to 1."""
FOLDER = "HVD_ASYNC_BENCH_FOLDER"
"""Variable of the environment with the job's folder, for its ranks."""


@functools.cache
def _all() -> tuple[Images, Indices, Indices]:
    """Return images, labels, and the fold in which each image is tested on."""
    if FOLDER in os.environ:
        with np.load(_file(Path(os.environ[FOLDER]))) as left:
            return left["images"], left["labels"], left["folds"]
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold

    raw = load_digits()
    labels = raw.target.astype(np.int64)
    folds = np.empty_like(labels)
    parts = StratifiedKFold(FOLDS, shuffle=True, random_state=FOLD_SEED).split(labels, labels)
    for number, (_, test) in enumerate(parts):
        folds[test] = number
    return ((raw.images / 16 - MEAN) / DEVIATION).astype(np.float32), labels, folds


def leave(folder: Path) -> None:
    """Write the digits to a job's folder, for its ranks."""
    pixels, labels, folds = _all()
    np.savez(_file(folder), images=pixels, labels=labels, folds=folds)


def _file(folder: Path) -> Path:
    return folder / "digits.npz"


def digits() -> tuple[Images, Indices]:
    """Return all images, [n, 8, 8], normalized, and their labels."""
    return _all()[:2]


def fold(number: int) -> tuple[Indices, Indices]:
    """Return (train, test) indices of a fold."""
    tested = _all()[2] == number
    return np.flatnonzero(~tested), np.flatnonzero(tested)


# -- gratings ----------------------------------------------------------------------------------------------------------

PHASES, SIDE = 16, 8
FREQUENCY = 0.2
"""Periods per pixel."""
CONTRAST = 1.0
"""Amplitude, in deviations of the noise."""
GRATINGS, GRATINGS_TEST = 4096, 2000
"""Images to train and to test on."""
GRATINGS_SEED = 11
BEST_ACCURACY = 0.978
"""The ideal observer's accuracy on 50,000 images (commit 998b13a computes it; standard error 0.0007)."""


def patterns() -> NDArray[np.float64]:
    """Return all gratings without noise, [classes, phases, pixels]."""
    y, x = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    angles = np.pi * np.arange(CLASSES)[:, None, None] / CLASSES
    waves = 2 * np.pi * FREQUENCY * (x * np.cos(angles) + y * np.sin(angles))
    phases = 2 * np.pi * np.arange(PHASES)[:, None, None] / PHASES
    found: NDArray[np.float64] = CONTRAST * np.cos(waves[:, None] + phases)
    return found.reshape(CLASSES, PHASES, SIDE * SIDE)


def draw_gratings(count: int, random: np.random.Generator) -> tuple[Images, Indices]:
    """Return images, [n, 8, 8], of random classes and phases, and their labels."""
    labels, phases = random.integers(CLASSES, size=count), random.integers(PHASES, size=count)
    pixels = patterns()[labels, phases] + random.standard_normal((count, SIDE * SIDE))
    return pixels.reshape(count, SIDE, SIDE).astype(np.float32), labels


@functools.cache
def gratings() -> tuple[Images, Indices]:
    """Return the images that all trainings share, first those to train on, and their labels."""
    return draw_gratings(GRATINGS + GRATINGS_TEST, np.random.default_rng([GRATINGS_SEED, 0]))


class Data(NamedTuple):
    """Images [n, 8, 8], their labels, and the indices of those to train on and to be scored by."""

    images: Images
    labels: Indices
    train: Indices
    scored: Indices


def parted(train: Indices, test: Indices, tuning: bool) -> tuple[Indices, Indices]:
    """Return the data to train on and to be scored by; while rates are tuned, two parts of the training data."""
    if not tuning:
        return train, test
    order = np.random.default_rng(HELD_SEED).permutation(train)
    held = round(HELD_OUT * len(train))
    return np.sort(order[held:]), np.sort(order[:held])


def images_of(name: str, tuning: bool = False, number: int = TEST_FOLD) -> Data:
    """Return the "digits" of a fold, or the "gratings"."""
    if name == "digits":
        return Data(*digits(), *parted(*fold(number), tuning))
    every = np.arange(GRATINGS + GRATINGS_TEST)
    return Data(*gratings(), *parted(every[:GRATINGS], every[GRATINGS:], tuning))


# -- clips -------------------------------------------------------------------------------------------------------------

MEDIAN, SHORTEST, LONGEST = 167, 29, 1776
"""Frames of UCF101's videos."""
SIGMA = 0.49
"""Deviation of the lengths' logarithm: with that median a mean of 188 frames and a standard deviation of 98."""
SHARE = 0.4
PIXELS = 64
CLIPS, CLIPS_TEST = 2048, 1000


@dataclass(frozen=True)
class Clips:
    """Clips: the indices of each one's images, and their classes."""

    frames: list[Indices]
    labels: Indices

    @property
    def lengths(self) -> Indices:
        """Frames of each clip."""
        return np.array([len(one) for one in self.frames])


class Batch(NamedTuple):
    """Clips that are computed together.

    Attributes:
        frames: [clips, frames of the longest, pixels]; after a clip's end there are zeros.
        lengths: the frames of each.
        labels: their classes.
    """

    frames: Images
    lengths: Indices
    labels: Indices


def draw_lengths(count: int, median: int, random: np.random.Generator) -> Indices:
    """Return the frames of ``count`` clips; limits scale with the median."""
    drawn = np.rint(median * np.exp(SIGMA * random.standard_normal(count)))
    least, most = round(median * SHORTEST / MEDIAN), round(median * LONGEST / MEDIAN)
    return np.clip(drawn, max(least, 1), most).astype(np.int64)


def draw_clips(lengths: Indices, usable: Indices, random: np.random.Generator) -> Clips:
    """Return clips of these lengths and of random classes, made of these images."""
    digit = digits()[1][usable]
    labels = random.integers(CLASSES, size=len(lengths))
    frames = []
    for length, label in zip(lengths.tolist(), labels.tolist(), strict=True):
        own = min(int(SHARE * length) + 1, length)
        mine = random.choice(usable[digit == label], own)
        others = random.choice(usable[digit != label], length - own)
        frames.append(random.permutation(np.concatenate([mine, others])))
    return Clips(frames, labels)


def lengths_of(seed: int, median: int, part: int = 0) -> Indices:
    """Return the frames of a seed's clips: those to train on, or to test on if ``part`` is 1."""
    return draw_lengths((CLIPS, CLIPS_TEST)[part], median, np.random.default_rng([seed, part, 0]))


@functools.lru_cache(maxsize=8)
def clips_of(seed: int, median: int) -> tuple[Clips, Clips]:
    """Return a seed's clips (train, test)."""
    train, test = (
        draw_clips(lengths_of(seed, median, part), usable, np.random.default_rng([seed, part, 1]))
        for part, usable in enumerate(fold(TEST_FOLD))
    )
    return train, test


def deal(task: Mapping[str, Any], lengths: Indices, ranks: int) -> Indices:
    """Return which clips each rank has in each step, [steps, ranks, batch], the same under all arms with the same seed.

    An epoch's batches have each clip once, except for a rest too small for one more batch, and come in random order.
    If they are ``bucketed``, a batch has clips of nearly the same length.
    """
    steps, batch, random = task["steps"], task["batch"], np.random.default_rng([task["seed"], 2])
    dealt: list[Indices] = []
    per_epoch = len(lengths) // batch
    while len(dealt) * per_epoch < steps * ranks:
        order = random.permutation(len(lengths))[: per_epoch * batch]
        if task["bucketed"]:
            order = order[np.argsort(lengths[order], kind="stable")]
        dealt.append(random.permutation(order.reshape(per_epoch, batch)))
    return np.concatenate(dealt)[: steps * ranks].reshape(steps, ranks, batch)


def trained_lengths(task: Mapping[str, Any]) -> tuple[Indices, Indices]:
    """Return the clips that a training is on, and their frames."""
    chosen = parted(np.arange(CLIPS), np.arange(0), task.get("tuning", False))[0]
    return chosen, lengths_of(task["seed"], task["median"])[chosen]


def longest_of(task: Mapping[str, Any], ranks: int) -> NDArray[np.float64]:
    """Return the frames of the longest clip that each rank has in each step, [steps, ranks]."""
    lengths = trained_lengths(task)[1]
    return lengths[deal(task, lengths, ranks)].max(axis=2).astype(np.float64)


def padded(clips: Clips, chosen: Indices) -> Batch:
    """Return some of the clips as a batch."""
    pixels = digits()[0].reshape(-1, PIXELS)
    lengths = clips.lengths[chosen]
    frames = np.zeros((len(chosen), int(lengths.max()), PIXELS), np.float32)
    for place, number in enumerate(chosen.tolist()):
        frames[place, : lengths[place]] = pixels[clips.frames[number]]
    return Batch(frames, lengths, clips.labels[chosen])


# -- who has which images ----------------------------------------------------------------------------------------------


def batches(task: Mapping[str, Any], data: Data, rank: int, size: int, epoch: int) -> list[Indices]:
    """Return a rank's batches of an epoch, in a new order each: its share of the images, or of those of its classes.

    With the split "classes" the last rank alone has the digits 8 and 9; the others share the rest.
    """
    batch, train = task["batch"], data.train
    steps = len(train) // (batch * size)
    random = np.random.default_rng([task["seed"], epoch])
    if task.get("split", "even") == "even":
        order = random.permutation(train)[: steps * batch * size]
        return list(order.reshape(steps, size, batch)[:, rank])
    classes = [8, 9] if rank == size - 1 else [digit for digit in range(8) if digit % (size - 1) == rank]
    own = train[np.isin(data.labels[train], classes)]
    return list(np.resize(np.random.default_rng([task["seed"], epoch, rank]).permutation(own), (steps, batch)))
