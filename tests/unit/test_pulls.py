"""The coordinator of leader-pull: its laws under any interleaving, and examples move by move."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms.eager.config import GradientReady, StepEntered
from hvd_async.algorithms.gossip.config import MessageQueued
from hvd_async.algorithms.leader.config import LeaderConfig, PullDone, PullProgress, StartPull, StepTaken
from hvd_async.algorithms.leader.machine import LeaderStateMachine
from hvd_async.algorithms.leader.selection import ALL_RANKS, CENTER, NO_LEADER
from hvd_async.errors import ProtocolError
from hvd_async.runtime.protocol import Accepted, Command, Drained, Finished, OptimizerEvent, Registered, Rejected
from tests.machines.driver import snapshot

PAIRS = LeaderConfig("lsgd", [[0, 1], [2, 3]], 2, 4, "")
TRIO = LeaderConfig("lsgd", [[0], [1], [2]], 1, 2, "")
ELASTIC = LeaderConfig("easgd", [[0, 1, 2]], 2, 2, "")


# -- how many pulls are due --------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**32))
def test_as_many_pulls_as_steps_make_due_whoever_takes_them(size, period, total, seed):
    """Where pulls take no time, one is due at each ``period`` x size steps of all ranks together, and at no other."""
    config = LeaderConfig("easgd", [list(range(size))], period, period, "")
    machine, due = opened(config, size), []
    for step, rank in enumerate((seed // 7**i) % size for i in range(total)):
        (pull,) = machine.handle(rank, StepTaken(7, None), 0.0) or [None]
        if pull is not None:
            due.append(step + 1)
            assert machine.handle(0, PullDone(7, pull.round), 0.0) == []
    assert due == list(range(period * size, total + 1, period * size))


# -- move by move ---------------------------------------------------------------------------------------------


def opened(config: LeaderConfig = PAIRS, size: int = 4) -> LeaderStateMachine:
    """A machine whose ranks have all opened."""
    machine = LeaderStateMachine(7, range(size))
    commands = [c for rank in range(size) for c in machine.handle(rank, Registered(7, config, ["w"], [1]), 0.0)]
    assert commands == [Accepted(7)]
    return machine


def play(machine: LeaderStateMachine, *moves: tuple[int, OptimizerEvent | float | None]) -> list[Command]:
    """(rank, event, or the loss that it tells after a step); what they brought about."""
    commands = []
    for rank, move in moves:
        event = StepTaken(7, move) if move is None or isinstance(move, float) else move
        commands += machine.handle(rank, event, 0.0)
    return commands


def steps(*losses: float | None) -> list[tuple[int, float | None]]:
    """A step of each rank."""
    return list(enumerate(losses))


def test_a_pull_is_due_at_the_step_that_makes_up_the_period_of_all():
    machine = opened()
    assert play(machine, *steps(1.0, 2.0, 3.0, 4.0), (0, 1.0)) == []
    assert play(machine, (1, 2.0)) == [StartPull(7, 1, 0, 0)]
    assert play(machine, (2, 3.0)) == []
    assert play(machine, (3, 2.5)) == [StartPull(7, 2, 1, 3)]
    assert play(machine, (0, PullDone(7, 1)), (2, PullDone(7, 2)), *steps(1.0, 2.0, 3.0, 0.5), (0, 1.0)) == []
    assert play(machine, (1, 2.0), (2, 3.0)) == [StartPull(7, 3, 0, 0)]
    assert play(machine, (3, 0.5)) == [StartPull(7, 4, 1, 3), StartPull(7, 5, ALL_RANKS, 3)]  # the group's first


def test_fast_ranks_do_more():
    machine = opened()
    assert play(machine, *[(0, 1.0)] * 3) == []
    assert play(machine, (0, 1.0)) == [StartPull(7, 1, 0, 0)]
    assert play(machine, *[(0, 1.0)] * 11) == []
    assert play(machine, (0, 1.0)) == [StartPull(7, 2, ALL_RANKS, 0)]  # (that of the group is on its way)


def test_one_pull_of_a_group_at_a_time_and_what_was_due_meanwhile_once():
    machine = opened(replace_config(PAIRS, global_period=1000))
    assert play(machine, *[(0, 1.0)] * 17) == [StartPull(7, 1, 0, 0)]
    assert play(machine, (2, 1.0), (2, 1.0), (2, 1.0), (3, 0.5)) == [StartPull(7, 2, 1, 3)]
    assert play(machine, (0, PullDone(7, 1))) == [StartPull(7, 3, 0, 0)]
    assert play(machine, (0, PullDone(7, 3)), (0, 1.0), (1, 0.1)) == []  # 1 of 17 was left, these make 3
    assert play(machine, (1, 0.1)) == [StartPull(7, 4, 0, 1)]


def test_a_pull_of_all_and_those_of_groups_do_not_wait_for_each_other():
    machine = opened(replace_config(PAIRS, local_period=1, global_period=1))
    assert play(machine, *steps(1.0, 2.0, 3.0, 4.0)) == [
        StartPull(7, 1, 0, 0),
        StartPull(7, 2, 1, 2),
        StartPull(7, 3, ALL_RANKS, 0),
    ]
    assert play(machine, *steps(9.0, 2.0, 3.0, 4.0), (0, PullDone(7, 3))) == [StartPull(7, 4, ALL_RANKS, 1)]
    assert play(machine, (2, PullDone(7, 2))) == [StartPull(7, 5, 1, 2)]


def replace_config(config: LeaderConfig, **changes: object) -> LeaderConfig:
    return msgspec.structs.replace(config, **changes)


def test_a_group_of_one_follows_nobody_of_its_own():
    machine = opened(TRIO, 3)
    assert play(machine, *steps(3.0, 2.0, 1.0), (0, 3.0), (1, 2.0)) == []
    assert play(machine, (2, 1.0)) == [StartPull(7, 1, ALL_RANKS, 2)]
    alone = opened(replace_config(TRIO, groups=[[0]]), 1)
    assert play(alone, (0, 1.0), (0, 1.0)) == [StartPull(7, 1, ALL_RANKS, 0)]


@pytest.mark.parametrize(
    ("losses", "leader"),
    [
        ((2.0, 1.0, 3.0), 1),
        ((1.0, 1.0, 1.0), 0),
        ((2.0, 1.0, 1.0), 1),
        ((math.nan, 5.0, math.inf), 1),
        ((-math.inf, math.nan, -7.0), 2),
        ((None, None, 9.0), 2),
        ((None, None, None), NO_LEADER),
    ],
)
def test_the_lowest_finite_mean_leads(losses, leader):
    machine = opened(replace_config(TRIO, global_period=1), 3)
    assert play(machine, *steps(*losses)) == [StartPull(7, 1, ALL_RANKS, leader)]
    assert machine.take_notice() is None


def test_a_rank_is_chosen_by_what_it_told_last():
    machine = opened(TRIO, 3)
    assert play(machine, *steps(1.0, 2.0, 3.0), *steps(math.nan, None, 1.5)) == [StartPull(7, 1, ALL_RANKS, 2)]
    assert play(machine, (0, PullDone(7, 1)), *steps(1.0, 2.0, 3.0), *steps(1.0, None, 3.0)) == [
        StartPull(7, 2, ALL_RANKS, 0)
    ]


def test_where_nobodys_loss_is_finite_nobody_is_pulled_and_people_hear_once():
    machine = opened(TRIO, 3)
    assert play(machine, *steps(math.nan, math.inf, None) * 2) == []
    news = machine.take_notice()
    assert news is not None
    assert "has a finite mean loss, so it has no leader and is not pulled; check what record_loss()" in news
    assert play(machine, *steps(math.nan, math.inf, None) * 2) == []
    assert machine.take_notice() is None
    assert play(machine, *steps(math.nan, math.inf, None), *steps(4.0, math.inf, None)) == [
        StartPull(7, 1, ALL_RANKS, 0)
    ]


def test_where_nobody_has_told_a_loss_the_ranks_hear_it_each_time():
    """Also in a group of which nobody has, where others have."""
    machine = opened(TRIO, 3)
    assert play(machine, *steps(None, None, None) * 2) == [StartPull(7, 1, ALL_RANKS, NO_LEADER)]
    assert play(machine, *steps(None, None, None) * 2) == [
        StartPull(7, 2, ALL_RANKS, NO_LEADER)
    ]  # nothing has to land before
    machine = opened()
    assert play(machine, (0, 1.0), *[(2, None)] * 3) == []
    assert play(machine, (3, None)) == [StartPull(7, 1, 1, NO_LEADER)]
    assert machine.take_notice() is None


def test_easgd_pulls_all_towards_the_centre_and_asks_for_no_loss():
    machine = opened(ELASTIC, 3)
    assert play(machine, *steps(None, 1.0, math.nan) * 2) == [StartPull(7, 1, ALL_RANKS, CENTER)]
    assert play(machine, *steps(None, None, None) * 4) == []
    assert play(machine, (0, PullDone(7, 1))) == [StartPull(7, 2, ALL_RANKS, CENTER)]
    assert machine.take_notice() is None


@pytest.mark.parametrize("flush", [True, False])
def test_counts_are_kept_over_a_cut_and_cleared_at_a_drain(flush):
    machine = opened(replace_config(PAIRS, local_period=10, global_period=10))
    assert play(machine, *steps(1.0, 2.0, math.nan, None), (0, 1.0), (0, 1.0)) == []
    assert play(machine, *[(rank, Finished(7, [3 if rank == 0 else 1], False)) for rank in range(3)]) == []
    standing = PullProgress(0, [0, 0, 0] if flush else [4, 2, 6], [1.0, 2.0, None, None])
    assert play(machine, (3, Finished(7, [1], flush))) == [Drained(7, 0, [6], 3, flush, standing)]
    due = 40 - standing.steps[-1]
    assert play(machine, *[(1 + step % 3, 2.0) for step in range(15)]) == []
    local = [command.group for command in play(machine, *[(1 + step % 3, 2.0) for step in range(15, due - 1)])]
    assert ALL_RANKS not in local
    assert play(machine, (0, 1.0))[-1] == StartPull(7, len(local) + 1, ALL_RANKS, 0)


def test_after_a_cut_nothing_is_pulled_before_somebody_steps():
    """What was due while a pull was on its way waits, so that nothing is on its way after a cut."""
    machine = opened(replace_config(ELASTIC, global_period=1), 3)
    assert play(machine, *steps(None, None, None)) == [StartPull(7, 1, ALL_RANKS, CENTER)]
    assert play(machine, *steps(None, None, None), *[(rank, Finished(7, [2], False)) for rank in range(2)]) == []
    (drained,) = play(machine, (2, Finished(7, [2], False)))
    assert drained == Drained(7, 1, [6], 2, False, PullProgress(0, [3], [None] * 3))
    assert play(machine, (0, PullDone(7, 1))) == []
    assert play(machine, (1, None)) == [StartPull(7, 2, ALL_RANKS, CENTER)]
    assert play(machine, (0, PullDone(7, 1)), (0, PullDone(7, 2))) == []


def test_what_stood_at_a_cut_goes_on_in_another_job():
    standing = PullProgress(1, [3, 0, 14], [2.0, 1.0, None, 3.0])
    machine = opened(replace_config(PAIRS, progress=standing))
    assert play(machine, (2, None)) == []
    assert play(machine, (0, None)) == [StartPull(7, 1, 0, 1), StartPull(7, 2, ALL_RANKS, 1)]
    again = opened(replace_config(PAIRS, progress=standing))
    *_, drained = play(again, *[(rank, Finished(7, [0], False)) for rank in range(4)])
    assert drained.details.means == standing.means


def test_ranks_have_numbers_of_their_own():
    machine = LeaderStateMachine(7, (3, 5, 8, 9))
    for rank in machine.ranks:
        machine.handle(rank, Registered(7, PAIRS, ["w"], [1]), 0.0)
    assert play(machine, *[(5, 1.0), (8, 0.5), (9, 0.1)] * 2, (3, 2.0)) == [StartPull(7, 1, 1, 9)]
    assert play(machine, (3, 2.0)) == [StartPull(7, 2, 0, 5)]
    (drained,) = play(machine, *[(rank, Finished(7, [2])) for rank in machine.ranks])[-1:]
    assert drained.details == PullProgress(9, [0, 0, 0], [2.0, 1.0, 0.5, 0.1])


def test_ranks_that_differ_are_refused_and_nothing_is_pulled():
    machine = LeaderStateMachine(7, range(2))
    machine.handle(0, Registered(7, replace_config(PAIRS, groups=[[0, 1]]), ["w"], [1]), 0.0)
    other = replace_config(PAIRS, groups=[[0, 1]], settings="loss_window 3")
    (refused,) = machine.handle(1, Registered(7, other, ["w"], [1]), 0.0)
    assert isinstance(refused, Rejected)
    assert play(machine, *[(0, 1.0)] * 20) == []


# -- illegal --------------------------------------------------------------------------------------------------

ILLEGAL: dict[str, tuple[list[OptimizerEvent], OptimizerEvent, str]] = {
    "opened twice": ([], Registered(7, PAIRS, ["w"], [1]), "twice"),
    "a step of partial allreduce": ([], StepEntered(7, 1, []), "sent StepEntered, which is no event of leader-pull"),
    "an arrival of partial allreduce": ([], GradientReady(7, [0], 1), "sent GradientReady, which is no event"),
    "a message of gossip": ([], MessageQueued(7, 1), "sent MessageQueued, which is no event"),
    "a step after done": ([Finished(7, [0])], StepTaken(7, 1.0), "although it is done"),
    "landed what did not go": ([StepTaken(7, 1.0)] * 4, PullDone(7, 2), "reported pull 2 as completed, of 1 started"),
    "landed number 0": ([StepTaken(7, 1.0)] * 4, PullDone(7, 0), "reported pull 0 as completed"),
    "done twice": ([Finished(7, [0])], Finished(7, [0]), "although it is done"),
    "done with no count": ([], Finished(7, []), "has produced"),
    "done with two counts": ([], Finished(7, [1, 1]), "has produced"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_moves_raise_and_change_nothing(name):
    before, event, hint = ILLEGAL[name]
    machine = opened()
    for move in before:
        machine.handle(0, move, 0.0)
    state = snapshot(machine)
    with pytest.raises(ProtocolError, match=rf"^rank 0 .*{hint}"):
        machine.handle(0, event, 1.0)
    assert snapshot(machine) == state


def test_before_all_have_opened_and_for_strangers_every_move_is_illegal():
    machine = LeaderStateMachine(7, (0, 2))
    machine.handle(0, Registered(7, replace_config(PAIRS, groups=[[0, 1]]), ["w"], [1]), 0.0)
    state = snapshot(machine)
    for rank, hint in ((0, "before all ranks had registered|of 0"), (2, "before it registered"), (1, "does not share")):
        for event in (StepTaken(7, 1.0), PullDone(7, 1)):
            with pytest.raises(ProtocolError, match=hint):
                machine.handle(rank, event, 0.0)
    assert snapshot(machine) == state
    assert machine.blocked_on() == ("the first step or drain", {2})
