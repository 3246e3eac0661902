"""The job of ``soak``: very many rounds of a small model, with random pauses, while the launcher stops processes."""

from __future__ import annotations

import json
import random
import time

import torch

from .shared import arm as arms
from .shared.rank import resident_mb

LOOKS = 400
"""How often each rank notes its memory."""


def small() -> tuple[torch.nn.Module, torch.Tensor]:
    """A model, and a batch for it."""
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)), torch.randn(4, 16)


def main() -> None:
    """Run the plan."""
    job = arms.start()
    plan = job.plan
    torch.manual_seed(0)
    model, inputs = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    arm = arms.Arm(plan["arm"], model, optimizer, job)
    draws = random.Random(1000 * plan["seed"] + job.rank)
    notes = (job.folder / f"soak.{job.rank}.jsonl").open("a", buffering=1)
    every = max(1, plan["rounds"] // LOOKS)
    started = time.perf_counter()
    for step in range(plan["rounds"]):
        pause = draws.uniform(0.0, plan["delay"]) if draws.random() < plan["share"] else 0.0
        arm.train(lambda trained: trained(inputs).square().mean(), pause)
        if step % every == 0:
            note = {"round": int(arm.stats()["rounds"]), "mb": resident_mb(), "s": time.perf_counter() - started}
            notes.write(json.dumps(note) + "\n")
        if (step + 1) % plan["drain_every"] == 0:
            arm.drain()  # it raises if a gradient was lost
    (job.folder / "stop").touch()  # no more stopping: what follows is not part of it
    arm.drain()
    elapsed = time.perf_counter() - started
    seen = [json.loads(line) for line in (job.folder / f"soak.{job.rank}.jsonl").read_text().splitlines()]
    found = {"elapsed": elapsed, "stats": arm.stats(), "identical": arm.identical(), "memory": seen}
    job.record({"arm": plan["arm"]}, found)
    arms.finish(job)


if __name__ == "__main__":
    main()
