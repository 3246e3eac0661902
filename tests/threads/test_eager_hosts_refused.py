"""Partial allreduce host by host: settings that no job of hosts can have are refused."""

from __future__ import annotations

import pytest

from hvd_async.algorithms.eager.config import EagerConfig
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster, InjectedError
from tests.threads.workload import Plan


def test_one_round_a_step_is_refused_where_ranks_skip_rounds_together():
    def train(rank: int) -> None:
        engine = local_engine()
        assert engine is not None
        one = Plan(EagerConfig("solo", 4, 0.0, 0, 1, "rounds", local_size=2), [(1, 1)])
        worker = one.worker(engine)
        worker.connect(["w"], [1])
        with pytest.raises(ReplicaStateError, match="takes one round a step"):
            worker.finish_step(one.rows(rank, 1), [{"lr": 1.0}], 1)
        worker.step(one.rows(rank, 1), [{"lr": 1.0}])
        worker.drain()

    Cluster(2).run(train)


def test_hosts_that_do_not_divide_the_ranks_are_refused():
    one = Plan(EagerConfig("solo", 4, 0.0, 0, 1, local_size=2), [(1, 1, 1)])

    def train(rank: int) -> None:
        engine = local_engine()
        assert engine is not None
        one.worker(engine).connect(["w"], [1])

    for outcome in Cluster(3).outcomes(train):
        assert isinstance(outcome, InjectedError)
        assert "2 ranks a host do not divide 3 ranks into hosts of equal size" in str(outcome)
