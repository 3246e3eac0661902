"""Buckets: gradients that travel together."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence


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
    """Part so many gradients, in the order of the forward pass, into groups of about equally many, as Horovod does: the
    first ones are larger by one if it does not come out even.

    Returns:
        Their positions, by group; without empty groups.
    """
    each, more = divmod(gradients, groups)
    ends = [group * each + min(group, more) for group in range(groups + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends) if end > start]
