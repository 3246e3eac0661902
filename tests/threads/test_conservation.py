"""No gradient is lost and none counts twice, by values; replicas get the same rounds; staleness keeps its bound."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hvd_async.algorithms.eager.rank import EagerWorker, RoundsInFlight
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conftest import LONG_RUN
from tests.covering import covering
from tests.threads.workload import Record, check_conservation, check_promises, plan, run, work

QUORUMS = ["solo", "majority", 2, "all"]


DIMENSIONS: list[tuple[Any, ...]] = [
    (*QUORUMS, 0.75),
    (0, 1, 2, 16),  # staleness
    ((6,), (6, 6), (7, 5, 6), (0, 4, 9, 2), (6, 0, 0), (6, 6, 6, 6, 6)),  # steps of the ranks
    (None, 0, -1),  # the slow one
    ((1, False), (2, False), (3, True)),  # buckets, and whether some leave before the step
]


@pytest.mark.parametrize(
    ("quorum", "staleness", "steps", "slow", "buckets"), covering(DIMENSIONS, 4 if LONG_RUN else 2), ids=str
)
def test_conservation(quorum, staleness, steps, slow, buckets):
    (count, early), size = buckets, len(steps)
    slow = None if len(set(steps)) > 1 else slow
    quorum = min(quorum, size) if quorum == 2 else quorum
    one = plan(quorum, staleness, steps, None if slow is None else slow % size, count, early=early)
    check_promises(one, run(one, jitter=0.002 * ((size + staleness) % 2)))


# -- staleness ------------------------------------------------------------------------------------------------


def test_a_late_rank_finds_three_rounds_and_then_none():
    """Rank 1 takes its first step when rank 0 has finished three."""
    first_three = threading.Event()

    def train(rank: int) -> list[int]:
        engine = local_engine()
        assert engine is not None
        one = plan("solo", 16, [4, 4])
        worker = one.worker(engine)
        worker.connect(["w"], [1])
        returned = []
        if rank == 1:
            assert first_three.wait(30)
            engine.wait(lambda: len(worker._rounds) == 3)
        for step in range(1, 4):
            returned.append(worker.step(one.rows(rank, step), [{"lr": 1.0}]))
        first_three.set()
        worker.drain()
        return returned

    assert Cluster(2).run(train) == [[1, 1, 1], [3, 0, 0]]


# -- do these tests see a bug? --------------------------------------------------------------------------------


def _late(transit: RoundsInFlight, version: int) -> bool:
    """Whether a gradient of ``version`` comes when a round has passed it by."""
    return transit._next_ready > version + 1


def _overwrites_values(worker: EagerWorker) -> None:
    """Do as the published code: the late gradient is zeroed; here even its count is kept, so only values tell."""
    transit = worker._in_flight
    original = transit.add

    def add(bucket: int, vector, version: int) -> None:  # type: ignore[no-untyped-def]
        if _late(transit, version):
            vector[:-1] = 0
        original(bucket, vector, version)

    transit.add = add  # type: ignore[method-assign]


def test_values_are_checked_and_not_counts_alone() -> None:
    one = plan("solo", 2, [6, 6, 6], slow=1, buckets=2)
    records: list[Record] = Cluster(3).run(work(one, _overwrites_values))
    with pytest.raises(AssertionError, match="lost or twice"):
        check_conservation(one, records)


def test_gradients_that_are_lost_are_noticed_at_the_drain() -> None:
    def drops(worker: EagerWorker) -> None:
        worker._in_flight.add = lambda bucket, vector, version: None  # type: ignore[method-assign]

    for record in Cluster(2).run(work(plan("all", 0, [2, 2]), drops)):
        assert "were produced but" in str(record.lost)
