"""The cases of the gossip jobs, as data: what the ranks run, and what the tests compare it with. No framework here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STEPS = 20


@dataclass(frozen=True)
class Gossip:
    """One training by the least squares of ``gossip_reference``.

    Attributes:
        name: of the case.
        options: of ``GossipOptimizer``.
        fewer: ranks that take so many steps fewer.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    fewer: dict[int, int] = field(default_factory=dict)

    @property
    def algorithm(self) -> str:
        """Its algorithm."""
        return str(self.options.get("algorithm", "sgp"))

    def steps(self, rank: int) -> int:
        """Of a rank."""
        return STEPS - self.fewer.get(rank, 0)

    @property
    def plan(self) -> dict[str, Any]:
        """What ``make_plan`` makes of the options."""
        names = {"topology": "graph", "mixing": "weights", "hierarchical": "local_size"}
        return {names.get(name, name): value for name, value in self.options.items()}


GRAPHS = ("exponential", "ring", "star", "complete")
EXACT = (
    *(Gossip(f"sgp {graph}", {"algorithm": "sgp", "topology": graph}) for graph in GRAPHS),
    *(
        Gossip(f"osgp {late} {graph}", {"algorithm": "osgp", "topology": graph, "max_staleness": late})
        for late, graph in ((0, "ring"), (1, "exponential"), (2, "star"))
    ),
    *(Gossip(f"dpsgd {graph}", {"algorithm": "dpsgd", "topology": graph}) for graph in ("ring", "complete")),
    Gossip("dpsgd star", {"algorithm": "dpsgd", "topology": "star", "mixing": "metropolis"}),
    *(Gossip(f"adpsgd {graph}", {"algorithm": "adpsgd", "topology": graph}) for graph in ("ring", "star")),
    Gossip("allreduce", {"algorithm": "allreduce"}),
    Gossip("sgp averaged", {"algorithm": "sgp", "topology": "ring", "average_every": 5}),
)
ON_A_RING = tuple(case for case in EXACT if case.algorithm == "allreduce" or case.options["topology"] == "ring")
"""For the framework in which a case costs more (the other graphs are tried in one process, at other sizes)."""
HOSTS = (
    Gossip("hosts sgp", {"algorithm": "sgp", "hierarchical": 2}),
    Gossip("hosts dpsgd", {"algorithm": "dpsgd", "hierarchical": 2}),
)
"""At 4 ranks only."""
COMPRESSED = tuple(
    Gossip(f"{algorithm} {name}", {"algorithm": algorithm, "compression": name})
    for algorithm, name in (("sgp", "fp16"), ("adpsgd", "bf16"), ("dpsgd", "int8"), ("osgp", "int8"))
)
UNEVEN = tuple(
    Gossip(f"uneven {algorithm}", {"algorithm": algorithm}, fewer={0: 3, 1: 17})
    for algorithm in ("sgp", "osgp", "dpsgd", "adpsgd", "allreduce")
)
FEW = tuple(case for case in (*EXACT, *COMPRESSED, *UNEVEN) if case.name in (
    "sgp star", "osgp 1 exponential", "dpsgd ring", "adpsgd ring", "dpsgd int8", "uneven sgp"))  # fmt: skip
