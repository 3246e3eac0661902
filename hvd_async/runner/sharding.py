"""Who trains on which sample: pure functions of (samples, ranks, batch size, seed, epoch)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def training_batches(
    samples: int, rank: int, size: int, batch_size: int, *, seed: int, epoch: int, lockstep: bool, lap: int = 0
) -> list[Indices]:
    """The batches of one rank in one epoch, each an array of sample indices, int64.

    The order is drawn from (seed, epoch, lap), the same on all ranks; laps after 0 are for a rank that goes round its
    images once more in the same epoch. Without `lockstep` every sample goes to exactly
    one rank, once; ranks may get different numbers of batches, also none, and a rank's batches differ in size by at
    most one image (a tiny last batch would count as much as a full one). With `lockstep` every rank gets the same
    number of batches, all of the same size, and the tail of the order is dropped.

    Raises ValueError in lockstep if there are fewer samples than ranks.
    """
    order = np.random.default_rng([seed, epoch, lap] if lap else [seed, epoch]).permutation(samples).astype(np.int64)
    if lockstep:
        steps, batch = _lockstep(samples, size, batch_size)
        return list(order[: steps * batch * size].reshape(steps, size, batch)[:, rank])
    mine = order[rank::size]
    return np.array_split(mine, math.ceil(len(mine) / batch_size)) if len(mine) else []


def most_batches(samples: int, size: int, batch_size: int, *, lockstep: bool) -> int:
    """The number of batches an epoch has on the rank that has the most. Errors as in `training_batches`."""
    if lockstep:
        return _lockstep(samples, size, batch_size)[0]
    return math.ceil(math.ceil(samples / size) / batch_size)


def evaluation_batches(samples: int, rank: int, size: int, batch_size: int) -> list[Indices]:
    """One rank's part of an evaluation: over all ranks every sample exactly once, in a fixed order."""
    mine = np.arange(rank, samples, size, dtype=np.int64)
    return [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]


def _lockstep(samples: int, size: int, batch_size: int) -> tuple[int, int]:
    """(steps in an epoch, images in a batch) when all ranks do the same number of steps with equal batches."""
    share = samples // size
    if share == 0:
        raise ValueError(
            f"{samples} training images cannot be shared by {size} ranks that must all do the same number of "
            "steps: start fewer ranks, or use --algorithm eager, which lets a rank have no batch"
        )
    batch = min(batch_size, share)
    return share // batch, batch
