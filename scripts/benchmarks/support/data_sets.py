"""The data of ``time_to_accuracy``: what is trained on and scored on, while rates are tuned and when it counts.

Rates are tuned on a part of the training data that is held out: the test data have no say in them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import digits, gratings
from .digits import TEST_FOLD, Indices

HELD_OUT = 0.2
"""Share of the training data."""
SEED = 5


class Data(NamedTuple):
    """Images and their labels, and which of them a training is for.

    Attributes:
        images: [n, 8, 8].
        labels: of all of them.
        train, scored: indices.
    """

    images: NDArray[np.float32]
    labels: Indices
    train: Indices
    scored: Indices


def parted(train: Indices, test: Indices, tuning: bool) -> tuple[Indices, Indices]:
    """Return the data to train on and to score on: all of both, or while rates are tuned two parts of the first."""
    if not tuning:
        return train, test
    order = np.random.default_rng(SEED).permutation(train)
    held = round(HELD_OUT * len(train))
    return np.sort(order[held:]), np.sort(order[:held])


def images_of(name: str, tuning: bool) -> Data:
    """The digits or the gratings."""
    if name == "digits":
        return Data(*digits.images(), *parted(*digits.fold(TEST_FOLD), tuning))
    every = np.arange(gratings.TRAIN + gratings.TEST)
    return Data(*gratings.images(), *parted(every[: gratings.TRAIN], every[gratings.TRAIN :], tuning))
