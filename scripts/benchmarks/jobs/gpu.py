"""The torch job of ``gpu``: ResNet-50 on a GPU under every arm, in alternation, timed by the device's clock."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch

from hvd_async.simulation.names import LEADERS, compression_of

from ..support.arms import eager
from .shared.arm import Arm, resnet50
from .shared.cycles import alternate
from .shared.rank import Job

CLASSES = 1000
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
UNTIMED = 3
"""Steps before a block's clock starts: the allocator settles, and what the last arm left in the caches goes."""
TRACED = 5
"""Steps of each arm that a profiler looks at."""
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
"""CUDA's calls that hold a thread up; the first waits for all of the device."""
SPAN = "hvd_async.steps"
"""The steps' name in the profiler."""


class GpuStepper:
    """A ResNet-50 of its own under one arm."""

    def __init__(self, name: str, job: Job) -> None:
        device, plan = torch.device("cuda", torch.cuda.current_device()), job.plan
        torch.manual_seed(0)
        model = resnet50(CLASSES).to(device, memory_format=torch.channels_last)
        self._dtype, self._base = DTYPES[plan["dtype"]], compression_of(name)[0]
        self._scaler = torch.amp.GradScaler("cuda", enabled=self._dtype == torch.float16)
        ours = eager(name) and self._scaler.is_enabled()
        self.arm = Arm(name, model, job, **({"scaler": self._scaler} if ours else {}))
        shape = (plan["batch_size"], 3, plan["image_size"], plan["image_size"])
        self._images = torch.randn(shape, device=device).contiguous(memory_format=torch.channels_last)
        self._labels = torch.randint(CLASSES, shape[:1], device=device)

    def step(self) -> None:
        """Forward, backward, update."""
        optimizer = self.arm.optimizer
        optimizer.zero_grad()
        with torch.autocast("cuda", self._dtype):
            loss = torch.nn.functional.cross_entropy(self.arm.model(self._images), self._labels)
        if self._base in LEADERS:
            optimizer.record_loss(loss)
        self._scaler.scale(loss).backward()
        shown: Any = contextlib.nullcontext()
        if self._base == "horovod":
            optimizer.synchronize()
            shown = optimizer.skip_synchronize()
        with shown:
            self._scaler.step(optimizer)
        self._scaler.update()

    def drain(self) -> None:
        """Leave nothing on its way."""
        if self.arm.ours:
            self.arm.drain()

    def fresh(self) -> int | None:
        """Not looked at."""
        return None


def by_device_clock(job: Job, stepper: GpuStepper, steps: int) -> dict[str, Any]:
    """Untimed steps, then ``steps`` between two events on the device."""
    job.barrier()
    for _ in range(UNTIMED):
        stepper.step()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(steps):
        stepper.step()
    last.record()
    last.synchronize()
    stepper.drain()
    return {"elapsed": first.elapsed_time(last) / 1e3, "steps": steps}


def trace(job: Job, name: str, stepper: GpuStepper) -> dict[str, Any]:
    """Count how often a step waits for CUDA, and in which call; write the trace if the plan says where."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    stepper.step()
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function(SPAN):
        for _ in range(TRACED):
            stepper.step()
    stepper.drain()
    events = profile.events()
    on_cpu = torch.autograd.DeviceType.CPU
    span = next(event.time_range for event in events if event.name == SPAN and event.device_type == on_cpu)
    # the profiler itself waits for the device when it ends
    inside = [event for event in events if span.start <= event.time_range.start < span.end]
    counts = Counter(event.name for event in inside if event.name in WAITS)
    if job.plan["traces"] and job.rank == 0:
        profile.export_chrome_trace(f"{job.plan['traces']}/{name}.json.gz")
    return {wait: counts[wait] / TRACED for wait in WAITS}


def work(job: Job) -> None:
    """Run the plan's cycles, then trace each arm."""
    torch.cuda.set_device(job.plan["devices"][job.rank % len(job.plan["devices"])])
    for name, stepper in alternate(job, GpuStepper, by_device_clock).items():
        job.record({"arm": name, "cycle": None}, trace(job, name, stepper))
