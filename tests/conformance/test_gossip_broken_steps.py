"""A rank whose step was broken off, by an interrupt or a time limit, and that trains no more: nobody waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.gossip.rank import PushSumWorker
from hvd_async.errors import ReplicaStateError, WaitTimeoutError
from hvd_async.testing import Cluster
from tests.conformance.gossip_ranks import SGD
from tests.conformance.gossip_reference import least_squares
from tests.conformance.torch_gossip_ranks import GossipTrainer

STEPS = 6


@pytest.mark.parametrize("broken_step", [1, 3])
@pytest.mark.parametrize("where", ["_offer", "_await_messages"])
@pytest.mark.parametrize("algorithm", ["sgp", "osgp", "dpsgd", "exact-diffusion", "noloco"])
def test_others_go_on_without_it(monkeypatch: Any, algorithm: str, where: str, broken_step: int) -> None:
    """Also when it had announced messages that it did not queue."""
    real = getattr(PushSumWorker, where)

    def broken(worker: Any, *args: Any) -> Any:
        if worker.engine.rank == 0 and worker._step == broken_step:
            raise WaitTimeoutError("a time limit")
        return real(worker, *args)

    monkeypatch.setattr(PushSumWorker, where, broken)

    def train(rank: int) -> Any:
        trainer = GossipTrainer(least_squares(3, SGD), rank, algorithm=algorithm, topology="ring", gossip_every=1)
        if rank == 0:
            with pytest.raises(WaitTimeoutError):
                trainer.train(STEPS)
            with pytest.raises(ReplicaStateError, match="broken off"):
                trainer.train(1)
            trainer.opt.discard()
            return None
        trainer.train(STEPS).opt.drain()
        assert trainer.opt.stats().steps == STEPS
        return trainer.weights()

    _, one, other = Cluster(3).run(train)
    np.testing.assert_array_equal(one, other)


def test_a_rank_that_ends_between_two_steps_sends_nothing_more() -> None:
    """D-PSGD's messages of its next step would be queued in the step that it does not take."""
    queued: list[Any] = []

    def train(rank: int) -> None:
        trainer = GossipTrainer(least_squares(3, SGD), rank, algorithm="dpsgd", topology="ring")
        trainer.train(2).opt.drain()
        if rank == 0:
            trainer.opt._async.worker._exchanges.offer = lambda *message: queued.append(message)
            trainer.opt.discard()
        else:
            trainer.train(2).opt.drain()

    Cluster(3).run(train)
    assert not queued
