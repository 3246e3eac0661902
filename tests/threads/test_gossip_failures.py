"""Gossip: who learns of it when a rank fails, and what is refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hvd_async.algorithms.gossip.rank import PushSumWorker
from hvd_async.errors import GradientLossError, RankLostError, ReplicaMismatchError, ReplicaStateError
from hvd_async.testing import Cluster, InjectedError
from tests.threads.gossip_holdups import at, pass_gate
from tests.threads.gossip_workload import Job, job, work


@pytest.mark.parametrize("average_every", [0, 2])
@pytest.mark.parametrize(
    "algorithm", ["sgp", "osgp", "dpsgd", "exact-diffusion", "noloco", "adpsgd", "allreduce", "local", "diloco"]
)
def test_a_rank_that_raises_is_named_to_the_others(algorithm, average_every, capfd):
    def boom(worker: PushSumWorker) -> None:
        raise ZeroDivisionError("boom")

    every = {} if algorithm in ("adpsgd", "noloco") else {"average_every": average_every}
    one = job([9, 9, 9], algorithm, **every)
    outcomes = Cluster(3).outcomes(work(one, before_step=at(1, 4, boom)))
    assert isinstance(outcomes[1], ZeroDivisionError)
    for rank in (0, 2):
        assert type(outcomes[rank]) is InjectedError
        assert "rank 1 on host host1 failed: ZeroDivisionError: boom" in str(outcomes[rank])
        cause = outcomes[rank].__cause__  # type: ignore[union-attr]
        assert isinstance(cause, RankLostError)
        assert cause.rank == 1
    assert "hvd_async: rank 1 on host host1 failed: ZeroDivisionError: boom" in capfd.readouterr().err


def test_other_plans_are_refused_on_all_ranks(capfd):
    def train(rank: int) -> None:
        one = job([1, 1, 1], graph="ring" if rank else "star")
        work(one)(rank)

    for outcome in Cluster(3).outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)
        assert "graph='star (" in str(outcome)


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


def test_a_rank_may_be_done_before_others_have_opened():
    """Rank 0 has nothing to do, says so, and all the time the others do not know of the optimizer."""
    early, one = threading.Event(), job((0, 3, 3))
    train = work(one)

    def hasty(rank: int) -> Any:
        if rank:
            pass_gate(early)
            return train(rank)
        worker = one.worker(0, lambda flush: model.update(z=worker.gather(model["z"], flush)))
        model = {"z": one.problem.start[0].copy()}
        worker.begin(model["z"].copy())
        worker.register(["w"], [1])
        worker.announce_finished(True)
        worker.engine.call_soon(early.set)
        worker.await_registration()
        worker.drain()
        return model["z"]

    outcomes = Cluster(3).run(hasty)
    assert outcomes[0].tobytes() == outcomes[1].segments[0].z.tobytes()
