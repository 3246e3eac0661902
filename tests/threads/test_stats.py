"""Counts that an optimizer keeps: who was there, who held others up, what travelled, what was held in memory."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.eager.config import EagerConfig
from hvd_async.algorithms.eager.gradient_format import GradientFormat, ReducedRound
from hvd_async.algorithms.eager.rank import EagerWorker
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.simulation.arms import EagerJob
from hvd_async.simulation.job import Setup
from hvd_async.simulation.network import Network
from hvd_async.stats import Stats
from hvd_async.testing import Cluster
from tests.threads.workload import plan as make_plan
from tests.threads.workload import work

ELEMENTS = 1000
NBYTES = 4 * (ELEMENTS + 1)
HYPER: list[dict[str, Any]] = [{"lr": 1.0}]


def worker(quorum: Any, staleness: int = 16, buckets: int = 1, **wire: Any) -> EagerWorker:
    """One that is open, with buckets of 1000 float32 elements."""
    engine = local_engine()
    assert engine is not None
    layout = {"zeros": lambda bucket: np.zeros(ELEMENTS + 1, np.float32), "nbytes": (NBYTES,) * buckets, **wire}
    one = EagerWorker(
        engine, EagerConfig(quorum, staleness, 0.0, 0, buckets), GradientFormat(**layout), lambda flush: None
    )
    one.connect(["w"], [1])
    return one


def rows(buckets: int = 1) -> dict[int, Any]:
    return {bucket: np.ones(ELEMENTS + 1, np.float32) for bucket in range(buckets)}


# -- contributors ---------------------------------------------------------------------------------------------


def test_contributors_count_those_in_time_and_not_the_gradients():
    """Rank 1 takes its three steps when rank 0 has taken five: these rounds had one rank each, the last has none."""
    ahead = threading.Event()

    def train(rank: int) -> Stats:
        one = worker("solo")
        assert rank == 0 or ahead.wait(30)
        for _ in range((5, 3)[rank]):
            one.step(rows(), HYPER)
        ahead.set()
        one.drain()
        return one.stats()

    for stats in Cluster(2).run(train):
        assert stats.contributors == {0: 1, 1: 5}
        assert stats.rounds == 6


# -- seconds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quorum", ["all", "solo"])
def test_a_rank_that_others_wait_for_is_named_with_their_seconds_and_a_sum_with_its_own(quorum):
    """In simulated time: rank 1 takes 1/8 s longer for each step than the others, and a sum takes half a second."""
    setup = Setup(np.tile([0.0, 0.125, 0.0], (4, 1)), Network(operation=0.5))
    job = EagerJob("", setup, quorum)
    job.run()
    for rank in job.ranks:
        stats = rank.worker.stats()
        assert stats.held_s == (0.0, 2 * 4 * 0.125 if quorum == "all" else 0.0, 0.0), "every rank knows"
        assert (stats.latency_s, stats.latency_max_s) == (0.5, 0.5)


# -- bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [(), (100, 20)])
def test_bytes_sent(sent):
    def train(rank: int) -> Stats:
        one = worker("all", buckets=2, sent=sent)
        for _ in range(3):
            one.step(rows(2), HYPER)
        one.drain()
        return one.stats()

    for stats in Cluster(2).run(train):
        assert stats.bytes_sent == 3 * (120 if sent else 2 * NBYTES)


@pytest.mark.parametrize("quorum", ["solo", "majority", "all"])
@pytest.mark.parametrize("buckets", [1, 3])
def test_at_most_two_vectors_are_held_and_one_for_each_round_that_waits(quorum, buckets):
    """The slow rank finds as many rounds as the bound lets the others go ahead."""
    staleness = 4
    one = make_plan(quorum, staleness, [12, 12, 12], slow=2, buckets=buckets, early=True)
    whole = buckets * one.row(0, 1, 0).nbytes
    for rank, record in enumerate(Cluster(3).run(work(one))):
        assert record.stats is not None
        most = max(record.per_step)
        assert record.stats.peak_bytes <= (2 + most) * whole
        assert record.stats.held_bytes == 0, f"rank {rank} keeps {record.stats.held_bytes} bytes"
        if quorum == "all":
            assert record.stats.peak_bytes <= 3 * whole
        elif quorum == "solo" and rank == 2:
            assert most >= staleness
            assert record.stats.peak_bytes >= most * whole


def test_a_rank_that_serves_others_holds_what_comes_back_and_then_nothing():
    """Rank 1 never steps: round by round it holds what came back until it has applied it, and then nothing."""
    applied: list[tuple[int, int]] = []
    next_step = threading.Semaphore(1)

    def train(rank: int) -> Stats:
        one = worker("solo")
        if rank == 0:
            for _ in range(6):
                assert next_step.acquire(timeout=30)
                one.step(rows(), HYPER)
            one.drain()
        else:

            def note(round_: ReducedRound) -> None:
                applied.append((round_.index, one.stats().held_bytes))
                next_step.release()

            one.apply = note
            one.drain()
        return one.stats()

    for stats in Cluster(2).run(train):
        assert stats.held_bytes == 0
        assert stats.peak_bytes <= 2 * NBYTES
    assert applied == [(index, NBYTES) for index in range(1, 7)]


def test_a_cut_holds_what_is_pending_twice_until_the_next_step():
    """Gradients that are pending at a cut are for its checkpoint, and also still on their way."""
    ahead = threading.Event()

    def train(rank: int) -> list[int]:
        one, held = worker("solo"), []
        assert rank == 0 or ahead.wait(30)
        one.step(rows(), HYPER)
        ahead.set()
        for _ in range(2):
            one.drain(False)
            held.append(one.stats().held_bytes)
        one.drain()
        return [*held, one.stats().held_bytes]

    assert Cluster(2).run(train) == [[0, 0, 0], [2 * NBYTES, 2 * NBYTES, 0]]
