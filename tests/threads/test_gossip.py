"""Gossip of ranks as threads: every step equals the reference's, and sums move by local updates alone."""

from __future__ import annotations

import threading
from collections import Counter

import networkx
import numpy as np
import pytest

from hvd_async import topology
from hvd_async.algorithms.gossip.error_feedback import SHARED
from hvd_async.algorithms.gossip.rank import PushSumWorker
from hvd_async.testing import Cluster
from tests.conformance.cases import Case
from tests.conformance.gossip_reference import on_time
from tests.threads.gossip_holdups import GATE_TIMEOUT, as_late_as_allowed, holding
from tests.threads.gossip_workload import check, check_sums, job, run, work

SIZES = [1, 2, 3, 4, 5, 8]
GRAPHS = {
    "sgp": ["ring", "exponential", "star", "complete"],
    "osgp": ["ring", "exponential", "star", "complete"],
    "dpsgd": ["ring", "bipartite-exponential", "star", "complete"],
    "adpsgd": ["ring", "bipartite-exponential", "star", "complete"],
    "exact-diffusion": ["ring", "complete"],
    "allreduce": [None],
}
PUSHES = ["sgp", "osgp", "dpsgd"]
MIXED = [*PUSHES, "exact-diffusion"]
SCHEMES = {"base": "uniform", "bipartite-exponential": "metropolis"}
STILL = Case("still", "sgd", 0.0)
UNEVEN = [((5, 0, 3, 8),), ((0, 0, 0, 0), (6, 2, 2, 1), (0, 3, 0, 0)), ((4, 4, 4, 4), (1, 7, 3, 2))]


def options(algorithm: str, graph: str | None = None) -> dict[str, object]:
    """Return options of a plan: those that the algorithm needs, and that bring about most."""
    return {
        "graph": graph or GRAPHS[algorithm][0],
        "weights": "metropolis" if algorithm in ("dpsgd", "exact-diffusion") else "uniform",
        "max_staleness": 2 if algorithm == "osgp" else None,
        "max_local_steps": 2 if algorithm == "adpsgd" else 4,
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("algorithm", "graph"), [(name, graph) for name, own in GRAPHS.items() for graph in own])
def test_every_step_equals_the_reference(algorithm, graph, size):
    one = job([10] * size, algorithm, **options(algorithm, graph))
    records = run(one)
    check(one, records)
    if algorithm in ("sgp", "dpsgd"):  # nothing is late, so nothing is left to chance
        assert all(set(record.stats.staleness) <= {0} for record in records)
        assert all(len(segment.log[-1][1]) == 0 for record in records for segment in record.segments)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("algorithm", GRAPHS)
def test_with_commands_that_come_late(algorithm, seed):
    for graph in ("star", "complete"):
        one = job([7, 7, 7, 7], algorithm, **options(algorithm, graph))
        check(one, run(one, jitter=0.003, seed=seed))


@pytest.mark.parametrize("late", [1, 2])
def test_osgp_in_a_fixed_schedule(late):
    """Nobody sees a message before ``late`` steps later, and then the rank waits for it."""
    one, together = job([20] * 3, "osgp", "ring-right", max_staleness=late), threading.Barrier(3)
    cluster = holding(3, lambda worker, keys: max(keys, default=0) <= worker._step - late)
    records = cluster.run(work(one, before_step=lambda *_: together.wait(GATE_TIMEOUT)))  # type: ignore[arg-type]
    taken = [[here for _, here in record.segments[0].log[:20]] for record in records]
    assert taken == on_time(one.plan.matrices, 20, late, late)
    for record in records:
        assert record.stats.staleness == Counter(min(late, 20 - step) for step in range(late, 21, late))
    check(one, records)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize(
    ("algorithm", "graph"),
    [("sgp", "star"), ("osgp", "star"), ("osgp", "exponential"), ("dpsgd", "bipartite-exponential")],
)
def test_equal_weights_stay_equal_whatever_comes_late_or_stays_out(algorithm, graph, hosts):
    """A rank whose x and w did not belong together would show it: without gradients nothing may move."""
    one = job([9, 14, 4, 2, 7, 7, 12, 1], algorithm, **options(algorithm, graph), local_size=hosts, case=STILL)
    for record in run(one, jitter=0.002, seed=1):
        path = np.array(record.segments[0].path)
        np.testing.assert_allclose(path, np.tile(one.problem.start[0], (len(path), 1)), rtol=1e-12)


