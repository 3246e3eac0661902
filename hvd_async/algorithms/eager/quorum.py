"""When does a round fire? Quorums, pure: who has arrived -> its initiator, if it may fire, and why.

Sources: solo and majority are those of Li et al., "Taming Unbalanced Training Workloads in Deep Learning with Partial
Collective Operations", PPoPP 2020 (majority: an initiator drawn anew each round from a seed all ranks share, so that
half of the ranks are in on average). A count or a fraction is a real quorum; "all" is synchronous.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

Quorum = str | int | float
NAMES = ("solo", "majority", "all", "auto")


def check_quorum(quorum: Quorum, size: int | None, whom: str = "ranks") -> None:
    """Refuse a quorum that no round at ``size`` ranks, or hosts, (None: nobody knows how many yet) can have.

    Raises:
        ValueError: it is not "solo", "majority", "all", "auto", a count in 1..size, or a fraction in (0, 1].
    """
    most = "" if size is None else f" to {size}"
    hint = f'take "solo", "majority", "all", "auto", a number of {whom} from 1{most}, or a fraction such as 0.75'
    if isinstance(quorum, bool) or not isinstance(quorum, str | int | float):
        raise ValueError(f"quorum={quorum!r} is not a quorum: {hint}")
    if isinstance(quorum, str):
        if quorum not in NAMES:
            raise ValueError(f"quorum={quorum!r} is not known: {hint}")
    elif isinstance(quorum, int):
        if quorum < 1 or (size is not None and quorum > size):
            of = "" if size is None else f" of {size} {whom}"
            raise ValueError(f"quorum={quorum}{of} cannot be: {hint}")
    elif not 0.0 < quorum <= 1.0:
        raise ValueError(f"quorum={quorum} is not a fraction in (0, 1]: {hint}")


def parse_quorum(text: str) -> Quorum:
    """A quorum as a command line gives it: a name, "3" or "0.75" (checked later, where the size is known)."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def needed(quorum: int | float, size: int) -> int:
    """How many ranks a count or a fraction asks for, of ``size`` ranks."""
    return quorum if isinstance(quorum, int) else math.ceil(quorum * size - 1e-9)


def waits_for_all(quorum: Quorum, size: int) -> bool:
    """Return whether no round starts without one of ``size`` ranks, or hosts."""
    if isinstance(quorum, str):
        return quorum == "all" or size == 1
    return needed(quorum, size) >= size


def initiator(round: int, seed: int, active: Collection[int], ranks: Sequence[int]) -> int:
    """Majority's initiator of a round: the first active rank of a permutation drawn from (seed, round).

    A permutation, so that a rank that finishes changes the draw only of the rounds that were its own.
    """
    return next(rank for rank in _order(round, seed, tuple(ranks)) if rank in active)


@functools.lru_cache(maxsize=64)
def _order(round: int, seed: int, ranks: tuple[int, ...]) -> list[int]:
    order = list(ranks)
    random.Random(f"{seed}:{round}").shuffle(order)
    return order


@dataclass
class RoundQuorum:
    """One round's quorum, for all its buckets. Where ranks step host by host, each host is here as its first rank.

    Args:
        quorum: one that ``check_quorum`` accepted, with a number in place of "auto".
        round: its number.
        ranks: all that share the optimizer.
        seed: of majority's draw.
        why: why this quorum, if it was chosen by itself.
        whose: "the host of " where hosts are counted, for people.
    """

    quorum: Quorum
    round: int
    ranks: Sequence[int] = field(repr=False)
    seed: int
    why: str = ""
    whose: str = ""

    def __post_init__(self) -> None:
        alone = self.quorum in ("solo", "majority")
        self._least = (
            1 if alone else len(self.ranks) if isinstance(self.quorum, str) else needed(self.quorum, len(self.ranks))
        )
        self._drawn: int | None = None

    def initiator(self, arrived: Collection[int], active: Collection[int]) -> int | None:
        """May the round fire? It is asked at each arrival, so the answer takes no longer where there are more ranks.

        Args:
            arrived: the active ranks that have arrived for this round, in order of arrival.
            active: the ranks that are not done; a quorum never asks for more than these.

        Returns:
            The rank whose hyperparameters it takes, if it can be; None if it may not fire yet.
        """
        present = len(arrived)
        if not present or (present < self._least and present < len(active)):
            return None
        if self.quorum != "majority":
            return next(iter(arrived))
        drawn = self.drawn(active)
        return drawn if drawn in arrived else None

    def least(self, active: int) -> int:
        """Return how many have to be there before the round may fire, with so many that are not done."""
        return min(self._least, active)

    def drawn(self, active: Collection[int]) -> int:
        """Return majority's initiator; drawn again only if the one before has finished."""
        if self._drawn is None or self._drawn not in active:
            self._drawn = initiator(self.round, self.seed, active, self.ranks)
        return self._drawn

    def reason(self, arrived: Collection[int], active: Collection[int]) -> str:
        """Return why the round may fire, for people."""
        present, left = len(arrived), len(active)
        if self.quorum == "solo":
            return f"solo: {self.whose}rank {next(iter(arrived))} came first"
        if self.quorum == "majority":
            return f"majority: {self.whose}rank {self.drawn(active)} was drawn; {present} of {left} are in"
        text = f"quorum: {present} of {left} are in, {min(self._least, left)} needed"
        return f"{text} ({self.why})" if self.why else text
