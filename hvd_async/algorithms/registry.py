"""All families of algorithms, joined."""

from __future__ import annotations

from hvd_async.algorithms.eager import messages as eager
from hvd_async.algorithms.eager.state_machine import Rounds
from hvd_async.algorithms.gossip import messages as gossip
from hvd_async.algorithms.gossip.state_machine import Exchanges
from hvd_async.algorithms.leader import messages as leader
from hvd_async.algorithms.leader.state_machine import Pulls
from hvd_async.runtime.family import Family

FAMILIES = (
    Family("eager", eager.EagerConfig, eager.EVENTS, eager.COMMANDS, Rounds),
    Family("gossip", gossip.GossipConfig, gossip.EVENTS, gossip.COMMANDS, Exchanges),
    Family("leader", leader.LeaderConfig, leader.EVENTS, leader.COMMANDS, Pulls, leader.Standing),
)
