"""The format of a binding's gradients: flat vectors with counting elements, and their compression.

A *vector* of bucket b is its gradients, flat, then ``slots`` elements that count gradients: a rank that hands one over
has 1 in slot ``index % slots`` and 0 in the others. So the sum over the ranks that a round brings back tells how many
gradients it really carried. One slot is enough unless the vectors travel in half precision, which cannot count far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.messages import Hyper

EXACT = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}
"""Up to which whole number a dtype holds all whole numbers."""


def count_slots(size: int, max_staleness: int, dtype: str) -> int:
    """How many counting elements a vector needs so that their sums are exact in ``dtype``, that of the wire.

    Between two rounds a rank hands over no more than ``max_staleness + 1`` gradients, and one more if it began with as
    many from a checkpoint; so a slot that ranks share in turn sums to no more than (ranks that share it) x that.

    Raises:
        ValueError: a single rank's gradients may be too many for the dtype.
    """
    each = EXACT[dtype] // (max_staleness + 2)
    if each < 1:
        raise ValueError(
            f"max_staleness={max_staleness} is too much for {dtype} compression, which counts to {EXACT[dtype]}: "
            f"lower max_staleness or leave compression out"
        )
    return -(-size // each)


def largest_summand(size: int) -> float:
    """The largest float16 of which ``size`` may be added up, in any order, without an infinity. Each addition rounds up
    by 2^-11 of its result at the most, and never by more than the number that is added."""
    return 65504 / size / min(2.0, (1 + 2**-11) ** size)


def same(vector: Vector) -> Vector:
    """The vector itself: no compression."""
    return vector


def same_bucket(vector: Vector, bucket: int) -> Vector:
    """The vector itself: no compression."""
    return vector


def last(vector: Vector, count: int) -> list[float]:
    """The last elements."""
    return [float(vector[-1 - place]) for place in range(count)]


@dataclass(frozen=True)
class GradientFormat:
    """How a binding's vectors look and travel.

    Attributes:
        zeros: a vector of a bucket that holds nothing; it is never changed, and may be the same one each time.
        nbytes: of each bucket's vector.
        slots: elements at a vector's end that count gradients.
        encode: makes of a vector what the collective sums (compression); ``decode`` takes it back, given the bucket.
        peek: the last so many elements of a sum that has come, in any order.
        sent: bytes of each bucket's vector as it travels; as ``nbytes`` if empty.
        release: gives memory back that is kept for later steps' vectors.
        scale: what the collectives multiply sums by, counts included.
        process_set: the ranks that share the optimizer, as the binding's collectives know them; None for all.
        members: those ranks; empty for all.
        process_set_id: 0 for all ranks.
    """

    zeros: Callable[[int], Vector]
    nbytes: tuple[int, ...]
    slots: int = 1
    encode: Callable[[Vector], Vector] = same
    decode: Callable[[Vector, int], Vector] = same_bucket
    peek: Callable[[Vector, int], Sequence[float]] = last
    sent: tuple[int, ...] = ()
    release: Callable[[], None] = lambda: None
    scale: float = 1.0
    process_set: Any = None
    members: tuple[int, ...] = ()
    process_set_id: int = 0

    def count(self, sums: Vector) -> int:
        """How many gradients a vector holds."""
        return sum(round(count / self.scale) for count in self.peek(sums, self.slots))

    def bytes_sent(self, bucket: int) -> int:
        """Return the vector that a rank sends in a bucket's round."""
        return (self.sent or self.nbytes)[bucket]


@dataclass(frozen=True)
class ReducedRound:
    """A round that is ready to be applied.

    Attributes:
        index: its number, from 1.
        sums: for each bucket the sum over all ranks x the wire's ``scale``, shape (elements + slots,); the last
            elements count gradients.
        hyper: the hyperparameters to apply it with.
        counts: how many gradients it carried in each bucket.
        whole: how many steps of this rank's host since the last drain or cut had been handed over when it started; 0
            where ranks do not step host by host.
    """

    index: int
    sums: tuple[Vector, ...]
    hyper: Hyper
    counts: tuple[int, ...]
    whole: int = 0

    @property
    def gradients(self) -> int:
        """How many it carried in the bucket that carried most; 0 if it must not be applied."""
        return max(self.counts)


class PendingGradient(NamedTuple):
    """Pending gradients of one bucket of one rank at a cut: their sum (None if there is none), their versions."""

    vector: Vector | None
    versions: list[int]
