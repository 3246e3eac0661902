"""Communication graphs as data: who sends to whom at each step, at any number of ranks.

A topology is a cycle of *phases*; at step k the edges of phase ``k % period`` carry messages. Static graphs have one
phase. The dynamic ones are those of SGP (Assran et al., ICML 2019, section 3.1 and appendix) and BlueFog (Ying et al.,
2021); all are built here at any size, odd ones and one rank included. Base graphs (Takezawa et al., NeurIPS 2023) bring
mixing weights of their own.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hvd_async.finite_time import base_graph

__all__ = [
    "NAMED", "WITH_PEERS", "Edge", "Topology", "base", "bipartite_exponential", "bipartite_linear", "check_peers",
    "complete", "exponential", "from_networkx", "inner_outer", "linear", "mesh", "named", "one_peer", "random_pairs",
    "ring", "star", "static_exponential", "symmetric_exponential",
]  # fmt: skip

Edge = tuple[int, int]
"""(sender, receiver)."""


@dataclass(frozen=True)
class Topology:
    """Who sends to whom.

    Attributes:
        name: for reports and messages.
        size: number of ranks.
        phases: for each phase its edges (sender, receiver), none of a rank to itself.
        weights: for each phase the mixing weights of these edges, where the graph depends on them; the sender keeps
            what is left of 1. Empty: any that ``mixing`` makes.

    Raises:
        ValueError: an edge of a rank that is not there, or of a rank to itself; weights of other edges.
    """

    name: str
    size: int
    phases: tuple[frozenset[Edge], ...]
    weights: tuple[Mapping[Edge, float], ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a topology of {self.size} ranks: there must be 1 or more")
        if not self.phases:
            raise ValueError(f"topology {self.name!r} has no phases: give it at least one, which may be empty")
        for edge in itertools.chain.from_iterable(self.phases):
            if not all(0 <= rank < self.size for rank in edge):
                raise ValueError(f"topology {self.name!r}: edge {edge} leaves the ranks 0 to {self.size - 1}")
            if edge[0] == edge[1]:
                raise ValueError(f"topology {self.name!r}: rank {edge[0]} sends to itself; leave such edges out")
        if self.weights and [frozenset(phase) for phase in self.weights] != list(self.phases):
            raise ValueError(f"topology {self.name!r}: give the weights of each phase's edges, or none at all")

    @property
    def period(self) -> int:
        """After how many steps the phases come back."""
        return len(self.phases)

    @cached_property
    def _neighbours(self) -> list[tuple[list[tuple[int, ...]], list[tuple[int, ...]]]]:
        found = []
        for edges in self.phases:
            out: list[list[int]] = [[] for _ in range(self.size)]
            into: list[list[int]] = [[] for _ in range(self.size)]
            for sender, receiver in sorted(edges):
                out[sender].append(receiver)
                into[receiver].append(sender)
            found.append(([tuple(ranks) for ranks in out], [tuple(ranks) for ranks in into]))
        return found

    def out(self, rank: int, step: int) -> tuple[int, ...]:
        """To whom ``rank`` sends at ``step`` (from 0), in ascending order."""
        return self._neighbours[step % self.period][0][rank]

    def into(self, rank: int, step: int) -> tuple[int, ...]:
        """From whom ``rank`` receives at ``step``, in ascending order."""
        return self._neighbours[step % self.period][1][rank]

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Everybody that ``rank`` sends to in some phase, in ascending order."""
        return tuple(sorted({peer for out, _ in self._neighbours for peer in out[rank]}))

    @cached_property
    def symmetric(self) -> bool:
        """Whether every message of every phase is answered in the same phase: what D-PSGD and AD-PSGD need."""
        return all((receiver, sender) in edges for edges in self.phases for sender, receiver in edges)

    @cached_property
    def regular(self) -> bool:
        """Whether in every phase all ranks send and receive equally many messages."""
        return all(
            len({len(ranks) for ranks in out} | {len(ranks) for ranks in into}) <= 1 for out, into in self._neighbours
        )

    def unreachable(self) -> tuple[int, int] | None:
        """A pair (from, to) between which no message ever finds a way over the phases; None if there is none."""
        edges = frozenset().union(*self.phases)
        for reverse in (False, True):
            ways: list[list[int]] = [[] for _ in range(self.size)]
            for sender, receiver in edges:
                a, b = (receiver, sender) if reverse else (sender, receiver)
                ways[a].append(b)
            seen, new = {0}, [0]
            while new:
                found = [rank for rank in ways[new.pop()] if rank not in seen]
                seen.update(found)
                new += found
            if len(seen) < self.size:
                other = min(set(range(self.size)) - seen)
                return (other, 0) if reverse else (0, other)
        return None


