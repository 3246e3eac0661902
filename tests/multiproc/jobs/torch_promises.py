"""The promises of docs/promises.md on real ranks, in torch: replicas, conservation, staleness, uneven batches."""

from __future__ import annotations

from typing import Any

import torch
from common import Report, Straggler
from promises import counts, run
from table import BOUNDED, FEW_PROMISES, PROMISES, Promise
from torch_common import Batches, Whole, crc, mlp, state_tensors

import hvd_async.torch as hvd

STEPS = 15


def promise(report: Report, case: Promise) -> None:
    """Momentum, decay and a schedule that steps on every rank's own count, with stragglers."""
    rank, size = hvd.rank(), hvd.size()
    model, batches = mlp(seed=1), Batches(rank)
    optimizer = hvd.EagerOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
        named_parameters=model.named_parameters(),
        quorum=case.quorum,
        max_staleness=case.max_staleness,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    straggler = Straggler(case.inject, rank, size, seed=3)
    history = []
    for _ in range(STEPS):
        batches.backward(model)
        straggler.compute()
        optimizer.step()
        schedule.step()
        history.append((optimizer.stats().rounds, crc([*model.parameters(), *state_tensors(optimizer)])))
    optimizer.drain()
    report.put(
        case.name,
        history=history,
        weights=crc(model.parameters()),
        state=crc(state_tensors(optimizer)),
        lr=schedule.get_last_lr()[0],
        **counts(optimizer),
    )


class TorchWhole(Whole):
    """Whole-number training."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.optimizer = hvd.EagerOptimizer(self.sgd(), **options)

    def step(self, rank: int, step: int) -> None:
        """A step with that rank's gradient."""
        self.set_gradients(rank, step)
        self.optimizer.step()


if __name__ == "__main__":
    run(hvd, promise, TorchWhole, (PROMISES + BOUNDED, FEW_PROMISES), 12)
