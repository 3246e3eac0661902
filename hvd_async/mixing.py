"""Mixing weights: matrices over a topology, their checks, and the least push-sum weight.

``W[i, j]`` is the weight that rank i gives to the message of rank j (to its own weights on the diagonal). SGP needs
columns that sum to 1 (push-sum corrects the rest: Assran et al., ICML 2019). D-PSGD and AD-PSGD need a symmetric W
whose rows also sum to 1 (Lian et al., NeurIPS 2017 and ICML 2018).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_async.topology import Edge, Topology

Matrix = np.ndarray[Any, np.dtype[np.float64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
TOLERANCE = 1e-9
SCHEMES = ("uniform", "metropolis")
MOST_STEPS = 2000
"""Steps for which ``least_weight`` follows push-sum weights."""
STRIP = "pass topology=hvd_async.topology.from_networkx(graph)"
"""Hint of error messages: how to ignore the edge weights of a networkx graph."""


@dataclass(frozen=True, eq=False)
class EdgeWeights:
    """A mixing matrix W as a list of edges. (At 10,000 ranks a dense matrix takes 800 MB, and a graph may have 14.)

    Attributes:
        receivers, senders: ends of each edge, int64, shape (E,), sorted by (receiver, sender); there are no self-loops.
        weights: W[receiver, sender] of each edge, float64, shape (E,).
        kept: the diagonal, float64, shape (P,).
    """

    receivers: Ints
    senders: Ints
    weights: Floats
    kept: Floats

    @classmethod
    def of(cls, matrix: Matrix) -> EdgeWeights:
        """Return the edges of a matrix of shape (P, P).

        Raises:
            ValueError: the matrix is not square.
        """
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"a mixing matrix must be square, a row and a column per rank, got shape {matrix.shape}")
        receivers, senders = np.nonzero(matrix - np.diag(matrix.diagonal()))
        return cls(receivers, senders, matrix[receivers, senders], matrix.diagonal())

    @classmethod
    def keeping_all(cls, size: int) -> EdgeWeights:
        """Return the identity matrix: no rank sends anything."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, np.zeros(0), np.ones(size))

    @classmethod
    def keeping_the_rest(cls, size: int, weights: Mapping[Edge, float]) -> EdgeWeights:
        """Return the matrix with these weights, by (sender, receiver); each rank keeps the remainder to 1."""
        edges = sorted((receiver, sender) for sender, receiver in weights)
        receivers, senders = np.array(edges, np.int64).reshape(-1, 2).T
        values = np.array([weights[sender, receiver] for receiver, sender in edges], np.float64)
        given = np.zeros(size)
        np.add.at(given, senders, values)
        return cls(receivers, senders, values, 1.0 - given)

    def __len__(self) -> int:
        return len(self.kept)

    def __matmul__(self, x: Floats) -> Floats:
        """Return W x, shape (P,)."""
        return np.bincount(self.receivers, self.weights * x[self.senders], len(self)) + self.kept * x

    def diagonal(self) -> Floats:
        """Return the diagonal, the part that each rank keeps, shape (P,)."""
        return self.kept

    def sums(self, of: Ints) -> Floats:
        """Return the sums of the columns (``of`` is ``senders``) or rows (``receivers``) of W, shape (P,)."""
        return np.bincount(of, self.weights, len(self)) + self.kept

    def lazy(self) -> EdgeWeights:
        """Return (W + I) / 2."""
        return EdgeWeights(self.receivers, self.senders, self.weights / 2, (self.kept + 1) / 2)

    def asymmetric(self) -> tuple[int, int, float, float] | None:
        """Return i, j, W[i, j], W[j, i] for two ranks where these differ; None if W is symmetric."""
        there, back = (a * len(self) + b for a, b in ((self.receivers, self.senders), (self.senders, self.receivers)))
        either = np.union1d(there, back)
        values = np.zeros((2, len(either)))
        for row, keys in zip(values, (there, back), strict=True):
            row[np.searchsorted(either, keys)] = self.weights
        wrong = np.flatnonzero(~(np.abs(values[0] - values[1]) <= TOLERANCE))
        if not len(wrong):
            return None
        i, j = divmod(int(either[wrong[0]]), len(self))
        return i, j, float(values[0, wrong[0]]), float(values[1, wrong[0]])

    def dense(self) -> Matrix:
        """Return W as an array of shape (P, P)."""
        matrix: Matrix = np.diag(self.kept)
        matrix[self.receivers, self.senders] = self.weights
        return matrix


def _uniform(topology: Topology, step: int) -> EdgeWeights:
    out = [topology.out(rank, step) for rank in range(topology.size)]
    weights = {(sender, receiver): 1.0 / (1 + len(own)) for sender, own in enumerate(out) for receiver in own}
    made = EdgeWeights.keeping_the_rest(topology.size, weights)
    return dataclasses.replace(made, kept=np.array([1.0 / (1 + len(own)) for own in out]))


def _metropolis(topology: Topology, step: int) -> EdgeWeights:
    degrees = [len(topology.out(rank, step)) for rank in range(topology.size)]
    edges = topology.phases[step % topology.period]
    for sender, receiver in sorted(edges):
        if (receiver, sender) not in edges:
            raise ValueError(
                f"topology {topology.name!r}: rank {sender} sends to rank {receiver} at step {step} and gets no "
                f"answer; Metropolis weights need a symmetric graph: use mixing='uniform', or another topology"
            )
    weights = {(a, b): 1.0 / (1 + max(degrees[a], degrees[b])) for a, b in edges}
    return EdgeWeights.keeping_the_rest(topology.size, weights)


def _own(topology: Topology, step: int) -> EdgeWeights:
    made = EdgeWeights.keeping_the_rest(topology.size, topology.weights[step % topology.period])
    check_columns(made)
    return made


