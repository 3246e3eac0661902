"""The format of a binding's gradients: buckets, flat vectors with counting elements, and their compression.

A *vector* of bucket b consists of its gradients, flat, and a ``Tail`` that counts them. So the sum over the ranks that
a round returns shows how many gradients it carried.

If rounds are weighted by samples, a rank multiplies its gradient g_j by its number of samples n_j, and the tail carries
the sum of these too: a round of k gradients is k sum_j n_j g_j / sum_j n_j instead of sum_j g_j, to which it is equal
if all n_j are.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.protocol import Hyper

# -- buckets: gradients that travel together ---------------------------------------------------------------------------


def by_size(gradients: Sequence[tuple[Hashable, int]], cap: float) -> list[list[int]]:
    """Divide gradients into buckets of one kind, of at most ``cap`` bytes unless a bucket holds a single gradient.

    Args:
        gradients: kind (dtype and device) and size (bytes) of each gradient, in the order in which backward computes
            them.
        cap: maximum size, bytes.

    Returns:
        Positions in ``gradients``, by bucket; buckets are in the order of their first gradients.
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


def divide(
    gradients: Sequence[tuple[Hashable, int]], cap: float, groups: int | Sequence[Sequence[int]] | None
) -> list[list[int]]:
    """Divide gradients into buckets of one kind, as Horovod's ``groups`` say.

    Args:
        gradients: as in ``by_size``, but in the order of the forward pass.
        cap: maximum size of a bucket of no group, bytes.
        groups: a number of groups of about equal numbers of gradients, or the positions of each group's gradients; the
            gradients in no group are divided by size. None or 0: no groups.

    Returns:
        Positions in ``gradients``, by bucket; the last group, and the last gradient in each, first, then those in none.

    Raises:
        ValueError: a gradient is listed twice.
    """
    if isinstance(groups, int) and groups:
        groups = _of_equal_number(len(gradients), groups)
    parts = [(group[::-1], math.inf) for group in reversed(groups or ())]
    listed = [place for part, _ in parts for place in part]
    if len({*listed}) < len(listed):
        raise ValueError("groups: a parameter is listed twice; each may be in one group only")
    parts.append(([place for place in reversed(range(len(gradients))) if place not in {*listed}], cap))
    split = [(part, by_size([gradients[place] for place in part], most)) for part, most in parts]
    return [[part[place] for place in bucket] for part, buckets in split for bucket in buckets]


