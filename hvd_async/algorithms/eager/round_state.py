"""State of rounds as rank 0 keeps it: by bucket, by round, by rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hvd_async.algorithms.eager.hosts import Gathering
from hvd_async.algorithms.eager.messages import HostSteps
from hvd_async.algorithms.eager.quorum import RoundQuorum
from hvd_async.runtime.messages import Hyper


class Positions:
    """Where each rank stands, and the least of those that are not done, at once: ranks are counted by position.

    Args:
        ranks: all, at position 0.
        done: those of them that are done.

    Attributes:
        of: each rank's position; it never falls.
        lowest: the least position of an active rank, if there is one.
    """

    __slots__ = ("_counts", "lowest", "of")

    def __init__(self, ranks: Sequence[int], done: Collection[int]) -> None:
        self.begin_anew(ranks, 0)
        for rank in done:
            self.leave(rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Positions) and (self.of, self._counts) == (other.of, other._counts)

    __hash__ = None  # type: ignore[assignment]

    def begin_anew(self, ranks: Sequence[int], at: int) -> None:
        """All ranks are active, at one position."""
        self.of = dict.fromkeys(ranks, at)
        self.lowest = at
        self._counts = [len(self.of)]
        """``_counts[i]``: active ranks at ``lowest + i``."""

    def step(self, ranks: Sequence[int], to: int) -> None:
        """Move active ranks from the position before to this one."""
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

    def move(self, rank: int, to: int) -> None:
        """Move an active rank to this position or keep it there."""
        self._counts += [0] * (to - self.lowest + 1 - len(self._counts))
        self._counts[to - self.lowest] += 1
        self.leave(rank)
        self.of[rank] = to

    def leave(self, rank: int) -> None:
        """Count a rank no more: it is done."""
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
    """Where one bucket stands: rounds fired, each rank's position, who is in for the next round."""

    positions: Positions
    gathering: Gathering
    fired: int = 0
    waiting: dict[int, float] = field(default_factory=dict)
    """Ranks that have arrived for round fired + 1, in order, and when."""
    hosts: dict[int, None] = field(default_factory=dict)
    """Their hosts, in order, where ranks step host by host."""
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


@dataclass(slots=True)
class Round:
    """State of a round, over all its buckets, from its first arrival until its hyperparameters are set."""

    quorum: RoundQuorum
    hyper: Hyper | None = None


class Started(NamedTuple):
    """A bucket's round that has started; as of ``StartRound``."""

    bucket: int
    round: int
    by: int
    arrived: int
    held: float
    hyper: Hyper | None
    """Of the round, with its last bucket; None if they are not known."""
    whole: HostSteps | None


class Steppers:
    """The ranks that are in ``step()``, by the number of the step, in the order in which they were heard.

    What each event costs does not depend on how many there are.
    """

    __slots__ = ("_by_step", "_step_of")

    def __init__(self) -> None:
        self._step_of: dict[int, int] = {}
        self._by_step: dict[int, dict[int, float]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steppers) and (self._step_of, self._by_step) == (other._step_of, other._by_step)

    __hash__ = None  # type: ignore[assignment]

    def last(self, rank: int) -> int | None:
        """Return the step in which a rank is; None if it is in none since the last end."""
        return self._step_of.get(rank)

    def enter(self, rank: int, step: int, now: float) -> None:
        """A rank is in a step, and in the one before no more."""
        before = self._step_of.get(rank)
        if before is not None:
            others = self._by_step[before]
            del others[rank]
            if not others:
                del self._by_step[before]
        self._step_of[rank] = step
        ranks = self._by_step.get(step)
        if ranks is None:
            self._by_step[step] = {rank: now}
        else:
            ranks[rank] = now

    def lead(self, step: int, ranks: Sequence[int]) -> int | None:
        """Return the first of ``ranks`` that is in a step, else the first that is; None if none is."""
        there = self._by_step.get(step)
        return None if there is None else next((rank for rank in ranks if rank in there), next(iter(there)))

    def waited(self, step: int, now: float) -> float:
        """Return how many seconds the ranks in a step have been in it, added up."""
        return sum(now - since for since in self._by_step.get(step, {}).values())

    def clear(self) -> None:
        """Ranks have ended."""
        self._step_of.clear()
        self._by_step.clear()
