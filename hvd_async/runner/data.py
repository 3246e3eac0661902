"""Where the images come from, as NumPy batches: digits, synthetic, or a folder; and their prefetching."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from .augment import augment
from .batches import Batch, Source, Split
from .image_folder import Folder
from .sharding import Indices

SPLIT_SEED = 20
"""Seed of the digits' split into train and test: accuracies of different runs are about the same images."""
AHEAD = 2
"""Batches that are made ready while the model computes."""


class Digits:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 grey, upscaled; every fifth of each class is the test split."""

    classes = 10

    def __init__(self, image_size: int, *, vary: bool) -> None:
        from PIL import Image
        from sklearn.datasets import load_digits

        raw = load_digits()
        small = raw.images.astype(np.float32) / 16
        large = np.stack(
            [
                np.asarray(Image.fromarray(image).resize((image_size, image_size), Image.Resampling.BICUBIC))
                for image in small
            ]
        )
        # The mean and the deviation of all pixels.
        self._images: NDArray[np.float32] = ((large - 0.305) / 0.376)[..., None].astype(np.float32)
        self._labels = raw.target.astype(np.int64)
        self._where = dict(zip(("train", "test"), stratified_split(self._labels, 0.2, SPLIT_SEED), strict=True))
        self._vary = vary

    def count(self, split: Split) -> int:
        """Return the number of images in a split."""
        return len(self._where[split])

    def batch(self, split: Split, indices: Indices, key: Sequence[int]) -> Batch:
        """Images of these indices; see `Source`."""
        where = self._where[split][indices]
        images = self._images[where]
        if self._vary and split == "train":
            images = augment(images, np.random.default_rng(key))
        return Batch(np.repeat(images, 3, axis=3), self._labels[where])


class Synthetic:
    """Random images with random labels, the same few for ever: for measuring speed, nothing can be learned."""

    classes = 1000
    _DISTINCT = 64

    def __init__(self, image_size: int, images: int = 1280) -> None:
        self._count = {"train": images, "test": images // 10}
        generator = np.random.default_rng(SPLIT_SEED)
        self._images = generator.standard_normal((self._DISTINCT, image_size, image_size, 3), np.float32)
        self._labels = generator.integers(self.classes, size=self._DISTINCT)

    def count(self, split: Split) -> int:
        """Return the number of images in a split."""
        return self._count[split]

    def batch(self, split: Split, indices: Indices, key: Sequence[int]) -> Batch:
        """Images of these indices; see `Source`."""
        where = indices % self._DISTINCT
        return Batch(self._images[where], self._labels[where])


def open_source(data: str, image_size: int, *, vary: bool, workers: int) -> Source:
    """The source that `--data` names. Raises ValueError, with what to do, if a folder is not laid out as needed."""
    if data == "digits":
        return Digits(image_size, vary=vary)
    if data == "synthetic":
        return Synthetic(image_size)

    return Folder(data, image_size, vary=vary, workers=workers)


def stratified_split(labels: NDArray[np.int64], share: float, seed: int) -> tuple[Indices, Indices]:
    """(train, test) indices, both sorted: `share` of each class, rounded, is drawn for the test."""
    generator = np.random.default_rng(seed)
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        test[generator.permutation(members)[: round(share * len(members))]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def training_data(
    source: Source, plan: Sequence[Indices], key: Sequence[int], *, lockstep: bool, first: int = 0
) -> Generator[Batch, None, None]:
    """The batches of a plan from number `first` on, prefetched, each varied by `key` and its place in the plan.

    A batch of which no image can be read is left out; in lockstep, where every rank must do as many steps as the
    others, a readable image of the same plan stands in for it.

    Raises ValueError in lockstep if none of the plan's images can be read.
    """
    work = ((plan[place], (*key, place)) for place in range(first, len(plan)))
    for place, batch in enumerate(_prefetched(source, "train", work), first):
        if len(batch):
            yield batch
        elif lockstep:
            yield _stand_in(source, plan, (*key, place))


def evaluation_data(source: Source, plan: Sequence[Indices]) -> Iterator[Batch]:
    """The test batches of a plan, prefetched; what cannot be read is left out, so count what comes."""
    return (batch for batch in _prefetched(source, "test", ((indices, ()) for indices in plan)) if len(batch))


def _stand_in(source: Source, plan: Sequence[Indices], key: Sequence[int]) -> Batch:
    for index in np.concatenate(plan):
        batch = source.batch("train", np.array([index]), key)
        if len(batch):
            return batch
    raise ValueError(
        "none of this rank's training images can be read: see the warnings above, and mend or remove the files"
    )


def _prefetched(source: Source, split: Split, work: Iterable[tuple[Indices, Sequence[int]]]) -> Iterator[Batch]:
    # One thread, so that batches come in order and a source is never entered twice; a folder decodes with its own pool.
    with ThreadPoolExecutor(1, thread_name_prefix="hvd_async-data") as pool:
        ready: deque[Future[Batch]] = deque()
        for indices, key in work:
            ready.append(pool.submit(source.batch, split, indices, key))
            if len(ready) > AHEAD:
                yield ready.popleft().result()
        while ready:
            yield ready.popleft().result()
