"""Gossip's coordinator, move by move."""

from __future__ import annotations

import pytest

from hvd_async.algorithms.eager.config import GradientReady, StepEntered
from hvd_async.algorithms.gossip.config import (
    AverageEntered,
    ExchangeDone,
    MessageQueued,
    PairRequested,
    RankFinished,
    StartAverage,
    StartExchange,
    WaitingForMessage,
    spans_of,
)
from hvd_async.algorithms.gossip.machine import SMOOTHING, GossipStateMachine
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.errors import ProtocolError
from hvd_async.runtime.protocol import Accepted, Drained, Finished, OptimizerEvent, Registered, Rejected
from tests.machines.driver import snapshot
from tests.unit.exchange_moves import SGP, exchange, opened, pairing, play, timed


def test_the_first_exchange_goes_at_once_and_the_next_when_it_has_landed():
    machine = opened()
    assert play(
        machine,
        (0.0, 1, MessageQueued(7, 1)),
        (0.5, 0, MessageQueued(7, 1)),
        (0.6, 2, MessageQueued(7, 1)),
        (0.7, 1, MessageQueued(7, 2)),
        (0.9, 1, ExchangeDone(7, 1)),
    ) == [[exchange(1, (1, 1))], [], [], [], [exchange(2, (0, 1), (2, 1))]]
    assert machine.deadline() is None


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


def test_what_has_waited_during_an_exchange_waits_for_others_as_if_it_came_when_that_lands():
    machine = timed()
    assert [len(c) for c in play(machine, *((10.0, rank, MessageQueued(7, 2)) for rank in range(3)))] == [0, 0, 1]
    assert play(machine, (10.5, 0, MessageQueued(7, 3)), (12.0, 0, ExchangeDone(7, 2))) == [[], []]
    assert machine.deadline() == 14.0
    assert machine.tick(14.0) == [exchange(3, (0, 3))]
    events = [(14.1, rank, MessageQueued(7, 4)) for rank in range(3)]
    assert play(machine, *events, (15.0, 0, ExchangeDone(7, 3)))[-1] == [exchange(4, (0, 4), (1, 4), (2, 4))]


def test_what_pairs_have_waited_during_an_exchange_counts():
    machine = timed(pairing("complete", 4), 4)
    assert play(machine, *((10.0, rank, PairRequested(7)) for rank in range(3))) == [[]] * 3
    assert [type(command) for command in machine.tick(12.0)] == [StartExchange]
    assert play(machine, (13.0, 0, PairRequested(7)), (14.0, 0, ExchangeDone(7, 2))) == [[], []]
    assert machine.deadline() == 15.0


def test_a_rank_that_waits_for_a_message_is_not_waited_for():
    machine = timed()
    assert (
        play(
            machine, (10.0, 0, MessageQueued(7, 2)), (10.1, 1, MessageQueued(7, 2)), (10.2, 2, WaitingForMessage(7, 0))
        )
        == [[]] * 3
    )
    assert machine.handle(2, WaitingForMessage(7, 1), 10.3) == [exchange(2, (0, 2), (1, 2))]
    # it may have been fed by that one
    assert (
        play(machine, (10.4, 0, MessageQueued(7, 3)), (10.5, 1, MessageQueued(7, 3)), (12.0, 0, ExchangeDone(7, 2)))
        == [[]] * 3
    )
    assert machine.handle(2, WaitingForMessage(7, 2), 12.1) == [exchange(3, (0, 3), (1, 3))]
    assert play(machine, (12.2, 2, MessageQueued(7, 4)), (13.0, 0, ExchangeDone(7, 3))) == [[], []]


def test_messages_of_one_step_go_together_and_earlier_steps_first():
    machine = timed()
    assert play(machine, (10.0, 0, MessageQueued(7, 3)), (10.1, 1, MessageQueued(7, 2))) == [[], []]
    # rank 0 has no earlier message any more; rank 2 may come
    assert machine.handle(2, MessageQueued(7, 2), 10.2) == [exchange(2, (1, 2), (2, 2))]
    assert play(machine, (10.3, 1, MessageQueued(7, 3)), (12.0, 1, ExchangeDone(7, 2))) == [[], []]
    assert machine.handle(2, MessageQueued(7, 3), 12.1) == [exchange(3, (0, 3), (1, 3), (2, 3))]


def test_a_rank_that_is_ahead_is_not_waited_for():
    machine = timed()
    play(machine, *((10.0, rank, MessageQueued(7, 2)) for rank in (0, 1)))
    assert machine.tick(12.0) == [exchange(2, (0, 2), (1, 2))]
    assert machine.handle(0, ExchangeDone(7, 2), 14.0) == []
    assert machine.handle(2, MessageQueued(7, 2), 14.1) == [exchange(3, (2, 2))]


