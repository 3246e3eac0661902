"""Simulated jobs of gossip and leaders: which rank waits for which and where, bytes, pulls."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_async.algorithms.gossip.config import WaitingForMessage
from hvd_async.simulation import schedule
from hvd_async.simulation.job import Clock, DataPlane, RankCollectives, Setup, Sizes
from hvd_async.simulation.network import Network
from scripts.benchmarks.support.schedule import job_of, simulate

# -- gossip -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "step"), [("sgp", 2.5), ("osgp", 1.5), ("dpsgd", 1.5), ("adpsgd", 1.0), ("exact-diffusion", 4.0)]
)
def test_who_waits_for_messages_that_take_longer_than_a_step(arm, step):
    times = schedule.constant(24, 8, 1.0)
    found = simulate(arm, Setup(times, Network(bandwidth=1e6), megabytes=1.5, untimed=8))
    assert 1 / found.steps_per_s == pytest.approx(step, rel=0.01)


MEGABYTES = {"sgp": 8.0, "osgp-bf16": 4.0, "exact-diffusion": 16.0, "noloco": 1.0, "local-sgd": 3.5, "local-bf16": 1.75}
"""Megabytes that a rank sends in a step of a model of 8 MB."""


@pytest.mark.parametrize("arm", [*MEGABYTES, "dpsgd", "adpsgd"])
def test_without_delays_gossip_runs_at_the_speed_of_computation(arm):
    found = simulate(arm, Setup(schedule.constant(32, 8, 0.25), megabytes=8.0))
    assert (found.seconds, found.wait_s) == (32 * 0.25, 0.0)
    assert found.sent_bytes == pytest.approx(1e6 * MEGABYTES.get(arm, found.sent_bytes / 1e6))


@pytest.mark.parametrize(
    ("arm", "graph", "ranks", "stalls"),
    [
        ("sgp", "ring", 6, {1: (5, {2}), 3: (5, {2}), 0: (6, {1}), 4: (6, {3}), 5: (7, {0, 4})}),
        (
            "sgp", "exponential", 8,
            {4: (5, {2}), 0: (6, {4}), 6: (6, {2}), 1: (7, {0}), 3: (7, {2}), 5: (7, {4}), 7: (7, {6})},
        ),
        # sent before a rank waits: a step later
        (
            "dpsgd", "ring", 8,
            {1: (6, {2}), 3: (6, {2}), 0: (7, {1}), 4: (7, {3}), 5: (8, {4}), 7: (8, {0}), 6: (9, {5, 7})},
        ),
        # sent after a rank has waited: each stops a step after its neighbour
        ("osgp", "ring-right", 6, {3: (6, {2}), 4: (7, {3}), 5: (8, {4}), 0: (9, {5}), 1: (10, {0})}),
        ("adpsgd", "ring", 8, {}),
    ],
)  # fmt: skip
def test_a_rank_that_stands_still_stops_ones_that_the_graph_says_where_it_says(arm, graph, ranks, stalls):
    """Rank 2 in step 5; of each other rank the step in which it stops, and the ranks whose messages it lacks."""
    times = schedule.constant(40, ranks, 0.1)
    times[4, 2] = 1000.0
    job = job_of(arm, Setup(times, window=100.0), graph=graph)
    assert job.run(until=99.0) is None
    standing = [rank for rank in job.ranks if rank.until is not None]
    assert {rank.rank: (rank.steps + 1, rank.worker._receive_buffer.missing()) for rank in standing} == stalls
    found = job.run()  # it continues when the sleeper does
    assert found is not None
    assert arm != "adpsgd" or (found.steps >= 7 * 990 and found.wait_s == 0.0)


def test_a_rank_that_waits_says_so_at_once_and_after_each_exchange_that_brings_nothing():
    """On a ring to the right rank 0 is slow: rank 1 waits for it, also when the others' messages have travelled."""
    times = schedule.constant(1, 3, 1.0)
    times[0, 0] = 10.0
    job, heard = job_of("sgp", Setup(times, Network(bandwidth=1e6), megabytes=2.0), graph="ring-right"), []
    receive = job.coordinator.receive
    job.coordinator.receive = lambda rank, events: (heard.append((job.clock.now, rank, events)), receive(rank, events))
    job.run(until=9.0)
    waiting = [(now, rank, e) for now, rank, events in heard for e in events if isinstance(e, WaitingForMessage)]
    assert [(now, rank, e.seen) for now, rank, e in waiting] == [
        *((1.0, 1, 0), (1.0, 2, 0)),
        *((3.0, 1, 1), (7.0, 1, 2)),  # rank 1's message has travelled alone; so has rank 2's, after a while
    ]


