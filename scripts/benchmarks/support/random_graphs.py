"""Random graphs over which every rank hears of every other. Pure."""

from __future__ import annotations

import random

from hvd_async.topology import Edge, Topology

MOST_PHASES = 3
MOST_EDGES = 0.4
"""The largest share of all possible edges beside those that connect."""


def random_graph(size: int, symmetric: bool, draws: random.Random) -> Topology:
    """A way around all ranks in a random order, a random share of all other edges, dealt out to a few phases.

    Args:
        size: number of ranks.
        symmetric: whether each edge goes both ways, in the same phases.
        draws: the same on all ranks.
    """
    order = draws.sample(range(size), size)
    edges: list[Edge] = [(a, b) for a, b in zip(order, order[1:] + order[:1], strict=True) if a != b]
    share = draws.uniform(0.0, MOST_EDGES)
    edges += [(a, b) for a in range(size) for b in range(size) if a != b and draws.random() < share]
    phases: list[set[Edge]] = [set() for _ in range(draws.randint(1, MOST_PHASES))]
    for a, b in edges:
        draws.choice(phases).update([(a, b), (b, a)] if symmetric else [(a, b)])
    return Topology("random", size, tuple(map(frozenset, phases)))
