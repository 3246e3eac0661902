"""Who leads when ranks are done or hang, and which pulls there are: move by move."""

from __future__ import annotations

import math

import pytest

from hvd_async.algorithms.leader.config import LeaderConfig, PullDone, PullProgress, StartPull
from hvd_async.algorithms.leader.selection import ALL_RANKS
from hvd_async.runtime.protocol import Drained, Finished
from tests.unit.test_pulls import PAIRS, TRIO, opened, play, replace_config, steps


def test_ranks_that_are_done_do_not_count():
    """Those that are left need not make up for them, nor do they lead; their end makes no pull due."""
    machine = opened(replace_config(TRIO, global_period=4), 3)
    assert play(machine, *steps(0.5, 1.0, 1.5) * 3, (1, 1.0), (1, 1.0)) == []  # 11 of 12
    assert play(machine, (0, Finished(7, [3]))) == []  # 7 of 8
    assert play(machine, (2, 2.0)) == [StartPull(7, 1, ALL_RANKS, 1)]
    assert play(machine, (0, PullDone(7, 1)), (1, 1.0), (2, 2.0), (2, 2.0)) == []
    assert play(machine, (1, Finished(7, [6]))) == []  # 1 of 4
    assert play(machine, (2, 2.0), (2, 2.0)) == []
    assert play(machine, (2, 2.0)) == [StartPull(7, 2, ALL_RANKS, 2)]
    (drained,) = play(machine, (2, Finished(7, [9])))
    assert drained == Drained(7, 2, [18], 2, True, PullProgress(0, [0] * 4, [0.5, 1.0, 2.0]))


def test_a_group_whose_ranks_are_all_done_is_pulled_no_more():
    machine = opened()
    assert play(machine, *steps(1.0, 2.0, 3.0, 4.0), (0, Finished(7, [1])), (1, Finished(7, [1]))) == []
    assert play(machine, (2, 3.0), (3, 4.0)) == [StartPull(7, 1, 1, 2)]


def test_a_pull_is_told_to_the_ranks_of_its_group_only():
    machine = opened()
    pulls = play(machine, *steps(1.0, 2.0, 3.0, 4.0) * 4)
    told = {pull.group: tuple(machine.recipients(pull)) for pull in pulls}
    assert told == {0: (0, 1), 1: (2, 3), ALL_RANKS: (0, 1, 2, 3)}
    assert tuple(machine.recipients(Drained(7, 0, [], 0, True))) == (0, 1, 2, 3)


def test_a_rank_that_hangs_leads_no_longer():
    """Rank 0 has the lowest loss and takes no more steps: the others are not pulled to it for ever."""
    machine = opened(replace_config(TRIO, global_period=1, loss_window=3), 3)
    assert play(machine, *steps(0.1, 1.0, 2.0)) == [StartPull(7, 1, ALL_RANKS, 0)]
    led = []
    for _ in range(4):
        led += play(machine, (0, PullDone(7, len(led) + 1)), (1, 1.0), (2, 2.0), (1, 1.0))
    assert [pull.leader for pull in led] == [0, 0, 1, 1]  # it was more than 3 steps ago
    assert play(machine, *[(0, PullDone(7, 5))], (0, 0.1), (1, 1.0), (2, 2.0)) == [
        StartPull(7, 6, ALL_RANKS, 0)
    ]  # it is back


def test_at_the_end_a_rank_leads_that_has_told_its_loss_of_late():
    """One that was done long before the others has frozen weights, and a loss of that time."""
    machine = opened(replace_config(PAIRS, local=False, whole=False, loss_window=5))
    assert play(machine, *steps(0.1, 1.0, 2.0, 3.0), (0, Finished(7, [1]))) == []
    assert (
        play(machine, *[(rank, 1.0 + rank) for rank in (1, 2, 3)] * 6, *[(r, Finished(7, [7])) for r in (1, 2)]) == []
    )
    (drained,) = play(machine, (3, Finished(7, [7])))
    assert drained.details.leader == 1
    near = opened(replace_config(PAIRS, local=False, whole=False, loss_window=5))
    assert play(near, *steps(0.1, 1.0, 2.0, 3.0) * 2, (0, Finished(7, [2]))) == []
    (drained,) = play(near, (1, 1.0), *[(r, Finished(7, [3 if r == 1 else 2])) for r in (1, 2, 3)])
    assert drained.details.leader == 0  # nothing has gone on without it to speak of


def test_at_the_end_the_last_finite_loss_leads_where_none_is_recent():
    machine = opened(replace_config(TRIO, whole=False, loss_window=1), 3)
    assert play(machine, *steps(5.0, 0.1, math.nan), (0, 5.0), *[(2, math.nan)] * 12) == []
    *_, drained = play(machine, *[(rank, Finished(7, [20])) for rank in range(3)])
    assert drained.details.leader == 0


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({}, 4),  # one host: a group of all ranks is that of all
        ({"groups": [[0, 1], [2, 3]]}, 4 + 2 * 16),
        ({"groups": [[0], [1], [2], [3]]}, 4),
        ({"groups": [[0, 1], [2, 3]], "local": False}, 4),
        ({"groups": [[0, 1], [2, 3]], "whole": False}, 2 * 16),
        ({"local": False, "whole": False}, 0),
        ({"algorithm": "easgd"}, 4),
        ({"algorithm": "easgd", "whole": False}, 0),
    ],
)
def test_no_pull_that_brings_nothing(changes, total):
    """Of 64 steps of 4 ranks, each 16 a pull of all, each 4 one of a group."""
    machine = opened(replace_config(LeaderConfig("lsgd", [[0, 1, 2, 3]], 4, 16, ""), **changes))
    pulls = []
    for _ in range(64):
        for command in play(machine, *steps(1.0, 2.0, 3.0, 4.0)):
            pulls.append(command)
            first = 0 if command.group == ALL_RANKS else machine._groups[command.group].ranks[0]
            assert play(machine, (first, PullDone(7, command.round))) == []
    assert len(pulls) == total