# -- static graphs --------------------------------------------------------------------------------------------


def ring(size: int, direction: str = "both") -> Topology:
    """Each rank to the next one (``right``), the one before (``left``), or both.

    Raises:
        ValueError: another direction.
    """
    hops = {"right": (1,), "left": (-1,), "both": (1, -1)}.get(direction)
    if hops is None:
        raise ValueError(f"direction={direction!r} of a ring: take 'left', 'right' or 'both'")
    name = "ring" if direction == "both" else f"ring-{direction}"
    return Topology(name, size, (_hops(size, hops),))


def complete(size: int) -> Topology:
    """Everybody to everybody."""
    return Topology("complete", size, (frozenset(itertools.permutations(range(size), 2)),))


def star(size: int, centre: int = 0) -> Topology:
    """All ranks to and from one; the plainest graph that is not regular."""
    spokes = [rank for rank in range(size) if rank != centre]
    edges = {(centre, rank) for rank in spokes} | {(rank, centre) for rank in spokes}
    return Topology("star", size, (frozenset(edges),))


def mesh(size: int) -> Topology:
    """A two-dimensional grid, as square as ``size`` allows, without wrapping around."""
    rows = next(r for r in range(math.isqrt(size), 0, -1) if size % r == 0)
    columns = size // rows
    edges: set[Edge] = set()
    for rank in range(size):
        row, column = divmod(rank, columns)
        for neighbour in ([rank + 1] if column + 1 < columns else []) + ([rank + columns] if row + 1 < rows else []):
            edges |= {(rank, neighbour), (neighbour, rank)}
    return Topology("mesh", size, (frozenset(edges),))


def static_exponential(size: int, base: int = 2) -> Topology:
    """Each rank r to r + base^k for all k at once.

    Raises:
        ValueError: a base below 2.
    """
    return Topology("static-exponential", size, (_hops(size, _powers(size, base)),))


