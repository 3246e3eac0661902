"""Trainings of an LSTM on clips of different lengths, whatever the framework. No framework here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...support.clips import Batch, clips_of, dealt_to, padded
from .rank import Block, Job, RunBlock, Trained, rate

HIDDEN = 48
"""Units of the LSTM."""
UNTIMED = 2
"""Steps at the start in which TensorFlow traces its graphs and Horovod fills its cache; they train as the others do."""


class Computation:
    """A step's computation: of so many seconds, or as many as it takes."""

    def __init__(self, seconds: float) -> None:
        self._began, self._seconds = time.perf_counter(), seconds
        self.took = 0.0

    def ends(self) -> None:
        """The gradients are there: sleep for what is left."""
        time.sleep(max(0.0, self._began + self._seconds - time.perf_counter()))
        self.took = time.perf_counter() - self._began


class Learner(Trained, Protocol):
    """One rank's model and optimizer, under one arm."""

    def step(self, batch: Batch, rate: float, computed: Callable[[], None]) -> None:
        """Forward and backward; ``computed()``; only then are the gradients handed over."""

    def stats(self) -> dict[str, Any]:
        """Return ``stats()`` as JSON; nothing of a rival."""

    def drain(self) -> None:
        """Apply every gradient everywhere."""

    def classify(self, batch: Batch) -> NDArray[np.int64]:
        """The clips' classes."""


def training_of(learner: Callable[[Job, Block], Learner]) -> RunBlock:
    """Return what runs a training of such models as a block."""
    return lambda job, block: run_block(job, block, learner(job, block))


def run_block(job: Job, block: Block, learner: Learner) -> None:
    """One training, and the accuracy on clips that are not in it."""
    train, test = clips_of(block["seed"], block["median"])
    order = dealt_to(block, train.lengths, job.size)[:, job.rank]
    longest = train.lengths[order].max(axis=1)
    seconds = []
    for step, chosen in enumerate(order):
        if step == UNTIMED:
            job.barrier()
            started = time.perf_counter()
        computation = Computation(block["ms"] / 1e3 * float(longest[step]))
        learner.step(padded(train, chosen), rate(block["lr"], step, len(order)), computation.ends)
        seconds.append(computation.took)
    elapsed = time.perf_counter() - started
    stats = learner.stats()  # before the drain: what it carries was not produced at the speed that is measured
    learner.drain()
    own = {
        "elapsed": elapsed,
        "longest": longest[UNTIMED:].tolist(),
        "computed": [round(took, 5) for took in seconds[UNTIMED:]],
        "accuracy": accuracy(learner, padded(test, np.arange(len(test.labels)))) if job.rank == 0 else None,
        "stats": stats,
        "rounds_before": UNTIMED,
    }
    job.conclude(learner, block, own)


def accuracy(learner: Learner, batch: Batch) -> float:
    """The share of the clips that are classified correctly."""
    return float((learner.classify(batch) == batch.labels).mean())
