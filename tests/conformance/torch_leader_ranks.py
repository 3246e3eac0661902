"""One rank that follows a leader in torch: least squares on two parameters, an optimizer by case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import hvd_async.torch as hvd
from hvd_async.algorithms.leader.worker import LeaderWorker
from hvd_async.testing import Cluster
from tests.conformance import leader_drive
from tests.conformance.gossip_reference import Problem
from tests.conformance.leader_drive import Seen
from tests.conformance.leader_reference import Following
from tests.conformance.reference import Array
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

    def worker(self) -> LeaderWorker:
        """The optimizer's; the first call meets the other ranks."""
        worker: LeaderWorker = self.opt._async.worker_now()
        return worker


class NormedTrainer(LeaderTrainer):
    """A rank with batch-norm statistics: a mean of two features that moves with each step, and a count."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.norm = torch.nn.BatchNorm1d(2)
        super().__init__(*args, named_buffers=self.norm.named_buffers(), **options)

    def moves(self, step: int) -> Array:
        """By what a step changes the mean, exact in float32."""
        return np.array([2.0**self.rank, 0.25 * step])

    def gradient(self) -> None:
        super().gradient()
        self.norm.running_mean += torch.as_tensor(self.moves(self.steps), dtype=torch.float32)
        self.norm.num_batches_tracked += 1

    def mean(self) -> Array:
        """The statistics."""
        return np.asarray(self.norm.running_mean.double())

    def weights(self) -> Array:
        """With the statistics."""
        return np.concatenate([super().weights(), self.mean()])


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
