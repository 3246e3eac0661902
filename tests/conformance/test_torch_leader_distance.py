"""torch: the distance of a rank to its leader, as ``hvd_async.testing`` tells it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hvd_async.testing import Cluster, distance_to_leader
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import least_squares
from tests.conformance.leader_cases import leads
from tests.conformance.leader_drive import TIMEOUT, wait_for_pulls
from tests.conformance.leader_reference import Following, several
from tests.conformance.torch_leader_ranks import LeaderTrainer

LSGD = leads(1, Following("lsgd", several(3, 3), 1, 1))
EASGD = Following("easgd", global_period=1)


@pytest.mark.parametrize("following", [LSGD, EASGD], ids=["lsgd", "easgd"])
def test_the_distance_is_that_to_the_leader_or_the_center(following):
    problem, together = least_squares(3, CASES[0]), threading.Barrier(3)

    def train(rank: int) -> Any:
        trainer = LeaderTrainer(problem, rank, following)
        worker = trainer.worker()
        together.wait(TIMEOUT)
        trainer.step()
        wait_for_pulls(worker, following.pulls(rank, 1))
        together.wait(TIMEOUT)
        own, told = trainer.weights(), distance_to_leader(trainer.opt)
        with trainer.opt.consensus():
            return own, told, trainer.weights()

    for rank, (own, told, common) in enumerate(Cluster(3).run(train)):
        if following is LSGD and rank == 1:
            assert told is None
        else:
            assert told == pytest.approx(np.linalg.norm(own - common), rel=1e-5)
            assert told > 0
