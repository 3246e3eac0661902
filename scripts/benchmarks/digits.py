"""The real digits: scikit-learn's 1,797 images of 8 x 8, and folds of them to test on. No framework here.

scikit-learn is imported only when they are asked for.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
FOLDS = 5
FOLD_SEED = 7
TEST_FOLD = 0
"""The images to test on, where there is one fold."""
MEAN, DEVIATION = 0.305, 0.376
"""Of the pixels, which are 0 to 1."""


@functools.cache
def images() -> tuple[NDArray[np.float32], Indices]:
    """All images, [n, 8, 8], normalised, and their labels."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    return ((raw.images / 16 - MEAN) / DEVIATION).astype(np.float32), raw.target.astype(np.int64)


def fold(number: int) -> tuple[Indices, Indices]:
    """(train, test) indices."""
    from sklearn.model_selection import StratifiedKFold

    labels = images()[1]
    splits = StratifiedKFold(FOLDS, shuffle=True, random_state=FOLD_SEED).split(labels, labels)
    train, test = list(splits)[number]
    return train, test
