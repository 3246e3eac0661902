"""Gossip plans: a topology and its mixing matrices, chosen and checked for an algorithm."""

from __future__ import annotations

import dataclasses
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hvd_async import mixing, topology
from hvd_async.algorithms.gossip.config import (
    ALGORITHMS,
    COMPRESSIONS,
    NO_USE,
    NOT_GIVEN,
    OUTER_BOUNDS,
    GossipAlgorithm,
    GossipConfig,
)
from hvd_async.algorithms.gossip.outer import Rhythm
from hvd_async.algorithms.option import check_hosts, check_one_of
from hvd_async.mixing import EdgeWeights, Matrix
from hvd_async.topology import Topology

# -- the graph ---------------------------------------------------------------------------------------------------------


def chosen_graph(
    size: int, kind: GossipAlgorithm, graph: Any, peers: int, weights: Any, what: str
) -> tuple[Topology, list[EdgeWeights]]:
    """Return the graph and its mixing matrices, one a phase, checked for the algorithm.

    Args:
        size: of the graph.
        kind: the algorithm.
        graph, peers, weights: as in ``make_plan``.
        what: name of its nodes in messages: ranks or hosts.

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


# -- the plan ----------------------------------------------------------------------------------------------------------


MIN_WEIGHT, LOW_WEIGHT = 0.025, 0.1
"""Push-sum weights below which a plan is refused, and warned of. The step in z is lr / w: on a quadratic of curvature
1, SGD with momentum 0.9 and lr 0.1 diverges from lr / w = 2 (1 + 0.9) on, which is w = 0.026."""
SAY_NOTHING = {"max_staleness": 0, "gossip_every": 1}
"""Values that ask for nothing, of options whose None is the algorithm's own."""
MOST_DENSE = 1024
"""Ranks of which a dense matrix is made (8 MB)."""
MOST_COPIES = 32
"""Vectors of weights that a rank may keep for 8-bit differences."""


