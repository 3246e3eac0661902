"""Gossip of ranks as threads: every step equals the float64 reference's, and sums move by local updates alone.

Two tables of jobs cross the options: graphs with numbers of ranks and ends; messages with hosts, averages and steps
that do not send. What holds in any order of events, whatever the ranks' speeds, is in ``tests/machines``.
"""

from __future__ import annotations

import networkx
import numpy as np
import pytest

from hvd_async.algorithms.gossip.config import COMPRESSIONS
from hvd_async.algorithms.gossip.error_feedback import SHARED
from hvd_async.algorithms.gossip.rank import PushSumWorker
from hvd_async.errors import GradientLossError, ReplicaStateError
from hvd_async.testing import Cluster
from tests.conftest import LONG_RUN
from tests.covering import covering
from tests.threads.gossip_holdups import as_late_as_allowed
from tests.threads.gossip_workload import Job, check, check_sums, job, run, work

GRAPHS = {
    "sgp": ["ring", "exponential", "star", "complete", "base"],
    "osgp": ["ring", "exponential", "star", "complete", "base"],
    "dpsgd": ["ring", "bipartite-exponential", "star", "complete", "base"],
    "adpsgd": ["ring", "bipartite-exponential", "star", "complete"],
    "exact-diffusion": ["ring", "complete"],
    "allreduce": [None],
}
SIZES = [1, 2, 3, 4, 5, 7]
ENDS = {
    "even": [(10,)],
    "uneven": [(5, 0, 3, 8)],
    "drains": [(0,), (6, 2, 2, 1), (0, 3, 0, 0)],
}
"""Steps of the ranks before each end, repeated for further ranks."""


