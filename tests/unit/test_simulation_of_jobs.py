"""Simulated jobs against figures that are known otherwise: schedules played, graphs, hand counts, measured tables."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hvd_async.simulation import schedule
from hvd_async.simulation.job import Clock, Setup
from hvd_async.simulation.network import Network
from scripts.benchmarks.support import simulated
from scripts.benchmarks.support.schedule import (
    Level,
    averaged,
    job_of,
    one_random,
    play,
    replay,
    simulate,
)

SLOW = Network(latency=0.002, bandwidth=1e8, hop=0.0001, cycle=0.001, operation=0.002, event=1e-5, sending=1e-5)
QUORUMS = ("all", "majority", "solo", "k3", "0.75", "auto")
OURS = (
    *(*QUORUMS, "sgp", "osgp", "dpsgd", "adpsgd", "exact-diffusion", "noloco"),
    *("local", "slowmo", "local-int8", "local-sgd", "dpsgd-avg4", "osgp-bf16", "lsgd", "easgd"),
)
RIVALS = ("horovod", "ddp-fp16", "post-local-sgd", "decent-dp")


def uneven(steps=30, ranks=6, seed=3):
    """Log-normal computation: no two things happen at once."""
    return schedule.lengths(steps, ranks, 0.1, 0.5, seed)


# -- the clock --------------------------------------------------------------------------------------------------


def test_the_clock_runs_actions_in_order_and_those_of_one_time_as_they_were_asked_for():
    clock, seen = Clock(), []
    for when, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b"), (9.0, "never")):
        clock.at(when, seen.append, name)
    assert not clock.run(lambda: False, until=5.0)
    assert seen == list("abcd")
    assert (clock.now, clock.actions) == (2.0, 4)
    with pytest.raises(ValueError, match="is to happen at"):
        clock.at(1.0, seen.append, "late")


def test_workloads_are_what_they_say():
    assert schedule.one_slow(2, 3, 1.0, 5.0).tolist() == [[1.0, 1.0, 5.0]] * 2
    assert np.median(schedule.lengths(100, 100, 0.2, 0.5, 0)) == pytest.approx(0.2, rel=0.02)


# -- partial allreduce ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["solo", "majority", "all", "k3", "0.75"])
@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("times", [uneven(), one_random(40, 8, 0.3, 0.2, 0), schedule.one_slow(60, 4, 0.1, 5)])
def test_free_communication_gives_the_figures_of_the_schedule_played(arm, barrier, times):
    found = simulate(arm, Setup(times, seed=2, barrier=barrier), grace=0.0)
    played = replay(times, arm, seed=2, barrier=barrier)
    assert found.seconds == played.seconds
    assert found.wait_s == pytest.approx(played.wait, abs=1e-12)
    assert found.steps_per_s == len(times) / played.seconds
    if barrier and len(np.unique(times)) == times.size:  # (no two ranks come at once)
        assert found.contributors == pytest.approx(played.contributors)


def test_staleness_by_hand():
    """Rank 0 arrives at 1, 2, 6; rank 1 at 3, 4, 5. Solo fires at 1, 2, 5, and the drain takes the last gradient."""
    found = simulate("solo", Setup(np.array([[1.0, 3.0], [1.0, 1.0], [4.0, 1.0]])), grace=0.0)
    assert found.staleness == {0: 4, 1: 1, 2: 1}


@pytest.mark.parametrize("arm", ["solo", "majority", "k3"])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_free_communication_waits_for_the_staleness_bound_as_the_schedule_played(arm, bound):
    """(A gradient that makes a round start which waited for it goes with it; its rank's next one is late by it.)"""
    times = uneven()
    found = simulate(arm, Setup(times), grace=0.0, max_staleness=bound)
    assert found.seconds == play(times, arm, max_staleness=bound).seconds
    assert found.max_staleness == bound


def test_in_pace_rounds_a_slow_rank_keeps_no_rank_waiting():
    """Seven ranks take 1 s a step and one 4 s: in 40 s that is 290 steps of all."""
    setup = Setup(schedule.one_slow(10, 8, 1.0, 4), window=40.5)
    found = simulate("solo", setup, grace=0.0, pace="rounds")
    assert found.steps == 7 * 40 + 10
    assert found.steps_per_s == pytest.approx(290 / 8 / 40.5)
    assert found.wait_s == 0.0
    assert found.max_staleness == 4  # its gradient is computed while four rounds are applied, and goes with the next


def test_a_round_starts_when_its_grace_is_over_whether_or_not_another_rank_comes():
    found = simulate("solo", Setup(np.array([[1.0, 9.0]] * 4)), grace=0.5)
    # Rank 0 waits half a second for rank 1 in each of its four steps; rank 1 is late for all but the last round.
    assert found.wait_s == pytest.approx(4 * 0.5 / 8)
    assert found.seconds == 36.0
    times = np.tile([1.0, 1.001, 1.002, 1.5], (40, 1))
    contributors = [simulate("solo", Setup(times), grace=grace).contributors for grace in (0.0, 0.1)]
    assert contributors == [1.0, pytest.approx(3.0, abs=0.5)]
    assert simulate("solo", Setup(times)).contributors > 1.5, 'grace="auto" has not learned it'


# -- what communication takes, by hand --------------------------------------------------------------------------


def test_a_synchronous_round_takes_latencies_and_the_ring():
    network = Network(latency=0.5, bandwidth=1e6, hop=0.25, operation=2.0)
    ring = 2 * 3 * (1e6 / 4 / 1e6 + 0.25)
    step = 10.0 + 2 * 0.5 + 2 * 2 * 0.25 + 2.0 + ring  # computation, messages, agreement, software, wire
    found = simulate("all", Setup(schedule.constant(5, 4, 10.0), network, megabytes=1.0))
    assert found.seconds == pytest.approx(5 * step)
    assert found.sent_bytes == pytest.approx(1.5e6)
    rival = simulate("horovod", Setup(schedule.constant(5, 4, 10.0), network, megabytes=1.0))
    assert rival.seconds == pytest.approx(5 * (step - 1.0))


def test_a_tree_is_quicker_where_hops_count():
    ring, tree, best = (Network(bandwidth=1e9, hop=1e-4, allreduce=how) for how in ("ring", "tree", "best"))
    assert ring.allreduce_seconds(1e3, 1024) > 10 * tree.allreduce_seconds(1e3, 1024)
    assert best.allreduce_seconds(1e3, 1024) == tree.allreduce_seconds(1e3, 1024)
    assert best.allreduce_seconds(1e9, 4) == ring.allreduce_seconds(1e9, 4)
    assert tree.allreduce_seconds(1e6, 1024) == pytest.approx(2 * (1e-3 + 10 * 1e-4))


def test_the_coordinator_handles_one_event_after_the_other():
    network = Network(event=0.01, sending=0.02, relay=4, relay_latency=0.1)
    found = simulate("all", Setup(schedule.constant(1, 8, 1.0), network, drains=False), grace=0.0)
    # To the coordinator and back by relays; 8 events; one command to each of two relays.
    assert found.seconds == pytest.approx(1.0 + 2 * 0.1 + 8 * 0.01 + 2 * 0.02)
    assert found.coordinator_s == pytest.approx(8 * 0.01 + 2 * 0.02)


def test_a_command_goes_out_before_the_next_message_is_handled():
    network = Network(event=0.01, sending=0.02)
    found = simulate("solo", Setup(schedule.constant(1, 4, 1.0), network, drains=False), grace=0.0)
    # An event of the first rank, then the command to four ranks; the others' gradients are late and wait for nothing.
    assert found.seconds == pytest.approx(1.0 + 0.01 + 4 * 0.02)
    assert found.contributors == 1.0


def test_the_next_message_waits_until_a_command_is_sent():
    network = Network(event=0.01, sending=1.0)
    job, handled = job_of("solo", Setup(schedule.constant(1, 2, 1.0), network), grace=0.0), []
    handle = job.machine.handle
    job.machine.handle = lambda rank, event, now: (handled.append((rank, round(now, 9))), handle(rank, event, now))[1]
    job.run()
    assert handled[:2] == [(0, 1.01), (1, 3.02)]


def test_a_collective_starts_at_horovods_next_cycle_and_after_the_one_before():
    network = Network(cycle=0.25, operation=0.1)
    found = simulate("all", Setup(schedule.constant(1, 2, 1.1), network, buckets=2))
    assert found.seconds == pytest.approx(1.6)  # from 1.25 to 1.35, from 1.5 to 1.6


# -- the rivals -----------------------------------------------------------------------------------------------


def test_averages_inside_groups_wait_for_the_group_alone():
    times = np.array([[1.0, 5.0, 1.0, 1.0], [1.0, 1.0, 1.0, 3.0]])
    network = Network(operation=0.5)
    apart = averaged("groups", Setup(times, network), 0.0, [Level(2, 1)])
    assert apart.seconds == 7.0  # 5.5 and 1.5 of the first; 1.5 and 3.5 of the second: 7.0 and 5.0
    both = averaged("both", Setup(times, network), 0.0, [Level(2, 1), Level(4, 2)])
    assert (both.seconds, both.wait_s, apart.wait_s) == (7.0, 14 / 8, 10 / 8)
    assert averaged("all", Setup(times, network), 0.0, [Level(4, 1)]).seconds == 5.5 + 3.5
    assert averaged("late", Setup(times, network), 0.0, [Level(4, 2)]).seconds == 6.5
    assert simulate("horovod", Setup(times, network)).seconds == 5.5 + 3.5


# -- what holds of all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pace", ["steps", "rounds"])
@pytest.mark.parametrize("bound", [0, 2, 16])
def test_every_gradient_is_applied_and_none_is_later_than_allowed(pace, bound):
    found = simulate("solo", Setup(uneven(40, 6), SLOW, 2.0, 4), max_staleness=bound, pace=pace)
    assert found.produced == found.applied > 0
    assert found.max_staleness <= bound
    assert sum(found.staleness.values()) * 4 == found.produced


@pytest.mark.parametrize("arm", OURS + RIVALS)
def test_nothing_is_lost_and_the_same_seed_gives_the_same_and_another_does_not(arm):
    first, again, other = (
        simulate(arm, Setup(uneven(20, 8, seed), SLOW, 4.0, 3, local_size=2, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first.seconds != other.seconds
    if arm in OURS:
        assert first.steps >= 20 * 8
        assert first.produced == first.applied
        assert first.produced > 0 or arm == "local-sgd"  # which hands nothing over but averages
        assert first.produced == 20 * 8 * 3 or arm not in QUORUMS


def test_where_no_rank_can_continue_it_says_who_waits():
    job = job_of("all", Setup(schedule.constant(3, 4, 0.1)))
    job.coordinator.receive = lambda rank, events: None  # it hears nothing
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1, 2, 3\] wait for"):
        job.run()


# -- compared with what was measured ---------------------------------------------------------------------------


def test_simulated_ratios_are_those_measured():
    rows = list(simulated.compared())
    assert len(rows) > 75
    for each in rows:
        assert (abs(each["off"]) > simulated.CLOSE) == bool(each["why_off"]), each
    one = next(each for each in rows if (each["setting"]["table"], each["arm"]) == ("slow network", "dpsgd"))
    assert one["measured"] == pytest.approx(2993 / 1403)


def test_rows_of_the_case_scale():
    arms = ["horovod", "solo", "adpsgd"]
    rows = simulated.jobs(arms, [8, 16], lambda text: None, steps=12)
    assert [(row["setting"]["ranks"], row["arm"]) for row in rows] == list(itertools.product((8, 16), arms))
    for row in rows:
        assert row["value"] > 0
        assert row["speedup"] >= 1.0
        assert 0 <= row["coordinator_share"] < 1
    times = one_random(12, 8, simulated.COMPUTE, simulated.DELAY, 0)
    assert rows[1]["bound"] == pytest.approx(12 * 0.6 / times.sum(axis=0).max())
    assert rows[2]["bound"] == pytest.approx(12 * 0.6 / times.sum(axis=0).mean())
