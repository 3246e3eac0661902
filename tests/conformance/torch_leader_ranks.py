"""One rank that follows a leader in torch: least squares on two parameters, an optimizer by case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hvd_async.torch as hvd
from hvd_async.following import FollowWorker
from hvd_async.testing import Cluster
from tests.conformance import leader_drive
from tests.conformance.gossip_reference import Problem
from tests.conformance.leader_drive import Seen
from tests.conformance.leader_reference import Following
from tests.conformance.torch_gossip_ranks import GossipTrainer


class LeaderTrainer(GossipTrainer):
    """One rank.

    Args:
        problem: its weights, data and optimizer.
        rank: which.
        following: whom it follows how.
        options: others of ``GossipTrainer`` and of ``LeaderOptimizer``.
    """

    wrapper = staticmethod(hvd.LeaderOptimizer)

    def __init__(self, problem: Problem, rank: int, following: Following, **options: Any) -> None:
        super().__init__(problem, rank, **{**following.options(), **options})
        self.following = following

    def gradient(self) -> None:
        """That of the next step, whose loss it tells."""
        super().gradient()
        loss = self.following.told(self.before, self.rank, self.steps)
        if loss is not None:
            self.opt.record_loss(loss)

    def worker(self) -> FollowWorker:
        """The optimizer's; the first call meets the other ranks."""
        worker: FollowWorker = self.opt._async_worker()
        return worker


def run(
    problem: Problem,
    following: Following,
    steps: int | Sequence[int],
    cluster: Cluster | None = None,
    in_step: bool = False,
    behind: Sequence[int] = (),
    **options: Any,
) -> list[Seen]:
    """As ``leader_drive.run``, on a plain cluster if none is given; ``options`` of ``LeaderTrainer``."""
    return leader_drive.run(
        lambda rank: LeaderTrainer(problem, rank, following, **options),
        following,
        steps,
        Cluster(len(problem.start)) if cluster is None else cluster,
        in_step,
        behind,
    )
