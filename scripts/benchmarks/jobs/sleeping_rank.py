"""The job of ``sleeping_rank``: ranks step for a time, and one training thread falls asleep in the middle of it."""

from __future__ import annotations

import time

import torch

from hvd_async.simulation.names import gossip_of

from .hetero import dense
from .shared.arm import Arm, mean_square
from .shared.rank import Block, Job

BATCH = 4


def run_block(job: Job, block: Block) -> None:
    """One arm, once."""
    torch.manual_seed(0)
    model, inputs = dense(block["megabytes"], BATCH)
    graph = {"topology": block["topology"]} if gossip_of(block["arm"]) else {}
    arm = Arm(block["arm"], model, job, **graph)
    loss = mean_square(inputs)
    arm.warm_up(loss)
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
    job.conclude(arm, block, found)
