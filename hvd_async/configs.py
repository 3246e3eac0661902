"""Configurations that all ranks of an optimizer must have in common, by its kind; parts of ``events.Opened``.

A leaf module: it imports nothing of the package.
"""

from __future__ import annotations

import msgspec


class EagerConfig(msgspec.Struct, frozen=True, tag=True):
    """What all ranks of a partial allreduce must have in common before the first round.

    Attributes:
        quorum: "solo", "majority", "all", "auto", an int (ranks) or a float (fraction of the ranks).
        max_staleness: rounds.
        grace: seconds to wait for more ranks once the quorum is there; ``seed``: of majority's initiator draw.
        buckets: how many buckets a round has.
        pace: "steps", where every rank does the same number of steps, or "rounds", where a late rank does fewer.
    """

    quorum: str | int | float
    max_staleness: int
    grace: float
    seed: int
    buckets: int
    pace: str = "steps"

    @property
    def counts(self) -> int:
        """How many numbers ``Done.produced`` has."""
        return self.buckets


class GossipConfig(msgspec.Struct, frozen=True, tag=True):
    """What all ranks that gossip must have in common before the first exchange.

    Attributes:
        algorithm: "sgp", "osgp", "dpsgd", "adpsgd" or "allreduce".
        graph: the topology's name, and a digest of its edges and their weights.
        neighbours: of each rank (by its place among those that share the optimizer); AD-PSGD alone needs them here.
        max_staleness: steps (OSGP).
        max_local_steps: steps a rank may take between two averagings (AD-PSGD).
        average_every: steps between two averages over all ranks; 0: never.
        compression: how messages travel.
        local_size: ranks that are averaged before they gossip; 1: none.
    """

    algorithm: str
    graph: str
    neighbours: list[list[int]] = []
    max_staleness: int = 0
    max_local_steps: int = 0
    average_every: int = 0
    compression: str = "none"
    local_size: int = 1

    @property
    def counts(self) -> int:
        """As ``EagerConfig.counts``: steps."""
        return 1


class Standing(msgspec.Struct, frozen=True):
    """How it stands between ranks that follow a leader, at a drain or cut.

    Attributes:
        leader: the rank whose mean loss is the lowest of the recent ones; the lowest-numbered where none is known.
        steps: since the last pull that was due, of each group of the ranks and, last, of all.
        means: mean losses by place; None where there is none that is finite.
    """

    leader: int
    steps: list[int]
    means: list[float | None]


class LeaderConfig(msgspec.Struct, frozen=True, tag=True):
    """What all ranks that follow a leader must have in common before the first pull.

    Attributes:
        algorithm: "lsgd" or "easgd".
        groups: of ranks, by their places among those that share the optimizer; each has its own leader (LSGD).
        local_period, global_period: pulls are due when the ranks have taken so many steps each, on the average: of a
            group towards its leader, of all towards the global leader or the centre.
        settings: what else must be the same, for people and for comparison: strengths of the pulls and the like.
        buffers: "average" if batch-norm statistics are averaged at each pull, else "local".
        loss_window: steps of a rank, on the average, after which a loss is too old to lead by.
        local, whole: whether pulls of groups, and of all, change anything; else there are none.
        standing: of an earlier run's cut, if this one goes on from there.
    """

    algorithm: str
    groups: list[list[int]]
    local_period: int
    global_period: int
    settings: str
    buffers: str = "local"
    loss_window: int = 10
    local: bool = True
    whole: bool = True
    standing: Standing | None = None

    @property
    def counts(self) -> int:
        """As ``EagerConfig.counts``: steps."""
        return 1
