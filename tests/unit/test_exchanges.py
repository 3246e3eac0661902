"""Gossip's coordinator: how long an exchange waits for ranks, whose turn it is, what it refuses.

Laws in any order of events are in ``tests/machines``.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

from hvd_async.algorithms.gossip.config import (
    AverageEntered,
    ExchangeDone,
    GossipConfig,
    MessageQueued,
    PairRequested,
    RankFinished,
    StartAverage,
    StartExchange,
    senders_of,
    spans_of,
)
from hvd_async.algorithms.gossip.machine import SMOOTHING, GossipStateMachine
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.errors import ProtocolError
from hvd_async.runtime.protocol import Command, Finished, OptimizerEvent, Registered, Rejected
from hvd_async.simulation.job import Setup
from hvd_async.simulation.network import Network
from scripts.benchmarks.support.schedule import job_of
from tests.machines.driver import state_of
from tests.unit.moves import registered

SGP = make_plan(3).config


def opened(config: GossipConfig = SGP, size: int = 3) -> GossipStateMachine:
    """A machine whose ranks have all registered."""
    return registered(GossipStateMachine(7, range(size)), config)


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


def test_an_exchange_waits_for_all_but_no_longer_than_one_takes():
    machine = timed()
    assert play(machine, (10.0, 2, MessageQueued(7, 2)), (11.0, 0, MessageQueued(7, 2))) == [[], []]
    assert machine.deadline() == 12.0
    assert machine.tick(11.9) == []
    assert machine.tick(12.0) == [exchange(2, (0, 2), (2, 2))]
    assert machine.deadline() is None
    assert machine.tick(20.0) == []
    assert machine.handle(0, ExchangeDone(7, 2), 16.0) == []  # 4 s
    assert play(machine, (20.0, 1, MessageQueued(7, 3)), (20.1, 0, MessageQueued(7, 3))) == [[], []]
    assert machine.deadline() == 20.0 + 2.0 + SMOOTHING * (4.0 - 2.0)
    assert machine.handle(2, MessageQueued(7, 3), 20.2) == [exchange(3, (0, 3), (1, 3), (2, 3))]


def test_what_pairs_have_waited_during_an_exchange_counts():
    machine = timed(pairing("complete", 4), 4)
    assert play(machine, *((10.0, rank, PairRequested(7)) for rank in range(3))) == [[]] * 3
    assert [type(command) for command in machine.tick(12.0)] == [StartExchange]
    assert play(machine, (13.0, 0, PairRequested(7)), (14.0, 0, ExchangeDone(7, 2))) == [[], []]
    assert machine.deadline() == 15.0


def test_an_average_goes_when_all_are_in_and_over_ones_that_are_left():
    machine = opened()
    assert play(machine, (0.0, 2, AverageEntered(7, 1, [0.5])), (0.0, 0, AverageEntered(7, 1, [1.0]))) == [[], []]
    assert machine.blocked_on() == ("average 1 over all ranks", {1})
    assert machine.handle(1, AverageEntered(7, 1, [1.5]), 0.0) == [StartAverage(7, 1, spans_of([0, 1, 2]), [3.0])]
    assert machine.blocked_on() is None
    assert play(machine, (0.0, 2, AverageEntered(7, 2, [1.0])), (0.0, 0, AverageEntered(7, 2, [0.25]))) == [[], []]
    assert machine.handle(1, Finished(7, [1]), 0.0) == [
        RankFinished(7, 1, 1),
        StartAverage(7, 2, spans_of([0, 2]), [1.25]),
    ]
    play(machine, (0.0, 0, Finished(7, [2])), (0.0, 2, Finished(7, [2])))
    assert play(machine, *((0.0, rank, AverageEntered(7, 1, [1.0])) for rank in range(3)))[2] == [
        StartAverage(7, 1, spans_of([0, 1, 2]), [3.0])
    ]


def test_before_all_have_opened_and_for_strangers_every_move_is_illegal():
    machine = GossipStateMachine(7, (0, 2))
    machine.handle(0, Registered(7, SGP, ["w"], [1]), 0.0)
    state = copy.deepcopy(state_of(machine))
    for rank, hint in ((0, "before all ranks had registered"), (2, "before it registered"), (1, "does not share")):
        for event in (MessageQueued(7, 1), PairRequested(7), AverageEntered(7, 1, [1.0])):
            with pytest.raises(ProtocolError, match=hint):
                machine.handle(rank, event, 0.0)
    with pytest.raises(ProtocolError, match="so far: 0"):
        machine.handle(0, ExchangeDone(7, 1), 0.0)
    assert state_of(machine) == state
    assert machine.deadline() is None


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({}, {"algorithm": "osgp", "max_staleness": 0}),
        ({}, {"graph": "ring"}),
        ({}, {"peers": 3}),
        ({}, {"compression": "fp16"}),
        ({}, {"average_every": 5}),
        ({}, {"gossip_every": 2}),
        ({}, {"local_size": 2}),
        ({"graph": "star"}, {"graph": "star", "weights": "metropolis"}),
        ({"algorithm": "osgp"}, {"algorithm": "osgp", "max_staleness": 2}),
        ({"algorithm": "adpsgd"}, {"algorithm": "adpsgd", "max_local_steps": 5}),
        ({"algorithm": "adpsgd"}, {"algorithm": "adpsgd", "graph": "star"}),
    ],
    ids=str,
)
def test_ranks_that_gossip_differently_are_refused(own, other):
    machine = GossipStateMachine(7, range(2))
    machine.handle(0, Registered(7, make_plan(4, **own).config, ["w"], [1]), 0.0)
    (refused,) = machine.handle(1, Registered(7, make_plan(4, **other).config, ["w"], [1]), 0.0)
    assert isinstance(refused, Rejected)
    assert "wrapped their optimizers differently" in refused.problem
    assert machine.handle(0, MessageQueued(7, 1), 0.0) == []  # on its way when the refusal went out
    assert machine.blocked_on() is None


def test_leaves_of_a_star_take_turns():
    machine, met = opened(pairing("star", 5), 5), []
    for number in range(1, 14):
        moves = [*((0.0, rank, PairRequested(7)) for rank in range(5)), (0.0, 0, ExchangeDone(7, number))]
        for commands in play(machine, *moves):
            met += [sorted(pair) for c in commands if isinstance(c, StartExchange) for pair in c.pairs]
    assert met[:14] == [[0, 1], *([0, leaf] for leaf in (1, 2, 3, 4) * 3), [0, 1]]


@pytest.mark.parametrize("late", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("compute", [0.2, 0.6, 0.9, 1.1, 2.0, 4.0])
def test_ranks_that_an_exchange_has_parted_meet_again(compute, late):
    """Else each step costs two exchanges. An exchange takes a second; every other rank comes late to the first step."""
    steps, ranks = 16, 8
    step, rank = np.indices((steps, ranks))
    times = compute * (1 + 0.02 * ((7 * rank + 3 * step) % 5) / 4) + late * (rank % 2) * (step == 0)
    job, started = job_of("sgp", Setup(times, Network(operation=1.0))), list[StartExchange]()
    for name in ("handle", "tick"):
        real = getattr(job.machine, name)
        setattr(job.machine, name, lambda *given, real=real: noted(real(*given), started))
    job.run()
    settled = [exchange for exchange in started if steps // 2 < exchange.messages[0][1] <= steps - 1]
    assert [sorted(rank for rank, _ in exchange.messages) for exchange in settled] == [[*range(ranks)]] * 7


def noted(commands: list[Command], started: list[StartExchange]) -> list[Command]:
    """Note the exchanges that commands start."""
    started += [command for command in commands if isinstance(command, StartExchange)]
    return commands
