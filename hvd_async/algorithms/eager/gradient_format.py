"""The format of a binding's gradients: buckets, flat vectors with counting elements, and their compression.

A *vector* of bucket b is its gradients, flat, then a ``Tail`` that counts them. So the sum over the ranks that a round
brings back tells how many gradients it really carried.

Where rounds are weighted by samples, a rank multiplies its gradient g_j by its samples n_j, and the tail carries the
sum of those too: a round of k gradients is k sum_j n_j g_j / sum_j n_j instead of sum_j g_j, which it is for equal n_j.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.protocol import Hyper

# -- buckets: gradients that travel together ---------------------------------------------------------------------------


def by_size(gradients: Sequence[tuple[Hashable, int]], cap: float) -> list[list[int]]:
    """Part gradients into buckets of one kind, none of more than ``cap`` bytes unless it holds but one gradient.

    Args:
        gradients: kind (of one dtype, on one device) and size (bytes) of each, in the order in which backward gets to
            them.
        cap: bytes.

    Returns:
        Positions in ``gradients``, by bucket; the bucket that is begun first comes first.
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for place, (kind, nbytes) in enumerate(gradients):
        if kind not in filling or filled[kind] + nbytes > cap:
            filling[kind], filled[kind] = [], 0
            buckets.append(filling[kind])
        filling[kind].append(place)
        filled[kind] += nbytes
    return buckets


def by_number(gradients: int, groups: int) -> list[range]:
    """Split gradients, in the order of the forward pass, into groups of equal size as Horovod does. If the number of
    gradients is not divisible by the number of groups, the first groups have one gradient more.

    Returns:
        The positions of each group's gradients; empty groups are omitted.
    """
    each, more = divmod(gradients, groups)
    ends = [group * each + min(group, more) for group in range(groups + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends) if end > start]


# -- vectors and their tails -------------------------------------------------------------------------------------------


EXACT = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}
"""Up to which whole number a dtype holds all whole numbers."""
SAMPLE_DIGITS = 32
"""Binary digits that tell the samples of a gradient."""
FIRST_UNIT = 1024.0
"""Between one sample and 2^20: float16 has both to spare for usual gradients."""


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


class Tally(NamedTuple):
    """How many gradients a sum holds, and of how many samples in all (0 where these are not counted)."""

    gradients: int
    samples: int


@dataclass(frozen=True)
class Tail:
    """The elements at a vector's end that count.

    The first ``slots`` count gradients: a rank that hands one over has 1 in its own and 0 in the others. One slot is
    enough unless the vectors travel in half precision, which cannot count far. Where rounds are weighted by samples,
    ``SAMPLE_DIGITS`` more for each slot have the gradient's samples as binary digits, the lowest first: they sum to no
    more than the slot's count does, so they are as exact.

    Attributes:
        slots: how many.
        slot: this rank's.
        weighted: whether samples are counted.
    """

    slots: int = 1
    slot: int = 0
    weighted: bool = False

    def __len__(self) -> int:
        return self.slots * (1 + SAMPLE_DIGITS * self.weighted)

    def of(self, samples: int = 0) -> list[float]:
        """Return the elements of one gradient.

        Raises:
            ValueError: so many samples cannot be counted.
        """
        if samples >= 2**SAMPLE_DIGITS:
            raise ValueError(f"{samples} samples in one gradient are too many: record fewer than 2**{SAMPLE_DIGITS}")
        elements = [0.0] * len(self)
        elements[self.slot] = 1.0
        if self.weighted:
            start = self.slots + self.slot * SAMPLE_DIGITS
            elements[start : start + SAMPLE_DIGITS] = [float(samples >> digit & 1) for digit in range(SAMPLE_DIGITS)]
        return elements

    def moved(self, elements: Sequence[float], before: Tail) -> list[float]:
        """Return elements that say here what a rank's own said where the tail was ``before``."""
        found = [0.0] * len(self)
        found[self.slot] = elements[before.slot]
        if self.weighted:
            start, digits = self.slots + self.slot * SAMPLE_DIGITS, before.slots + before.slot * SAMPLE_DIGITS
            found[start : start + SAMPLE_DIGITS] = elements[digits : digits + SAMPLE_DIGITS]
        return found

    def read(self, sums: Sequence[float], scale: float) -> Tally:
        """Return what sums of such elements x ``scale`` tell."""
        whole = [round(element / scale) for element in sums]
        digits = enumerate(whole[self.slots :])
        return Tally(sum(whole[: self.slots]), sum(number << place % SAMPLE_DIGITS for place, number in digits))


def same(vector: Vector, unit: float) -> Vector:
    """The vector itself: no compression."""
    return vector


def same_bucket(vector: Vector, bucket: int) -> Vector:
    """The vector itself: no compression."""
    return vector


