"""torch: what can be read of a wrapped optimizer: the algorithm in force, and why its state is not to be had."""

from __future__ import annotations

import threading

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.torch_ranks import quadratic


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([quadratic(1.0, 2.0)], lr=0.1)


def test_the_algorithm_in_force_can_be_read():
    with scripted_engine(4):
        eager = hvd.EagerOptimizer(sgd(), quorum="majority", max_staleness=3)
        assert eager.settings == {
            "algorithm": "eager", "quorum": "majority", "max_staleness": 3, "grace": 0.0, "seed": 0, "pace": "steps"
        }  # fmt: skip
        leader = hvd.LeaderOptimizer(sgd(), group=2, global_period=8, local_pull=0.3)
        own = {"algorithm": "lsgd", "groups": [[0, 1], [2, 3]], "global_period": 8, "local_period": 2}
        assert {**own, "local_pull": 0.3, "global_pull": 0.1, "loss_window": 10}.items() <= leader.settings.items()
        centre = hvd.LeaderOptimizer(sgd(), algorithm="easgd", beta=0.4)
        assert {"algorithm": "easgd", "alpha": 0.1, "beta": 0.4}.items() <= centre.settings.items()
        assert "local_pull" not in centre.settings


def test_the_algorithm_in_force_follows_the_schedule():
    def train(rank: int) -> None:
        opt = hvd.GossipOptimizer(sgd(), algorithm="osgp", max_staleness=2, topology="ring", schedule={3: "allreduce"})
        osgp = {"algorithm": "osgp", "max_staleness": 2, "topology": "ring", "compression": "none"}
        assert osgp.items() <= opt.settings.items()
        opt.set_epoch(2)
        assert opt.settings["algorithm"] == "osgp"
        opt.set_epoch(3)
        assert opt.settings["algorithm"] == "allreduce"
        opt.switch(algorithm="dpsgd", topology="bipartite-exponential")
        assert opt.settings["algorithm"] == "dpsgd"

    Cluster(2).run(train)


def test_a_state_that_lacks_gradients_of_this_rank_says_how_many_and_one_that_may_lack_others_does_not_say_none():
    late = threading.Event()

    def train(rank: int) -> str:
        parameter = quadratic(1.0)
        opt = hvd.EagerOptimizer(torch.optim.SGD([parameter], lr=0.1))
        opt._async.worker_now()
        if rank == 0:
            opt.step()
            late.set()
        else:
            assert late.wait(60)
            opt._async.worker.engine.wait(lambda: opt._async.worker._inbox.has_round())
            opt.step()  # it comes too late for round 1, and nobody starts another
        with pytest.raises(ReplicaStateError, match=r"on their way.*drain\(\).*cut\(\)") as caught:
            opt.state_dict()
        opt.drain()
        opt.state_dict()
        return str(caught.value)

    texts = Cluster(2).run(train)
    assert "other ranks may have some, which would be lost" in texts[0]
    assert "1 of this rank's would be lost" in texts[1]
