"""Gossip plans: a topology and its mixing matrices, chosen and checked for an algorithm."""

from __future__ import annotations

import dataclasses
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hvd_async import mixing, topology
from hvd_async.algorithms.gossip.config import (
    ALGORITHMS,
    COMPRESSIONS,
    GossipAlgorithm,
    GossipConfig,
    GossipOptions,
)
from hvd_async.algorithms.gossip.outer import Rhythm
from hvd_async.algorithms.option import check_bounds, check_hosts, check_one_of, options_of
from hvd_async.mixing import EdgeWeights, Matrix
from hvd_async.topology import Topology

# -- the graph ---------------------------------------------------------------------------------------------------------


def chosen_graph(
    size: int, kind: GossipAlgorithm, graph: Any, peers: int, weights: Any, what: str
) -> tuple[Topology, list[EdgeWeights]]:
    """Return the graph and its mixing matrices, one per phase, checked for the algorithm.

    Args:
        size: number of nodes.
        kind: the algorithm.
        graph, peers, weights: ``topology``, ``peers`` and ``mixing`` of ``GossipOptions``.
        what: the nodes' name in error messages, "ranks" or "hosts".

    Raises:
        ValueError: the algorithm cannot use them; the message has a hint.
    """
    chosen, matrices = _given_or_made(size, kind, graph, peers, weights)
    if kind.exact:
        if len(matrices) > 1:
            raise ValueError(
                f"topology {chosen.name!r} changes from step to step, and {kind.name} needs a static graph: use "
                f"'ring', 'symmetric-exponential' or 'complete', or algorithm='sgp'"
            )
        matrices = [matrix.lazy() for matrix in matrices]
    for matrix in matrices:
        if not matrix.diagonal().all():
            rank = int(np.argmin(matrix.diagonal()))
            raise ValueError(
                f"mixing matrix: W[{rank}, {rank}] must be above 0, got 0: rank {rank} would have no weights left "
                f"while its neighbours' messages are late"
            )
    if chosen.size != size:
        raise ValueError(f"topology {chosen.name!r} is one of {chosen.size} {what}, and there are {size}")
    mixing.check_connected(chosen)
    if kind.pairs and chosen.weights:
        raise ValueError(
            f"topology {chosen.name!r} defines its own mixing weights, and {kind.name} averages pairs with equal "
            f"weights: use 'bipartite-exponential', or algorithm='dpsgd'"
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
    """Return the graph passed or named by the user with its mixing matrices, or the graph of the matrices passed."""
    if _is_networkx(graph) and (own := _weighted(graph, peers, weights, kind)) is not None:
        graph, weights = None, own
    if isinstance(weights, str):
        chosen = _topology(size, graph, peers, kind)
        return chosen, mixing.edge_weights(chosen, weights)
    if graph is not None or peers != 1:
        raise ValueError("a matrix passed as mixing= defines the edges itself; omit topology and peers")
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
        raise ValueError(f"peers={peers}: a graph passed as topology= defines its own edges; omit peers")
    if isinstance(graph, Topology):
        return graph
    if _is_networkx(graph):
        return topology.from_networkx(graph)
    raise ValueError(
        f"topology must be a name ({', '.join(topology.NAMED)}), a Topology or a networkx graph, got {graph!r}"
    )


def _is_networkx(graph: Any) -> bool:
    return hasattr(graph, "nodes") and hasattr(graph, "is_directed")


def _weighted(graph: Any, peers: int, weights: Any, kind: GossipAlgorithm) -> Matrix | None:
    """Return the mixing matrix of a networkx graph's edge weights; None if it has no weights."""
    topology.from_networkx(graph)  # raises if the nodes are not ranks
    matrix = mixing.of_networkx(graph)
    if matrix is None:
        return None
    if kind.pairs or peers != 1 or not (isinstance(weights, str) and weights == "uniform"):
        own = f"{kind.name} averages pairs with equal weights" if kind.pairs else "omit mixing and peers"
        raise ValueError(
            f"the edges of this networkx graph have weights, which are mixing weights: {own}; or {mixing.STRIP}"
        )
    return matrix


def _of_matrices(matrices: Sequence[EdgeWeights]) -> Topology:
    sizes = {len(matrix) for matrix in matrices}
    if len(sizes) != 1:
        raise ValueError(f"mixing matrices must have one size, a row and a column per rank, got {sorted(sizes)}")
    phases = [frozenset(zip(each.senders.tolist(), each.receivers.tolist(), strict=True)) for each in matrices]
    return Topology("given by mixing=", sizes.pop(), tuple(phases))


def _check_symmetric(graph: Topology, algorithm: str) -> None:
    for step, edges in enumerate(graph.phases):
        for sender, receiver in sorted(edges):
            if (receiver, sender) not in edges:
                raise ValueError(
                    f"topology {graph.name!r}: rank {sender} sends to rank {receiver} at step {step} and gets no "
                    f"answer; {algorithm} needs a symmetric graph: use 'bipartite-exponential', 'ring' or another "
                    f"symmetric graph, or algorithm='sgp'"
                )


def _check_doubly(matrix: EdgeWeights, algorithm: str) -> None:
    try:
        mixing.check_doubly(matrix)
    except ValueError as error:
        raise ValueError(
            f"{error}; {algorithm} needs equal weights to stay equal: use mixing='metropolis', or algorithm='sgp'"
        ) from None
    if (pair := matrix.asymmetric()) is not None:
        i, j, there, back = pair
        raise ValueError(
            f"mixing matrix: W[{i}, {j}] = {there:.6g} and W[{j}, {i}] = {back:.6g}; {algorithm} needs a symmetric "
            f"matrix: use mixing='metropolis', or algorithm='sgp'"
        )


def _is_list(weights: Any) -> bool:
    """Return whether these are several matrices, not the rows of one."""
    if isinstance(weights, list | tuple):  # maybe of different sizes, for which NumPy has no number of dimensions
        return bool(weights) and np.ndim(weights[0]) == 2
    return bool(np.ndim(weights) == 3)


# -- the plan ----------------------------------------------------------------------------------------------------------


MIN_WEIGHT, LOW_WEIGHT = 0.025, 0.1
"""Push-sum weights below which a plan raises an error, and a warning. The step in z is lr / w: on a quadratic of
curvature 1, SGD with momentum 0.9 and lr 0.1 diverges from lr / w = 2 (1 + 0.9) on, which is w = 0.026."""
MOST_DENSE = 1024
"""Maximum number of ranks of a dense matrix (8 MB)."""
MOST_COPIES = 32
"""Maximum number of vectors of weights that a rank keeps for 8-bit differences."""


@dataclass(frozen=True)
class GossipPlan:
    """The messages of each step, as edges with mixing weights.

    Attributes:
        config: the configuration, the same on all ranks.
        topology: the graph over the places of the ranks that share the optimizer; over their hosts, if the ranks of a
            host are averaged first.
        weights: a mixing matrix per phase; columns sum to 1.
    """

    config: GossipConfig
    topology: Topology
    weights: tuple[EdgeWeights, ...]

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The mixing matrices ``W[receiver, sender]``, shape (P, P) each."""
        return tuple(each.dense() for each in self.weights)

    @cached_property
    def _period(self) -> int:
        return self.config.period

    def phase(self, step: int) -> int:
        """Return the phase of a sending step, from 1."""
        return (step - 1) // self._period % len(self.weights)

    def moves(self, step: int) -> bool:
        """Return whether any rank sends a message at ``step``: the last step of a period whose phase has edges."""
        return step % self._period == 0 and self._busy[self.phase(step)]

    def averages(self, step: int) -> bool:
        """Return whether all ranks are averaged at the end of ``step``."""
        return bool(self.config.average_every) and step % self.config.average_every == 0

    @cached_property
    def _busy(self) -> list[bool]:
        return [any(out) for out, _ in self._edges]

    @cached_property
    def _edges(self) -> list[tuple[list[list[tuple[int, float]]], list[list[tuple[int, float]]]]]:
        found = []
        for each in self.weights:
            out: list[list[tuple[int, float]]] = [[] for _ in range(len(each))]
            into: list[list[tuple[int, float]]] = [[] for _ in range(len(each))]
            edges = (each.receivers.tolist(), each.senders.tolist(), each.weights.tolist())
            for receiver, sender, weight in zip(*edges, strict=True):
                out[sender].append((receiver, weight))
                into[receiver].append((sender, weight))
            found.append((out, into))
        return found

    def out_edges(self, place: int, step: int) -> list[tuple[int, float]]:
        """Return (receiver, weight) of each message that ``place`` sends at ``step``, in ascending order."""
        return self._edges[self.phase(step)][0][place] if self.moves(step) else []

    def in_edges(self, place: int, step: int) -> list[tuple[int, float]]:
        """Return (sender, weight) of each message of step ``step`` that ``place`` receives."""
        return self._edges[self.phase(step)][1][place] if self.moves(step) else []

    def senders(self, place: int) -> frozenset[int]:
        """Return the ranks that send to ``place`` at any step."""
        return frozenset(sender for _, into in self._edges for sender, _ in into[place])

    @property
    def least_weight(self) -> float:
        """The value of ``mixing.least_weight``. While ranks have finished, weights may be as low as a rank's kept part
        of ``push_sum.MIN_WEIGHT``."""
        return mixing.least_weight(self.weights, overlap=self.config.max_staleness > 0)

    @property
    def copies(self) -> int:
        """The maximum number of vectors of weights that a rank keeps for 8-bit differences (CHOCO-SGD): the common
        start, one for each phase in which it sends, and one for each sender in each phase. On hosts a rank keeps parts
        of a vector: the start, one for each host that it sends to, and one for each host that it receives from."""
        places, parts = range(len(self.weights[0])), self.config.local_size
        if parts > 1:
            edges = frozenset().union(*self.topology.phases)
            return -(-(1 + max(sum(place in edge for edge in edges) for place in places)) // parts)
        counts = [sum(bool(out[r]) + len(into[r]) for out, into in self._edges) for r in places]
        return 1 + max(counts)

    @property
    def parts(self) -> int:
        """Number of parts of the weights that are sent as separate messages."""
        if ALGORITHMS[self.config.algorithm].outer is not None:
            return self.config.fragments * self.topology.size * self.config.local_size
        return self.config.local_size

    @property
    def plain_messages(self) -> int:
        """The maximum number of uncompressed parts that a rank sends in an exchange, to the other ranks of its host."""
        return (self.config.local_size - 1) * (self.parts // self.config.local_size)

    @property
    def max_messages(self) -> int:
        """The maximum number of messages that a rank sends in an exchange; 1 for AD-PSGD."""
        if ALGORITHMS[self.config.algorithm].pairs:
            return 1
        if ALGORITHMS[self.config.algorithm].outer is not None:
            return max(1, self.topology.size * self.config.local_size - 1)
        return max(1, self.config.local_size - 1, *(len(sent) for out, _ in self._edges for sent in out))

    @property
    def max_received(self) -> int:
        """The maximum number of messages that a rank receives in an exchange; 1 for AD-PSGD.

        0 for hosts, whose exchanges have messages of several steps, and for outer optimizers.
        """
        if self.parts > 1:
            return 0
        if ALGORITHMS[self.config.algorithm].pairs:
            return 1
        return max(1, *(len(received) for _, into in self._edges for received in into))


def make_plan(
    size: int,
    algorithm: str = GossipOptions.algorithm,
    graph: Any = GossipOptions.topology,
    weights: Any = GossipOptions.mixing,
    compression: str = "none",
    local_size: int = 1,
    **options: Any,
) -> GossipPlan:
    """Return ``plan_of`` for options one by one: ``topology`` is ``graph``, ``mixing`` is ``weights``, ``hierarchical``
    is ``local_size``, and ``options`` are others of ``GossipOptions``."""
    hierarchical = False if local_size == 1 else local_size
    own = {"algorithm": algorithm, "topology": graph, "mixing": weights, "hierarchical": hierarchical}
    return plan_of(size, GossipOptions(**own | options), compression)


def plan_of(size: int, options: GossipOptions, compression: str = "none") -> GossipPlan:
    """Return the plan by these options, checked.

    Args:
        size: ranks that share the optimizer.
        options: the options of one epoch; ``hierarchical`` is False or the number of ranks per host.
        compression: one of ``COMPRESSIONS``.

    Raises:
        ValueError: an invalid option, or options that exclude each other; the message has a hint.
    """
    kind = _checked(options, compression)
    local_size = 1 if options.hierarchical is False else int(options.hierarchical)
    check_hosts(size, local_size)
    places, what = size // local_size, "hosts" if local_size > 1 else "ranks"
    graph, matrices = Topology("none", places, (frozenset(),)), [EdgeWeights.keeping_all(places)]
    if kind.has_graph:
        assert isinstance(options.peers, int)  # (checked)
        graph, matrices = chosen_graph(places, kind, options.topology, options.peers, options.mixing, what)
    config = GossipConfig(
        algorithm=kind.name,
        graph=f"{graph.name} ({_digest(matrices):08x})",
        neighbours=[list(graph.neighbours(place)) for place in range(places)] if kind.pairs else [],
        compression=compression,
        local_size=local_size,
        quasi_global=options.quasi_global,
        fragments=options.fragments,
        **_numbers(kind, options),
    )
    plan = GossipPlan(config, graph, tuple(matrices))
    _check_weight(plan, kind)
    _check_copies(plan, kind)
    return plan


def _digest(weights: Sequence[EdgeWeights]) -> int:
    """Return a checksum of mixing matrices. Checkpoints contain it, so it must not change: up to ``MOST_DENSE`` ranks
    it is that of the dense matrices, above, where these take too much memory, that of the edges."""
    digest = 0
    for each in weights:
        parts = [each.dense()] if len(each) <= MOST_DENSE else dataclasses.astuple(each)
        for part in parts:
            digest = zlib.crc32(part.tobytes(), digest)
    return digest


def _numbers(kind: GossipAlgorithm, options: GossipOptions) -> dict[str, Any]:
    """Return the numbers of steps and the constants in a configuration: the user's, else the algorithm's defaults."""
    own = kind.options
    average_every: Any = options.average_every or own.get("average_every", 0)

    def chosen(name: str, otherwise: float) -> Any:
        value = getattr(options, name)
        return own.get(name) or otherwise if value is None else value

    late = chosen("max_staleness", 0)
    if kind.outer is not None:
        Rhythm(average_every, options.fragments).check()
        late = average_every // 2 if options.max_staleness is None else min(late, average_every - 1)
    return {
        "max_staleness": late,
        "gossip_every": chosen("gossip_every", 1),
        "max_local_steps": options.max_local_steps if "max_local_steps" in own else 0,
        "average_every": average_every,
        "outer_lr": chosen("outer_lr", 0.0),
        "outer_momentum": chosen("outer_momentum", 0.0),
    }


def _check_copies(plan: GossipPlan, kind: GossipAlgorithm) -> None:
    """Check the number of vectors that a rank keeps for 8-bit differences."""
    if plan.config.compression == "int8" and plan.copies > MOST_COPIES:
        graph = "a graph" if kind.symmetric_graph else "'exponential' (1 + 2 log2 P), another graph"
        raise ValueError(
            f"int8 on topology {plan.topology.name!r} keeps {plan.copies} copies of the weights on a rank (one for "
            f"each edge and phase), and the limit is {MOST_COPIES}: use {graph} with fewer edges and phases, or "
            f"compression bf16"
        )


def _check_weight(plan: GossipPlan, kind: GossipAlgorithm) -> None:
    """Raise or warn if push-sum weights fall so low that z = x / w diverges; on symmetric graphs they stay 1."""
    least = plan.least_weight if kind.has_graph and not kind.symmetric_graph else 1.0
    if least >= LOW_WEIGHT:
        return
    text = (
        f"topology {plan.topology.name!r} under {kind.name}: push-sum weights fall to {least:.3g}, so the optimizer's "
        f"step is up to {1 / least:.3g} times as long as its learning rate says"
    )
    hint = "use a topology on which ranks receive as much as they send, such as 'exponential'"
    if kind.may_be_late:
        hint += ", with few receivers per step"
    if least < MIN_WEIGHT:
        raise ValueError(f"{text}, so training would diverge; {hint}")
    warnings.warn(f"{text}; lower it, or {hint}", stacklevel=3)


def _checked(options: GossipOptions, compression: str) -> GossipAlgorithm:
    """Return the algorithm, after checking that the options are in range, supported by it and compatible."""
    check_one_of("algorithm", options.algorithm, ALGORITHMS)
    check_one_of("compression", compression, COMPRESSIONS)
    kind, described = ALGORITHMS[options.algorithm], options_of(GossipOptions)
    check_bounds(options, GossipOptions)
    for name, one in described.items():
        value, default = getattr(options, name), getattr(GossipOptions, name)
        if name in kind.options or not one.unsupported or (one.no_effect is not None and value == one.no_effect):
            continue
        if not isinstance(value, str | int | float | None) or value != default:
            raise ValueError(one.unsupported.format(kind.name))
    if compression != "none" and "compression" not in kind.options:
        raise ValueError("compression: averages over all ranks are not compressed; omit it")
    if compression not in kind.compressions:
        raise ValueError(
            f"{compression} sends differences to what a neighbour already has, and {kind.name} has no fixed "
            f"neighbours: use fp16 or bf16, or another algorithm"
        )
    if options.quasi_global and options.hierarchical:
        raise ValueError("quasi_global: with hierarchical each rank has its own momentum; omit one of the two")
    return kind
