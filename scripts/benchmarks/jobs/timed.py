"""The job of ``straggler`` and ``skew``: blocks of steps in which every rank sleeps as a schedule says."""

from __future__ import annotations

import time
from typing import Any

import torch

from .shared import arm as arms
from .shared.rank import Job, difference

WARM_UP = 3
"""Untimed steps of each block: the ranks meet, DDP orders its buckets, Horovod fills its cache."""


def small() -> torch.nn.Module:
    """So small that its computation and its messages do not count."""
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def run_block(job: Job, block: dict[str, Any]) -> None:
    """One arm through one schedule."""
    torch.manual_seed(0)
    real = job.plan["model"] == "resnet50"
    model = arms.resnet50() if real else small()
    images = torch.randn(16, 3, 32, 32) if real else torch.randn(8, 64)
    arm = arms.Arm(
        block["arm"],
        model,
        torch.optim.SGD(model.parameters(), lr=0.001),
        job,
        **({"seed": block["seed"]} if block["arm"] == "majority" else {}),
    )

    def loss(trained: torch.nn.Module) -> torch.Tensor:
        value: torch.Tensor = trained(images).square().mean()
        return value

    for _ in range(WARM_UP):
        arm.train(loss)
    arm.drain()
    before, waited = arm.stats(), arm.waited
    own = [row[job.rank] for row in block["times"]]
    job.barrier()
    started = time.perf_counter()
    for seconds in own:
        if block["barrier"]:
            job.barrier()
        arm.train(loss, seconds)
    elapsed, waited = time.perf_counter() - started, arm.waited - waited
    after = arm.stats()  # before the drain: what it carries was not produced at the speed that is measured
    arm.drain()
    found = {
        "elapsed": elapsed,
        "waited": waited,
        "stats": difference(after, before),
        "rounds_before": before.get("rounds", 0),
        "identical": arm.identical(),
    }
    arm.close()
    job.record({key: value for key, value in block.items() if key != "times"}, found)


def main() -> None:
    """Run the plan's blocks."""
    job = arms.start()
    for block in job.plan["blocks"]:
        run_block(job, block)
    arms.finish(job)


if __name__ == "__main__":
    main()
