"""The job of ``time_to_accuracy``: short trainings, looked at without stopping them.

Ranks copy their weights now and then and go on; what these were worth is found out when the training is over. So no
evaluation makes ranks wait for each other, or has late gradients applied before their time.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from ..support.arms import WARM_UP, eager, own_weights
from .shared.arm import Arm
from .shared.rank import Block, Job, rate
from .shared.tasks import Task, task_of, values_of, weights_in

Copies = NDArray[np.float32]
"""[looks, values of the model]."""


def run_block(job: Job, block: Block) -> None:
    """One training, and what stood for all ranks at each look; the last one is after the drain.

    The clock (of the machine, which all ranks share) starts when the last rank has taken the untimed steps.
    """
    task, steps = task_of(job, block), block["own_steps"][job.rank]
    optimizer = torch.optim.SGD(task.model.parameters(), lr=block["lr"], momentum=0.9, weight_decay=5e-4)
    own = {"seed": block["seed"], "pace": block["pace"]} if eager(block["arm"]) else {}
    arm = Arm(block["arm"], task.model, job, optimizer, **own)
    slept = [row[job.rank] for row in block["times"]]
    looks = set(np.linspace(WARM_UP, steps, block["looks"] + 1)[1:-1].round().astype(int).tolist())
    copies: list[NDArray[np.float32]] = []
    moments, started = [], 0.0

    def look() -> None:
        moments.append(time.perf_counter())
        copies.append(_values(task.model).numpy())

    task.model.train()
    job.barrier()
    for step in range(steps):
        for group in arm.optimizer.param_groups:
            group["lr"] = rate(block["lr"], step, steps)
        arm.train(task.loss(step), slept[step % len(slept)])
        if step + 1 == WARM_UP:
            started = time.perf_counter()
        if step + 1 in looks:
            look()
    ended = time.perf_counter()
    stats = arm.stats()
    arm.drain()
    look()
    found = {"seconds": ended - started, "steps": steps, "waited": arm.waited}
    found["staleness"] = stats.get("staleness", {})
    found["curve"] = curve(job, block["arm"], moments, started, look_back(job, block, task, np.array(copies)))
    job.conclude(arm, block, found)


def look_back(job: Job, block: Block, task: Task, copies: Copies) -> list[float]:
    """Collective: the accuracy at each look, of what stood for all ranks then; afterwards the model is as it was.

    Where ranks share weights that is rank 0's, else the mean. Statistics of batches are averaged, as by a drain. The
    ranks part the looks among themselves; what they need goes by files, since a link may be slow.
    """
    np.save(job.folder / f"copies.{job.rank}.npy", copies)
    job.barrier()
    every = [np.load(job.folder / f"copies.{rank}.npy") for rank in range(job.size)]
    weights = weights_in(task.model)
    mean = np.mean(every, axis=0, dtype=np.float64)
    if not own_weights(block["arm"]):
        mean[:, :weights] = every[0][:, :weights]
    drained = _values(task.model)
    mine = {look: _score(task, mean[look]) for look in range(job.rank, len(mean), job.size)}
    _put(task.model, drained)
    scores: dict[int, float] = {}
    for others in job.gather(mine):  # (which is also where all have read the files)
        scores |= others
    return [scores[look] for look in range(len(mean))]


def _values(model: torch.nn.Module) -> torch.Tensor:
    """A copy of all of them, one after the other."""
    return torch.cat([value.reshape(-1) for value in values_of(model)])


def _score(task: Task, values: NDArray[np.float64]) -> float:
    _put(task.model, torch.from_numpy(values.astype(np.float32)))
    return task.score()


@torch.no_grad()
def _put(model: torch.nn.Module, values: torch.Tensor) -> None:
    """Give a model these values."""
    places = values_of(model)
    for place, value in zip(places, values.split([place.numel() for place in places]), strict=True):
        place.copy_(value.view_as(place))


def curve(job: Job, arm: str, moments: list[float], started: float, scores: list[float]) -> list[list[float]]:
    """Collective: seconds and accuracy of each look.

    What stands for all ranks is there with rank 0's weights where they share them, else with the last rank's.
    """
    times = np.array(job.gather(moments)) - max(job.gather(started))
    seconds = times.max(axis=0) if own_weights(arm) else times[0]
    return [[float(second), score] for second, score in zip(seconds, scores, strict=True)]