def symmetric_exponential(size: int, base: int = 2) -> Topology:
    """Each rank r to r + base^k and r - base^k, for all k with base^k at most half of the ranks; raises as above."""
    hops = [hop for hop in _powers(size, base) if hop <= size // 2]
    return Topology("symmetric-exponential", size, (_hops(size, [*hops, *(-hop for hop in hops)]),))


# -- dynamic graphs -------------------------------------------------------------------------------------------


def exponential(size: int, peers: int = 1) -> Topology:
    """SGP's: at step k rank r sends to r + j (n + 1)^k, j = 1 .. n, with n = ``peers``; regular at any size.

    With one peer the hop is 2^k, and P = 2^m ranks agree exactly after m steps.
    """
    check_peers(peers, size)
    phases, hop = [], 1
    while hop < size:
        phases.append(_hops(size, [j * hop for j in range(1, peers + 1)]))
        hop *= peers + 1
    return Topology("exponential", size, tuple(phases) or (frozenset(),))


def linear(size: int, peers: int = 1) -> Topology:
    """SGP's dynamic linear graph: rank r sends to r + 1 at the first step, to r + 2 at the second, and so on."""
    check_peers(peers, size)
    hops = list(range(1, size))
    parts = [hops[i : i + peers] for i in range(0, len(hops), peers)]
    return Topology("linear", size, tuple(_hops(size, part) for part in parts) or (frozenset(),))


def bipartite_exponential(size: int) -> Topology:
    """Pairs of an even and an odd rank, r with r + 2^k - 1 at step k = 1, 2, ..: symmetric, one peer a step.

    With an odd number of ranks one of them has no partner at a step, another one at each.
    """
    even = size + size % 2
    hops = [(1 << k) - 1 for k in range(1, max(2, even.bit_length() + 1)) if (1 << k) - 1 < even]
    return Topology("bipartite-exponential", size, _pairs(size, hops))


def bipartite_linear(size: int) -> Topology:
    """Pairs of an even and an odd rank, r with r + 1, then r + 3, r + 5 and so on: symmetric, one peer a step."""
    return Topology("bipartite-linear", size, _pairs(size, list(range(1, size + size % 2, 2))))


def base(size: int, peers: int = 1) -> Topology:
    """Base-(k+1) graph with k = ``peers`` neighbours at the most: all agree exactly after a period, at any size."""
    check_peers(peers, size)
    weights = tuple(base_graph(range(size), peers)) or ({},)
    return Topology("base", size, tuple(map(frozenset, weights)), weights)


def random_pairs(size: int, seed: int = 0) -> Topology:
    """Pairs drawn at random: each phase is a matching of all ranks, or of all but one; 2 P phases, then from the first.

    Args:
        size: number of ranks.
        seed: of the drawing, the same on all ranks.
    """
    draw, ranks = random.Random(seed), list(range(size))
    phases = [frozenset[Edge]()] if size == 1 else []
    while len(phases) < 2 * size and size > 1:
        draw.shuffle(ranks)
        pairs = list(zip(ranks[::2], ranks[1::2], strict=False))
        phases.append(frozenset(pairs) | frozenset((b, a) for a, b in pairs))
    return Topology("random-pairs", size, tuple(phases))


def one_peer(graph: Topology) -> Topology:
    """BlueFog's dynamic form of a static graph: at each step every rank sends to the next of its out-neighbours.

    Neighbours take their turns clockwise, from the rank's own number upwards; the period is the least common multiple
    of their numbers.

    Raises:
        ValueError: the graph is dynamic already.
    """
    if graph.period != 1:
        raise ValueError(f"topology {graph.name!r} changes from step to step already: one_peer() wants a static one")
    turns = [sorted(graph.out(r, 0), key=lambda peer: (peer - r) % graph.size) for r in range(graph.size)]
    period = math.lcm(*(len(peers) for peers in turns if peers)) if any(turns) else 1
    phases = [frozenset((r, peers[k % len(peers)]) for r, peers in enumerate(turns) if peers) for k in range(period)]
    return Topology(f"one-peer {graph.name}", graph.size, tuple(phases))


def inner_outer(size: int, local_size: int, outer: str = "ring") -> Topology:
    """BlueFog's for hosts of ``local_size`` ranks: at each step one rank of each host sends to the same one of another
    host, and the others send to one another inside.

    Args:
        size: number of ranks.
        local_size: ranks of each host, numbered host by host.
        outer: "ring" (the next one, of hosts and of ranks inside) or "exponential" (2^k further at each turn).

    Raises:
        ValueError: the hosts do not fill up, or have two ranks (one would be left alone), or another ``outer``.
    """
    if local_size < 1 or size % local_size:
        raise ValueError(f"local_size={local_size} does not divide {size} ranks into hosts of equal size")
    if local_size == 2:
        raise ValueError("local_size=2: while one rank of a host sends outside, the other has nobody; take 3 or more")
    if outer not in ("ring", "exponential"):
        raise ValueError(f"outer={outer!r}: take 'ring' or 'exponential'")
    hosts, inside = size // local_size, local_size - 1

    def hops(count: int) -> list[int]:
        return ([1] if outer == "ring" else _powers(count, 2)) if count > 1 else [0]

    between, within = hops(hosts), hops(inside)
    phases = []
    for step in range(local_size * math.lcm(len(between), len(within))):
        turn, going = divmod(step, local_size)
        far, near = between[turn % len(between)], within[turn % len(within)]
        edges: set[Edge] = set()
        for host in range(hosts):
            first = host * local_size
            edges.add((first + going, (host + far) % hosts * local_size + going))
            staying = [first + local for local in range(local_size) if local != going]
            edges |= {(rank, staying[(place + near) % inside]) for place, rank in enumerate(staying)}
        phases.append(frozenset(edge for edge in edges if edge[0] != edge[1]))
    return Topology(f"inner-outer-{outer}", size, tuple(phases))


# -- by name, and from elsewhere ------------------------------------------------------------------------------


def from_networkx(graph: Any) -> Topology:
    """Any ``networkx`` graph whose nodes are the ranks 0 to P - 1; an undirected edge goes both ways.

    A topology has no weights: those of the edges are left out. (The graph itself, passed as
    ``topology=``, has them used.)

    Raises:
        ValueError: its nodes are others.
    """
    nodes = set(graph.nodes)
    if nodes != set(range(len(nodes))):
        raise ValueError(
            f"the nodes of a topology must be the ranks 0 to {len(nodes) - 1}; relabel them: "
            f"networkx.convert_node_labels_to_integers(graph)"
        )
    edges = {(int(a), int(b)) for a, b in graph.edges() if a != b}
    if not graph.is_directed():
        edges |= {(b, a) for a, b in edges}
    return Topology(str(graph.name) or "networkx", len(nodes), (frozenset(edges),))


NAMED: dict[str, Callable[[int], Topology]] = {
    "exponential": exponential,
    "bipartite-exponential": bipartite_exponential,
    "base": base,
    "linear": linear,
    "bipartite-linear": bipartite_linear,
    "random-pairs": random_pairs,
    "ring": ring,
    "ring-left": lambda size: ring(size, "left"),
    "ring-right": lambda size: ring(size, "right"),
    "static-exponential": static_exponential,
    "symmetric-exponential": symmetric_exponential,
    "mesh": mesh,
    "star": star,
    "complete": complete,
}
"""Names that ``topology=`` takes."""
WITH_PEERS: dict[str, Callable[[int, int], Topology]] = {"exponential": exponential, "linear": linear, "base": base}
"""Those of which a rank may have several peers a step."""


def named(name: str, size: int, peers: int = 1) -> Topology:
    """The graph of a name.

    Raises:
        ValueError: no such name, or a number of peers that it cannot have.
    """
    if name not in NAMED:
        raise ValueError(f"topology={name!r} is not known: take one of {', '.join(NAMED)}, or a networkx graph")
    if name in WITH_PEERS:
        return WITH_PEERS[name](size, peers)
    if peers != 1:
        raise ValueError(f"peers={peers}: topology {name!r} says itself who sends to whom; leave peers out")
    return NAMED[name](size)


def check_peers(peers: int, size: int) -> None:
    """Refuse what is no number of peers.

    Raises:
        ValueError: below 1, or more than there are other ranks.
    """
    if isinstance(peers, bool) or not isinstance(peers, int) or peers < 1:
        raise ValueError(f"peers={peers!r} is not a number of peers: take 1 or more")
    if peers > max(1, size - 1):
        raise ValueError(f"peers={peers} at {size} ranks: a rank has {size - 1} others to send to")


# -- pieces ---------------------------------------------------------------------------------------------------


def _hops(size: int, hops: Iterable[int]) -> frozenset[Edge]:
    """Every rank r to r + hop, around the ring."""
    return frozenset((r, (r + hop) % size) for r in range(size) for hop in hops if hop % size)


def _powers(size: int, base: int) -> list[int]:
    if base < 2:
        raise ValueError(f"base={base} of an exponential graph: take 2 or more")
    powers, hop = [], 1
    while hop < size:
        powers.append(hop)
        hop *= base
    return powers


def _pairs(size: int, hops: Sequence[int]) -> tuple[frozenset[Edge], ...]:
    """For each odd hop a matching of even ranks r with r + hop; a rank that is not there is nobody's partner."""
    even = size + size % 2
    phases = []
    for hop in hops:
        pairs = [(r, (r + hop) % even) for r in range(0, even, 2)]
        there = [(a, b) for a, b in pairs if a < size and b < size]
        phases.append(frozenset(there) | frozenset((b, a) for a, b in there))
    return tuple(phases) or (frozenset(),)
