"""The gossip algorithms, as data: their options with defaults, what they need of a graph, and what sets them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_async.runtime.family import Algorithm

COMPRESSIONS = ("none", "fp16", "bf16", "int8")
NOT_GIVEN: Mapping[str, Any] = {
    "graph": None,
    "peers": 1,
    "weights": "uniform",
    "max_staleness": None,
    "max_local_steps": 4,
    "average_every": 0,
    "compression": "none",
    "local_size": 1,
}
"""Values of ``make_plan``'s options that any algorithm takes: those of an option that was not given."""
NO_USE: Mapping[str, str] = {
    "graph": "topology: {0} averages all ranks; leave it out",
    "peers": "peers: {0} averages all ranks; leave it out",
    "weights": "mixing: {0} averages ranks alike (half and half, or all of them); leave it out, and give a graph as "
    "topology",
    "max_staleness": "max_staleness: messages of {0} are never late; take 'osgp', or 0",
    "max_local_steps": "max_local_steps: no rank of {0} goes on without its neighbours; leave it out, or take 'adpsgd'",
    "average_every": "average_every: {0} has no steps that all ranks take; call drain() where an average is due",
    "compression": "compression: averages over all ranks travel as they are; leave it out",
    "local_size": "hierarchical does not go with {0}: take sgp, osgp or dpsgd",
}
"""The error message for an option that an algorithm does not have."""


@dataclass(frozen=True)
class GossipAlgorithm(Algorithm):
    """One algorithm of the family. Its ``options`` hold the values that it uses where none was given.

    Attributes:
        doubly_stochastic: whether its mixing matrices must be doubly stochastic and symmetric.
        pairs: whether neighbours are averaged in pairs, when one asks: edges are not fixed, and no rank sends alone.
        sends_before_update: whether messages hold the weights from before a step's update.
    """

    doubly_stochastic: bool = False
    pairs: bool = False
    sends_before_update: bool = False

    @property
    def has_graph(self) -> bool:
        """Whether ranks have neighbours."""
        return "graph" in self.options

    @property
    def may_be_late(self) -> bool:
        """Whether messages may be ``max_staleness`` steps late."""
        return "max_staleness" in self.options


_PUSH_SUM = {
    "graph": "exponential",
    "peers": 1,
    "weights": "uniform",
    "average_every": 0,
    "compression": "none",
    "local_size": 1,
}
_SYMMETRIC = "bipartite-exponential"

ALGORITHMS: Mapping[str, GossipAlgorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        GossipAlgorithm("sgp", "gossip", _PUSH_SUM, sends="weights", waits_for="neighbours"),
        GossipAlgorithm("osgp", "gossip", _PUSH_SUM | {"max_staleness": 1}, sends="weights", waits_for="neighbours"),
        GossipAlgorithm(
            "dpsgd",
            "gossip",
            _PUSH_SUM | {"graph": _SYMMETRIC},
            sends="weights",
            waits_for="neighbours",
            symmetric_graph=True,
            doubly_stochastic=True,
            sends_before_update=True,
        ),
        GossipAlgorithm(
            "adpsgd",
            "gossip",
            {"graph": _SYMMETRIC, "peers": 1, "max_local_steps": 4, "compression": "none"},
            sends="weights",
            waits_for="nobody",
            symmetric_graph=True,
            pairs=True,
        ),
        GossipAlgorithm("allreduce", "gossip", {"average_every": 1}, sends="weights", waits_for="quorum"),
    )
}
"""By name. "allreduce" has no graph: ranks average all weights every so many steps."""
