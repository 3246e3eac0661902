"""The state machine alone: its laws under any interleaving, who fires what and why, illegal moves, disagreement."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_async.algorithms.eager.messages import (
    EagerConfig,
    GradientReady,
    RoundTrigger,
    SetHyperparameters,
    StartRound,
    StepEntered,
)
from hvd_async.algorithms.eager.state_machine import EagerStateMachine
from hvd_async.errors import ProtocolError
from hvd_async.runtime.messages import Drained, Finished, Registered, Rejected
from tests.conftest import examples
from tests.unit.moves import SOLO, kinds, opened, step, whys
from tests.unit.simulation import Job, Simulation

HINT_TORCH = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"


QUORUMS = ["solo", "majority", "all", "auto"]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    size = draw(st.integers(1, 5))
    indices = st.integers(0, size - 1)
    counts = st.lists(st.integers(0, 6), min_size=size, max_size=size)
    config = EagerConfig(
        draw(st.sampled_from(QUORUMS) | st.integers(1, size) | st.sampled_from([0.01, 0.5, 0.75, 1.0])),
        max_staleness=draw(st.integers(0, 3)),
        grace=draw(st.sampled_from([0.0, 0.0, 0.5])),
        seed=draw(st.integers(0, 99)),
        buckets=draw(st.integers(1, 3)),
        pace=draw(st.sampled_from(["steps", "rounds"])),
    )
    steps = tuple(tuple(c) for c in draw(st.lists(counts, min_size=1, max_size=3)))
    ends = [(segment, index) for segment in range(len(steps)) for index in range(size)]
    cuts = draw(st.sampled_from([set(), set(ends)]) | st.sets(st.sampled_from(ends)))
    first = draw(st.integers(0, 3))
    return Job(
        config,
        steps=steps,
        speeds=tuple(draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 5.0]), min_size=size, max_size=size))),
        one_by_one=frozenset(draw(st.sets(indices, max_size=2))),
        seed=draw(st.integers(0, 2**32)),
        cuts=frozenset(cuts),
        ranks=draw(st.sampled_from([(), tuple(range(first, first + 2 * size, 2))])),
        loaded=frozenset(draw(st.sets(indices))),
        empty=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )


ZEROS = Job(EagerConfig("solo", 0, 0.5, 0, 2), ((0, 0, 0), (0, 0, 0)), (1.0, 0.0, 1.0))


@settings(max_examples=examples(400))
@given(jobs())
@example(ZEROS)
def test_promises_hold_under_any_interleaving(job):
    simulation = Simulation(job).run()
    taken = sum(map(len, simulation.carried.values()))
    held = sum(len(pending) for rank in simulation.ranks for pending in rank.pending)
    assert len(simulation.staleness) == taken == sum(map(len, simulation.produced)) - held
    if job.flushes(len(job.steps) - 1):
        assert held == 0
    if not job.empty and job.config.pace == "steps":
        total = sum(map(sum, job.steps)) + len(job.loaded)
        assert [len(produced) for produced in simulation.produced] == [total] * job.config.buckets


def _speed_zero_last(quorum: str | int | float, staleness: int, size: int, slow: int, steps: int = 8) -> Simulation:
    """Every rank runs at full speed but ``slow``, which moves only when all others are stuck."""
    speeds = tuple(0.0 if rank == slow else 1.0 for rank in range(size))
    config = EagerConfig(quorum, staleness, 0.0, 3, 2)
    return Simulation(Job(config, ((steps,) * size,), speeds, seed=staleness)).run()


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
@pytest.mark.parametrize(("quorum", "size"), [("solo", 2), ("solo", 5), (2, 3), (0.5, 4)])
@pytest.mark.parametrize("slow", [0, -1])
def test_a_slow_rank_makes_staleness_reach_its_bound(quorum, size, staleness, slow):
    assert max(_speed_zero_last(quorum, staleness, size, slow % size).staleness) == staleness


@pytest.mark.parametrize("quorum", ["solo", "majority", 2])
def test_staleness_zero_is_synchronous(quorum):
    simulation = _speed_zero_last(quorum, 0, 3, 1)
    assert all(len(gradients) == 3 for gradients in simulation.carried.values())


def test_all_is_synchronous_whatever_the_staleness():
    simulation = _speed_zero_last("all", 16, 4, 2)
    assert set(simulation.staleness) == {0}
    assert all(len(gradients) == 4 for gradients in simulation.carried.values())


def test_simulation_tries_illegal_moves_and_late_hypers():
    tried = settled = one_more = 0
    for seed in range(20):
        config = EagerConfig("solo", 2, 0.0, 0, 3)
        simulation = Simulation(Job(config, ((5, 3, 4), (1, 0, 2)), (1.0, 1.0, 0.1), seed=seed)).run()
        tried += simulation.illegal_tried
        settled += sum(isinstance(command, SetHyperparameters) for command in simulation.log)
        one_more += len(simulation.ledger.drain_rounds)
    assert min(tried, settled, one_more) > 5, "the simulation has lost its teeth"


# -- examples, move by move -----------------------------------------------------------------------------------


def test_solo_fires_for_the_first_with_its_hyperparameters():
    rounds = opened(SOLO, 2)
    assert step(rounds, 1, 1, 3.0) == [
        StartRound(7, 0, 1, [{"lr": 1}], RoundTrigger("solo: rank 1 came first", 1, 1, first=3.0, fired=3.0, held=0.0))
    ]
    assert step(rounds, 0, 1) == []


def test_a_late_gradient_keeps_its_rank_from_nothing():
    rounds = opened(SOLO, 2)
    assert kinds(step(rounds, 0, 1) + step(rounds, 0, 2)) == ["StartRound", "StartRound"]
    assert step(rounds, 0, 3) == []  # rank 1 would be 3 rounds late
    assert rounds.blocked_on() == ("round 3", {1})
    assert kinds(step(rounds, 1, 1)) == ["StartRound"]
    assert rounds.blocked_on() is None


def test_count_fires_with_the_count_and_the_first_leads():
    rounds = opened(EagerConfig(2, 9, 0.0, 0, 1), 3)
    assert step(rounds, 2, 1, 3.0) == []
    assert rounds.blocked_on() == ("round 1", {0, 1})
    why = RoundTrigger("quorum: 2 of 3 are in, 2 needed", 0, 2, first=3.0, fired=4.5, held=1.5)
    assert step(rounds, 0, 1, 4.5) == [StartRound(7, 0, 1, [{"lr": 2}], why)]


def test_the_rank_that_fires_the_last_bucket_leads_if_it_is_in_step():
    rounds = opened(EagerConfig("solo", 9, 0.0, 0, 2), 2)
    assert whys(rounds.handle(1, GradientReady(7, 1, 1), 0.0)) == [(1, 1, None, "solo: rank 1 came first")]
    assert rounds.handle(1, StepEntered(7, 1, [{"lr": 1}]), 0.0) == []
    assert rounds.handle(0, StepEntered(7, 1, [{"lr": 0}]), 0.0) == []
    assert whys(rounds.handle(0, GradientReady(7, 0, 1), 0.0)) == [(0, 1, [{"lr": 0}], "solo: rank 0 came first")]


def test_a_rank_that_is_in_step_leads_in_place_of_one_that_is_not():
    rounds = opened(EagerConfig("solo", 9, 0.0, 0, 2), 3)
    assert whys(rounds.handle(1, GradientReady(7, 1, 1), 0.0)) == [(1, 1, None, "solo: rank 1 came first")]
    assert rounds.handle(2, StepEntered(7, 1, [{"lr": 2}]), 0.0) == []
    assert rounds.handle(0, StepEntered(7, 1, [{"lr": 0}]), 0.0) == []
    assert whys(rounds.handle(1, GradientReady(7, 0, 1), 0.0)) == [(0, 1, [{"lr": 2}], "solo: rank 1 came first")]


def test_nobody_waits_for_the_hyperparameters_of_a_rank_that_sleeps():
    """Rank 0's backward hands all over and it never comes to step(): rank 1 trains on, as far as the bound lets it."""
    rounds = opened(EagerConfig("solo", 4, 0.0, 0, 2), 2)
    for bucket in (1, 0):
        assert whys(rounds.handle(0, GradientReady(7, bucket, 1), 0.0)) == [
            (bucket, 1, None, "solo: rank 0 came first")
        ]
    for bucket in (1, 0):
        assert rounds.handle(1, GradientReady(7, bucket, 1), 1.0) == []
    assert rounds.handle(1, StepEntered(7, 1, [{"lr": 1}]), 1.0) == [SetHyperparameters(7, 1, [{"lr": 1}])]
    for number in range(2, 6):
        assert rounds.handle(1, StepEntered(7, number, [{"lr": number}]), 2.0) == []
        assert whys(rounds.handle(1, GradientReady(7, 1, number), 2.0)) == [
            (1, number, None, "solo: rank 1 came first")
        ]
        last = rounds.handle(1, GradientReady(7, 0, number), 2.0)
        assert whys(last) == [(0, number, [{"lr": number}], "solo: rank 1 came first")]
    assert rounds.handle(0, StepEntered(7, 1, [{"lr": 0}]), 9.0) == []  # too late to lead


