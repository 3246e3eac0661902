"""What the benchmarks of gossip make of the blocks that their jobs bring home, and whom a graph makes wait."""

from __future__ import annotations

import argparse
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async import topology
from scripts.benchmarks.cases import accuracy, exchange_cost, hetero, sleeping_rank, soak
from scripts.benchmarks.support import plot, soak_gossip, trainings
from scripts.benchmarks.support.random_graphs import random_graph
from scripts.benchmarks.support.report import Report
from scripts.benchmarks.support.stalls import Stall, stalls

RANKS = 4


# -- accuracy -------------------------------------------------------------------------------------------------


def trained(arm, fold, score, distance=None):
    own = {"elapsed": 1.0, "accuracy": score, "identical": True, "staleness": {}, "skipped": 0}
    own |= {"distance": distance, "norm": 50.0, "averagings": 9, "steps": 10}
    return {"arm": arm, "fold": fold, "seed": 0, "epochs": 1, "by_rank": [own] * RANKS}


def test_gossip_may_be_further_off_than_partial_allreduce():
    blocks = [trained("horovod", fold, 0.98) for fold in range(5)]
    blocks += [trained(arm, fold, 0.967 + 0.0001 * fold) for arm in ("solo",) for fold in range(5)]
    blocks += [trained("adpsgd", fold, 0.967 + 0.0001 * fold, distance=0.5) for fold in range(5)]
    rows = trainings.rows_of(blocks, {}, "horovod")
    report = Report("accuracy", RANKS, rows, accuracy.COLUMNS)
    trainings.judge(report, "horovod")
    assert [(goal.wanted, goal.met) for goal in report.goals[1:]] == [
        ("within 1 point", False),
        ("within 1.5 points", True),
    ]
    assert rows[2]["distance"] == 0.5
    assert rows[2]["apart_percent"] == pytest.approx(1.0)
    assert rows[2]["averagings_per_step"] == 0.9
    assert "distance" not in rows[1]


# -- hetero ---------------------------------------------------------------------------------------------------


def window(arm, slow_ends, fast_ends, repetition=0, synchronous=False, averagings=0):
    """A block of 10 s with batches of 2."""

    def own(ends):
        stats = {"averagings": averagings, "steps": len(ends)}
        return {"ends": ends, "waited": 0.0, "stats": stats, "latency_s": 0.1, "identical": True}

    ranks = [own(fast_ends)] * (RANKS - 1) + [own(slow_ends)]
    block = {"arm": arm, "repetition": repetition, "synchronous": synchronous, "even": False, "by_rank": ranks}
    return {**block, "window": 10.0, "batch": 2}


def test_hetero_counts_what_ended_within_the_window():
    slow, fast = [5.0, 11.0], [float(second) for second in range(1, 11)]
    adpsgd = window("adpsgd", slow, fast, averagings=9)
    assert hetero.samples_per_second(adpsgd) == pytest.approx(2 * (3 * 10 + 1) / 10)
    horovod = window("horovod", [5.0, 12.0], [5.0, 12.0], synchronous=True)  # its window ends with its last step
    assert hetero.samples_per_second(horovod) == pytest.approx(2 * 4 * 2 / 12)
    setting = {"compute": 1.0, "slowdown": 5.0}
    rows = hetero.rows_of([horovod, adpsgd], setting)
    assert rows[1]["speedup"] == pytest.approx(6.2 / (4 / 3))
    assert rows[1]["bound"] == (5 * 3 + 1) / 4
    assert rows[0]["bound"] == 1.0
    assert rows[1]["averagings_least"] == 0.9
    assert (rows[1]["fast_step_s"], rows[1]["slow_step_s"]) == (1.0, 5.5)
    report = Report("hetero", RANKS, rows, hetero.COLUMNS)
    hetero.judge(report)
    assert [goal.met for goal in report.goals] == [False, True, True]  # 12 / 2 s over 5 s; 4.65 of 4
    assert "too busy" in report.notes[0]


