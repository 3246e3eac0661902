"""Communication graphs as data: the messages of each step, at any number of ranks.

A topology is a cycle of *phases*; at step k the edges of phase ``k % period`` carry messages. Static graphs have one
phase. The dynamic graphs are from SGP (Assran et al., ICML 2019, section 3.1 and appendix) and BlueFog (Ying et al.,
2021). All can be built at any size, including odd sizes and one rank. Base graphs (Takezawa et al., NeurIPS 2023)
define their own mixing weights.
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
    """A communication graph: a cycle of phases, each a set of edges.

    Attributes:
        name: used in reports and error messages.
        size: number of ranks.
        phases: the edges (sender, receiver) of each phase, without self-loops.
        weights: the mixing weight of each edge of each phase, if the graph defines them; the sender keeps the remainder
            to 1. Empty: any weights of ``mixing`` apply.

    Raises:
        ValueError: an edge has an unknown rank or is a self-loop, or the weights do not match the edges.
    """

    name: str
    size: int
    phases: tuple[frozenset[Edge], ...]
    weights: tuple[Mapping[Edge, float], ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size of a topology must be 1 or more, got {self.size}")
        if not self.phases:
            raise ValueError(f"topology {self.name!r} must have at least one phase, which may be empty")
        for edge in itertools.chain.from_iterable(self.phases):
            if not all(0 <= rank < self.size for rank in edge):
                raise ValueError(f"topology {self.name!r}: edge {edge} must be between ranks 0 to {self.size - 1}")
            if edge[0] == edge[1]:
                raise ValueError(f"topology {self.name!r}: rank {edge[0]} sends to itself; remove such edges")
        if self.weights and [frozenset(phase) for phase in self.weights] != list(self.phases):
            raise ValueError(f"topology {self.name!r}: pass the weights of each phase's edges, or none at all")

    @property
    def period(self) -> int:
        """Number of steps after which the phases repeat."""
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
        """Return the ranks that ``rank`` sends to at ``step`` (from 0), in ascending order."""
        return self._neighbours[step % self.period][0][rank]

    def into(self, rank: int, step: int) -> tuple[int, ...]:
        """Return the ranks that ``rank`` receives from at ``step`` (from 0), in ascending order."""
        return self._neighbours[step % self.period][1][rank]

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that ``rank`` sends to in any phase, in ascending order."""
        return tuple(sorted({peer for out, _ in self._neighbours for peer in out[rank]}))

    @cached_property
    def symmetric(self) -> bool:
        """Whether in every phase each edge has its reverse edge, as D-PSGD and AD-PSGD need."""
        return all((receiver, sender) in edges for edges in self.phases for sender, receiver in edges)

    @cached_property
    def regular(self) -> bool:
        """Whether in every phase all ranks send and receive the same number of messages."""
        return all(
            len({len(ranks) for ranks in out} | {len(ranks) for ranks in into}) <= 1 for out, into in self._neighbours
        )

    def unreachable(self) -> tuple[int, int] | None:
        """Return a pair (source, target) that no path over all phases connects; None if the graph is connected."""
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
    """Return a ring: each rank sends to the next rank ("right"), the previous one ("left"), or both.

    Raises:
        ValueError: unknown direction.
    """
    hops = {"right": (1,), "left": (-1,), "both": (1, -1)}.get(direction)
    if hops is None:
        raise ValueError(f"direction of a ring must be 'left', 'right' or 'both', got {direction!r}")
    name = "ring" if direction == "both" else f"ring-{direction}"
    return Topology(name, size, (_hops(size, hops),))


def complete(size: int) -> Topology:
    """Return the complete graph: each rank sends to all others."""
    return Topology("complete", size, (frozenset(itertools.permutations(range(size), 2)),))


def star(size: int, centre: int = 0) -> Topology:
    """Return a star: rank ``centre`` exchanges messages with all others. The simplest graph that is not regular."""
    spokes = [rank for rank in range(size) if rank != centre]
    edges = {(centre, rank) for rank in spokes} | {(rank, centre) for rank in spokes}
    return Topology("star", size, (frozenset(edges),))


