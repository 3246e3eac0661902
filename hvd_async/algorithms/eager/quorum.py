"""When does a round fire? Quorums as pure functions: who has arrived -> (fire?, why).

Sources: solo and majority are those of Li et al., "Taming Unbalanced Training Workloads in Deep Learning with Partial
Collective Operations", PPoPP 2020 (majority: an initiator drawn anew each round from a seed all ranks share, so that
half of the ranks are in on average). A count or a fraction is a real quorum; "all" is synchronous.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

Quorum = str | int | float
NAMES = ("solo", "majority", "all", "auto")


class Decision(NamedTuple):
    """Whether a round may fire, who its initiator is (None: nobody yet), and why, for people."""

    fire: bool
    initiator: int | None
    reason: str


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


def initiator(round: int, seed: int, active: AbstractSet[int], ranks: Sequence[int]) -> int:
    """Majority's initiator of a round: the first active rank of a permutation drawn from (seed, round).

    A permutation, so that a rank that finishes changes the draw only of the rounds that were its own.
    """
    return next(rank for rank in _order(round, seed, tuple(ranks)) if rank in active)


@functools.lru_cache(maxsize=64)
def _order(round: int, seed: int, ranks: tuple[int, ...]) -> list[int]:
    order = list(ranks)
    random.Random(f"{seed}:{round}").shuffle(order)
    return order


def decide(
    quorum: Quorum,
    round: int,
    arrived: Sequence[int],
    active: AbstractSet[int],
    ranks: Sequence[int],
    seed: int,
    why: str = "",
    whose: str = "",
) -> Decision:
    """May ``round`` fire? Where ranks step host by host, each host is here as its first rank.

    Args:
        quorum: one that ``check_quorum`` accepted, with a number in place of "auto".
        arrived: the active ranks that have arrived for this round, in order of arrival.
        active: the ranks that are not done; a quorum never asks for more than these.
        ranks: all that share the optimizer.
        seed: of majority's draw.
        why: why this quorum, if it was chosen by itself.
        whose: "the host of " where hosts are counted, for people.
    """
    if not arrived:
        return Decision(False, None, "nobody has arrived")
    first, present, left = arrived[0], len(arrived), len(active)
    if quorum == "solo":
        return Decision(True, first, f"solo: {whose}rank {first} came first")
    if quorum == "majority":
        drawn = initiator(round, seed, active, ranks)
        return Decision(drawn in arrived, drawn, f"majority: {whose}rank {drawn} was drawn; {present} of {left} are in")
    want = left if isinstance(quorum, str) else min(needed(quorum, len(ranks)), left)
    text = f"quorum: {present} of {left} are in, {want} needed"
    return Decision(present >= want, first, f"{text} ({why})" if why else text)
