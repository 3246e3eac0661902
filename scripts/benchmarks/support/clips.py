"""Clips of digits: sequences of real images that differ in length as videos do. No framework here.

A clip has a class, one of ten. Two fifths of its frames, and one more, are images of this digit, the others of any
other digits, in random order: the class is what there is most of. Lengths are log-normal between limits, like those of
the videos of UCF101 (29 to 1,776 frames, median 167), which Li et al. trained an LSTM on (PPoPP 2020), in a smaller
scale. Clips to test on are made of images that no clip to train on has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .digits import TEST_FOLD, Indices, fold, images

MEDIAN, SHORTEST, LONGEST = 167, 29, 1776
"""UCF101's frames a video."""
SIGMA = 0.49
"""Deviation of the lengths' logarithm: with that median a mean of 188 frames and a standard deviation of 98."""
SHARE = 0.4
CLASSES = 10
PIXELS = 64
TRAIN, TEST = 2048, 1000
"""Clips."""


@dataclass(frozen=True)
class Clips:
    """Many of them.

    Attributes:
        frames: indices of each clip's images.
        labels: the clips' classes.
    """

    frames: list[Indices]
    labels: Indices

    @property
    def lengths(self) -> Indices:
        """Frames of each."""
        return np.array([len(one) for one in self.frames])


@dataclass(frozen=True)
class Batch:
    """Clips that are computed together.

    Attributes:
        frames: [clips, frames of the longest, pixels]; after a clip's end there are zeros.
        lengths: the frames of each.
        labels: their classes.
    """

    frames: NDArray[np.float32]
    lengths: Indices
    labels: Indices


def draw_lengths(count: int, median: int, random: np.random.Generator) -> Indices:
    """Frames of so many clips; limits go with the median."""
    drawn = np.rint(median * np.exp(SIGMA * random.standard_normal(count)))
    least, most = round(median * SHORTEST / MEDIAN), round(median * LONGEST / MEDIAN)
    return np.clip(drawn, max(least, 1), most).astype(np.int64)


def draw_clips(lengths: Indices, usable: Indices, random: np.random.Generator) -> Clips:
    """Clips of these lengths, of classes by chance, made of these images."""
    digit = images()[1][usable]
    labels = random.integers(CLASSES, size=len(lengths))
    frames = []
    for length, label in zip(lengths.tolist(), labels.tolist(), strict=True):
        own = min(int(SHARE * length) + 1, length)
        mine = random.choice(usable[digit == label], own)
        others = random.choice(usable[digit != label], length - own)
        frames.append(random.permutation(np.concatenate([mine, others])))
    return Clips(frames, labels)


def lengths_of(seed: int, median: int, part: int = 0) -> Indices:
    """Frames of a seed's clips: those to train on, or to test on if ``part`` is 1."""
    return draw_lengths((TRAIN, TEST)[part], median, np.random.default_rng([seed, part, 0]))


def clips_of(seed: int, median: int) -> tuple[Clips, Clips]:
    """(Train, test): the seed's clips, the same whoever asks."""
    train, test = (
        draw_clips(lengths_of(seed, median, part), usable, np.random.default_rng([seed, part, 1]))
        for part, usable in enumerate(fold(TEST_FOLD))
    )
    return train, test


def deal(
    lengths: Indices, *, steps: int, ranks: int, batch: int, bucketed: bool, random: np.random.Generator
) -> Indices:
    """Which clips each rank has in each step, [steps, ranks, batch].

    An epoch's batches have each clip once, but for those that are too few for one more batch, and come in random order.
    Bucketed, a batch has clips of nearly the same length.
    """
    dealt: list[Indices] = []
    per_epoch = len(lengths) // batch
    while len(dealt) * per_epoch < steps * ranks:
        order = random.permutation(len(lengths))[: per_epoch * batch]
        if bucketed:
            order = order[np.argsort(lengths[order], kind="stable")]
        dealt.append(random.permutation(order.reshape(per_epoch, batch)))
    return np.concatenate(dealt)[: steps * ranks].reshape(steps, ranks, batch)


def dealt_to(block: dict[str, Any], lengths: Indices, ranks: int) -> Indices:
    """``deal`` for a training, the same of all arms with the same seed."""
    how = {name: block[name] for name in ("steps", "batch", "bucketed")}
    return deal(lengths, ranks=ranks, random=np.random.default_rng([block["seed"], 2]), **how)


def padded(clips: Clips, chosen: Indices) -> Batch:
    """These of the clips as a batch."""
    pixels = images()[0].reshape(-1, PIXELS)
    lengths = clips.lengths[chosen]
    frames = np.zeros((len(chosen), int(lengths.max()), PIXELS), np.float32)
    for place, number in enumerate(chosen.tolist()):
        frames[place, : lengths[place]] = pixels[clips.frames[number]]
    return Batch(frames, lengths, clips.labels[chosen])
