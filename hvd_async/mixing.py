"""Mixing weights: matrices over a topology, their checks, and how fast they agree.

``W[i, j]`` is the weight that rank i gives to what rank j has sent (itself on the diagonal). SGP needs columns that sum
to 1 (push-sum takes care of the rest: Assran et al., ICML 2019); D-PSGD and AD-PSGD a symmetric W whose rows do too
(Lian et al., NeurIPS 2017 and ICML 2018).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_async.topology import Edge, Topology

Matrix = np.ndarray[Any, np.dtype[np.float64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
TOLERANCE = 1e-9
ROUNDING = 1e-12
SCHEMES = ("uniform", "metropolis")
MOST_STEPS = 2000
"""For which push-sum weights are followed."""
STRIP = "pass topology=hvd_async.topology.from_networkx(graph)"
"""Schemes that leave a graph's weights out."""


@dataclass(frozen=True, eq=False)
class EdgeWeights:
    """A mixing matrix W by its edges. (At 10,000 ranks a dense one takes 800 MB, and a graph may have 14.)

    Attributes:
        receivers, senders: of each edge, int64, shape (E,), in that order; no edge is of a rank to itself.
        weights: W[receiver, sender] of each, float64, shape (E,).
        kept: the diagonal, float64, shape (P,).
    """

    receivers: Ints
    senders: Ints
    weights: Floats
    kept: Floats

    @classmethod
    def of(cls, matrix: Matrix) -> EdgeWeights:
        """The edges of a matrix of shape (P, P).

        Raises:
            ValueError: it is not square.
        """
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"a mixing matrix of shape {matrix.shape}: it must be square, a row and a column a rank")
        receivers, senders = np.nonzero(matrix - np.diag(matrix.diagonal()))
        return cls(receivers, senders, matrix[receivers, senders], matrix.diagonal())

    @classmethod
    def keeping_all(cls, size: int) -> EdgeWeights:
        """Nobody sends anything."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, np.zeros(0), np.ones(size))

    @classmethod
    def keeping_the_rest(cls, size: int, weights: Mapping[Edge, float]) -> EdgeWeights:
        """Each rank keeps what it does not send. Keys are (sender, receiver)."""
        edges = sorted((receiver, sender) for sender, receiver in weights)
        receivers, senders = np.array(edges, np.int64).reshape(-1, 2).T
        values = np.array([weights[sender, receiver] for receiver, sender in edges], np.float64)
        given = np.zeros(size)
        np.add.at(given, senders, values)
        return cls(receivers, senders, values, 1.0 - given)

    def __len__(self) -> int:
        return len(self.kept)

    def __matmul__(self, x: Floats) -> Floats:
        """W x, of shape (P,)."""
        return np.bincount(self.receivers, self.weights * x[self.senders], len(self)) + self.kept * x

    def diagonal(self) -> Floats:
        """The part that each rank keeps of what it has, shape (P,)."""
        return self.kept

    def sums(self, of: Ints) -> Floats:
        """The sums of W's columns (``senders``) or rows (``receivers``)."""
        return np.bincount(of, self.weights, len(self)) + self.kept

    def lazy(self) -> EdgeWeights:
        """(W + 1) / 2."""
        return EdgeWeights(self.receivers, self.senders, self.weights / 2, (self.kept + 1) / 2)

    def asymmetric(self) -> tuple[int, int, float, float] | None:
        """Two ranks i, j with W[i, j] and W[j, i], where these differ; None if they nowhere do."""
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
        """W, shape (P, P)."""
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
                f"answer; Metropolis weights need a symmetric graph: take mixing='uniform', or another topology"
            )
    weights = {(a, b): 1.0 / (1 + max(degrees[a], degrees[b])) for a, b in edges}
    return EdgeWeights.keeping_the_rest(topology.size, weights)


def _own(topology: Topology, step: int) -> EdgeWeights:
    made = EdgeWeights.keeping_the_rest(topology.size, topology.weights[step % topology.period])
    check_columns(made)
    return made


def uniform(topology: Topology, step: int) -> Matrix:
    """Each rank keeps and sends equal parts of what it has: W[i, j] = 1 / (1 + out-neighbours of j at ``step``).

    Returns:
        Shape (P, P), float64; columns sum to 1, on regular graphs rows too.
    """
    return _uniform(topology, step).dense()


def metropolis(topology: Topology, step: int) -> Matrix:
    """Metropolis-Hastings: W[i, j] = 1 / (1 + the larger of both degrees), the rest on the diagonal.

    Returns:
        Shape (P, P), float64; symmetric, rows and columns sum to 1 on any symmetric graph.

    Raises:
        ValueError: the graph is directed at this step; names an edge without its answer.
    """
    return _metropolis(topology, step).dense()


def own(topology: Topology, step: int) -> Matrix:
    """The weights that a topology brings.

    Returns:
        Shape (P, P), float64; columns sum to 1.

    Raises:
        ValueError: a rank gives away more than it has.
    """
    return _own(topology, step).dense()