def test_hetero_bounds():
    assert hetero.bound_of("adpsgd-bf16", 8, 10.0) == pytest.approx(71 / 8)
    assert hetero.bound_of("dpsgd", 8, 10.0) == 1.0
    assert hetero.bound_of("majority", 8, 10.0) is None


# -- who waits ------------------------------------------------------------------------------------------------


def test_on_a_ring_one_more_rank_each_way_stops_at_each_step():
    assert stalls(topology.ring(8), 3, 10) == {
        2: Stall(10, (3,)),
        4: Stall(10, (3,)),
        1: Stall(11, (2,)),
        5: Stall(11, (4,)),
        0: Stall(12, (1,)),
        6: Stall(12, (5,)),
        7: Stall(13, (0, 6)),
    }


def test_on_a_directed_ring_ranks_stop_one_after_the_other():
    assert stalls(topology.ring(4, "right"), 1, 5) == {2: Stall(5, (1,)), 3: Stall(6, (2,)), 0: Stall(7, (3,))}


def test_a_dynamic_graph_stops_those_whose_turn_it_is():
    # Hops 1, 2, 4 at steps 1, 2, 3. Rank 0 does not end step 2: rank 2 waits there; at step 3 rank 4 waits for rank 0
    # and rank 6 for rank 2; at step 4 rank 1 waits for 0, 3 for 2, 5 for 4, 7 for 6.
    found = stalls(topology.exponential(8), 0, 2)
    assert found == {
        2: Stall(2, (0,)),
        4: Stall(3, (0,)),
        6: Stall(3, (2,)),
        1: Stall(4, (0,)),
        3: Stall(4, (2,)),
        5: Stall(4, (4,)),
        7: Stall(4, (6,)),
    }


def test_staleness_lets_ranks_go_on():
    assert stalls(topology.ring(4, "right"), 0, 5, staleness=2) == {
        1: Stall(7, (0,)),
        2: Stall(10, (1,)),
        3: Stall(13, (2,)),
    }


def test_under_dpsgd_whose_messages_go_a_step_ahead_all_stop_a_step_later():
    def slept(arm):
        ranks = [{"slept": 5 if rank == 2 else None} for rank in range(4)]
        return sleeping_rank.expected({"arm": arm, "topology": "ring", "sleeper": 2, "by_rank": ranks})

    assert slept("sgp") == {1: Stall(5, (2,)), 3: Stall(5, (2,)), 0: Stall(6, (1, 3))}
    assert slept("dpsgd") == {1: Stall(6, (2,)), 3: Stall(6, (2,)), 0: Stall(7, (1, 3))}
    assert slept("adpsgd") == {}


@given(st.integers(2, 9), st.integers(0, 2), st.integers(1, 9), st.randoms(use_true_random=False))
def test_everybody_stops_at_last(size, staleness, step, draws):
    graph = random_graph(size, False, draws)
    sleeper = draws.randrange(size)
    found = stalls(graph, sleeper, step, staleness)
    assert found.keys() == set(range(size)) - {sleeper}
    last = {rank: stall.step for rank, stall in found.items()} | {sleeper: step - 1}
    for rank, stall in found.items():
        assert stall.step >= step + staleness
        assert all(last[sender] < stall.step - staleness for sender in stall.senders)
        assert set(stall.senders) <= set(graph.into(rank, stall.step - staleness - 1))


# -- independence ---------------------------------------------------------------------------------------------


