"""Training with HOROVOD_TIMELINE set, ended by ``shutdown()`` or by the end of the program."""

from __future__ import annotations

import time

import torch
from common import Report, arguments
from torch_common import Batches, mlp

import hvd_async.torch as hvd

STEPS = 12


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
    for _ in range(STEPS):
        batches.backward(model)
        optimizer.step()
    optimizer.drain()
    report.put("training", began=began, ended=time.time(), rounds=optimizer.rounds)
    if end == "shutdown":
        hvd.shutdown()


if __name__ == "__main__":
    main()