def _of_equal_number(gradients: int, groups: int) -> list[range]:
    """Split gradients as Horovod does: if they are not divisible, the first groups have one more."""
    each, more = divmod(gradients, groups)
    ends = [group * each + min(group, more) for group in range(groups + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


# -- vectors and their tails -------------------------------------------------------------------------------------------


EXACT = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}
"""By dtype, the number up to which it represents all whole numbers exactly."""
SAMPLE_DIGITS = 32
"""Number of binary digits for the samples of a gradient."""
FIRST_UNIT = 1024.0
"""First divisor, in the middle between 1 sample and 2^20: usual gradients fit into float16 with either."""


def count_slots(size: int, max_staleness: int, dtype: str) -> int:
    """Return how many counting elements a vector needs so that their sums are exact in ``dtype``, that of the wire.

    Between two rounds a rank hands over at most ``max_staleness + 1`` gradients, and one more if it started with that
    many from a checkpoint. So a slot sums to at most (number of ranks that share it) x (``max_staleness + 2``).

    Raises:
        ValueError: the gradients of a single rank may be too many for the dtype.
    """
    each = EXACT[dtype] // (max_staleness + 2)
    if each < 1:
        raise ValueError(
            f"max_staleness={max_staleness} is too large for {dtype} compression, which counts to {EXACT[dtype]}: "
            f"lower max_staleness or leave compression out"
        )
    return -(-size // each)


def largest_summand(size: int) -> float:
    """Return the largest float16 of which ``size`` can be added in any order without overflow. Each addition rounds up
    by at most 2^-11 of its result, and by at most the number that is added."""
    return 65504 / size / min(2.0, (1 + 2**-11) ** size)


class Tally(NamedTuple):
    """Number of gradients in a sum, and their total number of samples (0 if these are not counted)."""

    gradients: int
    samples: int


@dataclass(frozen=True)
class Tail:
    """Counting elements at the end of a vector.

    The first ``slots`` elements count gradients: a rank that hands one over has 1 in its own slot and 0 in the others.
    One slot is enough unless the vectors travel in half precision, which represents few whole numbers exactly. If
    rounds are weighted by samples, ``SAMPLE_DIGITS`` more elements per slot hold the gradient's number of samples in
    binary, lowest digit first: they sum to at most the slot's count, so they are exact too.

    Attributes:
        slots: number of slots.
        slot: slot of this rank.
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
            ValueError: the number of samples is too large.
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
        """Return a rank's elements of the tail ``before``, converted to this tail."""
        found = [0.0] * len(self)
        found[self.slot] = elements[before.slot]
        if self.weighted:
            start, digits = self.slots + self.slot * SAMPLE_DIGITS, before.slots + before.slot * SAMPLE_DIGITS
            found[start : start + SAMPLE_DIGITS] = elements[digits : digits + SAMPLE_DIGITS]
        return found

    def read(self, sums: Sequence[float], scale: float) -> Tally:
        """Return the tally that sums of such elements, multiplied by ``scale``, contain."""
        whole = [round(element / scale) for element in sums]
        digits = enumerate(whole[self.slots :])
        return Tally(sum(whole[: self.slots]), sum(number << place % SAMPLE_DIGITS for place, number in digits))


@dataclass(frozen=True)
class GradientFormat:
    """Format of a binding's vectors in memory and on the wire; by default NumPy's, without compression.

    Attributes:
        zeros: returns an empty vector of a bucket; it is never changed, and may be the same object each time.
        nbytes: size of each bucket's vector, bytes.
        tail: counting elements at the end of a vector.
        encode: compresses a vector for the collective, its gradients divided by a unit if the format is ``narrow``.
        decode: inverse of ``encode`` for the sum of a bucket.
        read_tail: returns the decoded tail of a bucket's sum that is complete; None if that takes the whole sum.
        narrow: whether gradients x samples may exceed the range in which they travel (float16).
        peek: returns the last elements of a received sum, in order, given their number.
        add: returns the sum of two vectors, the first of which it may overwrite (engine thread).
        recount: returns a vector with other counting elements, given its present number of them.
        sent: size of each bucket's vector on the wire, bytes; empty: as ``nbytes``.
        release: frees memory that is reserved for vectors of later steps.
        scale: factor by which the collectives multiply sums, counts included.
        process_set: the ranks that share the optimizer, as the binding's collectives know them; None for all.
        members: these ranks; empty for all.
        process_set_id: 0 for all ranks.
    """

    zeros: Callable[[int], Vector]
    nbytes: tuple[int, ...]
    tail: Tail = Tail()
    encode: Callable[[Vector, float], Vector] = lambda vector, unit: vector
    decode: Callable[[Vector, int], Vector] = lambda vector, bucket: vector
    read_tail: Callable[[Vector, int], Vector] | None = lambda vector, bucket: vector
    narrow: bool = False
    peek: Callable[[Vector, int], Sequence[float]] = lambda sums, count: [float(sums[i]) for i in range(-count, 0)]
    add: Callable[[Vector, Vector], Vector] = operator.iadd
    recount: Callable[[Vector, int, Sequence[float]], Vector] = lambda vector, count, elements: np.concatenate(
        [vector[:-count], np.asarray(elements, vector.dtype)]
    )
    sent: tuple[int, ...] = ()
    release: Callable[[], None] = lambda: None
    scale: float = 1.0
    process_set: Any = None
    members: tuple[int, ...] = ()
    process_set_id: int = 0

    def tally(self, sums: Vector, unit: float) -> tuple[int, float, float]:
        """Return the number of gradients in a sum over the ranks, the factor for them, and the unit of a later round.

        Units are divisors of gradients x samples on the wire: about the number of samples of a gradient, so that the
        quotients are as large as gradients, and powers of two, so that nothing is rounded.

        Args:
            sums: sum of vectors over all ranks.
            unit: its unit: ``first_unit``, or what the call for an earlier round returned.

        Returns:
            The factor is 0 if none of the gradients has a weight.
        """
        gradients, samples = self.tail.read(self.peek(sums, len(self.tail)), self.scale)
        if not self.tail.weighted:
            return gradients, float(gradients > 0), unit
        later = float(1 << max(0, (samples // gradients).bit_length() - 1)) if self.narrow and samples else unit
        return gradients, gradients * unit / samples if samples else 0.0, later

    @property
    def first_unit(self) -> float:
        """Divisor of gradients x samples on the wire before any round has shown how many samples gradients have."""
        return FIRST_UNIT if self.narrow and self.tail.weighted else 1.0


@dataclass(frozen=True)
class ReducedRound:
    """Round that is ready to be applied.

    Attributes:
        index: number of the round, from 1.
        sums: for each bucket the sum over all ranks x the wire's ``scale``, shape (elements + tail,); the last
            elements count. A function returns it (``taken``) if the round is not complete.
        hyper: hyperparameters to apply the round with.
        counts: number of gradients that it carried, by bucket; empty if the round is not complete.
        whole: number of steps since the last drain or cut that this rank's host had handed over when the round started;
            0 where ranks do not step host by host.
        weights: factor for the gradients of each bucket; 0 if they must not be applied. Empty if all weigh the same.
    """

    index: int
    sums: tuple[Vector, ...]
    hyper: Hyper
    counts: tuple[int, ...]
    whole: int = 0
    weights: tuple[float, ...] = ()

    @property
    def gradients(self) -> int:
        """Largest number of gradients that it carried in a bucket; 0 if it must not be applied, and 1 if it must and is
        not complete."""
        return max(self.counts, default=1) if any(self.weights or self.counts) else 0

    def taken(self) -> ReducedRound:
        """Return the round with its sums, for work that the caller queues on its device from now on."""
        if self.counts:
            return self
        return replace(self, sums=tuple(take() if callable(take) else take for take in self.sums))

    def weight(self, bucket: int) -> float:
        """Return the factor for a bucket's gradients; 0 if they must not be applied."""
        return self.weights[bucket] if self.weights else float(self.counts[bucket] > 0)


class PendingGradient(NamedTuple):
    """Pending gradients of a bucket on a rank: their sum (None if there are none), and their versions."""

    vector: Vector | None
    versions: list[int]
