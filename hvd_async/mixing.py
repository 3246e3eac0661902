"""What ranks multiply by when they mix: matrices over a topology, their checks, and how fast they agree.

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
SCHEMES = ("uniform", "metropolis")


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


def matrices(topology: Topology, scheme: str) -> list[Matrix]:
    """The mixing matrix of each phase.

    Raises:
        ValueError: no such scheme, or one that the graph does not have.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"mixing={scheme!r} is not known: take one of {', '.join(map(repr, SCHEMES))}")
    make = uniform if scheme == "uniform" else metropolis
    return [make(topology, step) for step in range(topology.period)]


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


# -- how fast ranks agree -------------------------------------------------------------------------------------


def contraction(weights: Sequence[Matrix]) -> float:
    """The second largest singular value of the product of a period's matrices (doubly stochastic): by how much at least
    the ranks' disagreement sqrt(sum |x_i - mean|^2) shrinks over a period. 1: never (or not in one period)."""
    product = np.linalg.multi_dot([*reversed(weights)]) if len(weights) > 1 else weights[0]
    size = len(product)
    return float(np.linalg.norm(product - np.full((size, size), 1.0 / size), 2)) if size > 1 else 0.0


def second_eigenvalue(weights: Sequence[Matrix]) -> float:
    """The second largest absolute eigenvalue of the product of a period's matrices (any column-stochastic ones)."""
    product = np.linalg.multi_dot([*reversed(weights)]) if len(weights) > 1 else weights[0]
    values = sorted(np.abs(np.linalg.eigvals(product)), reverse=True)
    return float(values[1]) if len(values) > 1 else 0.0


def spectral_gap(weights: Sequence[Matrix]) -> float:
    """1 - (second largest absolute eigenvalue of a period's product)^(1 / period): per step, 1 is agreement at once."""
    return 1.0 - math.pow(min(1.0, second_eigenvalue(weights)), 1.0 / len(weights))


def mixing_time(weights: Sequence[Matrix], within: float = 1e-3) -> float:
    """Steps after which the disagreement is ``within`` of what it was, by the spectral gap; infinite without a gap."""
    gap = spectral_gap(weights)
    if gap <= 0.0:
        return math.inf
    return float(len(weights)) if gap >= 1.0 - 1e-12 else math.log(within) / math.log1p(-gap)