def test_grace_waits_for_more_but_not_longer_than_for_all():
    config = EagerConfig("solo", 9, 1.5, 0, 1)
    rounds = opened(config, 3)
    assert step(rounds, 0, 1, now=10.0) == []
    assert rounds.deadline() == 11.5
    assert rounds.tick(11.4) == []
    assert step(rounds, 1, 1, now=11.4) == []
    assert kinds(rounds.tick(11.5)) == ["StartRound"]
    assert rounds.deadline() is None
    assert step(rounds, 2, 1, now=11.6) == []
    for rank, expected in [(0, []), (1, []), (2, ["StartRound"])]:  # all in: no need to wait
        assert kinds(step(rounds, rank, 2, now=12.0)) == expected
    assert rounds.deadline() is None


def test_a_rank_that_is_done_is_no_longer_waited_for():
    rounds = opened(EagerConfig("all", 0, 0.0, 0, 1), 2)
    assert step(rounds, 0, 1) == []
    assert kinds(rounds.handle(1, Finished(7, [0]), 0.0)) == ["StartRound"]
    assert kinds(step(rounds, 0, 2)) == ["StartRound"]
    assert rounds.handle(0, Finished(7, [2]), 0.0) == [Drained(7, 2, [2], 0)]


def test_majority_redraws_when_the_drawn_rank_finishes():
    config = EagerConfig("majority", 9, 0.0, 0, 1)
    for drawn in range(2):
        rounds = opened(config, 2)
        goes = step(rounds, drawn, 1)
        if goes:
            continue  # this one was drawn itself; the other order shows it
        assert kinds(rounds.handle(1 - drawn, Finished(7, [0]), 0.0)) == ["StartRound"]
        return
    raise AssertionError("each rank was drawn for round 1")


