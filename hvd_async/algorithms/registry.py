"""All families and algorithms, joined from the families' tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_async.algorithms.eager import config as eager
from hvd_async.algorithms.eager.config import ALGORITHMS as EAGER
from hvd_async.algorithms.eager.config import EagerOptions
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.algorithms.gossip import config as gossip
from hvd_async.algorithms.gossip.config import ALGORITHMS as GOSSIP
from hvd_async.algorithms.gossip.config import GossipOptions
from hvd_async.algorithms.gossip.machine import GossipStateMachine
from hvd_async.algorithms.leader import config as leader
from hvd_async.algorithms.leader.config import ALGORITHMS as LEADER
from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.algorithms.leader.machine import LeaderStateMachine
from hvd_async.runtime.protocol import Algorithm, Family

FAMILIES = (
    Family("eager", eager.EagerConfig, eager.EVENTS, eager.COMMANDS, EagerStateMachine),
    Family("gossip", gossip.GossipConfig, gossip.EVENTS, gossip.COMMANDS, GossipStateMachine),
    Family("leader", leader.LeaderConfig, leader.EVENTS, leader.COMMANDS, LeaderStateMachine, leader.PullProgress),
)
ALGORITHMS: Mapping[str, Algorithm] = {**EAGER, **GOSSIP, **LEADER}
"""All algorithms, by name."""
OPTIONS: Mapping[str, type[Any]] = {"eager": EagerOptions, "gossip": GossipOptions, "leader": LeaderOptions}
"""Dataclasses of the options that a user can set, by family; their fields are made by ``option.option``."""