def edge_weights(topology: Topology, scheme: str) -> list[EdgeWeights]:
    """The mixing matrix of each phase, by its edges; "uniform" leaves a topology the weights that it brings.

    Raises:
        ValueError: no such scheme, or one that the graph does not have.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"mixing={scheme!r} is not known: take one of {', '.join(map(repr, SCHEMES))}")
    if topology.weights and scheme != "uniform":
        raise ValueError(f"mixing={scheme!r}: topology {topology.name!r} brings its own weights; leave mixing out")
    make = _own if topology.weights else _uniform if scheme == "uniform" else _metropolis
    return [make(topology, step) for step in range(topology.period)]


def matrices(topology: Topology, scheme: str) -> list[Matrix]:
    """The same as ``edge_weights``, as matrices of shape (P, P), float64; raises as that does."""
    return [each.dense() for each in edge_weights(topology, scheme)]


def of_networkx(graph: Any) -> Matrix | None:
    """The matrix that a networkx graph's edge weights are, as of BlueFog's graphs: W[i, j] of the edge from j to i, of
    an undirected one both. A rank keeps the weight of its edge to itself; without such edges, what it does not send.

    Returns:
        Shape (P, P), float64; None if no edge has a weight, or all have 1, which is networkx's default.

    Raises:
        ValueError: some edges have a weight and others none, or a rank gives away more or less than it has.
    """
    edges = [(int(a), int(b), weight) for a, b, weight in graph.edges(data="weight")]
    if all(weight is None or weight == 1 for _, _, weight in edges):
        return None
    bare = [(a, b) for a, b, weight in edges if weight is None]
    if bare:
        raise ValueError(
            f"the edge {bare[0]} has no weight, and others have one: edge weights are mixing weights; give all edges "
            f"one, or none ({STRIP})"
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
            f"edge weights of a networkx graph are mixing weights: {error} (to leave them out, {STRIP})"
        ) from None
    return weights


# -- checks ---------------------------------------------------------------------------------------------------


def check_columns(weights: Matrix | EdgeWeights) -> None:
    """Refuse a matrix whose columns do not sum to 1: push-sum would lose or gain weight.

    Raises:
        ValueError: names the rank.
    """
    edges = _checked(weights)
    _check_sums(edges.sums(edges.senders), "gives away", "column")


def check_rows(weights: Matrix | EdgeWeights) -> None:
    """Refuse a matrix whose rows do not sum to 1: equal weights would not stay equal.

    Raises:
        ValueError: names the rank.
    """
    edges = _checked(weights)
    _check_sums(edges.sums(edges.receivers), "takes in", "row")


def check_doubly(weights: Matrix | EdgeWeights) -> None:
    """Refuse a matrix whose rows or columns do not sum to 1.

    Raises:
        ValueError: names the rank.
    """
    check_columns(weights)
    check_rows(weights)


def check_connected(topology: Topology) -> None:
    """Refuse a graph over which some rank never hears of another.

    Raises:
        ValueError: names two ranks between which there is no way, over all phases.
    """
    pair = topology.unreachable()
    if pair is not None:
        raise ValueError(
            f"topology {topology.name!r} is not connected: nothing of rank {pair[0]} ever reaches rank {pair[1]}, over "
            f"all its {topology.period} phase(s); add edges"
        )


def _checked(weights: Matrix | EdgeWeights) -> EdgeWeights:
    """The edges of a matrix of which no entry is negative, or no number."""
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
            f"mixing matrix: rank {int(wrong[0])} {verb} {sums[wrong[0]]:.6g} in all; every {part} must sum to 1"
        )


def least_weight(weights: Sequence[Matrix | EdgeWeights], overlap: bool = False) -> float:
    """The lowest push-sum weight at which a rank computes a gradient, where all ranks begin with 1 and all messages of
    a step are there before the next ones go: the optimizer's step in z = x / w is at most 1 / that times its own.

    Args:
        weights: a matrix a phase, columns sum to 1.
        overlap: whether it computes while what it has given away is not made up for yet (OSGP).
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


# -- how fast ranks agree -------------------------------------------------------------------------------------


def disagreement(weights: Sequence[Matrix], steps: int) -> list[float]:
    """The most that can be left of the ranks' disagreement sqrt(sum |x_i - mean|^2) after each of so many steps, as a
    part of what it was: the norm of the product of (doubly stochastic) matrices, without its mean."""
    size, found = len(weights[0]), list[float]()
    product = np.eye(size)
    for step in range(steps):
        product = weights[step % len(weights)] @ product
        found.append(float(np.linalg.norm(product - 1.0 / size, 2)))
    return found


def contraction(weights: Sequence[Matrix]) -> float:
    """The second largest singular value of the product of a period's matrices (doubly stochastic): by how much at least
    the ranks' disagreement shrinks over a period. 1: never (or not in one period)."""
    return disagreement(weights, len(weights))[-1]


def second_eigenvalue(weights: Sequence[Matrix]) -> float:
    """The second largest absolute eigenvalue of the product of a period's matrices (any column-stochastic ones); 0 for
    what is rounding."""
    product = np.linalg.multi_dot([*reversed(weights)]) if len(weights) > 1 else weights[0]
    values = sorted(np.abs(np.linalg.eigvals(product)), reverse=True)
    return float(values[1]) if len(values) > 1 and values[1] > ROUNDING else 0.0


def spectral_gap(weights: Sequence[Matrix]) -> float:
    """1 - (second largest absolute eigenvalue of a period's product)^(1 / period): per step, 1 is agreement at once."""
    return 1.0 - math.pow(min(1.0, second_eigenvalue(weights)), 1.0 / len(weights))


def mixing_time(weights: Sequence[Matrix], within: float = 1e-3) -> float:
    """Steps after which the disagreement is ``within`` of what it was, by the spectral gap; infinite without a gap."""
    gap = spectral_gap(weights)
    if gap <= 0.0:
        return math.inf
    return float(len(weights)) if gap == 1.0 else math.log(within) / math.log1p(-gap)
