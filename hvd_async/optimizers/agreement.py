"""Collectives over replicas that every family has: buffers that agree, the distance of the ranks' weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.worker import Worker


class Buffers(NamedTuple):
    """Buffers of one kind, batch-norm statistics say, as one vector.

    Attributes:
        kind: their dtype, and where they lie; the same on all ranks.
        averaged: whether they can be averaged: counters and random seeds cannot.
        read: returns them with a 1 at the end, shape (n + 1,), a new vector.
        write: makes a vector of shape (n,) the buffers.
    """

    kind: str
    averaged: bool
    read: Callable[[], Vector]
    write: Callable[[Vector], None]


def unify_buffers(worker: Worker, buffers: Iterable[Buffers], policy: str, root: int) -> None:
    """Make buffers agree: the "average" of ranks whose own are finite, or those of rank ``root`` ("root").

    Buffers that cannot be averaged are rank ``root``'s. A collective of the ranks that still have the optimizer.
    """
    for one in buffers:
        own = one.read()
        if policy == "average" and one.averaged:
            if not (abs(own) < math.inf).all():
                own[:] = 0  # a rank whose batch held NaN says nothing; the last element counts those that do
            total = worker.sum(own, f"the average of buffers ({one.kind})").vector
            if total[-1] > 0:
                one.write(total[:-1] / total[-1])
        else:
            one.write(worker.broadcast(own, root, f"the broadcast of buffers ({one.kind})")[:-1])


def consensus_distance(worker: Worker, weights: Vector) -> float:
    """Return sqrt(mean over ranks of |x_i - mean x|^2), x_i rank i's weights; 0 if all are equal. A collective.

    Args:
        worker: of the ranks.
        weights: of this one, shape (n,), float64.
    """
    total, ranks, _ = worker.sum(weights + 0.0, "consensus_distance()")
    square = ((weights - total / len(ranks)) ** 2).sum().reshape(1)
    total, ranks, _ = worker.sum(square, "consensus_distance()")
    return math.sqrt(total[0] / len(ranks))