def asleep(arm, waits):
    """Rank 0 of 3 sleeps 10 s in its step 3; steps take 1 s; ``waits``: (rank, step): (seconds, for whom)."""
    ranks = []
    for rank in range(3):
        now, ends, waited, whom = 0.0, [], [], []
        for step in range(1, 8):
            seconds, sender = waits.get((rank, step), (0.01, None))
            now += 10.0 if (rank, step) == (0, 3) else 1.0 + seconds
            ends.append(now)
            waited.append(seconds)
            whom.append(sender)
        ranks.append({"ends": ends, "waits": waited, "waited_for": whom, "identical": True})
        ranks[-1] |= {"slept": 3 if rank == 0 else 0, "slept_at": 2.0 if rank == 0 else None}
    setting = {"sleep": 10.0, "sleeper": 0, "topology": "ring-right", "compute": 1.0}
    return {**setting, "arm": arm, "repetition": 0, "by_rank": ranks}, setting


@pytest.mark.parametrize(
    ("waits", "right"),
    [
        ({(1, 3): (9.0, 0), (2, 4): (8.0, 1)}, 2),
        ({(1, 3): (9.0, 2), (2, 4): (8.0, 1)}, 1),  # for another
        ({(1, 4): (9.0, 0), (2, 4): (8.0, 1)}, 1),  # in another step
        ({(1, 3): (9.0, 0), (2, 4): (8.0, 1), (2, 6): (9.0, 1)}, 1),  # twice
        ({(1, 3): (9.0, 0)}, 1),  # not at all
    ],
)
def test_independence_compares_waits_with_the_graph(waits, right):
    block, setting = asleep("sgp", waits)
    rows = sleeping_rank.rows_of([block], setting)
    report = Report("independence", 3, rows, sleeping_rank.COLUMNS)
    sleeping_rank.judge(report)
    assert report.goals[0].value == f"{right} of 2 ranks"
    assert report.goals[0].met is (right == 2)
    assert report.goals[0].exact
    assert (rows[1]["expected_step"], rows[2]["expected_step"]) == (0, 1)


@pytest.mark.parametrize(
    ("waits", "kept"),
    [({}, 6), ({(2, step): (4.0, None) for step in range(3, 8)}, 2)],
)
def test_independence_of_adpsgd(waits, kept):
    block, setting = asleep("adpsgd", waits)
    before = 1 / 1.8  # steps a second: what ended in the last 1.8 of the 2 s before
    assert sleeping_rank.share(block, 1) == pytest.approx(6 / 10 / before)  # (then the run ends)
    assert sleeping_rank.share(block, 2) == pytest.approx(kept / 10 / before)
    rows = sleeping_rank.rows_of([block], setting)
    report = Report("independence", 3, rows, sleeping_rank.COLUMNS)
    sleeping_rank.judge(report)
    assert [goal.met for goal in report.goals] == [kept == 6, True]
    assert rows[0]["as_expected"] is None


# -- soak -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.booleans(), st.randoms(use_true_random=False))
def test_random_graphs_connect_all(size, symmetric, draws):
    graph = random_graph(size, symmetric, draws)
    assert graph.unreachable() is None
    assert graph.symmetric or not symmetric
    assert graph.size == size


def test_random_graphs_differ():
    draws = random.Random(0)
    assert len({random_graph(8, False, draws).phases for _ in range(20)}) == 20


def soaked(arm, **changes):
    notes = [{"round": 10.0 * i, "mb": 300.0} for i in range(101)]
    stats = {
        "steps": 900,
        "averagings": 250,
        "messages_sent": 250,
        "messages_taken": 250,
        "messages_left": 0,
        "staleness": {"0": 3, "2": 1},
    }
    own = {"elapsed": 10.0, "identical": True, "stats": stats, "memory": notes}
    block = {"arm": arm, "done": 1000, "graphs_used": 3, "weights_off": [0.0, 1e-15, 0.0], "by_rank": [own] * 8}
    block |= changes
    stopper = argparse.Namespace(stops=5, seconds=2.5)
    return soak_gossip.row_of(block, {"rounds": 1000}, soak.common(block, stopper))


