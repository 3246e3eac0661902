"""The timed job of torch: a model under an arm takes steps of a given computation, and this rank's figures are noted.

A block has, in addition to what ``rank.timed`` reads:

``arm``: its name. ``own``: further arguments of the arm's optimizer. ``task``: see ``tasks``. ``seed``: of weights and
data. ``lr``, ``momentum``, ``weight_decay``: of SGD;
``cosine``: the rate rises and falls. ``exact``: ``times`` are those of the whole computation. ``trace``: folder to
record the steps to. ``scored``: the accuracy is found after the drain. ``looks``: how often the ranks copy their
weights, without stopping, to be scored later. ``apart``: how far the ranks' weights differ before the drain is noted.
``profile``: nothing is timed, a profiler counts what waits for the GPU. ``base``: the arm's name without a variant.
``environment``: variables that are set until the first step has been taken. ``reads_loss``: in every step.
"""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

import hvd_async.torch as hvd

from ..support.arms import MUTANT, has_own_weights
from ..support.launch import SPAN, TRACED
from .arm import Arm, average, forgetful
from .rank import Block, Job, WallClock, conclude, rate, steps_of, timed
from .tasks import Task, task_of

WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
"""CUDA's calls that hold a thread up; the first waits for all of the device."""


class TorchTrainer:
    """A model under an arm.

    Args:
        job: this rank.
        block: see above.

    Attributes:
        task: what is learned.
        arm: the model and its optimizer.
        computed: seconds of each step until its gradients were there.
    """

    def __init__(self, job: Job, block: Block) -> None:
        self.task: Task = task_of(block["task"], block["seed"], job.rank, job.size)
        self._block, self._steps, self._most = block, 0, steps_of(block, job.rank)
        how = {name: block[name] for name in ("momentum", "weight_decay") if name in block}
        optimizer = torch.optim.SGD(self.task.model.parameters(), lr=block["lr"], **how)
        scaler = torch.amp.GradScaler("cuda") if block["task"].get("dtype") == "fp16" else None
        self.arm = Arm(block.get("base", block["arm"]), self.task.model, job, optimizer, scaler, **block.get("own", {}))
        self.computed = self.arm.computed
        self.stats, self.drain = self.arm.stats, self.arm.drain
        self.identical, self.close = self.arm.identical, self.arm.close

    @property
    def waited(self) -> float:
        return self.arm.waited

    def step(self, seconds: float) -> None:
        if self._block.get("cosine"):
            steps = self._block["untimed"] + (self._most or 0)
            for group in self.arm.optimizer.param_groups:
                group["lr"] = rate(self._block["lr"], self._steps, steps)
        how = {"exact": self._block.get("exact", False), "reads_loss": self._block.get("reads_loss", False)}
        self.arm.train(self.task.loss(self._steps), seconds, **how)
        self._steps += 1


kept: dict[str, TorchTrainer] = {}
"""Models that stay for later blocks, by arm."""


def run_block(job: Job, block: Block) -> None:
    """Run one block."""
    on_gpu = "devices" in job.plan
    if on_gpu:
        torch.cuda.set_device(job.plan["devices"][job.rank % len(job.plan["devices"])])
    if block.get("profile"):
        trainer = started(job, block)
        for _ in range(block["untimed"]):
            trainer.step(0.0)
        own = traced(job, block["arm"], trainer)
        trainer.close()
        job.record(block, own)
        return
    with forgetful(block["arm"] == MUTANT):
        trainer = kept.get(block["arm"]) or started(job, block)
        if block.get("keep"):
            kept[block["arm"]] = trainer
        looks, clock = Looks(block, trainer.task.model, job.rank), DeviceClock() if on_gpu else WallClock()
        own = timed(
            *(job, block, trainer),
            clock=clock,
            record=(lambda: hvd.record(trainer.arm.optimizer, Path(block["trace"]))) if "trace" in block else None,
            on_step=looks.after,
            before_drain=(lambda: apart(job, block, trainer)) if "apart" in block else None,
        )
        model, score = trainer.task.model, trainer.task.score
        if "looks" in block:
            looks.look()
            own["curve"] = look_back(job, block["arm"], trainer.task, looks, max(job.gather(clock.started)))
        elif block.get("scored") and score is not None:
            own["accuracy"] = score(model) if job.rank == 0 else None
        conclude(job, block, trainer, own)


def started(job: Job, block: Block) -> TorchTrainer:
    """Return the model of a block under its arm. With an environment it has taken a step, by which its optimizer has
    read the variables."""
    environment = block.get("environment", {})
    with mock.patch.dict(os.environ, environment):
        trainer = TorchTrainer(job, block)
        if environment:
            trainer.step(0.0)
    return trainer


