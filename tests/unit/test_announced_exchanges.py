"""Exchanges that start before their messages are queued: all ranks have announced some."""

from __future__ import annotations

import pytest

from hvd_async.algorithms.gossip.config import (
    ExchangeDone,
    MessageComing,
    MessageQueued,
    NoMessage,
    RankFinished,
    StartExchange,
    senders_of,
)
from hvd_async.errors import ProtocolError
from hvd_async.runtime.protocol import Finished
from tests.machines.driver import snapshot
from tests.unit.test_exchanges import play, timed


def test_messages_that_all_have_announced_go_before_they_are_queued():
    """Also while the exchange before is under way; one that was queued before its rank knew does not go again."""
    machine = timed()
    assert play(machine, *((10.0, rank, MessageQueued(7, 2)) for rank in range(3)))[-1] != []
    assert play(machine, (10.1, 0, MessageComing(7, 3)), (10.1, 2, MessageComing(7, 3))) == [[], []]
    assert machine.handle(1, MessageComing(7, 3), 10.2) == [StartExchange(7, 3, senders_of([(0, 3), (1, 3), (2, 3)]))]
    assert play(machine, (10.3, 1, MessageQueued(7, 3)), (10.4, 0, NoMessage(7, 3))) == [[], []]
    assert play(machine, (11.0, 0, ExchangeDone(7, 2)), (12.0, 0, ExchangeDone(7, 3))) == [[], []]
    assert play(machine, *((13.0, rank, MessageQueued(7, 4)) for rank in range(3)))[-1] == [
        StartExchange(7, 4, senders_of([(0, 4), (1, 4), (2, 4)]))
    ]


def test_announced_messages_wait_for_those_of_earlier_steps_and_for_every_rank():
    machine = timed()
    events = [(10.0, rank, MessageComing(7, 3)) for rank in (0, 1)]
    assert play(machine, *events, (10.1, 2, MessageQueued(7, 2))) == [[], [], []]
    assert machine.handle(2, MessageComing(7, 3), 10.2) == []
    assert machine.tick(12.1) == [
        StartExchange(7, 2, senders_of([(2, 2)])),
        StartExchange(7, 3, senders_of([(0, 3), (1, 3), (2, 3)])),
    ]
    assert play(machine, (13.0, 0, MessageComing(7, 4)), (13.1, 1, MessageComing(7, 4))) == [[], []]
    commands = machine.handle(2, Finished(7, [3]), 13.2)
    assert commands == [RankFinished(7, 2, 3), StartExchange(7, 4, senders_of([(0, 4), (1, 4)]))]


@pytest.mark.parametrize("key", [2, 3])
def test_what_was_queued_or_announced_is_not_announced_again(key):
    machine = timed()
    play(machine, (10.0, 0, MessageQueued(7, 2)), (10.0, 0, MessageComing(7, 3)))
    before = snapshot(machine)
    with pytest.raises(ProtocolError, match="rank 0"):
        machine.handle(0, MessageComing(7, key), 10.1)
    assert snapshot(machine) == before