def mesh(size: int) -> Topology:
    """Return a two-dimensional grid, as square as ``size`` allows, without wraparound."""
    rows = next(r for r in range(math.isqrt(size), 0, -1) if size % r == 0)
    columns = size // rows
    edges: set[Edge] = set()
    for rank in range(size):
        row, column = divmod(rank, columns)
        for neighbour in ([rank + 1] if column + 1 < columns else []) + ([rank + columns] if row + 1 < rows else []):
            edges |= {(rank, neighbour), (neighbour, rank)}
    return Topology("mesh", size, (frozenset(edges),))


def static_exponential(size: int, base: int = 2) -> Topology:
    """Return the static exponential graph: at each step rank r sends to r + base^k, for all k.

    Raises:
        ValueError: ``base`` is below 2.
    """
    return Topology("static-exponential", size, (_hops(size, _powers(size, base)),))


def symmetric_exponential(size: int, base: int = 2) -> Topology:
    """Return a static graph: rank r sends to r + base^k and r - base^k, for all k with base^k <= size / 2.

    Raises:
        ValueError: ``base`` is below 2.
    """
    hops = [hop for hop in _powers(size, base) if hop <= size // 2]
    return Topology("symmetric-exponential", size, (_hops(size, [*hops, *(-hop for hop in hops)]),))


# -- dynamic graphs -------------------------------------------------------------------------------------------


def exponential(size: int, peers: int = 1) -> Topology:
    """Return SGP's graph: at step k rank r sends to r + j (n + 1)^k for j = 1 .. n, with n = ``peers``.

    It is regular at any size. With one peer the hop is 2^k, and P = 2^m ranks agree exactly after m steps.
    """
    check_peers(peers, size)
    phases, hop = [], 1
    while hop < size:
        phases.append(_hops(size, [j * hop for j in range(1, peers + 1)]))
        hop *= peers + 1
    return Topology("exponential", size, tuple(phases) or (frozenset(),))


def linear(size: int, peers: int = 1) -> Topology:
    """Return SGP's dynamic linear graph: rank r sends to r + 1 at the first step, to r + 2 at the second, and so on."""
    check_peers(peers, size)
    hops = list(range(1, size))
    parts = [hops[i : i + peers] for i in range(0, len(hops), peers)]
    return Topology("linear", size, tuple(_hops(size, part) for part in parts) or (frozenset(),))


def bipartite_exponential(size: int) -> Topology:
    """Return a graph of pairs: even rank r with r + 2^k - 1 at step k = 1, 2, ..; symmetric, one peer per step.

    At an odd number of ranks one rank has no partner, a different one at each step.
    """
    even = size + size % 2
    hops = [(1 << k) - 1 for k in range(1, max(2, even.bit_length() + 1)) if (1 << k) - 1 < even]
    return Topology("bipartite-exponential", size, _pairs(size, hops))


def bipartite_linear(size: int) -> Topology:
    """Return a graph of pairs: even rank r with r + 1, then r + 3, r + 5 and so on; symmetric, one peer per step."""
    return Topology("bipartite-linear", size, _pairs(size, list(range(1, size + size % 2, 2))))


def base(size: int, peers: int = 1) -> Topology:
    """Return the base-(k+1) graph with at most k = ``peers`` neighbours per step.

    All ranks agree exactly after a period, at any size.
    """
    check_peers(peers, size)
    weights = tuple(base_graph(range(size), peers)) or ({},)
    return Topology("base", size, tuple(map(frozenset, weights)), weights)


def random_pairs(size: int, seed: int = 0) -> Topology:
    """Return 2 P phases of random pairs: each phase is a matching of all ranks, or of all but one.

    Args:
        size: number of ranks, P.
        seed: seed of the random generator, the same on all ranks.
    """
    draw, ranks = random.Random(seed), list(range(size))
    phases = [frozenset[Edge]()] if size == 1 else []
    while len(phases) < 2 * size and size > 1:
        draw.shuffle(ranks)
        pairs = list(zip(ranks[::2], ranks[1::2], strict=False))
        phases.append(frozenset(pairs) | frozenset((b, a) for a, b in pairs))
    return Topology("random-pairs", size, tuple(phases))


def one_peer(graph: Topology) -> Topology:
    """Return BlueFog's dynamic form of a static graph: each rank sends to one of its out-neighbours per step, in turn.

    The turns go clockwise, upwards from the rank's own number. The period is the least common multiple of the
    out-degrees.

    Raises:
        ValueError: the graph is already dynamic.
    """
    if graph.period != 1:
        raise ValueError(f"topology of one_peer() must be static, got {graph.name!r} with {graph.period} phases")
    turns = [sorted(graph.out(r, 0), key=lambda peer: (peer - r) % graph.size) for r in range(graph.size)]
    period = math.lcm(*(len(peers) for peers in turns if peers)) if any(turns) else 1
    phases = [frozenset((r, peers[k % len(peers)]) for r, peers in enumerate(turns) if peers) for k in range(period)]
    return Topology(f"one-peer {graph.name}", graph.size, tuple(phases))


def inner_outer(size: int, local_size: int, outer: str = "ring") -> Topology:
    """Return BlueFog's graph for hosts of ``local_size`` ranks.

    At each step one rank of each host sends to its counterpart on another host, and the host's other ranks send to one
    another.

    Args:
        size: number of ranks.
        local_size: ranks per host, numbered host by host.
        outer: "ring" (to the next host, and to the next rank within the host) or "exponential" (hops of 2^k in turn).

    Raises:
        ValueError: ``local_size`` does not divide ``size`` or is 2 (one rank would have no peer); unknown ``outer``.
    """
    if local_size < 1 or size % local_size:
        raise ValueError(f"local_size={local_size} does not divide {size} ranks into hosts of equal size")
    if local_size == 2:
        raise ValueError(
            "local_size must be 1, or 3 or more, got 2: while one rank of a host sends outside, the other has no peer"
        )
    if outer not in ("ring", "exponential"):
        raise ValueError(f"outer must be 'ring' or 'exponential', got {outer!r}")
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
    """Return the topology of a ``networkx`` graph whose nodes are the ranks 0 to P - 1.

    An undirected edge becomes two edges. Edge weights are dropped; pass the graph itself as ``topology=`` to use them.

    Raises:
        ValueError: the nodes are not the ranks 0 to P - 1.
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
"""Names that ``topology=`` accepts."""
WITH_PEERS: dict[str, Callable[[int, int], Topology]] = {"exponential": exponential, "linear": linear, "base": base}
"""Topologies in which a rank may have several peers per step."""


def named(name: str, size: int, peers: int = 1) -> Topology:
    """Return the topology with the given name.

    Raises:
        ValueError: unknown name, or a number of peers that the topology does not support.
    """
    if name not in NAMED:
        raise ValueError(f"topology must be one of {', '.join(NAMED)}, or a networkx graph, got {name!r}")
    if name in WITH_PEERS:
        return WITH_PEERS[name](size, peers)
    if peers != 1:
        raise ValueError(f"peers={peers}: topology {name!r} defines its own edges; omit peers")
    return NAMED[name](size)


def check_peers(peers: int, size: int) -> None:
    """Check the number of peers per step.

    Raises:
        ValueError: it is below 1, or above the number of other ranks.
    """
    if isinstance(peers, bool) or not isinstance(peers, int) or peers < 1:
        raise ValueError(f"peers must be a whole number, 1 or more, got {peers!r}")
    if peers > max(1, size - 1):
        raise ValueError(f"peers must be at most {size - 1} at {size} ranks, got {peers}")


# -- pieces ---------------------------------------------------------------------------------------------------


def _hops(size: int, hops: Iterable[int]) -> frozenset[Edge]:
    """Return the edges from each rank r to r + hop, modulo ``size``."""
    return frozenset((r, (r + hop) % size) for r in range(size) for hop in hops if hop % size)


def _powers(size: int, base: int) -> list[int]:
    if base < 2:
        raise ValueError(f"base of an exponential graph must be 2 or more, got {base}")
    powers, hop = [], 1
    while hop < size:
        powers.append(hop)
        hop *= base
    return powers


def _pairs(size: int, hops: Sequence[int]) -> tuple[frozenset[Edge], ...]:
    """Return a matching of even ranks r with r + hop for each odd hop; pairs beyond ``size`` are dropped."""
    even = size + size % 2
    phases = []
    for hop in hops:
        pairs = [(r, (r + hop) % even) for r in range(0, even, 2)]
        there = [(a, b) for a, b in pairs if a < size and b < size]
        phases.append(frozenset(there) | frozenset((b, a) for a, b in there))
    return tuple(phases) or (frozenset(),)
