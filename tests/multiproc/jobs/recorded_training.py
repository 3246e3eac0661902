"""A training script that knows nothing of traces; then one whose optimizer is recorded by hand, in FOLDER/eager.

recorded_training.py FOLDER --steps N
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import horovod.torch as plain
import torch

import hvd_async.torch as hvd

COMPUTE = 0.02
"""Seconds that a step's computation is slept; rank 1's thrice as many."""


def train(optimizer: Any, model: torch.nn.Module, steps: int) -> None:
    """Train this many steps."""
    inputs = torch.ones(2, 8)
    for _ in range(steps):
        optimizer.zero_grad()
        time.sleep(COMPUTE * (3 if hvd.rank() == 1 else 1))
        model(inputs).square().mean().backward()
        optimizer.step()


def main() -> None:
    """Train under Horovod's optimizer with a scheduler, then under ours."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    plain.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    first = plain.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    torch.optim.lr_scheduler.StepLR(first, 10)
    train(first, model, given.steps)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 4)  # (Horovod's optimizer has left hooks at the other one)
    second = hvd.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), quorum="all")
    recorder = hvd.record(second, f"{given.folder}/eager")
    train(second, model, given.steps)
    second.drain()
    recorder.close()


if __name__ == "__main__":
    main()
