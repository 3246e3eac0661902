"""A training script for torchrun that knows nothing of traces: torchrun_training.py ddp|fsdp|own|hvd STEPS

"own" averages separately, "hvd" by the DistributedOptimizer of ``hvd_async.torch``.

Rank 1 computes for longer than rank 0, half of it before each of the two places where DDP waits.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

COMPUTE = (0.02, 0.1)
"""Seconds that each rank sleeps in a step."""
MICRO_BATCHES = 2
"""Backward passes of a step; under DDP only the last one averages."""


def build(kind: str) -> torch.nn.Module:
    """Return the model, shared by all ranks as ``kind`` says."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    if kind == "ddp":
        return DistributedDataParallel(module=model)  # (as Lightning calls it)
    if kind == "fsdp":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    return model


def train(kind: str, steps: int) -> None:
    """Train this many steps."""
    model = build(kind)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if kind == "hvd":
        hvd: Any = importlib.import_module("hvd_async.torch")
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=MICRO_BATCHES)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    inputs = torch.randn(4, 8)
    pause = COMPUTE[dist.get_rank()] / 2
    for _ in range(steps):
        optimizer.zero_grad()
        for batch in range(MICRO_BATCHES):
            accumulates = kind == "ddp" and batch + 1 < MICRO_BATCHES
            with model.no_sync() if accumulates else contextlib.nullcontext():
                if batch == 0:
                    time.sleep(pause)  # before the forward pass in which DDP broadcasts buffers
                loss = model(inputs).square().mean()
                if batch + 1 == MICRO_BATCHES:
                    time.sleep(pause)  # before the backward pass in which it averages
                loss.backward()
        if kind == "own":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        elif kind != "hvd":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


def main() -> None:
    """Train, and end the process group once no DDP holds it: DDP's destructor would join Gloo's threads with the GIL
    held, which these may need."""
    dist.init_process_group("gloo")
    train(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
