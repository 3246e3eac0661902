"""State of rounds as rank 0 keeps it: by bucket, by round, by rank."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hvd_async.algorithms.eager.quorum import RoundQuorum
from hvd_async.runtime.messages import Hyper


class Positions:
    """Where each rank stands in each bucket, and the least of those that are not done, at once.

    All buckets of a step come before the next step, so a rank stands at one position, but for those buckets of its next
    step that have come already. Ranks are counted by position.

    Args:
        ranks: all, at position 0.
        buckets: how many.
        done: those ranks that are done.

    Attributes:
        of: of each rank the position of all its buckets; it never falls.
        ahead: of ranks some of whose next step's buckets have come: which, as bits.
        lowest: the least position of an active rank, if there is one.
    """

    __slots__ = ("_ahead_at", "_all", "_counts", "ahead", "lowest", "of")

    def __init__(self, ranks: Sequence[int], buckets: int, done: Collection[int]) -> None:
        self._all = (1 << buckets) - 1
        self.begin_anew(ranks, 0)
        for rank in done:
            self.leave(rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Positions) and all(getattr(self, one) == getattr(other, one) for one in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def begin_anew(self, ranks: Sequence[int], at: int) -> None:
        """All ranks are active, at one position."""
        self.of = dict.fromkeys(ranks, at)
        self.ahead: dict[int, int] = {}
        self.lowest = at
        self._counts = [len(self.of)]
        """``_counts[i]``: active ranks at ``lowest + i``."""
        self._ahead_at: dict[tuple[int, int], int] = {}
        """Active ranks at a position that are ahead in a bucket, by both."""

    def at(self, rank: int, bucket: int) -> int:
        """Return a rank's position in a bucket."""
        return self.of[rank] + (self.ahead.get(rank, 0) >> bucket & 1)

    def lowest_in(self, bucket: int) -> int:
        """Return the least position of an active rank in a bucket."""
        return self.lowest + (self._ahead_at.get((self.lowest, bucket), 0) == self._counts[0])

    def step(self, ranks: Sequence[int], to: int, buckets: Sequence[int], bits: int) -> bool:
        """Move active ranks that stand alike to the next position in some buckets, and return whether it is all."""
        if bits != self._all and not self._gain(ranks, to - 1, buckets, bits):
            return False
        of, counts, place, count = self.of, self._counts, to - self.lowest, len(ranks)
        for rank in ranks:
            of[rank] = to
        if place == len(counts):
            counts.append(count)
        else:
            counts[place] += count
        counts[place - 1] -= count
        if not counts[0]:
            self._rise()
        return True

    def _gain(self, ranks: Sequence[int], at: int, buckets: Sequence[int], bits: int) -> bool:
        """Put ranks ahead in some buckets; once in all, they are to move on."""
        ahead_at = self._ahead_at
        for bucket in buckets:
            ahead_at[at, bucket] = ahead_at.get((at, bucket), 0) + len(ranks)
        for rank in ranks:
            self.ahead[rank] = self.ahead.get(rank, 0) | bits
        if self.ahead[ranks[0]] != self._all:
            return False
        for rank in ranks:
            self._fall_in(rank)
        return True

    def _fall_in(self, rank: int) -> None:
        """Count a rank no more as ahead."""
        bits, at = self.ahead.pop(rank, 0), self.of[rank]
        for bucket in range(bits.bit_length()):
            if bits >> bucket & 1:
                self._ahead_at[at, bucket] -= 1
                if not self._ahead_at[at, bucket]:
                    del self._ahead_at[at, bucket]

    def move(self, rank: int, to: int) -> None:
        """Move an active rank that is ahead in no bucket to this position, or keep it there."""
        self._counts += [0] * (to - self.lowest + 1 - len(self._counts))
        self._counts[to - self.lowest] += 1
        self.leave(rank)
        self.of[rank] = to

    def leave(self, rank: int) -> None:
        """Count a rank no more: it is done."""
        self._fall_in(rank)
        self._counts[self.of[rank] - self.lowest] -= 1
        if not self._counts[0]:
            self._rise()

    def _rise(self) -> None:
        empty, last = 0, len(self._counts) - 1
        while empty < last and not self._counts[empty]:
            empty += 1
        del self._counts[:empty]
        self.lowest += empty


@dataclass(slots=True)
class Bucket:
    """Where one bucket stands: rounds fired, and who is in for the next round."""

    fired: int = 0
    waiting: dict[int, float] = field(default_factory=dict)
    """Hosts (ranks, where each is by itself) that have arrived for round fired + 1, in order, and when."""
    arrived: int = 0
    """How many ranks these are."""
    least: int = 1
    """How many of them there have to be before it is worth a look whether the round may fire."""
    quorum_at: float | None = None
    """When the next round's quorum came together (grace counts from there)."""
    loaded: bool = False
    """Whether a gradient was handed over since the last round took what was pending."""
    landed: int = 0
    """Rounds that are known to have come back to some rank; they come back to all at much the same time."""
    fired_at: float = 0.0
    """When the last round fired."""
    called: int = 0
    """The number of the first roll call since then; 0 before there was one."""
    answered: set[int] = field(default_factory=set)
    """The ranks whose engines have submitted that round, as the roll call has shown."""


def is_last(buckets: Sequence[Bucket], index: int) -> bool:
    """Return whether all other buckets have fired the round that is next of this one."""
    number = buckets[index].fired + 1
    return all(bucket.fired >= number for other, bucket in enumerate(buckets) if other != index)


@dataclass(slots=True)
class Round:
    """State of a round, over all its buckets, from its first arrival until its hyperparameters are set."""

    quorum: RoundQuorum
    hyper: Hyper | None = None


class Steppers:
    """The ranks that are in ``step()``, and since when, by the number of a step whose round has not fired yet."""

    __slots__ = ("_by_step", "_step_of")

    def __init__(self) -> None:
        self._step_of: dict[int, int] = {}
        self._by_step: dict[int, dict[int, float]] = {}
        """In the order in which they were heard; some may be in a later step meanwhile."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steppers) and (self._step_of, self._by_step) == (other._step_of, other._by_step)

    __hash__ = None  # type: ignore[assignment]

    def last(self, rank: int) -> int | None:
        """Return the step in which a rank is; None if it is in none since the last end."""
        return self._step_of.get(rank)

    def enter(self, rank: int, step: int, now: float, fired: int) -> None:
        """A rank is in a step, and in the one before no more; so many rounds have fired."""
        self._step_of[rank] = step
        if step > fired:
            ranks = self._by_step.get(step)
            if ranks is None:
                ranks = self._by_step[step] = {}
            ranks[rank] = now

    def lead(self, step: int, ranks: Sequence[int]) -> int | None:
        """Return the first of ``ranks`` that is in a step, else the first that is; None if none is."""
        there = self._by_step.get(step, {})
        there_first = itertools.chain((rank for rank in ranks if rank in there), there)
        return next((rank for rank in there_first if self._step_of[rank] == step), None)

    def waited(self, step: int, now: float) -> float:
        """Return how many seconds the ranks in a step have been in it, added up."""
        there = self._by_step.get(step, {})
        return sum(now - since for rank, since in there.items() if self._step_of[rank] == step)

    def forget(self, step: int) -> None:
        """The rounds until this step's have fired: nobody asks for their ranks any more."""
        for old in [number for number in self._by_step if number <= step]:
            del self._by_step[old]

    def clear(self) -> None:
        """Ranks have ended."""
        self._step_of.clear()
        self._by_step.clear()
