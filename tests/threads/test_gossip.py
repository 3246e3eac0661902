"""Gossip of ranks as threads: real engines take the steps that ``tests/machines/test_references`` compares."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_async.algorithms.gossip.rank import PushSumWorker
from hvd_async.errors import GradientLossError, ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.machines.least_squares import Training
from tests.threads.gossip_workload import check, job, run, work

KINDS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "sgp": ("sgp", "star", {"average_every": 3}),
    "osgp": ("osgp", "exponential", {"max_staleness": 2}),
    "dpsgd": ("dpsgd", "ring", {"compression": "int8", "weights": "metropolis"}),
    "adpsgd": ("adpsgd", "ring", {"max_local_steps": 2}),
    "exact diffusion": ("exact-diffusion", "ring", {"compression": "int8", "gossip_every": 2}),
    "noloco": ("noloco", "random-pairs", {"gossip_every": 2}),
    "local": ("local", None, {"average_every": 4, "fragments": 3, "max_staleness": 2, "compression": "int8"}),
    "diloco": ("diloco", None, {"average_every": 4, "fragments": 2}),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_every_step_equals_the_reference(name: str, late: bool) -> None:
    algorithm, graph, more = KINDS[name]
    one = job(((9,) * 5, (6, 2, 0, 2, 1), (0, 3, 0, 0, 4)), algorithm, graph, **more)
    check(one, run(one, jitter=0.001 * late))


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
            one = job([1, 1], algorithm)
            worker, z = Training(one, rank, local_engine()).worker, one.problem.start[rank]
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
