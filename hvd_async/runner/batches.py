"""Sources of images: labelled batches of NumPy arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from .sharding import Indices

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Batch:
    """images: [n, height, width, 3] float32, normalised. labels: [n] int64."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


class Source(Protocol):
    """A labelled set of images in two splits."""

    classes: int

    def count(self, split: Split) -> int:
        """The number of images in a split."""

    def batch(self, split: Split, indices: Indices, key: Sequence[int]) -> Batch:
        """The images of these indices; fewer if some cannot be read. `key` seeds the variation of training images."""


def parts(batch: Batch, passes: int) -> list[tuple[float, Batch]]:
    """(share of the batch, images) of each of `passes` backward passes: losses weighted so add up to the batch's mean.

    Where there are fewer images than passes the rest are the first image over, at a share of 0.
    """
    bounds = [len(batch) * i // passes for i in range(passes + 1)]
    found = []
    for start, end in itertools.pairwise(bounds):
        where = slice(start, end) if end > start else slice(0, 1)
        found.append(((end - start) / len(batch), Batch(batch.images[where], batch.labels[where])))
    return found