@pytest.mark.parametrize("peers", [1, 2])
@pytest.mark.parametrize("algorithm", PUSHES)
def test_graphs_with_weights_of_their_own(algorithm, peers):
    """At sizes that are no power: messages that are late, compressed, of ranks that end early."""
    for size in (5, 6, 7):
        own = {"peers": peers, "average_every": 4, "max_staleness": 2 if algorithm == "osgp" else None}
        for more in ({}, {"gossip_every": 2, "compression": "int8"}):
            steps = ((12,) * size, tuple(3 + rank % 4 for rank in range(size)))
            one = job(steps, algorithm, "base", **own, **more)
            check(one, run(one, jitter=0.001))
    hosts = job([9] * 6, algorithm, "base", local_size=2, max_staleness=0)
    check(hosts, run(hosts))


@pytest.mark.parametrize("size", [3, 5, 6, 7])
@pytest.mark.parametrize("algorithm", ["sgp", "dpsgd"])
def test_ranks_on_a_base_graph_agree_after_a_period(algorithm, size):
    """Ranks apart, that move no more; on the one-peer exponential graph they are far from it then."""
    first = job([60] * size, algorithm, "complete", cuts=frozenset({0}), gossip_every=61)  # (whole periods of all)
    saved = [record.saved[0] for record in run(first)]
    left = {}
    for graph in ("base", "bipartite-exponential"):
        second = job([topology.base(size).period] * size, algorithm, graph, case=STILL, weights=SCHEMES[graph])
        models = np.array([record.segments[0].path[-1] for record in run(second, resumed=saved)])
        left[graph] = np.abs(models - models.mean(axis=0)).max()
    assert left["base"] < 1e-14 < 1e-4 < left["bipartite-exponential"]


@pytest.mark.parametrize("local", [1, 2])
@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("algorithm", PUSHES)
def test_local_steps_between_sending_steps(algorithm, every, local):
    """Each ``every``-th step sends; after the last of them a rank's neighbours have what it had."""
    sent = len(range(every, 13, every))
    for graph in (GRAPHS[algorithm][1], "complete"):
        one = job([12] * 4, algorithm, graph, gossip_every=every, local_size=local, elements=8)
        records = run(one, tweak=as_late_as_allowed if local > 1 else lambda worker: None)
        check(one, records)
        out = sum(len(one.plan.out_edges(0, step)) for step in range(1, 13))
        inside = 12 * 2 * (local - 1)  # a part to, and one from, each other rank of the host
        assert {record.stats.messages_sent for record in records} == {out + inside}
        assert out == (sent if graph != "complete" or local == 2 else 3 * sent)


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("steps", UNEVEN)
@pytest.mark.parametrize("algorithm", MIXED)
def test_local_steps_of_ranks_that_are_uneven_and_cut(algorithm, steps, every):
    one = job(steps, algorithm, **options(algorithm, "star"), gossip_every=every, average_every=4)
    check(one, run(one, jitter=0.001))
    cuts = frozenset(range(len(steps) - 1))
    one = job(steps, algorithm, **options(algorithm, "star"), gossip_every=every, compression="int8", cuts=cuts)
    check_sums(one, run(one, jitter=0.001))


@pytest.mark.parametrize("steps", UNEVEN)
@pytest.mark.parametrize("algorithm", GRAPHS)
def test_uneven_steps_and_several_drains(algorithm, steps):
    one = job(steps, algorithm, **options(algorithm, "star"))
    check(one, run(one, jitter=0.001))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("algorithm", [*MIXED, "allreduce"])
