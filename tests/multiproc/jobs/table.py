"""Which cases there are: read by the jobs, which run them, and by the tests, which look at them. No framework here."""

from __future__ import annotations

from typing import NamedTuple

Quorum = str | int
QUORUMS: tuple[Quorum, ...] = ("solo", "majority", 2, "all")
BOUNDS = (0, 1, 2)


class Promise(NamedTuple):
    """Real training with stragglers; ``inject`` as the runners' ``--inject``."""

    quorum: Quorum
    inject: str
    max_staleness: int = 16

    @property
    def name(self) -> str:
        return f"promise-{self.quorum}-{self.inject.partition(':')[0]}-{self.max_staleness}"


PROMISES = tuple(Promise(q, inject) for inject in ("random:1:0.03", "rank:0:0.02") for q in QUORUMS)
"""At the default staleness bound."""
BOUNDED = tuple(Promise("solo", "rank:0:0.05", bound) for bound in BOUNDS)
"""With bounds that a slow rank reaches."""
FEW_PROMISES = (*(Promise(q, "random:1:0.03") for q in QUORUMS), Promise("solo", "rank:0:0.02"))
"""For the framework in which steps cost more, and for MPI, which waits busily."""


def conservation(quorum: Quorum) -> str:
    """Name of the case that trains with whole numbers, so that every lost or doubled gradient shows in the weights."""
    return f"conservation-{quorum}"


def uneven(quorum: Quorum) -> str:
    """Name of the case whose ranks do different numbers of steps, three times over, with a drain in between."""
    return f"uneven-{quorum}"


def uneven_steps(phase: int, rank: int, size: int) -> int:
    """Steps of a rank in a phase: at first rank 0 has none, then the last rank has none, then only rank 0 has some."""
    return (3 * rank, 2 * (size - 1 - rank), 2 * (rank == 0))[phase]
