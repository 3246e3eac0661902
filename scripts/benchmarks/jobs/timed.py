"""The job of ``straggler``, ``skew`` and ``advice``: blocks of steps in which every rank sleeps as a schedule says."""

from __future__ import annotations

import time
from typing import Any

import torch

import hvd_async.torch as hvd

from .network import network
from .shared.arm import Arm, mean_square, resnet50
from .shared.rank import Block, Job, difference


def small() -> torch.nn.Module:
    """So small that its computation and its messages do not count."""
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def made(plan: dict[str, Any]) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return the plan's model, and inputs for it."""
    if plan["model"] == "resnet50":
        return resnet50(), torch.randn(16, 3, 32, 32)
    if plan["model"] == "network":
        return network(plan["megabytes"]), torch.randn(1, 64)
    return small(), torch.randn(8, 64)


def run_block(job: Job, block: Block) -> None:
    """One arm through one schedule."""
    torch.manual_seed(0)
    model, images = made(job.plan)
    own = {"seed": block["seed"]} if block["arm"] == "majority" else {}
    arm = Arm(block["arm"], model, job, torch.optim.SGD(model.parameters(), lr=0.001), **own)
    loss = mean_square(images)
    arm.warm_up(loss)
    recorder = hvd.record(arm.optimizer, block["trace"]) if "trace" in block else None
    before, waited = arm.stats(), arm.waited
    times = [row[job.rank] for row in block["times"]]
    job.barrier()
    started = time.perf_counter()
    for seconds in times:
        if block["barrier"]:
            job.barrier()
        arm.train(loss, seconds)
    elapsed, waited = time.perf_counter() - started, arm.waited - waited
    after = arm.stats()  # before the drain: what it carries was not produced at the speed that is measured
    arm.drain()
    if recorder is not None:
        recorder.close()
    found = {
        "elapsed": elapsed,
        "waited": waited,
        "stats": difference(after, before),
        "rounds_before": before.get("rounds", 0),
    }
    job.conclude(arm, block, found)
