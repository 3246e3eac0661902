"""Hosts of which a rank's optimizer is gone, or that has left, under gossip: the others continue with their weights.

(``tests/machines`` has ranks that are no hosts.)
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.gossip.config import rank_class
from hvd_async.algorithms.gossip.message_format import NumpyMessageFormat
from hvd_async.algorithms.gossip.plan import GossipPlan, make_plan
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster, MemoryCollectives

WEIGHTS = 6
GATE = 30.0
"""Seconds that a rank waits for what a test holds back."""


class Rank:
    """One rank's weights and worker; its gradient moves each weight by 1."""

    def __init__(self, plan: GossipPlan) -> None:
        engine = local_engine()
        assert engine is not None
        self.engine: Engine = engine
        self.z = np.zeros(WEIGHTS)
        own = plan.max_messages, None, plan.parts
        post = NumpyMessageFormat(WEIGHTS, np.float64, plan.config.compression, *own, plain=plan.plain_messages)
        kind: Any = rank_class(plan.config)
        self.worker = kind(engine, plan, post, self._finish)
        self.worker.begin(self.z + 0)
        self.worker.connect(["weights"], [0])

    def _finish(self, flush: bool) -> None:
        self.z = self.worker.gather(self.z + 0, flush)

    def steps(self, count: int) -> None:
        """Take ``count`` steps."""
        for _ in range(count):
            self.z = self.worker.mix(self.z + 0, self.z + 1.0)
            self.worker.publish(self.z)


def all_equal(vectors: list[Any], value: float) -> None:
    """All are this, everywhere, to rounding."""
    for vector in vectors:
        np.testing.assert_allclose(vector, np.full(WEIGHTS, value), rtol=1e-12)


@pytest.mark.parametrize("flush", [True, False], ids=["drain", "cut"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"compression": "int8"},
        {"average_every": 2},
        {"algorithm": "adpsgd", "max_local_steps": 1},
        {"algorithm": "local", "graph": None, "average_every": 3, "compression": "bf16"},
    ],
    ids=str,
)
def test_a_host_continues_when_one_of_its_ranks_has_left(more: dict[str, Any], flush: bool):
    """Its engine still owns a part of the host's weights, with estimates of other hosts', and counts steps from 0 again
    after each end, as the others do."""

    def train(number: int) -> Any:
        rank = Rank(make_plan(4, **{"graph": "ring", "local_size": 2, **more}))
        rank.steps(2)
        rank.engine.drain()
        if number == 1:
            return None
        for _ in range(3):
            rank.steps(2)
            rank.engine.drain(flush)
        rank.engine.drain()
        return rank.z

    outcomes = Cluster(4).run(train)
    all_equal([outcomes[number] for number in (0, 2, 3)], 8.0)


@pytest.mark.parametrize("left", [[1], [0], [1, 2], [0, 1]], ids=str)
def test_pairs_of_hosts_continue_when_ranks_are_discarded_between_two_steps(left: list[int]):
    """Their engines own their parts of the host's weights, and know the average of the next drain, and of the one
    after. Hosts of which one rank is left count half as much."""
    gone = threading.Barrier(4)

    def train(number: int) -> Any:
        rank = Rank(make_plan(4, "adpsgd", "ring", local_size=2, max_local_steps=1))
        rank.steps(3)
        gone.wait(GATE)
        if number in left:
            rank.worker.delete()
            return None
        found = []
        for end in range(5):
            rank.steps(2 + number)
            rank.engine.drain(end % 2 == 0)
            found.append(rank.z + 0)
        return found

    outcomes = [found for found in Cluster(4, jitter=0.001).run(train) if found is not None]
    stay = [number for number in range(4) if number not in left]
    for end in (0, 2, 4):
        assert len({found[end].tobytes() for found in outcomes}) == 1
    moved = 2 * (2 + sum(stay) / len(stay))  # of each two ends
    all_equal([found[end] - found[end - 2] for found in outcomes for end in (2, 4)], moved)


def test_the_engine_of_a_rank_that_is_discarded_in_a_drain_waits_for_the_average():
    """It comes late there; the others are averaged with this rank's part of its host's weights at once."""

    def late(collectives: MemoryCollectives) -> MemoryCollectives:
        total = collectives.allreduce_sum

        def allreduce_sum(*args: Any, **more: Any) -> Any:
            handle, until = total(*args, **more), time.monotonic() + 0.05 * (collectives.rank == 1)
            done = handle.done
            handle.done = lambda: time.monotonic() >= until and done()  # type: ignore[method-assign]
            handle.seconds_to_poll = lambda: 0.005  # type: ignore[method-assign]
            return handle

        collectives.allreduce_sum = allreduce_sum  # type: ignore[method-assign]
        return collectives

    def train(number: int) -> Any:
        rank = Rank(make_plan(4, "adpsgd", "ring", local_size=2, max_local_steps=1))
        rank.steps(5 * number)
        if number == 1:
            add_up = rank.worker.sum_program

            def broken_off(*args: Any) -> Any:
                rank.worker.delete()
                return add_up(*args)

            rank.worker.sum_program = broken_off  # type: ignore[method-assign]
            with pytest.raises(ReplicaStateError, match="was discarded while this rank waited in"):
                rank.engine.drain()
            return None
        rank.engine.drain()
        first = rank.z + 0
        rank.steps(number)
        rank.engine.drain()
        return rank.z - first

    outcomes = Cluster(4, wrap=late).run(train)
    all_equal([outcomes[number] for number in (0, 2, 3)], 5 / 3)


def test_a_host_continues_when_one_of_its_ranks_is_discarded_with_a_message_of_another_host():
    came, deleted = threading.Event(), threading.Event()

    def train(number: int) -> Any:
        rank = Rank(make_plan(4, "sgp", "ring", local_size=2))
        if number == 1:
            deliver = rank.worker._deliver

            def watched(*message: Any) -> None:
                deliver(*message)
                came.set()

            rank.worker._exchanges._deliver = watched
            assert came.wait(GATE)
            rank.worker.delete()
            deleted.set()
            return None
        if number == 0:
            assert deleted.wait(GATE)
        rank.steps(1)
        rank.engine.drain()
        return rank.z

    outcomes = Cluster(4).run(train)
    all_equal([outcomes[number] for number in (0, 2, 3)], 1.0)
