"""Gossip of ranks as threads on least squares: ``tests/machines/least_squares`` has the jobs, and what must hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvd_async.algorithms.gossip.rank import PushSumWorker
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.machines.least_squares import Job, Record, Saved, Training, check, check_sums, job

__all__ = ["Job", "Record", "check", "check_sums", "job", "run", "work"]


def work(
    one: Job,
    before_step: Callable[[int, int, PushSumWorker], None] = lambda place, step, worker: None,
    tweak: Callable[[PushSumWorker], None] = lambda worker: None,
    resumed: Sequence[Saved | None] = (),
    before_end: Callable[[int, PushSumWorker], None] = lambda place, worker: None,
) -> Callable[[int], Record]:
    """Return the function that ``Cluster.run`` calls for a rank; the arguments are those of ``Training``, of all ranks,
    and of its program."""

    def train(rank: int) -> Record:
        engine, place = local_engine(), rank if one.rank_group is None else one.rank_group.index(rank)
        assert engine is not None
        training = Training(one, place, engine, tweak, resumed[place] if resumed else None)
        training.worker.run(training.program(before_step, before_end))
        return training.record

    return train


def run(one: Job, jitter: float = 0.0, seed: int = 0, **options: Any) -> list[Record]:
    """The job on a new cluster."""
    return Cluster(one.size, jitter=jitter, seed=seed).run(work(one, **options))
