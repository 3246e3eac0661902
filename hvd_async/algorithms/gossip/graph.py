"""Which graph an algorithm of gossip has, and which mixing matrices: what a user gave, checked for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_async import mixing, topology
from hvd_async.algorithms.gossip.options import GossipAlgorithm
from hvd_async.mixing import EdgeWeights, Matrix
from hvd_async.topology import Topology


def chosen_graph(
    size: int, kind: GossipAlgorithm, graph: Any, peers: int, weights: Any, what: str
) -> tuple[Topology, list[EdgeWeights]]:
    """Return the graph and its mixing matrices, one a phase, checked for the algorithm.

    Args:
        size: of the graph.
        kind: the algorithm.
        graph, peers, weights: as of ``make_plan``.
        what: its nodes are, for people.

    Raises:
        ValueError: they cannot be; the message says what can.
    """
    chosen, matrices = _given_or_made(size, kind, graph, peers, weights)
    if kind.exact:
        if len(matrices) > 1:
            raise ValueError(
                f"topology {chosen.name!r} changes from step to step, and {kind.name} corrects what flows over edges "
                f"that stay: take 'ring', 'symmetric-exponential' or 'complete', or algorithm='sgp'"
            )
        matrices = [matrix.lazy() for matrix in matrices]
    for matrix in matrices:
        if not matrix.diagonal().all():
            rank = int(np.argmin(matrix.diagonal()))
            raise ValueError(
                f"mixing matrix: W[{rank}, {rank}] = 0, so rank {rank} would have no weights left whenever its "
                f"neighbours' are late: give it a part above 0"
            )
    if chosen.size != size:
        raise ValueError(f"topology {chosen.name!r} is one of {chosen.size} {what}, and there are {size}")
    mixing.check_connected(chosen)
    if kind.pairs and chosen.weights:
        raise ValueError(
            f"topology {chosen.name!r} agrees by mixing weights of its own, and {kind.name} averages half and half: "
            f"take 'bipartite-exponential', or algorithm='dpsgd'"
        )
    if kind.symmetric_graph:
        _check_symmetric(chosen, kind.name)
    if kind.doubly_stochastic:
        for matrix in matrices:
            _check_doubly(matrix, kind.name)
    return chosen, matrices


def _given_or_made(
    size: int, kind: GossipAlgorithm, graph: Any, peers: int, weights: Any
) -> tuple[Topology, list[EdgeWeights]]:
    """Return the graph that was given or named, with its mixing matrices; or that of the matrices that were given."""
    if _is_networkx(graph) and (own := _weighted(graph, peers, weights, kind)) is not None:
        graph, weights = None, own
    if isinstance(weights, str):
        chosen = _topology(size, graph, peers, kind)
        return chosen, mixing.edge_weights(chosen, weights)
    if graph is not None or peers != 1:
        raise ValueError("a matrix given as mixing= says itself who sends to whom: leave topology and peers out")
    matrices = [EdgeWeights.of(np.asarray(one, np.float64)) for one in (weights if _is_list(weights) else [weights])]
    for matrix in matrices:
        mixing.check_columns(matrix)
    return _of_matrices(matrices), matrices


def _topology(size: int, graph: Any, peers: int, kind: GossipAlgorithm) -> Topology:
    if graph is None:
        graph = kind.options["topology"]
    if isinstance(graph, str):
        return topology.named(graph, size, peers)
    topology.check_peers(peers, size)
    if peers != 1:
        raise ValueError(f"peers={peers}: a graph that is given says itself who sends to whom; leave peers out")
    if isinstance(graph, Topology):
        return graph
    if _is_networkx(graph):
        return topology.from_networkx(graph)
    raise ValueError(
        f"topology={graph!r} is none: take a name ({', '.join(topology.NAMED)}), a Topology or a networkx graph"
    )


def _is_networkx(graph: Any) -> bool:
    return hasattr(graph, "nodes") and hasattr(graph, "is_directed")


def _weighted(graph: Any, peers: int, weights: Any, kind: GossipAlgorithm) -> Matrix | None:
    """Return the mixing matrix of a networkx graph's edge weights; None if it has none."""
    topology.from_networkx(graph)  # raises if its nodes are no ranks
    matrix = mixing.of_networkx(graph)
    if matrix is None:
        return None
    if kind.pairs or peers != 1 or not (isinstance(weights, str) and weights == "uniform"):
        own = f"{kind.name} averages half and half" if kind.pairs else "leave mixing and peers out"
        raise ValueError(
            f"the edges of this networkx graph have weights, which are mixing weights: {own}; or {mixing.STRIP}"
        )
    return matrix


def _of_matrices(matrices: Sequence[EdgeWeights]) -> Topology:
    sizes = {len(matrix) for matrix in matrices}
    if len(sizes) != 1:
        raise ValueError(f"mixing matrices of different sizes: {sorted(sizes)}; each needs a row and a column a rank")
    phases = [frozenset(zip(each.senders.tolist(), each.receivers.tolist(), strict=True)) for each in matrices]
    return Topology("given by mixing=", sizes.pop(), tuple(phases))


def _check_symmetric(graph: Topology, algorithm: str) -> None:
    for step, edges in enumerate(graph.phases):
        for sender, receiver in sorted(edges):
            if (receiver, sender) not in edges:
                raise ValueError(
                    f"topology {graph.name!r}: rank {sender} sends to rank {receiver} at step {step} and gets no "
                    f"answer; {algorithm} needs a symmetric graph: take 'bipartite-exponential', 'ring' or another "
                    f"that is, or algorithm='sgp'"
                )


def _check_doubly(matrix: EdgeWeights, algorithm: str) -> None:
    try:
        mixing.check_doubly(matrix)
    except ValueError as error:
        raise ValueError(
            f"{error}; {algorithm} needs equal weights to stay equal: take mixing='metropolis', or algorithm='sgp'"
        ) from None
    if (pair := matrix.asymmetric()) is not None:
        i, j, there, back = pair
        raise ValueError(
            f"mixing matrix: W[{i}, {j}] = {there:.6g} and W[{j}, {i}] = {back:.6g}; {algorithm} needs a symmetric "
            f"matrix: take mixing='metropolis', or algorithm='sgp'"
        )


def _is_list(weights: Any) -> bool:
    """Return whether these are several matrices, rather than the rows of one."""
    if isinstance(weights, list | tuple):  # maybe of different sizes, for which NumPy has no number of dimensions
        return bool(weights) and np.ndim(weights[0]) == 2
    return bool(np.ndim(weights) == 3)
