"""The job of ``soak``: very many rounds of a small model, with random pauses, while the launcher stops processes."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import torch

from .shared.arm import Arm, mean_square
from .shared.rank import Job, resident_mb

LOOKS = 400
"""How often each rank notes its memory."""


def small() -> tuple[torch.nn.Module, torch.Tensor]:
    """A model, and a batch for it."""
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)), torch.randn(4, 16)


def pause(draws: random.Random, plan: dict[str, Any]) -> float:
    """Draw the seconds that a step pauses."""
    return draws.uniform(0.0, plan["delay"]) if draws.random() < plan["share"] else 0.0


class Notes:
    """A rank's notes of its memory while it trains.

    Args:
        job: this rank.
    """

    def __init__(self, job: Job) -> None:
        self._path = job.folder / f"soak.{job.rank}.jsonl"
        self._file = self._path.open("a", buffering=1)
        self._started = time.perf_counter()

    def add(self, round_: float) -> None:
        """Note this process's memory at a round."""
        self._file.write(json.dumps({"round": round_, "mb": resident_mb(), "s": self.elapsed}) + "\n")

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    @property
    def all(self) -> list[dict[str, float]]:
        """All that was noted."""
        return [json.loads(line) for line in self._path.read_text().splitlines()]


def work(job: Job) -> None:
    """Run the plan."""
    plan = job.plan
    torch.manual_seed(0)
    model, inputs = small()
    arm = Arm(plan["arm"], model, job)
    draws, notes = random.Random(1000 * plan["seed"] + job.rank), Notes(job)
    every = max(1, plan["rounds"] // LOOKS)
    for step in range(plan["rounds"]):
        arm.train(mean_square(inputs), pause(draws, plan))
        if step % every == 0:
            notes.add(int(arm.stats()["rounds"]))
        if (step + 1) % plan["drain_every"] == 0:
            arm.drain()  # it raises if a gradient was lost
    (job.folder / "stop").touch()  # no more stopping: what follows is not part of it
    arm.drain()
    found = {"elapsed": notes.elapsed, "stats": arm.stats(), "identical": arm.identical(), "memory": notes.all}
    job.record({"arm": plan["arm"]}, found)
