"""The jobs that are explored: small enough that all their interleavings can be visited, each for some laws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from hvd_async.algorithms.eager.config import EagerConfig
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.algorithms.gossip.machine import GossipStateMachine
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.algorithms.leader.config import LeaderConfig
from hvd_async.algorithms.leader.machine import LeaderStateMachine
from hvd_async.runtime.machine import StateMachine
from tests.unit.explore_eager import EagerWorld
from tests.unit.explore_gossip import GossipWorld
from tests.unit.explore_leader import LeaderWorld, Losses
from tests.unit.explore_world import Program, World

Machine = type[StateMachine[Any]]
Job = Callable[[Machine], World]
MACHINES: Mapping[str, Machine] = {
    "eager": EagerStateMachine,
    "gossip": GossipStateMachine,
    "leader": LeaderStateMachine,
}


def programs(*texts: str) -> tuple[Program, ...]:
    """Of ranks, one a text: "2 drain" is two steps and a drain."""
    return tuple(
        tuple(token for word in text.split() for token in (["step"] * int(word) if word.isdigit() else [word]))
        for text in texts
    )


def eager(
    *texts: str,
    quorum: str | int = "solo",
    staleness: int = 1,
    buckets: int = 1,
    pace: str = "steps",
    grace: float = 0.0,
    opening: bool = False,
    local_size: int = 1,
) -> Job:
    config = EagerConfig(quorum, staleness, grace, 0, buckets, pace, local_size)
    return lambda machine: EagerWorld(machine, config, programs(*texts), opening)


def gossip(*texts: str, slow: bool = False, opening: bool = False, **options: Any) -> Job:
    plan = make_plan(len(texts), options.pop("algorithm", "sgp"), **options)
    return lambda machine: GossipWorld(machine, plan, programs(*texts), opening, slow)


def leader(
    *texts: str,
    algorithm: str = "lsgd",
    groups: list[list[int]] | None = None,
    periods: tuple[int, int] = (1, 1),
    losses: Losses = ((1.0, 3.0), (2.0, math.nan), (0.5, 4.0)),
    opening: bool = False,
) -> Job:
    config = LeaderConfig(algorithm, groups or [list(range(len(texts)))], *periods, "", loss_window=100)
    return lambda machine: LeaderWorld(machine, config, programs(*texts), losses, opening)


LATER = {"algorithm": "local", "average_every": 2, "max_staleness": 1}
QUICK: Mapping[str, Mapping[str, Job]] = {
    "eager": {
        "opening": eager("1 drain", "drain", opening=True),
        "steps that differ": eager("3 drain", "1 drain", staleness=1),
        "staleness 0": eager("2 drain", "2 drain", staleness=0),
        "staleness 2": eager("3 drain", "2 drain", staleness=2),
        "two buckets": eager("2 drain 1 drain", "1 drain drain", buckets=2),
        "two buckets, both late": eager("1 drain 1 drain", "1 drain 1 drain", buckets=2),
        "all": eager("2 drain", "1 drain", quorum="all"),
        "majority": eager("2 drain", "2 drain", quorum="majority"),
        "pace by rounds": eager("3 drain", "2 drain", pace="rounds"),
        "grace": eager("2 drain", "2 drain", grace=1.0),
        "cut": eager("1 cut 1 cut drain", "1 cut cut 1 drain"),
        "cut and drain": eager("1 cut 1 drain", "1 drain drain"),
        "collectives": eager("1 drain sum 1 drain", "1 drain sum drain leave"),
        "one leaves in a collective": eager("1 drain sum drain", "1 drain leave"),
        "one leaves for good": eager("2 drain 1 drain leave", "2 leave"),
        "one leaves, one cuts": eager("1 cut 1 drain", "1 leave"),
        "three ranks": eager("1 drain", "1 drain", "1 drain"),
        "three ranks, two needed": eager("1 drain", "1 drain", "1 leave", quorum=2),
        "a host": eager("2 drain 1 drain", "2 drain 1 drain", local_size=2),
        "a host, uneven, cut": eager("2 cut 1 drain", "1 cut drain", local_size=2),
        "a host, two buckets": eager("1 drain 1 drain", "1 drain drain", buckets=2, local_size=2),
        "a host, one leaves": eager("2 drain 1 drain", "1 leave", local_size=2),
        "two hosts": eager("1 drain", "1 drain", "1 drain", "drain", local_size=2),
        "half of each host": eager("1 drain", "drain", "1 drain", "drain", local_size=2),
    },
    "gossip": {
        "opening": gossip("1 drain", "drain", opening=True),
        "sgp": gossip("2 drain", "1 drain"),
        "sgp, exchanges take time": gossip("1 drain drain", "2 drain drain", slow=True),
        "cut and drain": gossip("1 cut sum 1 drain", "1 drain sum drain"),
        "one leaves for good": gossip("2 drain sum", "1 leave"),
        "osgp": gossip("4 drain", "3 drain", algorithm="osgp", max_staleness=2),
        "dpsgd": gossip("2 drain", "1 drain", algorithm="dpsgd"),
        "noloco": gossip("2 drain", "1 drain", algorithm="noloco", gossip_every=1),
        "exact diffusion": gossip("2 drain", "1 drain", algorithm="exact-diffusion"),
        "each second step": gossip("2 drain 1 drain", "3 drain drain", gossip_every=2),
        "osgp, each second step": gossip("4 drain", "3 drain", algorithm="osgp", gossip_every=2),
        "dpsgd, each second step": gossip("2 drain 1 drain", "1 drain 2 drain", algorithm="dpsgd", gossip_every=2),
        "each second step, one leaves": gossip("2 drain sum", "1 leave", gossip_every=2),
        "adpsgd": gossip("2 drain 1 drain", "1 drain drain", algorithm="adpsgd", max_local_steps=1),
        "adpsgd, exchanges take time": gossip("2 drain", "1 drain", algorithm="adpsgd", max_local_steps=1, slow=True),
        "adpsgd of three ranks": gossip("1 drain", "1 drain", "1 drain", algorithm="adpsgd", max_local_steps=1),
        "sgp of three ranks": gossip("1 drain", "1 drain", "drain"),
        "averages": gossip("2 drain 1 drain", "1 drain 1 drain", algorithm="allreduce", average_every=1),
        "sgp and averages": gossip("1 drain", "1 drain", average_every=1),
        "averages of three ranks": gossip("2 drain", "1 leave", "1 drain", algorithm="allreduce", average_every=1),
        "averages that ranks go on from": gossip("3 drain 2 drain", "2 cut 2 drain", **LATER),
        "one is in an average and finishes": gossip("2 drain", "1 drain", "2 leave", **LATER),
    },
    "leader": {
        "opening": leader("1 drain", "drain", opening=True),
        "lsgd": leader("2 drain 1 drain", "2 drain 1 drain"),
        "lsgd, no losses": leader("2 drain", "1 drain", losses=((None,), (None, 1.0))),
        "lsgd, one leads at times": leader("2 drain", "2 drain", losses=((math.inf, 1.0), (math.nan,))),
        "easgd": leader("2 cut 1 drain", "1 cut 2 drain", algorithm="easgd"),
        "cut and drain": leader("1 cut 1 drain", "1 drain 1 drain", periods=(1, 2)),
        "one leaves for good": leader("1 drain 2 drain leave", "2 leave"),
        "groups": leader("1 drain", "1 drain", "1 drain", groups=[[0, 1], [2]], periods=(1, 2)),
    },
}
LONG: Mapping[str, Mapping[str, Job]] = {
    "eager": {
        "four steps": eager("4 drain", "4 drain", staleness=2),
        "two buckets": eager("2 drain 2 drain", "2 drain 1 drain", buckets=2),
        "two buckets, pace by rounds": eager("3 drain", "3 drain", buckets=2, pace="rounds"),
        "three ranks": eager("2 drain", "2 drain", "1 drain"),
        "two hosts": eager("2 drain", "2 drain", "1 drain", "drain", local_size=2),
        "two hosts, two buckets": eager("1 drain", "1 drain", "1 drain", "drain", buckets=2, local_size=2),
        "two hosts, pace by rounds": eager("2 drain", "2 drain", "1 drain", "1 drain", pace="rounds", local_size=2),
        "three ranks, grace": eager("1 drain 1 drain", "1 drain drain", "1 leave", grace=1.0, quorum=2),
    },
    "gossip": {
        "sgp": gossip("2 drain 1 drain", "2 drain 1 drain"),
        "sgp, exchanges take time": gossip("2 drain 1 drain", "1 drain 1 drain", slow=True),
        "osgp": gossip("4 drain", "4 drain", algorithm="osgp", max_staleness=2),
        "dpsgd": gossip("2 drain 1 drain", "2 drain 1 drain", algorithm="dpsgd"),
        "adpsgd": gossip("3 drain", "3 drain", algorithm="adpsgd", max_local_steps=2, slow=True),
        "adpsgd of three ranks, uneven": gossip("2 drain", "1 drain", "1 leave", algorithm="adpsgd", max_local_steps=1),
        "sgp of three ranks": gossip("1 drain", "1 drain", "1 drain"),
        "sgp of three ranks, all differ": gossip("2 drain", "1 drain", "drain"),
        "sgp of three ranks, uneven": gossip("1 drain", "1 drain", "2 drain"),
    },
    "leader": {
        "lsgd": leader("3 drain 2 drain", "3 cut 2 drain", periods=(1, 2)),
        "groups": leader("2 drain", "2 drain", "2 drain", groups=[[0, 1], [2]], periods=(1, 2)),
        "easgd of three ranks": leader("2 drain", "1 drain", "1 leave", algorithm="easgd"),
    },
}
