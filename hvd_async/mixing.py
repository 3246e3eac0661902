"""Mixing weights: matrices over a topology, their checks, and how fast they agree.

``W[i, j]`` is the weight that rank i gives to what rank j has sent (itself on the diagonal). SGP needs columns that sum
to 1 (push-sum takes care of the rest: Assran et al., ICML 2019); D-PSGD and AD-PSGD a symmetric W whose rows do too
(Lian et al., NeurIPS 2017 and ICML 2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_async.topology import Topology

Matrix = np.ndarray[Any, np.dtype[np.float64]]
TOLERANCE = 1e-9
ROUNDING = 1e-12
SCHEMES = ("uniform", "metropolis")
MOST_STEPS = 2000
"""For which push-sum weights are followed."""
STRIP = "pass topology=hvd_async.topology.from_networkx(graph)"
"""Schemes that leave a graph's weights out."""


def uniform(topology: Topology, step: int) -> Matrix:
    """Each rank keeps and sends equal parts of what it has: W[i, j] = 1 / (1 + out-neighbours of j at ``step``).

    Returns:
        Shape (P, P), float64; columns sum to 1, on regular graphs rows too.
    """
    weights = np.zeros((topology.size, topology.size))
    for sender in range(topology.size):
        receivers = topology.out(sender, step)
        weights[[sender, *receivers], sender] = 1.0 / (1 + len(receivers))
    return weights


def metropolis(topology: Topology, step: int) -> Matrix:
    """Metropolis-Hastings: W[i, j] = 1 / (1 + the larger of both degrees), the rest on the diagonal.

    Returns:
        Shape (P, P), float64; symmetric, rows and columns sum to 1 on any symmetric graph.

    Raises:
        ValueError: the graph is directed at this step; names an edge without its answer.
    """
    weights = np.zeros((topology.size, topology.size))
    degrees = [len(topology.out(rank, step)) for rank in range(topology.size)]
    for sender in range(topology.size):
        for receiver in topology.out(sender, step):
            if sender not in topology.out(receiver, step):
                raise ValueError(
                    f"topology {topology.name!r}: rank {sender} sends to rank {receiver} at step {step} and gets no "
                    f"answer; Metropolis weights need a symmetric graph: take mixing='uniform', or another topology"
                )
            weights[receiver, sender] = 1.0 / (1 + max(degrees[sender], degrees[receiver]))
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=0))
    return weights


def own(topology: Topology, step: int) -> Matrix:
    """The weights that a topology brings.

    Returns:
        Shape (P, P), float64; columns sum to 1.

    Raises:
        ValueError: a rank gives away more than it has.
    """
    weights = np.zeros((topology.size, topology.size))
    for (sender, receiver), weight in topology.weights[step % topology.period].items():
        weights[receiver, sender] = weight
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=0))
    check_columns(weights)
    return weights


def matrices(topology: Topology, scheme: str) -> list[Matrix]:
    """The mixing matrix of each phase; "uniform" leaves a topology the weights that it brings.

    Raises:
        ValueError: no such scheme, or one that the graph does not have.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"mixing={scheme!r} is not known: take one of {', '.join(map(repr, SCHEMES))}")
    if topology.weights and scheme != "uniform":
        raise ValueError(f"mixing={scheme!r}: topology {topology.name!r} brings its own weights; leave mixing out")
    make = own if topology.weights else uniform if scheme == "uniform" else metropolis
    return [make(topology, step) for step in range(topology.period)]


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


def check_columns(weights: Matrix) -> None:
    """Refuse a matrix whose columns do not sum to 1: push-sum would lose or gain weight.

    Raises:
        ValueError: names the rank.
    """
    _check_entries(weights)
    _check_sums(weights.sum(axis=0), "gives away", "column")


def check_rows(weights: Matrix) -> None:
    """Refuse a matrix whose rows do not sum to 1: equal weights would not stay equal.

    Raises:
        ValueError: names the rank.
    """
    _check_entries(weights)
    _check_sums(weights.sum(axis=1), "takes in", "row")


def check_doubly(weights: Matrix) -> None:
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


def _check_entries(weights: Matrix) -> None:
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1]:
        raise ValueError(f"a mixing matrix of shape {weights.shape}: it must be square, a row and a column a rank")
    wrong = np.argwhere(~(weights >= 0.0))  # (NaN too)
    if len(wrong):
        receiver, sender = map(int, wrong[0])
        raise ValueError(
            f"mixing matrix: the weight of the edge from rank {sender} to rank {receiver} is "
            f"{weights[receiver, sender]}; weights must be 0 or more"
        )


def _check_sums(sums: Matrix, verb: str, part: str) -> None:
    wrong = np.flatnonzero(np.abs(sums - 1.0) > TOLERANCE)
    if len(wrong):
        raise ValueError(
            f"mixing matrix: rank {int(wrong[0])} {verb} {sums[wrong[0]]:.6g} in all; every {part} must sum to 1"
        )


def least_weight(weights: Sequence[Matrix], overlap: bool = False) -> float:
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
