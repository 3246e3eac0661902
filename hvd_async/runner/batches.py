"""What a source of images gives: labelled batches of NumPy arrays."""

from __future__ import annotations

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