def steps_of(size: int, ends: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the steps of each rank before each end."""
    return [tuple(counts[rank % len(counts)] for rank in range(size)) for counts in ends]


@pytest.mark.parametrize(
    ("kind", "size", "ends", "peers"),
    covering(
        ([(name, graph) for name, own in GRAPHS.items() for graph in own], SIZES, list(ENDS), (1, 2)),
        3 if LONG_RUN else 2,
    ),
    ids=str,
)
def test_every_step_equals_the_reference(kind, size, ends, peers):
    algorithm, graph = kind
    one = job(
        steps_of(size, ENDS[ends]),
        algorithm,
        graph,
        weights="metropolis" if algorithm in ("dpsgd", "exact-diffusion") and graph != "base" else "uniform",
        max_staleness=2 if algorithm == "osgp" else None,
        max_local_steps=2 if algorithm == "adpsgd" else 4,
        peers=min(peers, max(1, size - 1)) if graph == "base" else 1,
        average_every=0 if algorithm == "adpsgd" else 3 if ends == "uneven" else 1 if algorithm == "allreduce" else 0,
    )
    records = run(one, jitter=0.0 if ends == "even" else 0.001)
    check(one, records)
    if algorithm in ("sgp", "dpsgd") and ends == "even":  # nothing is late, so nothing is left to chance
        assert all(set(record.stats.staleness) <= {0} for record in records)
        assert all(len(segment.log[-1][1]) == 0 for record in records for segment in record.segments)


PUSHES = (("sgp", "star", 0), ("osgp", "star", 1), ("osgp", "exponential", 2), ("dpsgd", "ring", 0))
"""With a graph and a staleness. On a star of 3 hosts push-sum weights are not 1."""
HOSTS = ((1, 1), (4, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2))
"""Hosts, and ranks of each."""
CROSSED = covering((PUSHES, tuple(COMPRESSIONS), (0, 3), (1, 2), HOSTS), 4 if LONG_RUN else 2)
"""Any two options in all their values: an algorithm, a compression, ``average_every``, ``gossip_every``, hosts."""


def crossed(row: tuple, ends: list[tuple[int, ...]], **more: object) -> Job:
    """Return the job of a row whose ranks take these steps; 7 weights cannot be shared out evenly in a host."""
    (algorithm, graph, late), compression, average_every, gossip_every, (hosts, local) = row
    return job(
        steps_of(hosts * local, ends), algorithm, graph, max_staleness=late, compression=compression,
        average_every=average_every, gossip_every=gossip_every, local_size=local,
        weights="metropolis" if algorithm == "dpsgd" else "uniform", elements=7, **more,
    )  # fmt: skip


@pytest.mark.parametrize("row", CROSSED, ids=str)
def test_crossed_options_equal_the_reference(row):
    local, one = row[-1][1], crossed(row, [(7,), (4,)])
    records = run(one, tweak=as_late_as_allowed if local > 1 else lambda worker: None)
    check(one, records)
    for place, record in enumerate(records):
        first = records[place - place % local]
        for own, others in zip(record.segments, first.segments, strict=True):
            np.testing.assert_array_equal(own.path, others.path)
        assert record.stats.averagings == (7 // 3 + 4 // 3 if one.plan.config.average_every else 0)


@pytest.mark.parametrize("row", CROSSED, ids=str)
def test_ranks_that_end_early_cut_and_drain_lose_nothing(row):
    """Hosts whose ranks all finish first, and hosts of which one rank continues."""
    one = crossed(row, [(4,), (5, 0, 3, 8), (2, 6, 1), (6, 6, 2, 2, 4)], cuts=frozenset({0, 1}), saves=False)
    check_sums(one, run(one, jitter=0.001))


@pytest.mark.parametrize(("algorithm", "last"), [("dpsgd", 7), ("exact-diffusion", 6)])
def test_differences_for_no_step_are_read_after_those_for_one(algorithm, last):
    """Rank 0 stops one step early, and is sent messages of the step after its last one before others know: they add to
    what it has not read yet."""
    one = job(((5, 6, 6, 6), (6, 6, 6, 6)), algorithm, "ring", compression="int8", weights="metropolis")
    ended = list[int]()

    def before_end(place: int, worker: PushSumWorker) -> None:
        if place == 0 and not ended:
            ended.append(place)
            senders = {sender for sender, _ in worker._into(0, last)}
            worker.engine.wait(lambda: all((sender, last) in worker._receive_buffer.received for sender in senders))

    records = run(one, before_end=before_end)
    check(one, records)
    assert records[0].stats.messages_left > 0


@pytest.mark.parametrize(
    ("graph", "hosts", "compression"),
    [
        (networkx.path_graph(4), (1, 1), "int8"),
        ("exponential", (1, 1), "none"),
        ("star", (4, 1), "int8"),
        ("star", (1, 2), "int8"),
        ("star", (2, 1), "none"),
    ],
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


def test_weights_that_are_lost_are_noticed_at_the_drain():
    def tweak(worker: PushSumWorker) -> None:
        if worker._place == 1:
            deliver = worker._exchanges._deliver
            worker._exchanges._deliver = lambda sender, key, weight, data: deliver(sender, key, weight / 2, data)

    for outcome in Cluster(3).outcomes(work(job([3, 3, 3]), tweak=tweak)):
        assert isinstance(outcome, GradientLossError)
        assert "push-sum weights of 3 ranks sum to" in str(outcome)


def test_a_worker_is_used_in_its_order():
    def train(rank: int) -> None:
        for algorithm in ("sgp", "adpsgd"):
            one: Job = job([1, 1], algorithm)
            worker = one.worker(rank, lambda flush: None)
            z = one.problem.start[rank]
            worker.begin(z.copy())
            with pytest.raises(ReplicaStateError, match="before it was registered"):
                worker.mix(z.copy(), z.copy())
            worker.connect(["w"], [1])
            worker.announce_finished(True)
            with pytest.raises(ReplicaStateError, match="was interrupted: call it again"):
                worker.mix(z.copy(), z.copy())
            worker.drain()
            assert worker.settled

    Cluster(2).run(train)