def test_averages_over_all_ranks_that_are_left(algorithm, every):
    one = job(((7, 3, 5, 9), (2, 4, 4, 4)), algorithm, **options(algorithm, "star"), average_every=every)
    records = run(one)
    check(one, records)
    for place, record in enumerate(records):
        assert record.stats.averagings == sum(counts[place] // every for counts in one.steps)
    for step in range(every, 4, every):  # all four are there
        assert len({record.segments[0].path[step - 1].tobytes() for record in records}) == 1


@pytest.mark.parametrize("graph", ["ring", "bipartite-exponential"])
def test_differences_for_no_step_are_read_after_those_for_one(graph):
    """Rank 0 stops one step early, and is sent messages of the step after the last before others know: they add to what
    it has not read yet."""
    one = job((5, 6, 6, 6), "dpsgd", graph, compression="int8", weights="metropolis")

    def before_end(place: int, worker: PushSumWorker) -> None:
        if place == 0:
            senders = {sender for sender, _ in worker._into(0, 7)}
            worker.engine.wait(lambda: all((sender, 7) in worker._receive_buffer.received for sender in senders))

    records = run(one, before_end=before_end)
    check(one, records)
    assert records[0].stats.messages_left > 0


def test_messages_of_8_bits_reach_consensus():
    """The next difference has what rounding left out: ranks apart agree as closely as float32 scales allow."""
    first = job([10] * 4, "dpsgd", compression="int8", cuts=frozenset({0}))
    saved = [record.saved[0] for record in run(first)]
    second = job([40] * 4, "dpsgd", compression="int8", case=STILL)
    models = np.array([record.segments[0].path for record in run(second, resumed=saved)])
    apart = np.abs(models - models.mean(axis=0)).max(axis=(0, 2))
    assert apart[0] > 0.01
    assert apart[-1] < 1e-5 * apart[0]


def test_int8_of_more_than_one_chunk():
    one = job((4, 4, 4), compression="int8", elements=2500)
    records = run(one)
    check(one, records)
    assert records[0].stats.bytes_sent == 2 * 4 * (2 * (2048 + 4) + 16)


# -- cuts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize("steps", [((3, 3, 3), (4, 4, 4), (2, 2, 2)), ((9, 3, 6), (5, 2, 0), (0, 4, 1))])
@pytest.mark.parametrize("algorithm", [*MIXED, "adpsgd"])
def test_cuts_lose_nothing_and_training_goes_on(algorithm, steps, compression):
    if (algorithm, compression) == ("adpsgd", "int8"):
        compression = "bf16"
    for graph in ("star", "complete", GRAPHS[algorithm][1]):
        one = job(steps, algorithm, **options(algorithm, graph), compression=compression, cuts=frozenset({0, 1}))
        records = run(one, jitter=0.001)
        check_sums(one, records)
        for record in records:  # what both ends of an edge know is kept, unless they may know different things
            copies = record.saved[0].kept.copies if record.saved[0] is not None else {}
            copies = {name: copy for name, copy in copies.items() if not name.startswith("difference to")}
            assert (len(copies) > 1) == (compression == "int8" and len(set(steps[0])) == 1)
        if algorithm not in ("osgp", "adpsgd") and len(set(steps[0])) == 1:  # nothing was on its way
            for record in records:
                np.testing.assert_array_equal(record.segments[0].z, record.segments[0].path[-1])


@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize(
    ("graph", "hosts"),
    [(networkx.path_graph(4), (1, 1)), ("exponential", (1, 1)), ("star", (4, 1)), ("star", (1, 2)), ("star", (2, 1))],
    ids=str,
)
def test_a_job_may_be_resumed_on_another_graph_and_with_another_compression(graph, hosts, compression):
    """Each rank has weights and a push-sum weight of its own; what is known of them must fit at both ends."""
    first = job((4, 4, 4, 4), graph="star", compression=compression, cuts=frozenset({0}), local_size=hosts[0])
    saved = [record.saved[0] for record in run(first)]
    weights = [each.kept.weight for each in saved if each is not None]
    assert len(weights) == 4
    assert len(set(weights)) > 1 or hosts[0] > 1
    mean = sum(each.z * each.kept.weight for each in saved if each is not None) / 4

    def nothing_of_other_graphs(worker: PushSumWorker) -> None:
        assert worker._known.saved_state().keys() <= ({SHARED} if hosts == (1, 1) else set())

    for other in ("none", "int8"):
        second = job((5, 5, 5, 5), graph=graph, compression=other, local_size=hosts[1])
        segments = [record.segments[0] for record in run(second, resumed=saved, tweak=nothing_of_other_graphs)]
        expected = mean + sum(segment.moved for segment in segments) / 4
        for segment in segments:
            np.testing.assert_allclose(segment.z, expected, rtol=1e-12, atol=1e-12)


def test_pairs_are_resumed_with_their_own_weights():
    first = job((5, 2, 4), "adpsgd", cuts=frozenset({0}))
    records = run(first)
    saved = [record.saved[0] for record in records]
    second = job((3, 3, 3), "adpsgd")
    segments = [record.segments[0] for record in run(second, resumed=saved)]
    mean = sum(record.segments[0].z for record in records) / 3 + sum(segment.moved for segment in segments) / 3
    np.testing.assert_allclose(segments[0].z, mean, rtol=1e-12, atol=1e-12)


# -- some of the ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", GRAPHS)
def test_a_process_set_gossips_by_itself(algorithm):
    one = job(((5, 2, 4), (1, 1, 2)), algorithm, **options(algorithm), rank_group=(0, 2, 3))
    train = work(one)
    records = Cluster(4).run(lambda rank: None if rank == 1 else train(rank))
    check(one, [record for record in records if record is not None])
