"""Which cases there are: read by the jobs, which run them, and by the tests, which look at them. No framework here."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Quorum = str | int
Share = Literal["all", "some", "few"]
"""How many of a topic's cases a job has: all; some, where steps cost more; few, at two ranks, which are all alike."""
QUORUMS: tuple[Quorum, ...] = ("solo", "majority", 2, "all")


BROADCASTS = (("sgd", (2, 0)), ("adam", (3, 2)), ("adam", (0, 2)))
"""Optimizers, and the steps that each rank has taken, when their state is broadcast."""


class Promise(NamedTuple):
    """Real training with stragglers; ``inject`` as the runners' ``--inject``."""

    quorum: Quorum
    inject: str
    max_staleness: int = 16
    steps: int = 12

    @property
    def name(self) -> str:
        return f"promise-{self.quorum}-{self.inject.partition(':')[0]}-{self.max_staleness}"


def promises(share: Share) -> tuple[Promise, ...]:
    """At the default staleness bound."""
    drawn = quorums(share)[:1] if share == "some" else quorums(share)
    random = tuple(Promise(quorum, "random:1:0.03") for quorum in drawn)
    return (*random, Promise("solo", "rank:0:0.02")) if share == "all" else random


def bounded(share: Share) -> tuple[Promise, ...]:
    """With bounds that a slow rank reaches."""
    bounds = {"all": (0, 1, 2), "some": (1,), "few": ()}[share]
    return tuple(Promise("solo", "rank:0:0.05", bound) for bound in bounds)


def quorums(share: Share) -> tuple[Quorum, ...]:
    """The ones that are tried."""
    shares: dict[Share, tuple[Quorum, ...]] = {"all": QUORUMS, "some": ("solo", "majority"), "few": ("solo", "all")}
    return shares[share]


def conservation(quorum: Quorum) -> str:
    """Name of the case that trains with whole numbers, so that every lost or doubled gradient shows in the weights."""
    return f"conservation-{quorum}"


def uneven(quorum: Quorum) -> str:
    """Name of the case whose ranks do different numbers of steps, three times over, with a drain in between."""
    return f"uneven-{quorum}"


def uneven_steps(phase: int, rank: int, size: int) -> int:
    """Steps of a rank in a phase: at first rank 0 has none, then the last rank has none, then only rank 0 has some."""
    return (3 * rank, 2 * (size - 1 - rank), 2 * (rank == 0))[phase]


class Equality(NamedTuple):
    """Ours in quorum "all" next to Horovod's, in torch.

    Attributes:
        theirs: keywords of Horovod's optimizer, and ``ours`` of this library, as text where they are objects.
        passes: backward passes a step.
        difference: between the weights after 30 steps, at most.
        buckets: of this library.
    """

    name: str
    optimizer: str
    theirs: dict[str, Any]
    ours: dict[str, Any]
    passes: int = 1
    difference: float = 1e-6
    buckets: int = 1


def both(name: str, optimizer: str = "sgd", passes: int = 1, difference: float = 1e-6, **options: Any) -> Equality:
    """The same keywords on both sides."""
    return Equality(name, optimizer, options, options, passes, difference)


SMALL = {"bucket_cap_mb": 1e-4}
"""Of 105 bytes: every parameter but the smallest has a bucket of its own."""
EQUALITIES = (
    both("sgd"),
    both("adam", "adam"),
    Equality("adam in buckets", "adam", {}, SMALL, buckets=6),
    both("sum", op="Sum"),
    both("predivided", gradient_predivide_factor=2.0),
    both("three passes", passes=3, backward_passes_per_step=3),
    Equality("groups", "sgd", {"groups": 2}, {"groups": 2}, buckets=2),
    Equality("fp16 in buckets", "sgd", {"compression": "fp16"}, {"compression": "fp16", **SMALL}, 1, 5e-2, 6),
    Equality("bf16 in buckets", "sgd", {}, {"compression": "bf16", **SMALL}, 1, 6e-2, 6),
)


def equalities(share: Share) -> tuple[Equality, ...]:
    """The ones that a job tries."""
    names = {"sgd", "adam in buckets", "three passes", "fp16 in buckets"}
    return tuple(case for case in EQUALITIES if share == "all" or case.name in names)