@dataclass(frozen=True)
class GossipPlan:
    """Edges of each step with their mixing weights.

    Attributes:
        config: the same on all ranks.
        topology: of the ranks that share the optimizer, by place; of their hosts, if ranks are averaged there first.
        weights: of the edges, a mixing matrix a phase; columns sum to 1.
    """

    config: GossipConfig
    topology: Topology
    weights: tuple[EdgeWeights, ...]

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The mixing matrices, ``W[receiver, sender]``, shape (P, P) each."""
        return tuple(each.dense() for each in self.weights)

    @cached_property
    def _period(self) -> int:
        return self.config.period

    def phase(self, step: int) -> int:
        """Return the phase of a sending step, from 1."""
        return (step - 1) // self._period % len(self.weights)

    def moves(self, step: int) -> bool:
        """Return whether any rank sends anything at ``step``: in the last step of a period, so that after a period's
        steps ranks have mixed."""
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
        """The value of ``mixing.least_weight``; it is lower only when ranks have finished, then a kept part of 0.75."""
        return mixing.least_weight(self.weights, overlap=self.config.max_staleness > 0)

    @property
    def copies(self) -> int:
        """The most vectors of weights that a rank keeps for 8-bit differences (CHOCO-SGD): the one all ranks started
        with, one for each phase in which it sends, one for each sender in each phase. Of hosts each rank keeps parts:
        that of the start, one for each host that it sends to, one for each that it receives from."""
        places, parts = range(len(self.weights[0])), self.config.local_size
        if parts > 1:
            edges = frozenset().union(*self.topology.phases)
            return -(-(1 + max(sum(place in edge for edge in edges) for place in places)) // parts)
        counts = [sum(bool(out[r]) + len(into[r]) for out, into in self._edges) for r in places]
        return 1 + max(counts)

    @property
    def parts(self) -> int:
        """How many parts of the weights travel in messages of their own."""
        if ALGORITHMS[self.config.algorithm].outer is not None:
            return self.config.fragments * self.topology.size
        return self.config.local_size

    @property
    def plain_messages(self) -> int:
        """The most messages that a rank sends as they are in an exchange: to the other ranks of its host."""
        return self.config.local_size - 1

    @property
    def max_messages(self) -> int:
        """The most messages that a rank sends in an exchange; AD-PSGD: one."""
        if ALGORITHMS[self.config.algorithm].pairs:
            return 1
        if ALGORITHMS[self.config.algorithm].outer is not None:
            return max(1, self.topology.size - 1)
        return max(1, self.config.local_size - 1, *(len(sent) for out, _ in self._edges for sent in out))

    @property
    def max_received(self) -> int:
        """The most messages that a rank receives in an exchange; AD-PSGD: one; 0 where hosts gossip, whose messages of
        one exchange are of several steps, and for an outer optimizer."""
        if self.parts > 1:
            return 0
        if ALGORITHMS[self.config.algorithm].pairs:
            return 1
        return max(1, *(len(received) for _, into in self._edges for received in into))


def algorithms_of(graph: Topology) -> tuple[str, ...]:
    """Return the algorithms that may use a graph: all if it is symmetric, those of push-sum if it is directed, none if
    weights of some rank never reach another; pairs, which average half and half, only if it has no weights, exact ones
    only if it is static."""
    if graph.unreachable() is not None:
        return ()
    fit = [each for each in ALGORITHMS.values() if each.has_graph and (graph.symmetric or not each.symmetric_graph)]
    fit = [each for each in fit if not (each.pairs and graph.weights) and not (each.exact and graph.period > 1)]
    return tuple(each.name for each in fit)


def make_plan(
    size: int,
    algorithm: str = "sgp",
    graph: Any = None,
    peers: int = 1,
    weights: Any = "uniform",
    max_staleness: int | None = None,
    gossip_every: int | None = None,
    max_local_steps: int = 4,
    average_every: int = 0,
    fragments: int = 1,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    compression: str = "none",
    quasi_global: bool = False,
    local_size: int = 1,
) -> GossipPlan:
    """Return the plan by these options, checked.

    Args:
        size: ranks that share the optimizer.
        algorithm: one of ``ALGORITHMS``.
        graph: a name of ``topology.NAMED``, a ``Topology``, a networkx graph; None: the algorithm's own.
        peers: neighbours of a rank at a step, where the graph leaves it open.
        weights: "uniform", "metropolis", a matrix, or a list of one a phase, shape (P, P).
        max_staleness: steps (OSGP; outer optimizers: below ``average_every``); None: 1, half of that, or 0 elsewhere.
        gossip_every: steps between two in which messages are sent; None: the algorithm's own.
        max_local_steps: steps between two averagings (AD-PSGD).
        average_every: steps between two averages over all ranks; 0: never.
        fragments: of the weights, averaged in turn (outer optimizers).
        outer_lr, outer_momentum: of an outer optimizer; None: the algorithm's own.
        compression: one of ``COMPRESSIONS``.
        quasi_global: whether gossip corrects the momentum.
        local_size: ranks of a host that are averaged before they gossip.

    Raises:
        ValueError: options that do not fit together; the message says which would.
    """
    given = {
        "topology": graph,
        "peers": peers,
        "mixing": weights,
        "max_staleness": max_staleness,
        "gossip_every": gossip_every,
        "max_local_steps": max_local_steps,
        "average_every": average_every,
        "fragments": fragments,
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "compression": compression,
        "hierarchical": local_size > 1,
        "quasi_global": quasi_global,
    }
    kind = _checked(algorithm, given)
    check_hosts(size, local_size)
    plan = _planned(kind, given, size, local_size)
    _check_weight(plan, kind)
    _check_copies(plan, kind)
    return plan


def _planned(kind: GossipAlgorithm, given: Mapping[str, Any], size: int, local_size: int) -> GossipPlan:
    """Return the plan by a user's options, which were checked one by one."""
    places, what = size // local_size, "hosts" if local_size > 1 else "ranks"
    graph, matrices = Topology("none", places, (frozenset(),)), [EdgeWeights.keeping_all(places)]
    if kind.has_graph:
        graph, matrices = chosen_graph(places, kind, given["topology"], given["peers"], given["mixing"], what)
    config = GossipConfig(
        algorithm=kind.name,
        graph=f"{graph.name} ({_digest(matrices):08x})",
        neighbours=[list(graph.neighbours(place)) for place in range(places)] if kind.pairs else [],
        compression=given["compression"],
        local_size=local_size,
        quasi_global=given["quasi_global"],
        fragments=given["fragments"],
        **_rhythm(kind, given),
        **_constants(kind, given),
    )
    return GossipPlan(config, graph, tuple(matrices))


