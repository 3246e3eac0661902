"""The Keras job of ``host``: steps of a model of many small variables as one graph; counted and timed."""

from __future__ import annotations

import time
from typing import Any

from hvd_async.testing import stop_engine

from ..support.arms import PLAIN, eager
from .shared.keras_host_counts import BUCKET_MB, STEPS, Crossings, SmallSteps
from .shared.rank import Block, Job


def run_block(job: Job, block: Block) -> None:
    """One arm."""
    arm, steps = block["arm"], block["steps"]
    own: dict[str, Any] = {"bucket_cap_mb": BUCKET_MB} if arm != PLAIN and eager(arm) else {}
    trained = SmallSteps(arm, **own)
    job.barrier()
    first = time.process_time()
    trained.train()  # (traces)
    first = time.process_time() - first
    for _ in range(STEPS):
        trained.train()
    job.barrier()
    process, training = time.process_time(), time.thread_time()
    for _ in range(steps):
        trained.train()
    training, process = time.thread_time() - training, time.process_time() - process
    crossings = Crossings()
    crossings.begin()
    for _ in range(STEPS):
        trained.train()
    crossings.end()
    if arm != PLAIN:
        trained.optimizer.drain()
        stop_engine(trained.optimizer)
    found = {"training_ms": 1e3 * training / steps, "other_ms": 1e3 * (process - training) / steps}
    found |= {"first_ms": 1e3 * first, "operators": trained.operators().total(), "crossings": crossings.count / STEPS}
    found |= {"buckets": len(trained.optimizer._async.replica.layout) if own else None}
    job.record(block, found)
