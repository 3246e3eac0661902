"""Gossip's coordinator in tests: opened, and told of moves."""

from __future__ import annotations

from hvd_async.algorithms.gossip.config import (
    ExchangeDone,
    GossipConfig,
    MessageQueued,
    PairRequested,
    StartExchange,
    senders_of,
)
from hvd_async.algorithms.gossip.machine import GossipStateMachine
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.runtime.protocol import Accepted, Command, OptimizerEvent, Registered

SGP = make_plan(3).config


def opened(config: GossipConfig = SGP, size: int = 3) -> GossipStateMachine:
    """A machine whose ranks have all opened."""
    machine = GossipStateMachine(7, range(size))
    commands = [c for rank in range(size) for c in machine.handle(rank, Registered(7, config, ["w"], [1]), 0.0)]
    assert commands == [Accepted(7)]
    return machine


def play(machine: GossipStateMachine, *moves: tuple[float, int, OptimizerEvent]) -> list[list[Command]]:
    """(when, rank, event); what each of them brought about."""
    return [machine.handle(rank, event, now) for now, rank, event in moves]


def timed(config: GossipConfig = SGP, size: int = 3, seconds: float = 2.0) -> GossipStateMachine:
    """A machine that has seen one exchange, of rank 0, which took so long and ended at 0."""
    machine = opened(config, size)
    event = PairRequested(7) if config.algorithm == "adpsgd" else MessageQueued(7, 1)
    assert [type(c) for c in machine.handle(0, event, -seconds)] == [StartExchange]
    assert machine.handle(0, ExchangeDone(7, 1), 0.0) == []
    return machine


def exchange(number: int, *messages: tuple[int, int]) -> StartExchange:
    return StartExchange(7, number, senders_of(messages))


def pairing(graph: str, size: int) -> GossipConfig:
    return make_plan(size, "adpsgd", graph).config