def _digest(weights: Sequence[EdgeWeights]) -> int:
    """A number that tells mixing matrices apart. Checkpoints name it, so it is one of dense matrices, as it always was;
    of more ranks than fit into memory that way it is one of the edges."""
    digest = 0
    for each in weights:
        parts = [each.dense()] if len(each) <= MOST_DENSE else dataclasses.astuple(each)
        for part in parts:
            digest = zlib.crc32(part.tobytes(), digest)
    return digest


def _rhythm(kind: GossipAlgorithm, given: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of steps in a configuration: those given, else the algorithm's own."""
    own, late, every = kind.options, given["max_staleness"], given["gossip_every"]
    average_every = given["average_every"] or own.get("average_every", 0)
    if kind.outer is not None:
        Rhythm(average_every, given["fragments"]).check()
        late = average_every // 2 if late is None else min(late, average_every - 1)
    return {
        "max_staleness": own.get("max_staleness", 0) if late is None else late,
        "gossip_every": own.get("gossip_every") or 1 if every is None else every,
        "max_local_steps": given["max_local_steps"] if "max_local_steps" in own else 0,
        "average_every": average_every,
    }


def _constants(kind: GossipAlgorithm, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants of an outer optimizer in a configuration: those given, else the algorithm's own."""
    return {
        name: kind.options.get(name, 0.0) if given[name] is None else given[name]
        for name in ("outer_lr", "outer_momentum")
    }


def _check_copies(plan: GossipPlan, kind: GossipAlgorithm) -> None:
    """Refuse 8-bit differences to more vectors than a rank may keep."""
    if plan.config.compression == "int8" and plan.copies > MOST_COPIES:
        graph = "a graph" if kind.symmetric_graph else "'exponential' (1 + 2 log2 P), another graph"
        raise ValueError(
            f"int8 on topology {plan.topology.name!r} keeps {plan.copies} copies of the weights on a rank (one for "
            f"each edge and phase), and {MOST_COPIES} are the limit: take {graph} with fewer edges and phases, or "
            f"compression bf16"
        )


def _check_weight(plan: GossipPlan, kind: GossipAlgorithm) -> None:
    """Refuse, or warn of, push-sum weights so low that z = x / w diverges; on symmetric graphs they stay 1."""
    least = plan.least_weight if kind.has_graph and not kind.symmetric_graph else 1.0
    if least >= LOW_WEIGHT:
        return
    text = (
        f"topology {plan.topology.name!r} under {kind.name}: push-sum weights fall to {least:.3g}, so the optimizer's "
        f"step is up to {1 / least:.3g} times as long as its learning rate says"
    )
    hint = "take a topology on which ranks get as much as they give, such as 'exponential'"
    if kind.may_be_late:
        hint += ", with few receivers a step"
    if least < MIN_WEIGHT:
        raise ValueError(f"{text}, which lets weights run away; {hint}")
    warnings.warn(f"{text}; lower that, or {hint}", stacklevel=3)


def _checked(algorithm: str, given: Mapping[str, Any]) -> GossipAlgorithm:
    """Return the algorithm; refuse options out of range, that it does not have, or that do not go together."""
    check_one_of("algorithm", algorithm, ALGORITHMS)
    _check_number("gossip_every", 1 if given["gossip_every"] is None else given["gossip_every"], 1)
    _check_number("max_local_steps", given["max_local_steps"], 1)
    _check_number("average_every", given["average_every"], 0)
    _check_number("max_staleness", given["max_staleness"] or 0, 0)
    for name, bounds in OUTER_BOUNDS.items():
        if given[name] is not None:
            bounds.check(name, given[name])
    compression = given["compression"]
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression={compression!r} of messages: take one of {', '.join(map(repr, COMPRESSIONS))}")
    kind = ALGORITHMS[algorithm]
    for name in sorted(NOT_GIVEN.keys() - kind.options.keys()):
        value = given[name]
        if name in SAY_NOTHING and value == SAY_NOTHING[name]:
            continue
        if not isinstance(value, str | int | float | None) or value != NOT_GIVEN[name]:
            raise ValueError(NO_USE[name].format(algorithm))
    if compression not in kind.compressions:
        raise ValueError(
            f"{compression} sends differences to what a neighbour knows already, and {algorithm} has no fixed "
            f"neighbours: take fp16 or bf16, or another algorithm"
        )
    if given["quasi_global"] and given["hierarchical"]:
        raise ValueError("quasi_global: with hierarchical each rank's momentum is its own; leave one of the two out")
    return kind


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} is not a number of steps: take {least} or more")
