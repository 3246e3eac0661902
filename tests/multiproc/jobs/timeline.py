"""Training with HOROVOD_TIMELINE set, ended by ``shutdown()`` or by the end of the program.

Horovod's writer drops what it holds when it ends, so training continues until rank 0's file has some of its events.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import torch
from common import Report, arguments
from torch_common import Batches, mlp

import hvd_async.torch as hvd

STEPS, PATIENCE = 12, 60.0
"""The fewest steps; seconds after which training ends in any case."""


def has_written() -> bool:
    """Return whether Horovod has written this many of its collectives of either bucket."""
    return Path(os.environ["HOROVOD_TIMELINE"]).read_text().count("GLOO_ALLREDUCE") >= 4 * STEPS


def main() -> None:
    """One optimizer with two buckets."""
    end = arguments("end").end
    hvd.init()
    report = Report(hvd.rank())
    model, batches = mlp(seed=1), Batches(hvd.rank())
    optimizer = hvd.EagerOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), quorum="all", groups=2
    )
    began = time.time()
    deadline = time.monotonic() + PATIENCE
    for step in itertools.count(1):
        batches.backward(model)
        optimizer.step()
        ends = hvd.rank() == 0 and step >= STEPS and (has_written() or time.monotonic() > deadline)
        if hvd.broadcast_object(ends, root_rank=0, name=f"ends.{step}"):
            break
    optimizer.drain()
    report.put("training", began=began, ended=time.time(), rounds=optimizer.rounds)
    if end == "shutdown":
        hvd.shutdown()


if __name__ == "__main__":
    main()