def test_messages_of_hosts_go_as_they_come():
    config = make_plan(2, "sgp", local_size=2).config
    machine = opened(config, 4)
    play(
        machine,
        (0.0, 0, MessageQueued(7, 3)),
        (0.0, 1, MessageQueued(7, 4)),
        (0.0, 2, MessageQueued(7, 3)),
        (0.0, 3, MessageQueued(7, 5)),
    )
    assert machine.handle(0, ExchangeDone(7, 1), 0.0) == [exchange(2, (1, 4), (2, 3), (3, 5))]


def test_a_rank_that_waits_for_an_average_is_not_waited_for():
    machine = timed()
    assert play(machine, (10.0, 0, MessageQueued(7, 2)), (10.1, 1, MessageQueued(7, 2))) == [[], []]
    assert machine.handle(2, AverageEntered(7, 1, [1.0]), 10.2) == [exchange(2, (0, 2), (1, 2))]


def test_a_rank_sends_one_message_an_exchange_in_its_order():
    machine = opened()
    machine.handle(0, MessageQueued(7, 5), 0.0)
    for key in (8, 6, 7):
        assert machine.handle(0, MessageQueued(7, key), 0.0) == []
    for number, key in ((2, 8), (3, 6), (4, 7)):
        assert machine.handle(0, ExchangeDone(7, number - 1), 0.0) == [exchange(number, (0, key))]


def test_a_rank_that_is_done_is_waited_for_no_longer():
    machine = timed()
    assert play(machine, (10.0, 0, MessageQueued(7, 2)), (10.1, 1, MessageQueued(7, 2))) == [[], []]
    assert machine.handle(2, Finished(7, [0]), 10.2) == [
        RankFinished(7, 2, 0),
        exchange(2, (0, 2), (1, 2)),
    ]


def test_retired_counts_steps_since_the_last_drain():
    machine = opened(size=2)
    for before, (zero, one) in (([0, 0], (4, 2)), ([4, 2], (1, 0)), ([5, 2], (0, 3))):
        assert machine.handle(1, Finished(7, [before[1] + one]), 0.0) == [RankFinished(7, 1, one)]
        total = sum(before) + zero + one
        assert machine.handle(0, Finished(7, [before[0] + zero], False), 0.0) == [Drained(7, 0, [total], 0, True)]


def test_what_was_offered_goes_out_before_all_are_told_that_all_are_done():
    machine = opened(size=2)
    play(
        machine,
        (0.0, 0, MessageQueued(7, 1)),
        (0.0, 0, MessageQueued(7, 2)),
        (0.0, 1, MessageQueued(7, 1)),
        (0.0, 0, MessageQueued(7, 3)),
    )
    assert machine.handle(0, Finished(7, [3], False), 0.0) == [RankFinished(7, 0, 3)]
    assert machine.blocked_on() == ("drain", {1})
    assert machine.handle(1, Finished(7, [1], False), 0.0) == [
        exchange(2, (1, 1)),
        exchange(3, (0, 2)),
        exchange(4, (0, 3)),
        Drained(7, 4, [4], 1, False),
    ]
    # exchange 1 was not seen to land: the next need not wait for it, and its landing means nothing then
    assert machine.handle(1, MessageQueued(7, 1), 1.0) == [exchange(5, (1, 1))]
    assert play(machine, (1.1, 0, MessageQueued(7, 1)), (1.2, 0, ExchangeDone(7, 1))) == [[], []]
    assert machine.handle(1, ExchangeDone(7, 5), 1.3) == [exchange(6, (0, 1))]


def test_ranks_that_are_done_before_all_have_opened_are_told_of_afterwards():
    machine = GossipStateMachine(7, range(3))
    told = [
        machine.handle(rank, event, 0.0)
        for rank in (2, 0)
        for event in (Registered(7, SGP, ["w"], [1]), Finished(7, [0]))
    ]
    assert told == [[], [], [], []]
    assert machine.blocked_on() == ("the first step or drain", {1})
    assert machine.handle(1, Registered(7, SGP, ["w"], [1]), 0.0) == [
        Accepted(7),
        RankFinished(7, 0, 0),
        RankFinished(7, 2, 0),
    ]
    assert machine.handle(1, MessageQueued(7, 1), 0.0) == [exchange(1, (1, 1))]
    assert machine.handle(1, Finished(7, [1]), 0.0) == [Drained(7, 1, [1], 1)]


# -- pairs ----------------------------------------------------------------------------------------------------


