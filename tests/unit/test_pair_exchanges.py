"""Gossip's coordinator, move by move: ranks averaged as pairs (AD-PSGD)."""

from __future__ import annotations

from hvd_async.algorithms.gossip.config import (
    ExchangeDone,
    PairRequested,
    RankFinished,
    StartExchange,
)
from hvd_async.runtime.protocol import Drained, Finished
from tests.unit.exchange_moves import opened, pairing, play, timed


def test_ranks_that_ask_are_averaged_with_neighbours_that_ask():
    machine = opened(pairing("ring", 4), 4)
    machine.handle(0, PairRequested(7), 0.0)
    assert (
        play(
            machine,
            (1.0, 1, PairRequested(7)),
            (2.0, 0, PairRequested(7)),
            (3.0, 2, PairRequested(7)),
            (4.0, 3, PairRequested(7)),
        )
        == [[]] * 4
    )
    assert machine.handle(0, ExchangeDone(7, 1), 5.0) == [StartExchange(7, 2, [], [(1, 2), (0, 3)])]


def test_a_rank_that_does_not_ask_serves_when_nobody_else_can():
    machine = timed(pairing("ring", 4), 4)
    assert play(machine, (10.0, 3, PairRequested(7)), (11.0, 2, PairRequested(7)), (11.5, 1, PairRequested(7))) == [
        [],
        [],
        [],
    ]
    assert machine.deadline() == 12.0
    assert machine.tick(12.0) == [StartExchange(7, 2, [], [(3, 2), (1, 0)])]


def test_of_several_neighbours_the_one_that_was_averaged_longest_ago():
    machine = opened(pairing("complete", 4), 4)
    assert machine.handle(0, PairRequested(7), 0.0) == [StartExchange(7, 1, [], [(0, 1)])]
    machine.handle(0, ExchangeDone(7, 1), 0.0)
    assert machine.handle(0, PairRequested(7), 0.0) == [StartExchange(7, 2, [], [(0, 2)])]
    machine.handle(0, ExchangeDone(7, 2), 0.0)
    assert machine.handle(1, PairRequested(7), 0.0) == [StartExchange(7, 3, [], [(1, 3)])]
    machine.handle(1, ExchangeDone(7, 3), 0.0)
    assert machine.handle(3, PairRequested(7), 0.0) == [StartExchange(7, 4, [], [(3, 0)])]


def test_nobody_is_averaged_with_a_rank_that_is_done_or_no_neighbour():
    machine = opened(pairing("star", 3), 3)
    assert machine.handle(1, PairRequested(7), 0.0) == [StartExchange(7, 1, [], [(1, 0)])]
    machine.handle(1, ExchangeDone(7, 1), 0.0)
    assert machine.handle(0, Finished(7, [0]), 0.0) == [RankFinished(7, 0, 0)]
    assert play(machine, (0.0, 1, PairRequested(7)), (0.0, 2, PairRequested(7))) == [[], []]
    assert machine.deadline() is None
    assert play(machine, (0.0, 1, Finished(7, [2])), (0.0, 2, Finished(7, [1]))) == [
        [RankFinished(7, 1, 2)],
        [Drained(7, 1, [3], 2)],
    ]
    assert machine.handle(2, PairRequested(7), 0.0) == [
        StartExchange(7, 2, [], [(2, 0)])
    ]  # nothing is left of the wish before


def test_leaves_of_a_star_take_turns():
    machine, met = opened(pairing("star", 5), 5), []
    for number in range(1, 14):
        moves = [*((0.0, rank, PairRequested(7)) for rank in range(5)), (0.0, 0, ExchangeDone(7, number))]
        for commands in play(machine, *moves):
            met += [sorted(pair) for c in commands if isinstance(c, StartExchange) for pair in c.pairs]
    assert met[:14] == [[0, 1], *([0, leaf] for leaf in (1, 2, 3, 4) * 3), [0, 1]]


# -- averages -------------------------------------------------------------------------------------------------
