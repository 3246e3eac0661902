"""``EagerOptimizer(quorum="all")`` beside ``horovod.torch.DistributedOptimizer``, from the same seeds, in one job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as horovod
import torch
from common import Report
from torch_common import crc

import hvd_async.torch as hvd

STEPS = 30
Wrap = Callable[[torch.optim.Optimizer, torch.nn.Module], Any]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def network() -> torch.nn.Module:
    """Two convolutions with batch norm, for 1 x 8 x 8 images."""
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(4, 8, 3, stride=2, bias=False),  # a bias before batch norm: gradients of pure rounding
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(72, 10),
    )


def train(make: Callable[[Any], torch.optim.Optimizer], wrap: Wrap) -> tuple[torch.nn.Module, Any]:
    """30 steps on this rank's own data."""
    model = network()
    optimizer = wrap(make(model.parameters()), model)
    generator = torch.Generator().manual_seed(100 + hvd.rank())
    for _ in range(STEPS):
        x = torch.randn(16, 1, 8, 8, generator=generator)
        y = torch.randint(0, 10, (16,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def main() -> None:
    hvd.init()
    report = Report(hvd.rank())
    for name, make in OPTIMIZERS.items():
        theirs, _ = train(
            make, lambda optimizer, model: horovod.DistributedOptimizer(optimizer, model.named_parameters())
        )
        ours, optimizer = train(
            make,
            lambda optimizer, model: hvd.EagerOptimizer(optimizer, model.named_parameters(), quorum="all"),
        )
        optimizer.drain()
        start = network()
        report.put(
            name,
            difference=max(
                float((a - b).abs().max().detach()) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True)
            ),
            buffers=max(float((a - b).abs().max()) for a, b in zip(theirs.buffers(), ours.buffers(), strict=True)),
            moved=max(
                float((a - b).abs().max().detach()) for a, b in zip(start.parameters(), ours.parameters(), strict=True)
            ),
            weights=crc(ours.parameters()),
            rounds=optimizer.stats().rounds_applied,
        )
    hvd.shutdown()
    report.put("end")


if __name__ == "__main__":
    main()
