"""Small jobs, each for some laws: in any order they keep these, and in some order each planted fault breaks one."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping
from typing import Any

from tests.machines.driver import Drive, Job
from tests.machines.eager import EagerDrive, EagerJob, eager
from tests.machines.gossip import GossipDrive, GossipJob, gossip
from tests.machines.leader import LeaderDrive, LeaderJob, leader
from tests.machines.least_squares import ReferenceDrive, ReferenceJob, job, reference

LATER = {"algorithm": "local", "average_every": 2, "max_staleness": 1}
EVEN, UNEVEN = ((4, 4, 4), (3, 3, 3)), ((4, 4, 4), (3, 1, 2))


def compared(steps: tuple[tuple[int, ...], ...], algorithm: str, graph: str | None = None, **options: Any) -> Job:
    """Return a job whose steps are compared with the reference."""
    return reference(job(steps, algorithm, graph, **options))


JOBS: Mapping[str, Mapping[str, Job]] = {
    "eager": {
        "opening": eager("1 drain", "drain"),
        "steps that differ": eager("3 drain", "1 drain"),
        "staleness 0": eager("2 drain", "2 drain", staleness=0),
        "staleness 2": eager("3 drain", "2 drain", staleness=2),
        "two buckets": eager("2 drain 1 drain", "1 drain drain", buckets=2),
        "two buckets, both late": eager("1 drain 1 drain", "1 drain 1 drain", buckets=2),
        "two buckets, pace by rounds": eager("3 drain", "3 drain", buckets=2, pace="rounds"),
        "all": eager("2 drain", "1 drain", quorum="all"),
        "announced": eager("3 drain 2 drain", "2 drain 2 drain", quorum="all", buckets=2, agree=True),
        "announced, uneven": eager(
            "3 drain 1 drain", "1 cut drain", "2 drain 2 cut", quorum="all", buckets=3, agree=True
        ),
        "announced, one leaves": eager("3 drain", "2 begin leave", quorum="all", buckets=2, agree=True),
        "majority": eager("2 drain", "2 drain", quorum="majority"),
        "pace by rounds": eager("3 drain", "2 drain", pace="rounds"),
        "grace": eager("2 drain", "2 drain", grace=1.0),
        "cut": eager("1 cut 1 cut drain", "1 cut cut 1 drain"),
        "cut and drain": eager("1 cut 1 drain", "1 drain drain"),
        "collectives": eager("1 drain sum 1 drain", "1 drain sum drain leave"),
        "one leaves in a collective": eager("1 drain sum drain", "1 drain leave"),
        "one leaves for good": eager("2 drain 1 drain leave", "2 leave"),
        "one leaves, one cuts": eager("1 cut 1 drain", "1 leave"),
        "three ranks": eager("2 drain", "2 drain", "1 drain"),
        "three ranks, two needed": eager("1 drain", "1 drain", "1 leave", quorum=2),
        "three ranks, grace": eager("1 drain 1 drain", "1 drain drain", "1 leave", grace=1.0, quorum=2),
        "an earlier run": eager("drain 2 drain", "1 drain drain", loaded=frozenset({0, 1})),
        "empty buckets": eager("3 drain 1 drain", "2 drain 1 drain", buckets=2, empty=0.4),
        "a host": eager("2 drain 1 drain", "2 drain 1 drain", local_size=2),
        "a host, uneven, cut": eager("2 cut 1 drain", "1 cut drain", local_size=2),
        "a host, two buckets": eager("1 drain 1 drain", "1 drain drain", buckets=2, local_size=2),
        "a host, one leaves": eager("2 drain 1 drain", "1 leave", local_size=2),
        "two hosts": eager("2 drain", "2 drain", "1 drain", "drain", local_size=2),
        "two hosts, pace by rounds": eager("2 drain", "2 drain", "1 drain", "1 drain", pace="rounds", local_size=2),
        "half of each host": eager("1 drain", "drain", "1 drain", "drain", local_size=2),
    },
    "gossip": {
        "opening": gossip("1 drain", "drain"),
        "sgp": gossip("2 drain 1 drain", "1 drain 2 drain"),
        "cut and drain": gossip("1 cut sum 1 drain", "1 drain sum drain"),
        "sgp, cuts": gossip("2 cut 2 cut 2 drain", "2 cut 2 cut 2 drain"),
        "one leaves for good": gossip("2 drain sum", "1 leave"),
        "osgp": gossip("4 drain", "3 drain", algorithm="osgp", max_staleness=2),
        "dpsgd": gossip("2 drain 1 drain", "1 drain 1 drain", algorithm="dpsgd"),
        "noloco": gossip("2 drain", "1 drain", algorithm="noloco", gossip_every=1),
        "exact diffusion": gossip("2 drain", "1 drain", algorithm="exact-diffusion"),
        "each second step": gossip("2 drain 1 drain", "3 drain drain", gossip_every=2),
        "osgp, each second step": gossip("4 drain", "3 drain", algorithm="osgp", gossip_every=2),
        "dpsgd, each second step": gossip("2 drain 1 drain", "1 drain 2 drain", algorithm="dpsgd", gossip_every=2),
        "each second step, one leaves": gossip("2 drain sum", "1 leave", gossip_every=2),
        "adpsgd": gossip("3 drain 1 drain", "2 drain drain", algorithm="adpsgd", max_local_steps=1),
        "adpsgd of three ranks": gossip("2 drain", "1 drain", "2 drain", algorithm="adpsgd", max_local_steps=1),
        "adpsgd, one leaves": gossip("2 drain", "1 drain", "1 leave", algorithm="adpsgd", max_local_steps=1),
        "adpsgd on a ring": gossip(*["2 drain"] * 4, algorithm="adpsgd", graph="ring", max_local_steps=1),
        "sgp of three ranks": gossip("1 drain", "1 drain", "2 drain"),
        "an average": gossip("1 drain", "drain", algorithm="allreduce", average_every=1),
        "averages": gossip("2 drain 1 drain", "1 drain 1 drain", algorithm="allreduce", average_every=1),
        "sgp and averages": gossip("2 drain", "1 drain", average_every=1),
        "dpsgd and averages": gossip("3 drain", "2 drain", algorithm="dpsgd", average_every=2),
        "averages of three ranks": gossip("2 drain", "1 leave", "1 drain", algorithm="allreduce", average_every=1),
        "averages that ranks continue from": gossip("3 drain 2 drain", "2 cut 2 drain", **LATER),
        "averages in two stages": gossip("6 drain", "6 drain", **{**LATER, "fragments": 2, "compression": "int8"}),
        "one is in an average and finishes": gossip("2 drain", "1 drain", "2 leave", **LATER),
        "one is in an average and leaves": gossip(
            "2 drain", "begin leave", "2 drain", algorithm="allreduce", average_every=1
        ),
        "one leaves averages in two stages": gossip(
            "6 drain 4 drain", "2 leave", "6 drain 4 drain", **{**LATER, "fragments": 2, "compression": "bf16"}
        ),
        "one finishes much sooner": gossip("1 drain", "9 drain", **LATER),
        "one leaves after a cut": gossip("cut 1 cut 1 cut 1 drain", "leave", "cut 1 cut 1 cut 1 drain"),
        "one leaves exact diffusion": gossip(
            "2 cut 2 cut 1 drain", "2 cut leave", "2 cut 2 cut 2 drain", algorithm="exact-diffusion"
        ),
        "compared sgp": compared(UNEVEN, "sgp", "star", average_every=3),
        "compared sgp, fp16": compared(UNEVEN, "sgp", "star", compression="fp16"),
        "compared sgp, cuts": compared(
            ((3,) * 5, (2,) * 5, (3,) * 5), "sgp", "exponential", compression="int8", cuts=frozenset({0, 1})
        ),
        "compared osgp": compared(((7, 7), (6, 4)), "osgp", "exponential"),
        "compared dpsgd": compared(UNEVEN, "dpsgd", "ring", compression="int8"),
        "compared exact diffusion": compared(UNEVEN, "exact-diffusion", "ring"),
        "compared noloco": compared(UNEVEN, "noloco", "ring", gossip_every=2),
        "compared adpsgd": compared(UNEVEN, "adpsgd", "ring", max_local_steps=1),
        "compared local": compared(((5, 5), (7, 3)), "local", average_every=3, fragments=2, max_staleness=2),
        "compared local, int8": compared(
            ((5, 5, 5), (7, 3, 9)), "local", average_every=2, compression="int8", max_staleness=0, elements=12
        ),
        "compared diloco": compared(((5, 5), (7, 3)), "diloco", average_every=2, max_staleness=1),
        "compared local, cuts": compared(
            ((3, 3), (2, 2), (3, 3)), "local", average_every=2, max_staleness=1, cuts=frozenset({0, 1})
        ),
        "hosts": gossip(*("2 drain", "1 drain", "2 drain", "2 drain"), local_size=2),
        "hosts with local steps": gossip(*("3 drain 1 drain", "2 drain 2 drain") * 2, local_size=2, **LATER),
        "hosts with local steps, cut": gossip(*["2 cut 1 drain"] * 2, *["1 cut 2 drain"] * 2, local_size=2, **LATER),
        "hosts in pairs": gossip(*("2 drain 1 drain", "1 drain drain") * 2, algorithm="adpsgd", local_size=2),
    },
    "leader": {
        "opening": leader("1 drain", "drain"),
        "lsgd": leader("3 drain 2 drain", "2 drain 1 drain", losses=(1.0, 3.0, 2.0)),
        "lsgd, losses that are no numbers": leader("2 drain", "2 drain", losses=(math.inf, 1.0, math.nan), window=1),
        "easgd": leader("2 cut 1 drain", "1 cut 2 drain", algorithm="easgd"),
        "easgd of three ranks": leader("2 drain", "1 drain", "1 leave", algorithm="easgd"),
        "cut and drain": leader("1 cut 1 drain", "1 drain 1 drain", periods=(1, 2)),
        "one leaves for good": leader("1 drain 1 drain leave", "2 leave", losses=(1.0, 2.0)),
        "groups": leader("2 drain", "2 drain", "2 drain", groups=[[0, 1], [2]], periods=(1, 2)),
        "four ranks": leader("2 drain", "1 drain", "2 drain", "1 drain", periods=(1, 3), groups=[[0, 1], [2, 3]]),
    },
}


SPEEDS = (0.02, 0.3, 1.0, 1.0, 5.0)


def drive_of(job: Job, quick: bool = False) -> Drive:
    """Return the drive of a job."""
    kinds: Mapping[type[Job], Any] = {
        EagerJob: EagerDrive,
        GossipJob: GossipDrive,
        ReferenceJob: ReferenceDrive,
        LeaderJob: LeaderDrive,
    }
    found: Drive = kinds[type(job)](job, quick)
    return found


def drawn(job: Job, seed: int) -> Job:
    """Return a job whose ranks' speeds, and the order of all moves, a seed draws."""
    draw = random.Random(seed)
    return dataclasses.replace(job, seed=seed, speeds=tuple(draw.choice(SPEEDS) for _ in job.programs))