def apart(job: Job, block: Block, trainer: TorchTrainer) -> dict[str, Any]:
    """Return how far ranks are apart; with ``apart`` "mean" also the accuracy of the mean of their weights."""
    own = {"distance": trainer.arm.distance(), "norm": trainer.arm.norm(), "of_mean": None}
    if block["apart"] == "mean":
        mean = copy.deepcopy(trainer.task.model)
        average(mean)
        assert trainer.task.score is not None
        own["of_mean"] = trainer.task.score(mean) if job.rank == 0 else None
    return own


# -- looks at a training that is not stopped ---------------------------------------------------------------------------


def values_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return a model's weights, then its statistics of batches, as they are in memory."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return [*(parameter.detach() for parameter in model.parameters()), *buffers]


def flat(model: torch.nn.Module) -> NDArray[np.float32]:
    """Return a copy of all values, one after the other."""
    copied: NDArray[np.float32] = torch.cat([value.reshape(-1) for value in values_of(model)]).numpy()
    return copied


@torch.no_grad()
def put(model: torch.nn.Module, values: NDArray[np.float32]) -> None:
    """Set a model's values."""
    places = values_of(model)
    parts = torch.from_numpy(values).split([place.numel() for place in places])
    for place, value in zip(places, parts, strict=True):
        place.copy_(value.view_as(place))


class Looks:
    """Copies of a model's values, taken now and then while it is trained; the last one is after the drain.

    Args:
        block: says how many, of how many steps.
        model: that is trained.
        rank: this one.

    Attributes:
        copies: see ``flat``.
        seconds: when each was taken, by the machine's clock.
    """

    def __init__(self, block: Block, model: torch.nn.Module, rank: int) -> None:
        self._model = model
        shares = np.linspace(0, steps_of(block, rank) or 0, block.get("looks", 1) + 1)[1:-1]
        self._wanted = set(shares.round().astype(int).tolist())
        self.copies: list[NDArray[np.float32]] = []
        self.seconds: list[float] = []

    def after(self, step: int) -> None:
        """Copy the values if it is time to."""
        if step in self._wanted:
            self.look()

    def look(self) -> None:
        """Copy the values."""
        self.seconds.append(time.perf_counter())
        self.copies.append(flat(self._model))


def look_back(job: Job, arm: str, task: Task, looks: Looks, started: float) -> list[list[float]]:
    """Return seconds and accuracy of the consensus at each look. Collective; afterwards the model is as it was.

    Where ranks share weights these are rank 0's, else their mean, which is there with the last rank's; statistics of
    batches are averaged, as by a drain. The ranks divide the looks among themselves; what they need goes by files,
    since a link may be slow.
    """
    np.save(job.folder / f"copies.{job.rank}.npy", np.array(looks.copies))
    job.barrier()
    every = [np.load(job.folder / f"copies.{rank}.npy") for rank in range(job.size)]
    mean = np.mean(every, axis=0, dtype=np.float64)
    times = np.array(job.gather(looks.seconds))
    if has_own_weights(arm):
        seconds = times.max(axis=0)
    else:
        seconds, weights = times[0], sum(parameter.numel() for parameter in task.model.parameters())
        mean[:, :weights] = every[0][:, :weights]
    drained, mine = flat(task.model), dict[int, float]()
    assert task.score is not None
    for look in range(job.rank, len(mean), job.size):
        put(task.model, mean[look].astype(np.float32))
        mine[look] = task.score(task.model)
    put(task.model, drained)
    scores: dict[int, float] = {}
    for others in job.gather(mine):  # (which is also where all have read the files)
        scores |= others
    return [[float(second) - started, scores[look]] for look, second in enumerate(seconds)]


# -- on a GPU ----------------------------------------------------------------------------------------------------------


class DeviceClock(WallClock):
    """Time as the GPU sees it."""

    def start(self) -> None:
        super().start()
        self._events = [torch.cuda.Event(enable_timing=True)]
        self._events[0].record()

    def lap(self) -> float:
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record()
        return 0.0

    def stop(self) -> None:
        self._events[-1].synchronize()
        self.laps = [self._events[0].elapsed_time(event) / 1e3 for event in self._events[1:]]


def traced(job: Job, name: str, trainer: TorchTrainer) -> dict[str, Any]:
    """Return how often a step waits for CUDA, by call; write the trace if the plan says where."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    trainer.step(0.0)
    with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function(SPAN):
        for _ in range(TRACED):
            trainer.step(0.0)
    trainer.drain()
    events = profile.events()
    on_cpu = torch.autograd.DeviceType.CPU
    span = next(event.time_range for event in events if event.name == SPAN and event.device_type == on_cpu)
    # the profiler itself waits for the device when it ends
    inside = [event for event in events if span.start <= event.time_range.start < span.end]
    found = Counter(event.name for event in inside if event.name in WAITS)
    if job.plan["traces"] and job.rank == 0:
        profile.export_chrome_trace(f"{job.plan['traces']}/{name}.json.gz")
    return {wait: found[wait] / TRACED for wait in WAITS}
