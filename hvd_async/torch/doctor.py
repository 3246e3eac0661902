"""The part of ``hvd_async doctor`` that needs torch: a tiny training."""

from __future__ import annotations

from typing import Any

import torch

from hvd_async.torch import EagerOptimizer
from hvd_async.torch.horovod_api import hvd

STEPS = 20


def train() -> dict[str, Any] | None:
    """Fit a line on every rank's own samples, and drain; rank 0 returns losses, rounds and how replicas differ."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    inputs = torch.randn(64, 8)
    targets = inputs.sum(1, keepdim=True)
    model = torch.nn.Linear(8, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = torch.nn.functional.mse_loss(model(inputs), targets).item()
    optimizer = EagerOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters(), quorum="majority"
    )
    for _step in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    optimizer.drain()
    after = torch.nn.functional.mse_loss(model(inputs), targets).item()
    distance = float(optimizer.consensus_distance())
    result = {"loss_before": before, "loss_after": after, "distance": distance, "rounds": optimizer.rounds}
    return None if hvd.rank() else result
