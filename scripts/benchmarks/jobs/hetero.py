"""The job of ``hetero``: every rank steps at its own pace until a time is over; the last one is slower."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from ..support.arms import eager
from .shared.arm import Arm, mean_square
from .shared.rank import Block, Job, difference


def dense(megabytes: float, batch: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """One square layer of so many megabytes, and a batch for it."""
    side = round(math.sqrt(megabytes * 1e6 / 4))
    return torch.nn.Linear(side, side, bias=False), torch.randn(batch, side)


def run_block(job: Job, block: Block) -> None:
    """One arm for one window."""
    torch.manual_seed(0)
    model, inputs = dense(block["megabytes"], block["batch"])
    paced = eager(block["arm"]) and not block["synchronous"]
    arm = Arm(block["arm"], model, job, **({"pace": "rounds"} if paced else {}))
    loss = mean_square(inputs)
    arm.warm_up(loss)
    slowest = block["compute"] * block["slowdown"]
    compute = slowest if job.rank == job.size - 1 else block["compute"]
    most = max(1, round(block["window"] / slowest)) if block["synchronous"] else math.inf
    before, waited = arm.stats(), arm.waited
    job.barrier()
    started = time.perf_counter()
    ends: list[float] = []
    while len(ends) < most and (block["synchronous"] or not ends or ends[-1] < block["window"]):
        arm.train(loss, compute)
        ends.append(time.perf_counter() - started)
    waited, after = arm.waited - waited, arm.stats()
    own = {"ends": ends, "waited": waited, "stats": difference(after, before), "latency_s": latency(before, after)}
    arm.drain()
    job.conclude(arm, block, own)


def latency(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Mean seconds of an exchange, round or pull, of those that have come in between."""
    count = next((name for name in ("exchanges", "pulls") if name in after), "rounds")
    mean = "pull_s" if count == "pulls" else "latency_s"
    if after.get(count, 0) == before.get(count, 0):
        return None
    seconds = after[mean] * after[count] - before[mean] * before[count]
    return float(seconds / (after[count] - before[count]))
