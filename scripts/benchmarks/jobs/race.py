"""The job of ``race``: trainings on the real digits that all take the same time; the clock stops for evaluations."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from ..digits import fold
from ..leadership import Clock
from ..schedule import LEADERS, eager, waits_for_nobody
from . import arms
from .accuracy import accuracy, batches, digits, resnet
from .common import Job, rate

FOLD = 0
"""The images to test on."""


class Training:
    """One rank's part in a training.

    Args:
        job: this rank.
        block: what is to be trained how.

    Attributes:
        arm: the model and its optimizer.
        steps: that this rank has taken.
    """

    def __init__(self, job: Job, block: dict[str, Any]) -> None:
        torch.manual_seed(block["seed"])
        model = resnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=block["lr"], momentum=0.9, weight_decay=5e-4)
        self.arm = arms.Arm(block["arm"], model, optimizer, job, **_own(block))
        self.steps = 0
        self._block, self._images, self._labels = block, digits()[0], torch.from_numpy(digits()[1])
        self._train, self.test = fold(FOLD)
        self._compute = block["compute"] + (block["delay"] if job.rank == job.size - 1 else 0.0)
        epochs = (batches(block, self._train, job.rank, job.size, epoch) for epoch in itertools.count())
        self._batches = itertools.chain.from_iterable(epochs)

    def step(self, at: float) -> None:
        """One step, ``at`` seconds by the clock; the learning rate goes by that."""
        for group in self.arm.optimizer.param_groups:
            group["lr"] = rate(self._block["lr"], round(1e3 * at), round(1e3 * self._block["seconds"]))
        indices = next(self._batches)
        x, y = self._images[indices], self._labels[indices]
        self.arm.train(lambda model: torch.nn.functional.cross_entropy(model(x), y), self._compute)
        self.steps += 1


def _own(block: dict[str, Any]) -> dict[str, Any]:
    """Further arguments of the arm's optimizer."""
    arm = block["arm"]
    if arm == "lsgd":
        names = ("local_period", "global_period", "group")
        return {name: block[name] for name in names}
    if arm in LEADERS:
        return {"global_period": block["global_period"]}
    return {"seed": block["seed"]} if eager(arm) else {}


def run_block(job: Job, block: dict[str, Any]) -> None:
    """One training: stretches of it, with an evaluation after each.

    Where ranks wait for each other, all take equally many steps in a stretch; else each goes by the clock.
    """
    together = not waits_for_nobody(block["arm"])
    training = Training(job, block)
    arm, clock, curve = training.arm, Clock(), []
    arm.model.train()
    pace = 0.0
    """Seconds a step, where all ranks step together."""
    while block["seconds"] - clock.now > pace / 2:
        until = min(block["seconds"], clock.now + block["every"])
        job.barrier()
        began, unix = time.perf_counter(), time.time()
        if together:
            count = max(1, round((until - clock.now) / pace)) if pace else 1
            for number in range(count):
                training.step(clock.now + (until - clock.now) * number / count)
        else:
            while (at := clock.now + time.perf_counter() - began) < until:
                training.step(at)
        if arm.gossip:
            arm.optimizer.cut()  # (whoever waits for this rank hears that it has stopped)
        job.barrier()  # the clock stops for all when the last rank has ended its step
        took = job.agree(time.perf_counter() - began)
        pace = took / count if together else 0.0
        clock.went(unix, took)
        with arm.consensus():
            if job.rank == 0:
                curve.append([clock.now, accuracy(arm.model, training.test)])
            arm.model.train()
    stats = arm.stats()
    history = [[clock.at(unix), group, leader] for unix, group, leader in arm.history()]
    arm.drain()
    own = {
        "curve": curve,
        "seconds": clock.now,
        "steps": training.steps,
        "pulls": stats.get("pulls"),
        "history": history,
        "identical": arm.identical(),
    }
    arm.close()
    job.record(block, own)


def main() -> None:
    """Run the plan's blocks."""
    job = arms.start()
    for block in job.plan["blocks"]:
        run_block(job, block)
    arms.finish(job)


if __name__ == "__main__":
    main()
