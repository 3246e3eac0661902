"""Base-(k+1) graphs: symmetric, at most k neighbours a step, exact averages after finitely many steps at any size.

Takezawa, Sato, Bao, Niwa and Yamada, NeurIPS 2023: the k-peer hyper-hypercube (Algorithm 1), the simple base-(k+1)
graph (Algorithm 2) and the base-(k+1) graph (Algorithm 3). Phases are returned as the mixing weights of their edges; a
rank keeps what is left of 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Phase = dict[tuple[int, int], float]
"""A phase: the weight of each edge (sender, receiver)."""
Phases = list[Phase]


def base_graph(ranks: Sequence[int], peers: int) -> Phases:
    """Return the shorter one of the simple base-(k+1) graph and of one in two stages (Algorithm 3).

    n = p q, where no prime factor of q is k + 1 or less: p times q ranks agree side by side, then p ranks of one place
    in these. At most 2 log(n) / log(k + 1) + 2 phases.

    Args:
        ranks: the nodes, in an order that is the same everywhere.
        peers: k, the most neighbours a rank may have in a phase.
    """
    inside = len(ranks)
    for factor in range(2, peers + 2):
        while inside % factor == 0:
            inside //= factor
    blocks = [ranks[start : start + inside] for start in range(0, len(ranks), inside)]
    staged = _beside(simple_base_graph(block, peers) for block in blocks)
    staged += _beside(hyper_hypercube(across, peers) for across in zip(*blocks, strict=True))
    simple = simple_base_graph(ranks, peers)
    return simple if len(simple) < len(staged) else staged


def simple_base_graph(ranks: Sequence[int], peers: int) -> Phases:
    """Return the phases of Algorithm 2, with n = sum_l a_l (k + 1)^p_l in base k + 1, p_l falling.

    The ranks are parted in V_l of a_l (k + 1)^p_l. First each V_l agrees by itself. Then the ranks of all later parts
    are averaged with a_l of V_l, one of each (k + 1)^p_l, so that they have the mean of these parts and V_l, and so V_l
    has it in the mean, also each (k + 1)^p_l of it; these agree at last, while later parts go on.
    """
    if factors(len(ranks), peers + 1) is not None:
        return hyper_hypercube(ranks, peers)
    parts = _parts(ranks, peers + 1)
    first = _beside(hyper_hypercube([rank for block in part for rank in block], peers) for part in parts)
    timelines = [first]
    for number, part in enumerate(parts[:-1]):
        size = sum(map(len, part))
        later = [rank for other in parts[number + 1 :] for block in other for rank in block]
        weight = size / (len(part) * (size + len(later)))
        exchange = {
            edge: weight for block in part for a, b in zip(later, block, strict=False) for edge in ((a, b), (b, a))
        }
        own = _beside(hyper_hypercube(block, peers) for block in part)
        timelines.append([*({} for _ in range(len(first) + number)), exchange, *own])
    return _beside(timelines)


def hyper_hypercube(ranks: Sequence[int], peers: int) -> Phases:
    """Return the phases of Algorithm 1: in phase l, ranks that differ in the l-th digit alone are averaged.

    Raises:
        ValueError: the number of ranks has a prime factor above k + 1.
    """
    digits = factors(len(ranks), peers + 1)
    if digits is None:
        raise ValueError(f"{len(ranks)} ranks have a prime factor above {peers + 1}: take base_graph")
    phases, stride = list[Phase](), 1
    for radix in digits:
        phase: Phase = {}
        for place, rank in enumerate(ranks):
            digit = place // stride % radix
            others = (ranks[place + (other - digit) * stride] for other in range(radix) if other != digit)
            phase |= {(rank, other): 1.0 / radix for other in others}
        phases.append(phase)
        stride *= radix
    return phases


def factors(number: int, most: int) -> list[int] | None:
    """Return the fewest factors from 2 to ``most`` whose product is the number; None if there are none."""
    if number == 1:
        return []
    found: list[int] | None = None
    for factor in range(min(most, number), 1, -1):
        rest = factors(number // factor, factor) if number % factor == 0 else None
        if rest is not None and (found is None or len(rest) + 1 < len(found)):
            found = [factor, *rest]
    return found


def _parts(ranks: Sequence[int], base: int) -> list[list[Sequence[int]]]:
    """Return the parts V_l by the number's digits in a base, the largest first, each as its a_l blocks."""
    parts, start, power = list[list[Sequence[int]]](), 0, 1
    while power * base <= len(ranks):
        power *= base
    while power:
        blocks = (len(ranks) - start) // power
        if blocks:
            parts.append([ranks[start + i * power : start + (i + 1) * power] for i in range(blocks)])
        start += blocks * power
        power //= base
    return parts


def _beside(timelines: Iterable[Sequence[Mapping[tuple[int, int], float]]]) -> Phases:
    """Return the phases of several graphs that begin at the same time, and at one time have no rank in common."""
    phases = Phases()
    for timeline in timelines:
        phases += [{} for _ in range(len(timeline) - len(phases))]
        for phase, edges in zip(phases, timeline, strict=False):
            phase |= edges
    return phases
