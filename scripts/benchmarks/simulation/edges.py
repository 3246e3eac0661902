"""Who sends to whom in a simulated gossip: a topology and an algorithm's configuration, without matrices. Pure.

``make_plan`` has a dense mixing matrix for each phase, which at 10,000 ranks is 800 MB.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from hvd_async import topology
from hvd_async.algorithms.gossip.messages import GossipConfig
from hvd_async.algorithms.gossip.options import ALGORITHMS
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.topology import Topology

FEW = 4
"""Ranks with which a configuration's numbers are resolved: they do not depend on how many there are."""


class Edges(NamedTuple):
    """Edges of each step.

    Attributes:
        config: what the ranks register with.
        topology: None of an algorithm without a graph.
    """

    config: GossipConfig
    topology: Topology | None

    def moves(self, step: int) -> bool:
        """Return whether any rank sends anything at ``step`` (from 1), as ``GossipPlan.moves``."""
        if self.topology is None or step % self.config.period:
            return False
        return bool(self.topology.phases[self._phase(step) % self.topology.period])

    def out(self, rank: int, step: int) -> tuple[int, ...]:
        """Return to whom a rank sends at ``step``."""
        return self.topology.out(rank, self._phase(step)) if self.topology is not None and self.moves(step) else ()

    def into(self, rank: int, step: int) -> tuple[int, ...]:
        """Return from whom a rank receives at ``step``."""
        return self.topology.into(rank, self._phase(step)) if self.topology is not None and self.moves(step) else ()

    def averages(self, step: int) -> bool:
        """Return whether all ranks are averaged at the end of ``step``."""
        return bool(self.config.average_every) and step % self.config.average_every == 0

    def _phase(self, step: int) -> int:
        return (step - 1) // self.config.period


def edges_of(ranks: int, algorithm: str, graph: str | Topology | None = None, **options: Any) -> Edges:
    """Return the edges of an algorithm.

    Args:
        ranks: how many.
        algorithm: a name of ``options.ALGORITHMS``.
        graph: a topology or the name of one; None: the algorithm's own.
        options: others of ``make_plan``.
    """
    kind, config = ALGORITHMS[algorithm], make_plan(FEW, algorithm, **options).config
    if not kind.has_graph:
        return Edges(config, None)
    chosen = kind.options["topology"] if graph is None else graph
    found = topology.named(chosen, ranks) if isinstance(chosen, str) else chosen
    neighbours = [list(found.neighbours(rank)) for rank in range(ranks)] if kind.pairs else []
    return Edges(msgspec.structs.replace(config, graph=found.name, neighbours=neighbours), found)
