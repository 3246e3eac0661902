"""The torch job of ``host``: steps of a model of many small tensors, whose cost is the host's; counted and timed."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from hvd_async.torch.testing import FakeGpu

from ..support.arms import DDP_NO_OP, PLAIN, eager
from .shared import rivals
from .shared.arm import Arm
from .shared.host_counts import (
    BUCKET_MB,
    ELEMENTS,
    STEPS,
    SmallTensors,
    count_steps,
    mean_counts,
    momentum_sgd,
)
from .shared.rank import Block, Job


def run_block(job: Job, block: Block) -> None:
    """One arm."""
    if block["device"] == "cpu":
        run_on(job, block, None)
    else:
        gpu = FakeGpu()
        with gpu.installed():
            run_on(job, block, gpu)


def run_on(job: Job, block: Block, gpu: FakeGpu | None) -> None:
    """One arm on a fake GPU, or, for None, on the CPU."""
    arm, inputs = made(block["arm"], job), torch.ones(ELEMENTS)

    def step() -> None:
        arm.train(lambda model: model(inputs))

    for _ in range(STEPS):
        step()
    arm.sleeps = True  # (waiting costs nothing then)
    job.barrier()
    process, training = time.process_time(), time.thread_time()
    for _ in range(block["steps"]):
        step()
    training, process = time.thread_time() - training, time.process_time() - process
    arm.sleeps = False  # (Horovod waits without calls of Python)
    before = waits_of_this_thread(gpu)
    counted = count_steps(step)
    counts, waits = mean_counts(counted), waits_of_this_thread(gpu) - before
    if gpu is not None:  # (what else reads numbers reads the host's memory)
        reads = sum(operators.waits for operators, _ in counted)
        counts = counts._replace(
            host_waits=waits / (2 * len(counted)) + reads / len(counted)
        )  # (counting takes two steps)
    arm.drain()
    own = {"training_ms": 1e3 * training / block["steps"], "other_ms": 1e3 * (process - training) / block["steps"]}
    own |= {"aten_calls": counts.aten_calls, "python_calls": counts.python_calls + counts.c_calls}
    own |= {"host_waits": counts.host_waits, "copies": counts.copies}
    own |= {"buckets": len(arm.optimizer._async.replica.layout) if arm.ours and eager(arm.name) else None}
    job.conclude(arm, block, own)


def waits_of_this_thread(gpu: FakeGpu | None) -> int:
    """Return how often this thread has waited for the fake GPU's copies and events."""
    name = threading.current_thread().name
    return 0 if gpu is None else sum(count for (thread, _), count in gpu.waits.items() if thread == name)


def made(name: str, job: Job) -> Arm:
    """Return the model under an arm, with buckets of the same size in all that have some."""
    model = SmallTensors()
    optimizer = momentum_sgd(model)
    if name in ("ddp", DDP_NO_OP):
        rivals.join_process_group(job)
        wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
        if name == DDP_NO_OP:
            from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks

            wrapped.register_comm_hook(None, debugging_hooks.noop_hook)
        return Arm(PLAIN, wrapped, job, optimizer)
    own: dict[str, Any] = {"bucket_cap_mb": BUCKET_MB} if eager(name) else {}
    return Arm(name, model, job, optimizer, **own)
