"""The cases of the gossip jobs, as data: what the ranks run, and what the tests compare it with. No framework here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # (tests know it as jobs.table)
    from table import Share

STEPS = 20


@dataclass(frozen=True)
class Gossip:
    """One training by the least squares of ``gossip_reference``.

    Attributes:
        name: of the case.
        options: of ``GossipOptimizer``.
        fewer: ranks that take this many steps fewer.
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


EXACT = (
    Gossip("sgp star", {"algorithm": "sgp", "topology": "star"}),
    Gossip("sgp averaged", {"algorithm": "sgp", "topology": "ring", "average_every": 5}),
    Gossip("sgp each third step", {"algorithm": "sgp", "topology": "star", "gossip_every": 3}),
    Gossip("osgp 1 exponential", {"algorithm": "osgp", "topology": "exponential", "max_staleness": 1}),
    Gossip("osgp 2 star", {"algorithm": "osgp", "topology": "star", "max_staleness": 2}),
    Gossip("dpsgd ring", {"algorithm": "dpsgd", "topology": "ring"}),
    Gossip("dpsgd base", {"algorithm": "dpsgd", "topology": "base"}),
    Gossip("sgp quasi-global", {"algorithm": "sgp", "topology": "star", "quasi_global": True}),
    Gossip("dpsgd quasi-global", {"algorithm": "dpsgd", "topology": "ring", "quasi_global": True, "gossip_every": 2}),
    Gossip("adpsgd quasi-global", {"algorithm": "adpsgd", "topology": "ring", "quasi_global": True}),
    Gossip("exact diffusion ring", {"algorithm": "exact-diffusion", "topology": "ring"}),
    Gossip("noloco", {"algorithm": "noloco", "gossip_every": 3}),
    Gossip("adpsgd star", {"algorithm": "adpsgd", "topology": "star"}),
    Gossip("allreduce", {"algorithm": "allreduce"}),
    Gossip("local", {"algorithm": "local", "average_every": 3, "fragments": 2}),
    Gossip("local empty fragments", {"algorithm": "local", "average_every": 4, "fragments": 4, "max_staleness": 0}),
    Gossip("slowmo", {"algorithm": "slowmo", "average_every": 4, "max_staleness": 0}),
    Gossip("diloco", {"algorithm": "diloco", "average_every": 6, "max_staleness": 2}),
)
"""(Every algorithm is tried on every graph in one process: tests/threads, tests/conformance.)"""
HOSTS = (
    Gossip("hosts sgp", {"algorithm": "sgp", "hierarchical": 2}),
    Gossip("hosts dpsgd", {"algorithm": "dpsgd", "hierarchical": 2}),
    Gossip("hosts averaged", {"algorithm": "sgp", "hierarchical": 2, "average_every": 5}),
    Gossip("hosts diloco", {"algorithm": "diloco", "hierarchical": 2, "average_every": 7}),
    Gossip("hosts adpsgd", {"algorithm": "adpsgd", "hierarchical": 2}),
    Gossip("hosts adpsgd uneven", {"algorithm": "adpsgd", "hierarchical": 2}, fewer={0: 17, 1: 3, 2: 9}),
)
HOSTS_COMPRESSED = tuple(
    Gossip(f"hosts {name}", {"algorithm": algorithm, "hierarchical": 2, "compression": name, **more})
    for algorithm, name, more in (
        ("sgp", "int8", {"average_every": 5}),
        ("dpsgd", "bf16", {"average_every": 5}),
        ("adpsgd", "fp16", {}),
    )
)
UNEVEN_HOSTS = tuple(
    Gossip(f"hosts uneven {algorithm}", {"algorithm": algorithm, "hierarchical": 2}, fewer={0: 17, 3: 5})
    for algorithm in ("sgp", "osgp")
)
"""At 4 ranks only."""
COMPRESSED = tuple(
    Gossip(f"{algorithm} {name}", {"algorithm": algorithm, "compression": name})
    for algorithm, names in {
        "sgp": ["fp16"],
        "adpsgd": ["bf16"],
        "dpsgd": ["int8"],
        "exact-diffusion": ["int8"],
        "noloco": ["bf16"],
        "local": ["bf16", "int8"],
        "diloco": ["int8"],
    }.items()
    for name in names
)
COMPRESSED += (
    Gossip("local empty int8", {"algorithm": "local", "average_every": 4, "fragments": 4, "compression": "int8"}),
)
"""(A vector of six weights has less than four fragments of a part a rank.)"""
UNEVEN = tuple(
    Gossip(f"uneven {algorithm}", {"algorithm": algorithm}, fewer={0: 3, 1: 17})
    for algorithm in ("sgp", "osgp", "adpsgd", "exact-diffusion", "noloco", "local", "slowmo")
)
FEW = {"osgp 1 exponential", "dpsgd ring", "adpsgd star", "dpsgd int8", "uneven sgp"}
FEW |= {"dpsgd quasi-global", "noloco", "local", "local int8", "uneven local"}
FEW |= {"hosts sgp", "hosts diloco", "hosts adpsgd", "hosts int8", "hosts uneven osgp"}
SOME = FEW | {"sgp star", "exact diffusion ring", "uneven adpsgd"}
"""Each algorithm, compression and kind; torch's ranks have all of them, and so has Keras in one process."""
SHARES = {"some": SOME, "few": FEW}


def cases(size: int, share: Share) -> tuple[Gossip, ...]:
    """Those of a job."""
    everything = HOSTS + HOSTS_COMPRESSED + UNEVEN_HOSTS if size == 4 else EXACT + COMPRESSED + UNEVEN
    return everything if share == "all" else tuple(case for case in everything if case.name in SHARES[share])
