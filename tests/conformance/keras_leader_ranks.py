"""One rank that follows a leader in Keras: least squares on two variables, an optimizer by case."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

import hvd_async.tensorflow as hvd
from hvd_async.algorithms.leader.worker import LeaderWorker
from hvd_async.testing import Cluster
from tests.conformance import leader_drive
from tests.conformance.gossip_reference import Problem
from tests.conformance.keras_gossip_ranks import GossipTrainer
from tests.conformance.leader_drive import Seen
from tests.conformance.leader_reference import Following
from tests.conformance.reference import Array


class LeaderTrainer(GossipTrainer):
    """One rank. It tells its losses as numbers, or where a step is a graph, there.

    Args:
        problem: its weights, data and optimizer.
        rank: which.
        following: whom it follows how.
        options: others of ``GossipTrainer`` and of ``LeaderOptimizer``.
    """

    wrapper = staticmethod(hvd.LeaderOptimizer)

    def __init__(self, problem: Problem, rank: int, following: Following, **options: Any) -> None:
        self.following = following
        super().__init__(problem, rank, **{**following.options(), **options})

    @property
    def steps(self) -> int:
        """So far, those of an earlier job included."""
        return len(self.path)

    def _logged(self, make: Callable[..., Any], *arguments: Any) -> Any:
        return make(*arguments)

    def given(self, before: Array) -> list[Any]:
        """The loss too, first."""
        loss = self.following.told(before, self.rank, len(self.path) + 1)
        in_graph = loss is not None and self._apply != self._take
        return [tf.constant(loss, tf.float64) if in_graph else loss, *super().given(before)]

    def _take(self, *given: Any) -> None:
        loss, *gradients = given
        if loss is not None:
            self.opt.record_loss(loss)
        self.opt.apply(gradients, self.variables)

    def worker(self) -> LeaderWorker:
        """The optimizer's; the first call meets the other ranks."""
        worker: LeaderWorker = self.opt._async.worker_now()
        return worker


Trained = TypeVar("Trained", bound=GossipTrainer)


def saved(trainer: GossipTrainer) -> dict[str, Any]:
    """What a script would save, through a file without pickles."""
    file = io.BytesIO()
    np.savez(file, weights=trainer.weights(), **trainer.opt.get_state())
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def resume(state: dict[str, Any], trainer: Trained, done: int = 0) -> Trained:
    """A trainer that has taken up what was saved after so many steps."""
    own = dict(state)
    trainer.assign(own.pop("weights"))
    trainer.opt.set_state(own)
    trainer.path = [np.empty(0)] * done
    return trainer


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