def last(vector: Vector, count: int) -> list[float]:
    """The last elements, in order."""
    return [float(vector[place]) for place in range(-count, 0)]


def recounted(vector: Vector, count: int, elements: Sequence[float]) -> Vector:
    """The NumPy vector with these elements in place of its last ``count``."""
    return np.concatenate([vector[:-count], np.asarray(elements, vector.dtype)])


@dataclass(frozen=True)
class GradientFormat:
    """How a binding's vectors look and travel.

    Attributes:
        zeros: a vector of a bucket that holds nothing; it is never changed, and may be the same one each time.
        nbytes: of each bucket's vector.
        tail: the elements at a vector's end that count.
        encode: makes of a vector what the collective sums (compression), its gradients divided by a unit if it is
            ``narrow``; ``decode`` takes it back, given the bucket.
        narrow: whether gradients x samples may be out of the range in which they travel (float16).
        peek: the last so many elements of a sum that has come, in order.
        recount: returns a vector with other counting elements, given how many it has.
        sent: bytes of each bucket's vector as it travels; as ``nbytes`` if empty.
        release: gives memory back that is kept for later steps' vectors.
        scale: what the collectives multiply sums by, counts included.
        process_set: the ranks that share the optimizer, as the binding's collectives know them; None for all.
        members: those ranks; empty for all.
        process_set_id: 0 for all ranks.
    """

    zeros: Callable[[int], Vector]
    nbytes: tuple[int, ...]
    tail: Tail = Tail()
    encode: Callable[[Vector, float], Vector] = same
    decode: Callable[[Vector, int], Vector] = same_bucket
    narrow: bool = False
    peek: Callable[[Vector, int], Sequence[float]] = last
    recount: Callable[[Vector, int, Sequence[float]], Vector] = recounted
    sent: tuple[int, ...] = ()
    release: Callable[[], None] = lambda: None
    scale: float = 1.0
    process_set: Any = None
    members: tuple[int, ...] = ()
    process_set_id: int = 0

    def tally(self, sums: Vector) -> Tally:
        """Return what a sum over the ranks holds."""
        return self.tail.read(self.peek(sums, len(self.tail)), self.scale)

    def weight(self, tally: Tally, unit: float) -> float:
        """Return by what a sum's gradients are to be multiplied; 0 if it holds nothing that has a weight.

        Args:
            tally: of the sum.
            unit: by which they were divided on their way.
        """
        if not self.tail.weighted:
            return float(tally.gradients > 0)
        return tally.gradients * unit / tally.samples if tally.samples else 0.0

    @property
    def first_unit(self) -> float:
        """By what gradients x samples are divided on their way while no round has told how many samples they have."""
        return FIRST_UNIT if self.narrow and self.tail.weighted else 1.0

    def next_unit(self, tally: Tally, unit: float) -> float:
        """Return by what gradients x samples are divided on their way in a later round, so that they are as large as
        gradients are: about the samples of a gradient, and a power of two, by which nothing is rounded.

        Args:
            tally: of a round before.
            unit: of that one.
        """
        if not (self.narrow and tally.samples):
            return unit
        return float(1 << max(0, (tally.samples // tally.gradients).bit_length() - 1))

    def bytes_sent(self, bucket: int) -> int:
        """Return the vector that a rank sends in a bucket's round."""
        return (self.sent or self.nbytes)[bucket]


@dataclass(frozen=True)
class ReducedRound:
    """A round that is ready to be applied.

    Attributes:
        index: its number, from 1.
        sums: for each bucket the sum over all ranks x the wire's ``scale``, shape (elements + tail,); the last
            elements count.
        hyper: the hyperparameters to apply it with.
        counts: how many gradients it carried in each bucket.
        whole: how many steps of this rank's host since the last drain or cut had been handed over when it started; 0
            where ranks do not step host by host.
        weights: for each bucket by what its gradients are to be multiplied; 0 if they must not be applied. Empty where
            all that there are weigh the same.
    """

    index: int
    sums: tuple[Vector, ...]
    hyper: Hyper
    counts: tuple[int, ...]
    whole: int = 0
    weights: tuple[float, ...] = ()

    @property
    def gradients(self) -> int:
        """How many it carried in the bucket that carried most; 0 if it must not be applied."""
        return max(self.counts) if any(self.weights or self.counts) else 0

    def weight(self, bucket: int) -> float:
        """Return by what a bucket's gradients are to be multiplied; 0 if they must not be applied."""
        return self.weights[bucket] if self.weights else float(self.counts[bucket] > 0)


class PendingGradient(NamedTuple):
    """Pending gradients of one bucket of one rank at a cut: their sum (None if there is none), their versions."""

    vector: Vector | None
    versions: list[int]