def test_soak_of_gossip():
    row = soaked("adpsgd")
    assert (row["value"], row["produced"], row["applied"], row["weights_off"]) == (100.0, 2000, 2000, 1e-15)
    assert (row["staleness_mean"], row["staleness_most"]) == (0.5, 2)
    report = Report("soak", 8, [row], soak.COLUMNS)
    soak_gossip.judge(report, row)
    assert [goal.met for goal in report.goals] == [True] * 5
    assert [goal.exact for goal in report.goals] == [True] * 4 + [False]  # but memory
    assert "pairings" in report.goals[0].what
    report.text()


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"done": 999}, "steps of each rank"),
        ({"weights_off": [0.0, 1e-3]}, "push-sum weights"),
    ],
)
def test_soak_of_gossip_that_fails(changes, missed):
    row = soaked("sgp", **changes)
    report = Report("soak", 8, [row], soak.COLUMNS)
    soak_gossip.judge(report, row)
    [goal] = [goal for goal in report.goals if not goal.met]
    assert goal.what.startswith(missed)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, None),
        ({"applied": 7999}, "gradients applied"),
        ({"applied_alike": False}, "gradients applied"),
        ({"identical": False}, "replicas identical"),
        ({"slope_mb": 6.0}, "MB in 100,000 rounds"),
    ],
)
def test_soak_of_partial_allreduce(changes, missed):
    """What must not be lost is judged in runs of any length, memory in long ones."""
    row = {"arm": "solo", "produced": 8000, "applied": 8000, "applied_alike": True, "identical": True, "slope_mb": 1.0}
    report = Report("soak", 4, [], soak.COLUMNS)
    soak.judge(report, row | changes)
    assert [goal.what.startswith(missed) for goal in report.goals if not goal.met] == [True] * (missed is not None)
    assert [goal.exact for goal in report.goals] == [True, True, False]


# -- exchange -------------------------------------------------------------------------------------------------


def test_exchange_compares_with_process_sets_that_begin_alike():
    def block(arm, seconds, repetition=0):
        own = [{"seconds": [s] * 3} for s in seconds]
        return {"arm": arm, "megabytes": 1.0, "repetition": repetition, "rounds": 3, "within": 0.1, "by_rank": own}

    blocks = [block("pairs", [0.1, 0.3]), block("pairs-unaligned", [0.4, 0.4]), block("hop", [0.1, 0.1])]
    blocks += [block("alltoall", [0.2, 0.2]), block("alltoall-unaligned", [0.1, 0.3], 0)]
    blocks += [block("alltoall-unaligned", [0.2, 0.4], 1), block("alltoall-unaligned", [0.1, 0.1], 2)]
    rows = {row["arm"]: row for row in exchange_cost.rows_of(blocks, {"seed": 0})}
    assert rows["pairs"]["value"] == pytest.approx(200)
    assert rows["pairs"]["slowest_ms"] == pytest.approx(300)
    assert rows["alltoall"]["speedup"] == pytest.approx(1.0)
    assert rows["hop"]["speedup"] == pytest.approx(2.0)
    own = rows["alltoall-unaligned"]
    assert (own["value"], own["low"], own["high"]) == pytest.approx((200, 100, 300))
    assert own["speedup"] == pytest.approx(2.0)


def test_exchange_refuses_other_arms():
    args = argparse.Namespace(arms="alltoall,solo", megabytes=[1.0], rounds=1, repetitions=1, seed=0, chunk=1.0)
    with pytest.raises(ValueError, match="no arm 'solo' in this case"):
        exchange_cost.blocks_of(args)


# -- plots ----------------------------------------------------------------------------------------------------


def test_arms_that_are_drawn_together_look_different():
    arms = ["horovod", "ddp", "all", "majority", "solo", "auto", "sgp", "osgp", "dpsgd", "adpsgd"]
    assert len({plot.colour(arm, arms) for arm in arms}) == len(arms)
    others = ["horovod", "sgp", "osgp", "dpsgd", "adpsgd", "sgp-int8", "dpsgd-int8", "dpsgd-bf16"]
    assert len({plot.colour(arm, others) for arm in others}) == len(others)
