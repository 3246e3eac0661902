"""All families of algorithms, joined."""

from __future__ import annotations

from hvd_async.algorithms.eager import messages as eager
from hvd_async.algorithms.eager.state_machine import EagerStateMachine
from hvd_async.algorithms.gossip import messages as gossip
from hvd_async.algorithms.gossip.state_machine import GossipStateMachine
from hvd_async.algorithms.leader import messages as leader
from hvd_async.algorithms.leader.state_machine import LeaderStateMachine
from hvd_async.runtime.family import Family

FAMILIES = (
    Family("eager", eager.EagerConfig, eager.EVENTS, eager.COMMANDS, EagerStateMachine),
    Family("gossip", gossip.GossipConfig, gossip.EVENTS, gossip.COMMANDS, GossipStateMachine),
    Family("leader", leader.LeaderConfig, leader.EVENTS, leader.COMMANDS, LeaderStateMachine, leader.PullProgress),
)
