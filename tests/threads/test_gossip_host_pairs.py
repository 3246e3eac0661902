"""AD-PSGD of hosts: compression, steps between averagings, hosts and their ranks, uneven steps, drains, cuts."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.gossip.rank import PushSumWorker
from hvd_async.testing import Cluster, MemoryCollectives
from tests.conftest import LONG_RUN
from tests.covering import covering
from tests.threads.gossip_holdups import at, pass_gate
from tests.threads.gossip_workload import Job, check, check_sums, job, run, work
from tests.threads.test_gossip_holdups import finishing

HOSTS = ((1, 2), (2, 2), (2, 3), (3, 2), (4, 3))
"""Hosts, and ranks of each."""


@dataclass(frozen=True)
class Crossing:
    """One row of the table."""

    compression: str
    most: int
    graph: str
    hosts: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.compression}-{self.most}-{self.graph}-{self.hosts}x{self.ranks}"

    def job(self, counts: tuple[tuple[int, ...], ...], **options: Any) -> Job:
        """Return a job whose ranks take these steps before each end; each tuple is repeated for further ranks."""
        size = self.hosts * self.ranks
        steps = [tuple(itertools.islice(itertools.cycle(each), size)) for each in counts]
        return job(
            steps, "adpsgd", self.graph, max_local_steps=self.most, compression=self.compression,
            local_size=self.ranks, elements=7, **options,
        )  # fmt: skip


DIMENSIONS: list[tuple[Any, ...]] = [("none", "fp16", "bf16"), (1, 4), ("ring", "star"), HOSTS]


def table(crossed: int) -> list[Crossing]:
    """Rows in which any ``crossed`` options have all their values."""
    rows = covering(DIMENSIONS, crossed)
    return [Crossing(compression, most, graph, hosts, ranks) for compression, most, graph, (hosts, ranks) in rows]


TABLE = table(4 if LONG_RUN else 2)
EXACT = [row for row in table(4 if LONG_RUN else 3) if row.compression == "none"]


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_step_equals_the_reference(row):
    one = row.job(((7,), (4,)))
    records = run(one, jitter=0.001)
    (check if row.compression == "none" else check_sums)(one, records)
    for place, record in enumerate(records):
        first = records[place - place % row.ranks]
        for own, others in zip(record.segments, first.segments, strict=True):
            np.testing.assert_array_equal(own.path, others.path)
        assert record.stats.averagings > 0 or row.hosts == 1


@pytest.mark.parametrize("row", EXACT, ids=str)
def test_ranks_that_end_early_equal_the_reference(row):
    one = row.job(((5, 0, 3, 8), (0,), (2, 6, 1), (0, 0, 4)))
    check(one, run(one, jitter=0.001))


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_ranks_that_end_early_cut_and_drain_lose_nothing(row):
    """Hosts whose ranks all are done before, and hosts of which one continues; after a cut a host's ranks are alike."""
    one = row.job(((4,), (5, 0, 3, 8), (2, 6, 1), (0,), (6, 6, 2, 2, 4)), cuts=frozenset({0, 1, 3}))
    records = run(one, jitter=0.001)
    check_sums(one, records)
    for end in one.cuts:
        for place, record in enumerate(records):
            own, first = record.segments[end], records[place - place % row.ranks].segments[end]
            np.testing.assert_array_equal(own.z, first.z)


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("stuck", [0, 1])
def test_a_host_that_is_stuck_holds_up_no_other(stuck, most):
    """One of its ranks continues when all ranks of the other hosts have taken all their steps; its engines have served
    them meanwhile, which have no other neighbour."""
    finished, one = threading.Semaphore(0), job([12] * 6, "adpsgd", "star", max_local_steps=most, local_size=2)

    def wait_for_others(worker: PushSumWorker) -> None:
        for _ in range(4):
            pass_gate(finished)

    records = run(one, before_step=at(stuck, 3, wait_for_others), tweak=finishing(finished))
    check(one, records)
    log = records[stuck].segments[0].log
    before = [entry[0] for entry in log[: log.index(("step", 3))]]
    assert before.count("landed") >= 2 * ((12 - 1) // most)


@pytest.mark.parametrize("most", [1, 3])
def test_no_host_takes_more_steps_between_two_averagings(most):
    """Whichever of its ranks requests them: the first ones finish, and one of each host continues."""
    one = job([1, 4, 40] * 3, "adpsgd", "ring", max_local_steps=most, local_size=3)
    records = run(one, jitter=0.001)
    check(one, records)
    for record in records[2::3]:  # (they request them from the first's and second's end on)
        kinds = [entry[0] for entry in record.segments[0].log]
        first = record.segments[0].log.index(("step", 6))
        last = len(kinds) - kinds[::-1].index("landed")
        assert max(map(len, "".join("s" if kind == "step" else " " for kind in kinds[first:last]).split())) <= most


def taking(seconds: float) -> Callable[[MemoryCollectives], MemoryCollectives]:
    """For ``Cluster(wrap=...)``: exchanges take so long, and the next waits as long for more ranks."""

    def wrap(collectives: MemoryCollectives) -> MemoryCollectives:
        exchange = collectives.alltoall

        def alltoall(*args: Any, **more: Any) -> Any:
            handle, until = exchange(*args, **more), time.monotonic() + seconds
            done = handle.done
            handle.done = lambda: time.monotonic() >= until and done()  # type: ignore[method-assign]
            handle.seconds_to_poll = lambda: 0.001  # type: ignore[method-assign]
            return handle

        collectives.alltoall = alltoall  # type: ignore[method-assign]
        return collectives

    return wrap


def test_an_averaging_that_was_requested_by_a_rank_that_finishes_is_requested_by_the_next():
    """The request is forgotten while it waits for the other host, which is stuck."""
    finished, one = threading.Semaphore(0), job([2, 6, 3, 3], "adpsgd", "ring", max_local_steps=1, local_size=2)

    def wait_for_others(worker: PushSumWorker) -> None:
        for _ in range(2):
            pass_gate(finished)

    def before_step(place: int, step: int, worker: PushSumWorker) -> None:
        if (place, step) == (2, 1):
            wait_for_others(worker)
        if (place, step) == (1, 3):
            worker.engine.wait(lambda: 0 in worker._receive_buffer.finished)

    train = work(one, before_step=before_step, tweak=finishing(finished))
    check(one, Cluster(4, wrap=taking(0.02)).run(train))


@pytest.mark.parametrize("counts", [((9,),), ((9, 0), (0, 9), (3, 3))])
def test_a_host_alone_waits_for_no_rank(counts):
    one = job([(own * 3)[:3] for own in counts], "adpsgd", "complete", max_local_steps=1, local_size=3)
    check(one, run(one))


@pytest.mark.parametrize("end", [frozenset(), frozenset({0})], ids=["drain", "cut"])
def test_a_cut_continues_as_it_would_have(end):
    """A job that begins with the states of a cut keeps the mean, and so does the one that has made it."""
    first = job(((5, 2, 4, 1),), "adpsgd", "ring", local_size=2, cuts=frozenset({0}))
    records = run(first, jitter=0.001)
    saved = [record.saved[0] for record in records]
    assert all(one is not None for one in saved)
    second = job(((3, 0, 3, 3), (2, 2, 2, 2)), "adpsgd", "ring", local_size=2, cuts=end)
    segments = [record.segments for record in run(second, resumed=saved, jitter=0.001)]
    mean = sum(record.segments[0].z for record in records) / 4
    mean = mean + sum(segment.moved for own in segments for segment in own) / 4
    for own in segments:
        np.testing.assert_allclose(own[-1].z, mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"local_size": 2}, {"algorithm": "sgp", "local_size": 4}], ids=str)
def test_states_of_ranks_that_were_not_alike_are_refused(options):
    first = job(((5, 2, 4, 1),), **{"algorithm": "adpsgd", "graph": "ring", **options}, cuts=frozenset({0}))
    saved = [record.saved[0] for record in run(first)]
    second = job(((1,) * 4,), "adpsgd", "ring", local_size=4)
    with pytest.raises(ValueError, match=r"weights of their own.*hierarchical=4 only if it was saved so"):
        run(second, resumed=saved)