def edge_weights(topology: Topology, scheme: str) -> list[EdgeWeights]:
    """Return the mixing matrix of each phase, as edges; "uniform" keeps the weights that a topology defines itself.

    Raises:
        ValueError: unknown scheme, or one that the topology does not support.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"mixing must be one of {', '.join(map(repr, SCHEMES))}, got {scheme!r}")
    if topology.weights and scheme != "uniform":
        raise ValueError(f"mixing={scheme!r}: topology {topology.name!r} defines its own weights; omit mixing")
    make = _own if topology.weights else _uniform if scheme == "uniform" else _metropolis
    return [make(topology, step) for step in range(topology.period)]


def matrices(topology: Topology, scheme: str) -> list[Matrix]:
    """Return the result of ``edge_weights`` as dense matrices, shape (P, P), float64; raises the same errors."""
    return [each.dense() for each in edge_weights(topology, scheme)]


def of_networkx(graph: Any) -> Matrix | None:
    """Return the mixing matrix that the edge weights of a networkx graph define, as in BlueFog.

    The weight of the edge from j to i is W[i, j]; of an undirected edge, also W[j, i]. A rank keeps the weight of its
    self-loop; if the graph has no self-loops, the remainder to 1.

    Returns:
        Shape (P, P), float64; None if no edge has a weight, or all have 1, the default of networkx.

    Raises:
        ValueError: only some edges have a weight, or the columns do not sum to 1.
    """
    edges = [(int(a), int(b), weight) for a, b, weight in graph.edges(data="weight")]
    if all(weight is None or weight == 1 for _, _, weight in edges):
        return None
    bare = [(a, b) for a, b, weight in edges if weight is None]
    if bare:
        raise ValueError(
            f"the edge {bare[0]} has no weight, and others have one: edge weights are mixing weights; set the weights "
            f"of all edges or of none ({STRIP})"
        )
    weights = np.zeros((len(graph), len(graph)))
    for a, b, weight in edges:
        weights[b, a] += weight
        if a != b and not graph.is_directed():
            weights[a, b] += weight
    if not any(a == b for a, b, _ in edges):
        np.fill_diagonal(weights, 1.0 - weights.sum(axis=0))
    try:
        check_columns(weights)
    except ValueError as error:
        raise ValueError(
            f"edge weights of a networkx graph are mixing weights: {error} (to ignore them, {STRIP})"
        ) from None
    return weights


# -- checks ---------------------------------------------------------------------------------------------------


def check_columns(weights: Matrix | EdgeWeights) -> None:
    """Check that columns sum to 1; otherwise push-sum would lose or gain weight.

    Raises:
        ValueError: a column does not; the message names the rank.
    """
    edges = _checked(weights)
    _check_sums(edges.sums(edges.senders), "sends", "column")


def check_rows(weights: Matrix | EdgeWeights) -> None:
    """Check that rows sum to 1; otherwise equal weights would not stay equal.

    Raises:
        ValueError: a row does not; the message names the rank.
    """
    edges = _checked(weights)
    _check_sums(edges.sums(edges.receivers), "receives", "row")


def check_doubly(weights: Matrix | EdgeWeights) -> None:
    """Check that rows and columns sum to 1.

    Raises:
        ValueError: one does not; the message names the rank.
    """
    check_columns(weights)
    check_rows(weights)


def check_connected(topology: Topology) -> None:
    """Check that the union of all phases is strongly connected.

    Raises:
        ValueError: it is not; the message names two ranks without a path between them.
    """
    pair = topology.unreachable()
    if pair is not None:
        raise ValueError(
            f"topology {topology.name!r} is not connected: nothing of rank {pair[0]} ever reaches rank {pair[1]}, over "
            f"all its {topology.period} phase(s); add edges"
        )


def _checked(weights: Matrix | EdgeWeights) -> EdgeWeights:
    """Return the edges of a matrix, after checking that no weight is negative or NaN."""
    edges = weights if isinstance(weights, EdgeWeights) else EdgeWeights.of(weights)
    ranks = np.arange(len(edges))
    for receivers, senders, values in (
        (edges.receivers, edges.senders, edges.weights),
        (ranks, ranks, edges.kept),
    ):
        wrong = np.flatnonzero(~(values >= 0.0))  # (NaN too)
        if len(wrong):
            first = wrong[0]
            raise ValueError(
                f"mixing matrix: the weight of the edge from rank {senders[first]} to rank {receivers[first]} is "
                f"{values[first]}; weights must be 0 or more"
            )
    return edges


def _check_sums(sums: Matrix, verb: str, part: str) -> None:
    wrong = np.flatnonzero(np.abs(sums - 1.0) > TOLERANCE)
    if len(wrong):
        raise ValueError(
            f"mixing matrix: rank {int(wrong[0])} {verb} {sums[wrong[0]]:.6g} in total; every {part} must sum to 1"
        )


def least_weight(weights: Sequence[Matrix | EdgeWeights], overlap: bool = False) -> float:
    """Return the lowest push-sum weight at which a rank computes a gradient.

    All ranks start with weight 1, and all messages of a step arrive before the next step. The optimizer's step in
    z = x / w is at most 1 / (this weight) times its nominal length.

    Args:
        weights: a matrix per phase; columns sum to 1.
        overlap: whether ranks compute after they have sent their share and before they receive others' (OSGP).
    """
    least, w = 1.0, np.ones(len(weights[0]))
    for _ in range(-(-MOST_STEPS // len(weights))):
        begin = w
        for each in weights:
            if overlap:
                least = min(least, float((w * each.diagonal()).min()))
            w = each @ w
            least = min(least, float(w.min()))
        if np.abs(w - begin).max() < TOLERANCE:  # periods repeat from here on
            break
    return least
