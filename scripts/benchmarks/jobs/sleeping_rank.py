"""The job of ``independence``: ranks step for a time, and one training thread falls asleep in the middle of it."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..support.schedule import gossip_of
from .hetero import dense
from .shared import arm as arms
from .shared.rank import Job

WARM_UP = 3
"""Untimed steps of each block, without sleep."""
BATCH = 4


def run_block(job: Job, block: dict[str, Any]) -> None:
    """One arm, once."""
    torch.manual_seed(0)
    model, inputs = dense(block["megabytes"], BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    graph = {"topology": block["topology"]} if gossip_of(block["arm"]) else {}
    arm = arms.Arm(block["arm"], model, optimizer, job, **graph)

    def loss(trained: torch.nn.Module) -> torch.Tensor:
        value: torch.Tensor = trained(inputs).square().mean()
        return value

    for _ in range(WARM_UP):
        arm.train(loss)
    arm.drain()
    job.barrier()
    started, unix = job.agree((time.monotonic(), time.time()))  # one clock for all: they are on one machine
    begins, ends, waits, waited_for = [], [], [], []
    apart: dict[str, float | None] = {}
    slept = 0
    stats = arm.stats()
    while not ends or ends[-1] < block["before"] + block["sleep"] + block["after"]:
        begins.append(time.monotonic() - started)
        sleeps = not slept and job.rank == block["sleeper"] and begins[-1] >= block["before"]
        if sleeps:
            slept = len(begins)
            apart["as it fell asleep"] = arm.apart()
            time.sleep(block["sleep"])
            apart["as it woke"] = arm.apart()
        arm.train(loss, 0.0 if sleeps else block["compute"])
        if sleeps:
            apart["after its next step"] = arm.apart()
        ends.append(time.monotonic() - started)
        before, stats = stats, arm.stats()
        waits.append(stats["wait_s"] - before["wait_s"])
        each = [b - a for a, b in zip(before.get("waited_for", ()), stats.get("waited_for", ()), strict=True)]
        waited_for.append(max(range(job.size), key=each.__getitem__) if any(each) else None)
    found = {
        "slept": slept,
        "slept_at": begins[slept - 1] if slept else None,
        "ends": ends,
        "waits": waits,
        "waited_for": waited_for,
        "pulls": [at - unix for at, _, _ in arm.history()],
        "apart": {**apart, "at the end": arm.apart()},
    }
    arm.drain()
    found["identical"] = arm.identical()
    arm.close()
    job.record(block, found)


def main() -> None:
    """Run the plan's blocks."""
    job = arms.start()
    for block in job.plan["blocks"]:
        run_block(job, block)
    arms.finish(job)


if __name__ == "__main__":
    main()
