"""The job of ``memory``: how many bytes of gradients each rank holds, by our own count and by the process's memory."""

from __future__ import annotations

import gc
import threading
import time

import torch

from ..support.intervals import quantile
from .shared.arm import Arm
from .shared.rank import Block, Job, resident_mb

EVERY = 0.004
"""Seconds between two looks at the process's memory."""
PARAMETERS = 16
WARM_UP = 2


class Sampler:
    """Looks at this process's memory again and again, in MB, until it is stopped."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            self.seen.append(resident_mb())

    def stop(self) -> list[float]:
        """Return all looks, one at least."""
        self._stop.set()
        self._thread.join()
        return [*self.seen, resident_mb()]


def run_block(job: Job, block: Block, record: bool = True) -> None:
    """One arm; the last rank is done early if the block says so."""
    torch.manual_seed(0)
    elements = int(job.plan["megabytes"] * 1e6 / 4 / PARAMETERS)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(elements)) for _ in range(PARAMETERS)])
    nbytes = 4.0 * elements * PARAMETERS
    loss(model).backward()
    gc.collect()
    start = resident_mb()  # with the weights and one p.grad for each of them: what plain torch needs
    for parameter in model:
        parameter.grad = None
    if block["mode"] == "two":
        older = Arm(block["arm"], torch.nn.Linear(4, 4), job)
        older.train(loss)
        older.drain()
    arm = Arm(block["arm"], model, job, torch.optim.SGD(model.parameters(), lr=0.0))
    own = [row[job.rank] for row in block["times"]]
    leaves = block["mode"] in ("done", "two") and job.rank == job.size - 1
    if leaves:
        own = own[: len(own) // 4]
    job.barrier()
    sampler, waiting = Sampler(), 0
    for seconds in own:
        before = arm.stats().get("rounds", 0)
        arm.train(loss, seconds)
        waiting = max(waiting, arm.stats().get("rounds", 0) - before)
    peak = arm.stats().get("peak_bytes", 0)
    seen = sampler.stop()
    model.zero_grad()
    gc.collect()
    sampler = Sampler()
    arm.drain()
    serving = sampler.stop()
    job.barrier()
    time.sleep(0.05)
    found = {
        "peak": peak / nbytes,
        "waiting": waiting,
        "resident": 1e6 * (max(seen) - start) / nbytes,
        "left": leaves,
        # In drain() there is no p.grad, which ``start`` has: one copy more. What is kept between two rounds is a low
        # share of what was seen once rounds were served: between them the others sleep for longer than they last.
        "serving_most": 1e6 * (max(serving) - start) / nbytes + 1,
        "keeps": 1e6 * (quantile(serving[len(serving) // 2 :], 0.25) - start) / nbytes + 1,
        "after": 1e6 * (resident_mb() - start) / nbytes + 1,
    }
    arm.close()
    if record:
        job.record(block, found)


def loss(model: torch.nn.Module) -> torch.Tensor:
    """Something of which every parameter has a gradient."""
    total: torch.Tensor = sum(parameter.sum() for parameter in model.parameters())  # type: ignore[assignment]
    return total


def work(job: Job) -> None:
    """Run the plan's blocks, after one that is not recorded."""
    # Horovod's own buffers are made by its first large allreduces; they are not what is measured.
    warm_up = {"arm": "horovod", "mode": "together", "times": [[0.0] * job.size] * WARM_UP}
    run_block(job, warm_up, record=False)
    job.each_block(run_block)