def test_what_is_pending_at_the_end_goes_out_with_the_last_hyperparameters():
    rounds = opened(SOLO, 2)
    step(rounds, 0, 1)
    assert step(rounds, 1, 1) == []  # late: nobody is there to fire again
    assert rounds.handle(0, Finished(7, [1]), 0.0) == []
    assert rounds.handle(1, Finished(7, [1]), 0.0) == [
        StartRound(
            7, 0, 2, [{"lr": 0}], RoundTrigger("drain: all ranks are done", 1, 0, first=0.0, fired=0.0, held=0.0)
        ),
        Drained(7, 2, [2], 1),
    ]


def test_after_drained_steps_go_on_from_the_rounds():
    rounds = opened(SOLO, 2)
    for number in (1, 2):
        step(rounds, 0, number)
    for rank, produced in ((0, 2), (1, 0)):
        commands = rounds.handle(rank, Finished(7, [produced]), 0.0)
    assert commands == [Drained(7, 2, [2], 1)]
    with pytest.raises(ProtocolError, match="rank 1 handed over step 1"):
        rounds.handle(1, GradientReady(7, 0, 1), 0.0)
    assert kinds(step(rounds, 1, 3)) == ["StartRound"]
    assert kinds(step(rounds, 1, 4)) == ["StartRound"]
    assert step(rounds, 1, 5) == []  # rank 0's lateness counts from the drain


def test_drains_with_nothing_to_do():
    rounds = opened(SOLO, 2)
    for _ in range(2):
        assert rounds.handle(0, Finished(7, [0]), 0.0) == []
        assert rounds.blocked_on() == ("drain", {1})
        assert rounds.handle(1, Finished(7, [0]), 0.0) == [Drained(7, 0, [0], 1)]


# -- ranks that do not fit together ---------------------------------------------------------------------------


def refusal(*events: Registered) -> str:
    """What the ranks are told that open with these events, in every order of opening."""
    told = set()
    for order in itertools.permutations(range(len(events))):
        rounds = EagerStateMachine(7, range(len(events)))
        commands = [c for rank in order for c in rounds.handle(rank, events[rank], 0.0)]
        assert kinds(commands) == ["Rejected"]
        assert isinstance(commands[0], Rejected)
        assert rounds.blocked_on() is None
        assert rounds.handle(0, StepEntered(7, 1, []), 0.0) == []  # on its way when the refusal went out
        told.add(commands[0].problem)
    assert len(told) == 1
    return told.pop()


def test_other_weights_are_told_by_name_and_how_to_mend_them():
    good, bad = Registered(7, SOLO, ["a (2,)", "b (3,)"], [1, 2]), Registered(7, SOLO, ["a (2,)", "b (3,)"], [1, 3])
    text = refusal(good, bad, bad)
    assert "weights differ" in text
    assert "ranks 1, 2 from rank 0" in text
    assert "'b (3,)'" in text
    assert HINT_TORCH in text
    assert "BroadcastGlobalVariablesCallback(0)" in text


def test_other_settings_are_told():
    text = refusal(Registered(7, SOLO, ["a"], [1]), Registered(7, EagerConfig("all", 2, 0.0, 0, 1), ["a"], [1]))
    assert "wrapped their optimizers differently" in text
    assert "rank 1 has" in text
    assert "quorum='all'" in text
    assert "Pass the same arguments on every rank" in text


@pytest.mark.parametrize("names", [["a"], ["a (2,)", "c (3,)"], ["a (2,)", "b (4,)"]])
def test_other_parameters_are_told(names):
    text = refusal(Registered(7, SOLO, ["a (2,)", "b (3,)"], [1, 2]), Registered(7, SOLO, names, [1] * len(names)))
    assert "different parameters" in text
    first = next(pair for pair in itertools.zip_longest(["a (2,)", "b (3,)"], names) if pair[0] != pair[1])
    assert f"where rank 1 has {first[1] or 'nothing'!r}" in text
