"""The real digits: scikit-learn's 1,797 images of 8 x 8, and folds of them to test on. No framework here.

scikit-learn, which takes 2 s of a core to import, is imported only when they are asked for, and not by the ranks of a
job: these find them in its folder.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
FOLDS = 5
FOLD_SEED = 7
TEST_FOLD = 0
"""The images to test on, where there is one fold."""
MEAN, DEVIATION = 0.305, 0.376
"""Mean and deviation of the pixels, which are 0 to 1."""


FOLDER = "HVD_ASYNC_BENCH_FOLDER"
"""The variable that tells ranks their job's folder."""


@functools.cache
def _all() -> tuple[NDArray[np.float32], Indices, Indices]:
    """Images, labels, and the fold in which each is tested on."""
    if FOLDER in os.environ:
        with np.load(_file(Path(os.environ[FOLDER]))) as left:
            return left["images"], left["labels"], left["folds"]
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold

    raw = load_digits()
    labels = raw.target.astype(np.int64)
    folds = np.empty_like(labels)
    for number, (_, test) in enumerate(
        StratifiedKFold(FOLDS, shuffle=True, random_state=FOLD_SEED).split(labels, labels)
    ):
        folds[test] = number
    return ((raw.images / 16 - MEAN) / DEVIATION).astype(np.float32), labels, folds


def leave(folder: Path) -> None:
    """Write them to a job's folder, for its ranks."""
    pixels, labels, folds = _all()
    np.savez(_file(folder), images=pixels, labels=labels, folds=folds)


def _file(folder: Path) -> Path:
    return folder / "digits.npz"


def images() -> tuple[NDArray[np.float32], Indices]:
    """All images, [n, 8, 8], normalised, and their labels."""
    return _all()[:2]


def fold(number: int) -> tuple[Indices, Indices]:
    """(train, test) indices."""
    tested = _all()[2] == number
    return np.flatnonzero(~tested), np.flatnonzero(tested)


def common(number: int, count: int, seed: int) -> Indices:
    """So many images of a fold's training part, of all classes as they come: the same on every rank."""
    return np.random.default_rng(seed).choice(fold(number)[0], count, replace=False)