def test_an_average_goes_when_all_are_in_and_over_those_that_are_left():
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


def test_an_average_needs_no_exchange_and_holds_none_up():
    machine = opened()
    assert machine.handle(0, MessageQueued(7, 1), 0.0) == [exchange(1, (0, 1))]
    commands = play(machine, *((0.0, rank, AverageEntered(7, 1, [1.0])) for rank in range(3)))
    assert [len(own) for own in commands] == [0, 0, 1]


# -- illegal --------------------------------------------------------------------------------------------------

ILLEGAL: dict[str, tuple[str, list[OptimizerEvent], OptimizerEvent, str]] = {
    "opened twice": ("sgp", [], Registered(7, SGP, ["w"], [1]), "twice"),
    "a step of partial allreduce": ("sgp", [], StepEntered(7, 1, []), "sent StepEntered, which gossip does not handle"),
    "an arrival of partial allreduce": ("sgp", [], GradientReady(7, [0], 1), "sent GradientReady, which gossip does"),
    "offered twice": (
        "sgp",
        [MessageQueued(7, 1), MessageQueued(7, 2)],
        MessageQueued(7, 2),
        "offered message 2 twice",
    ),
    "offered after done": ("sgp", [Finished(7, [0])], MessageQueued(7, 1), "offered message 1 after it finished"),
    "wanted in SGP": ("sgp", [], PairRequested(7), "which only AD-PSGD supports"),
    "wanted after done": ("adpsgd", [Finished(7, [0])], PairRequested(7), "although it is done"),
    "averaged again": (
        "sgp",
        [AverageEntered(7, 1, [1.0])],
        AverageEntered(7, 1, [1.0]),
        "average 1 out of order, after average 1",
    ),
    "averaged ahead": (
        "sgp",
        [AverageEntered(7, 1, [1.0])],
        AverageEntered(7, 2, [1.0]),
        "average 2 out of order, after average 1",
    ),
    "averaged too early": ("sgp", [], AverageEntered(7, 2, [1.0]), "entered average 2 out of order, after average 0"),
    "averaged by parts": ("sgp", [], AverageEntered(7, 1, [1.0, 1.0]), "with 1 weights, got 2"),
    "averaged before the first": ("sgp", [], AverageEntered(7, 0, [1.0]), "average 0"),
    "averaged after done": ("sgp", [Finished(7, [0])], AverageEntered(7, 1, [1.0]), "although it is done"),
    "landed what did not go": (
        "sgp",
        [MessageQueued(7, 1)],
        ExchangeDone(7, 2),
        "reported exchange 2 as done; exchanges so far: 1",
    ),
    "landed number 0": ("sgp", [MessageQueued(7, 1)], ExchangeDone(7, 0), "reported exchange 0 as done"),
    "done twice": ("sgp", [Finished(7, [0])], Finished(7, [0]), "although it is done"),
    "done in an average": (
        "sgp",
        [AverageEntered(7, 1, [1.0])],
        Finished(7, [1]),
        "finished while it waits for an average",
    ),
    "done with no count": ("sgp", [], Finished(7, []), "has produced"),
    "done with two counts": ("sgp", [], Finished(7, [1, 1]), "has produced"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_moves_raise_and_change_nothing(name):
    algorithm, before, event, hint = ILLEGAL[name]
    machine = opened(make_plan(3, algorithm).config)
    for move in before:
        machine.handle(0, move, 0.0)
    state = snapshot(machine)
    with pytest.raises(ProtocolError, match=rf"^rank 0 .*{hint}"):
        machine.handle(0, event, 1.0)
    assert snapshot(machine) == state


def test_before_all_have_opened_and_for_strangers_every_move_is_illegal():
    machine = GossipStateMachine(7, (0, 2))
    machine.handle(0, Registered(7, SGP, ["w"], [1]), 0.0)
    state = snapshot(machine)
    for rank, hint in ((0, "before all ranks had registered"), (2, "before it registered"), (1, "does not share")):
        for event in (MessageQueued(7, 1), PairRequested(7), AverageEntered(7, 1, [1.0])):
            with pytest.raises(ProtocolError, match=hint):
                machine.handle(rank, event, 0.0)
    with pytest.raises(ProtocolError, match="so far: 0"):
        machine.handle(0, ExchangeDone(7, 1), 0.0)
    assert snapshot(machine) == state
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


def test_where_hosts_gossip_engines_serve_ranks_that_are_done():
    machine = opened(make_plan(4, local_size=2).config, 4)
    machine.handle(0, Finished(7, [0]), 0.0)
    assert machine.handle(0, MessageQueued(7, 1), 0.0) == [exchange(1, (0, 1))]
