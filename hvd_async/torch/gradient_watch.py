"""Finds gradients that were changed after they had been handed over, and so would be lost.

An in-place operation moves a tensor's version counter, unless it goes by ``.data``; and clipping that only logs a norm
moves it and changes nothing. So what counts is the bits. A fingerprint is taken of every bucket that leaves early, in
one pass; it is compared where a version has moved, in the first steps, and of one bucket in turn in later ones.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from hvd_async.errors import ReplicaStateError
from hvd_async.torch.bucket_layout import Layout

FIRST_STEPS = 10
"""Steps with early buckets in which all of these are compared."""
EVERY = 4
"""Afterwards one bucket is, in every so manieth step."""
LANES = 1 << 16
"""Number of different weights: enough for the rows of a bucket of 32 MiB."""
ROW = 64
"""Adjacent words that are summed before they are weighted, so that a fingerprint costs little more than to read the
vector."""
SMALL = 1 << 13
"""Elements up to which each is weighted separately: in a small vector, one kernel less is worth more."""


class _Handed(NamedTuple):
    """A bucket as it left: each ``p.grad`` and its version counter, whether it is compared in any case, and the
    fingerprint of them all."""

    gradients: list[torch.Tensor | None]
    versions: list[int]
    due: bool
    fingerprint: torch.Tensor | None


class Watch:
    """Over the gradients of one optimizer.

    Args:
        layout: of its buckets.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._handed: dict[int, _Handed] = {}
        self._steps = 0
        """That have ended with early buckets."""

    def handed(self, bucket: int, vector: torch.Tensor) -> None:
        """A bucket is about to leave, as this vector."""
        gradients = [p.grad for p in self._layout.buckets[bucket].parameters]
        # (its bits may differ each time it is made dense)
        sparse = True in [gradient is not None and gradient.is_sparse for gradient in gradients]
        turn, off_turn = divmod(self._steps, EVERY)
        due = self._steps < FIRST_STEPS or (off_turn == 0 and turn % len(self._layout) == bucket)
        print_ = None if sparse else fingerprint(vector, due)
        versions = [0 if gradient is None else gradient._version for gradient in gradients]
        self._handed[bucket] = _Handed(gradients, versions, due, print_)

    def check(self, buckets: Collection[int], vector: Callable[[int], torch.Tensor]) -> None:
        """The step ends in which these buckets left early.

        Args:
            buckets: their numbers.
            vector: makes a bucket's vector of its gradients as they are now.

        Raises:
            ReplicaStateError: a gradient of theirs is not what was handed over.
        """
        handed = {bucket: one for bucket, one in self._handed.items() if bucket in buckets}
        self._steps += bool(handed)
        for bucket, one in handed.items():
            moved = self._moved(bucket, one)
            if one.fingerprint is None:
                changed = moved
            else:
                looked_at = moved or one.due
                changed = looked_at and not torch.equal(fingerprint(vector(bucket), one.due), one.fingerprint)
            if changed:
                raise ReplicaStateError(
                    "a gradient was changed after backward() and before step(), when it was on its way to the other "
                    "ranks already. Clip averaged gradients by round_transform=, or between optimizer.synchronize() "
                    "and `with optimizer.skip_synchronize(): optimizer.step()`; accumulate by "
                    "backward_passes_per_step="
                )

    def clear(self) -> None:
        """The step is over: hold its gradients no longer."""
        self._handed.clear()

    def _moved(self, bucket: int, one: _Handed) -> bool:
        now = [p.grad for p in self._layout.buckets[bucket].parameters]
        versions = [0 if gradient is None else gradient._version for gradient in now]
        return versions != one.versions or any(map(operator.is_not, now, one.gradients))


def fingerprint(vector: torch.Tensor, thorough: bool) -> torch.Tensor:
    """A number of 64 bits that goes by the vector's bits: the sum of its words, those of each row of 64 times an odd
    number for the row's place. Whole numbers add up to the same in any order, on any number of threads.

    Args:
        vector: shape (n,), contiguous, float32 or float64.
        thorough: see also words that change places in a row, and signs that change in pairs; it takes several times as
            long. (Of a word's highest bit the sum only knows whether it is set an odd number of times.) float64 is
            always done so.

    Returns:
        Shape (), int64, on the vector's device; nobody has waited for it.
    """
    wide = vector.dtype == torch.float64
    if vector.numel() <= SMALL:
        words = vector.view(torch.int64 if wide else torch.int32)
        total = _weighted(words)
    else:
        half = 0 if wide else vector.numel() % 2
        words = vector[: vector.numel() - half].view(torch.int64)
        whole = words.numel() // ROW * ROW
        odd = vector[vector.numel() - half :].view(torch.int32)
        total = _weighted(torch.cat([words[:whole].view(-1, ROW).sum(1), words[whole:], odd]))
    return total + 3 * _weighted(words >> 32) if wide or (thorough and vector.numel() > SMALL) else total


def _weighted(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum of integers, each times the odd number of its place in ``LANES``."""
    if (whole := numbers.numel() // LANES * LANES) > LANES:
        numbers = torch.cat([numbers[:whole].view(-1, LANES).sum(0), numbers[whole:]])
    return (numbers * _weights(numbers.device)[: numbers.numel()]).sum()


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Shape (2 ``LANES``,), the same in every process."""
    drawn = torch.randint(-(2**62), 2**62, (2 * LANES,), generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    return (drawn | 1).to(device)
