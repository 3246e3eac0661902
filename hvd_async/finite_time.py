"""Base-(k+1) graphs: symmetric, at most k neighbours per step, exact averages after finitely many steps at any size.

Takezawa, Sato, Bao, Niwa and Yamada, NeurIPS 2023: the k-peer hyper-hypercube (Algorithm 1), the simple base-(k+1)
graph (Algorithm 2) and the base-(k+1) graph (Algorithm 3). Phases are returned as the mixing weights of their edges; a
rank keeps the remainder to 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Phase = dict[tuple[int, int], float]
"""Weight of each edge (sender, receiver) of a phase."""
Phases = list[Phase]


def base_graph(ranks: Sequence[int], peers: int) -> Phases:
    """Return the shorter of the simple base-(k+1) graph and a two-stage graph (Algorithm 3).

    Let n = p q, where every prime factor of q exceeds k + 1. First p blocks of q ranks agree in parallel, then the p
    ranks at the same position of each block agree. There are at most 2 log(n) / log(k + 1) + 2 phases.

    Args:
        ranks: the nodes, in the same order on all ranks.
        peers: k, the maximum number of neighbours of a rank in a phase.
    """
    inside = len(ranks)
    for factor in range(2, peers + 2):
        while inside % factor == 0:
            inside //= factor
    blocks = [ranks[start : start + inside] for start in range(0, len(ranks), inside)]
    staged = _in_parallel(simple_base_graph(block, peers) for block in blocks)
    staged += _in_parallel(hyper_hypercube(across, peers) for across in zip(*blocks, strict=True))
    simple = simple_base_graph(ranks, peers)
    return simple if len(simple) < len(staged) else staged


def simple_base_graph(ranks: Sequence[int], peers: int) -> Phases:
    """Return the phases of Algorithm 2, with n = sum_l a_l (k + 1)^p_l in base k + 1, p_l falling.

    The ranks are divided into parts V_l of a_l blocks with (k + 1)^p_l ranks each. First each part agrees separately.
    Then each rank of the later parts is averaged with one rank per block of V_l. It now holds the mean of V_l and the
    later parts, and so does each block of V_l on average. Finally each block agrees, while the later parts continue.
    """
    if factors(len(ranks), peers + 1) is not None:
        return hyper_hypercube(ranks, peers)
    parts = _parts(ranks, peers + 1)
    first = _in_parallel(hyper_hypercube([rank for block in part for rank in block], peers) for part in parts)
    timelines = [first]
    for number, part in enumerate(parts[:-1]):
        size = sum(map(len, part))
        later = [rank for other in parts[number + 1 :] for block in other for rank in block]
        weight = size / (len(part) * (size + len(later)))
        exchange = {
            edge: weight for block in part for a, b in zip(later, block, strict=False) for edge in ((a, b), (b, a))
        }
        own = _in_parallel(hyper_hypercube(block, peers) for block in part)
        timelines.append([*({} for _ in range(len(first) + number)), exchange, *own])
    return _in_parallel(timelines)


def hyper_hypercube(ranks: Sequence[int], peers: int) -> Phases:
    """Return the phases of Algorithm 1: phase l averages ranks that differ in the l-th digit only.

    Raises:
        ValueError: the number of ranks has a prime factor above k + 1.
    """
    digits = factors(len(ranks), peers + 1)
    if digits is None:
        raise ValueError(f"{len(ranks)} ranks have a prime factor above {peers + 1}; use base_graph()")
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
    """Return the shortest list of factors from 2 to ``most`` whose product is ``number``; None if none exists."""
    if number == 1:
        return []
    found: list[int] | None = None
    for factor in range(min(most, number), 1, -1):
        rest = factors(number // factor, factor) if number % factor == 0 else None
        if rest is not None and (found is None or len(rest) + 1 < len(found)):
            found = [factor, *rest]
    return found


def _parts(ranks: Sequence[int], base: int) -> list[list[Sequence[int]]]:
    """Return the parts V_l by the digits of the number of ranks in ``base``, largest first, each as its a_l blocks."""
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


def _in_parallel(timelines: Iterable[Sequence[Mapping[tuple[int, int], float]]]) -> Phases:
    """Return the phases of several graphs that run in parallel; in no phase do they share a rank."""
    phases = Phases()
    for timeline in timelines:
        phases += [{} for _ in range(len(timeline) - len(phases))]
        for phase, edges in zip(phases, timeline, strict=False):
            phase |= edges
    return phases