def test_who_waits_to_be_averaged_continues_when_all_its_neighbours_have_finished():
    """An averaging takes 100 s; rank 0 waits for it after four steps, until rank 1 finishes at 30 s."""
    times = np.array([[1.0, 10.0]] * 50)
    job = job_of("adpsgd", Setup(times, Network(bandwidth=1e4), megabytes=1.0, window=25.0))
    job.run(until=29.0)
    assert [rank.steps for rank in job.ranks] == [4, 2]
    job.run(until=31.0)
    assert [rank.steps for rank in job.ranks] == [5, 3]
    found = job.run()
    assert found.steps == 4 + 2
    assert found.drain_s > 70.0


def test_an_average_hides_behind_the_steps_that_may_follow_it():
    network = Network(bandwidth=1e6)
    for seconds, step in ((1.5, 1.0), (4.0, 1.5)):  # of an average; two steps of 1 s may follow, of each four
        setup = Setup(schedule.constant(48, 2, 1.0), network, megabytes=seconds, untimed=16)
        assert 1 / simulate("local", setup).steps_per_s == pytest.approx(step, rel=0.01)
        assert 1 / simulate("local-sgd", setup).steps_per_s == pytest.approx(1.0 + seconds / 4, rel=0.01)


# -- leaders ----------------------------------------------------------------------------------------------------


def test_pulls_are_as_many_as_the_periods_and_no_rank_waits():
    setup = Setup(schedule.constant(64, 8, 0.1), Network(bandwidth=1e9), megabytes=8.0, local_size=4)
    lsgd, easgd = simulate("lsgd", setup), simulate("easgd", setup)
    assert (lsgd.wait_s, easgd.wait_s) == (0.0, 0.0)
    assert easgd.produced == 64 // 16
    assert lsgd.produced == 64 // 16 + 2 * (64 // 4)  # of all, and of two groups
    assert lsgd.seconds == pytest.approx(6.4)


def test_a_pulls_staleness_is_the_steps_that_ranks_take_while_it_travels():
    network = Network(bandwidth=1e6)  # an allreduce of 1 MB between two ranks takes 1 s
    found = simulate("easgd", Setup(schedule.constant(40, 2, 0.3), network, megabytes=1.0))
    assert found.staleness == {3: 4}  # two pulls of two ranks, from 4.8 and 9.6 s on


def test_pulls_of_groups_share_no_wire_and_one_of_all_waits_for_theirs():
    clock, ended = Clock(), []
    plane = DataPlane(clock, Network(operation=1.0), 4, Sizes(0.0), lambda name, _: ended.append((clock.now, name)))
    collectives = [RankCollectives(rank, 4, plane) for rank in range(4)]
    for name, group in (("a", (0, 1)), ("b", (2, 3)), ("c", (0, 1)), ("all", (0, 1, 2, 3)), ("d", (2, 3))):
        for rank in group:
            collectives[rank].allreduce_sum(np.ones(1), name, None if len(group) == 4 else group)
    clock.run(lambda: len(ended) == 5)
    assert [name for _, name in ended] == ["a", "b", "c", "all", "d"]
    assert [at for at, _ in ended] == pytest.approx([1.0, 1.0, 2.0, 3.0, 4.0])
