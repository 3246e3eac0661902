"""The job of ``accuracy``, ``split_classes`` and ``convergence``: short trainings on the real digits, one by one.

Beside the public API it needs the worker of partial allreduce: the mutant, which loses late gradients, is one that
is broken on purpose.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np

from hvd_async.algorithms.eager.config import StartRound
from hvd_async.algorithms.eager.rank import EagerWorker
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.protocol import Command

from ..support.arms import MUTANT
from .shared.arm import average
from .shared.digit_models import accuracy, loss
from .shared.rank import Block, Job, rate
from .shared.training import Training


class Forgetful(EagerWorker):
    """The mutant: what comes too late for its own round is lost, as in the code published with the paper.

    Its late gradients go into a buffer that is emptied, or written over, before the next round takes it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gone: dict[int, int] = {}

    def on_command(self, command: Command) -> None:
        """Note which round has gone."""
        if isinstance(command, StartRound):
            self._gone.update(dict.fromkeys(command.buckets, command.round))
        super().on_command(command)

    def hand_over(self, bucket: int, vector: Vector | None) -> None:
        """Hand over nothing if it is too late."""
        super().hand_over(bucket, self._kept(bucket, vector))

    def step(self, vectors: Mapping[int, Vector | None], *args: Any, **kwargs: Any) -> Any:
        """Take a step without the buckets that are too late."""
        kept = {bucket: self._kept(bucket, vector) for bucket, vector in vectors.items()}
        return super().step(kept, *args, **kwargs)

    def _kept(self, bucket: int, vector: Vector | None) -> Vector | None:
        late = self._gone.get(bucket, 0) >= self._steps + self._base + 1
        return None if late else vector


def run_block(job: Job, block: Block) -> None:
    """One training, with an evaluation after each of so many equal shares of this rank's steps."""
    delays = np.resize([row[job.rank] for row in block["times"]], block["steps"][job.rank])
    curve: list[list[float]] = []
    with forgetful(block["arm"] == MUTANT):
        training = Training(job, block)
        arm = training.arm
        for share in np.array_split(delays, block["evaluations"]):
            with training.stretch():
                for delay in share.tolist():
                    training.step(rate(block["lr"], training.steps, len(delays)), delay)
            with training.evaluation() as model:
                losses = job.gather(loss(model, training.train[job.rank :: job.size]))
                if job.rank == 0:
                    mean = sum(losses) / len(training.train)
                    curve.append([training.clock.now, mean, accuracy(model, training.test)])
    distance = arm.distance()
    mean = None
    if block.get("mean"):
        mean = copy.deepcopy(arm.model)
        average(mean)
    arm.drain()
    stats = arm.stats()
    own = {
        "elapsed": training.clock.now,
        "curve": curve,
        "accuracy": curve[-1][-1] if curve else None,
        "of_mean": None if mean is None else accuracy(mean, training.test),
        "pulls": stats.get("pulls"),
        "distance": distance,
        "norm": arm.norm(),
        "averagings": stats.get("averagings"),
        "steps": len(delays),
        "staleness": stats.get("staleness", {}),
        "skipped": stats.get("gradients_skipped", 0),
    }
    job.conclude(arm, block, own)


@contextlib.contextmanager
def forgetful(wanted: bool) -> Iterator[None]:
    """Inside it, optimizers that take their first step lose what is late, if this is wanted."""
    if not wanted:
        yield
        return
    with mock.patch("hvd_async.optimizers.eager.EagerWorker", Forgetful):
        yield
