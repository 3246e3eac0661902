"""A training on the real digits, in stretches: between two of them the clock stops for all ranks."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...support.arms import FOLLOWING, eager
from ...support.digits import Indices, common, fold
from ...support.leadership import Clock
from .arm import Arm, Loss
from .digit_models import batches, digits, plain, resnet
from .rank import Job


class Training:
    """One rank's part in a training.

    Args:
        job: this rank.
        block: what is to be trained how: ``arm``, or its ``algorithm`` where the arm's name is none, ``seed``,
            ``model``, ``fold``, ``lr``, ``batch`` and ``split``; of those that follow a leader also what differs from
            the optimizer's defaults, and ``common``: how many images, the same on all ranks, the loss that is recorded
            is of (not there: the step's own loss).

    Attributes:
        arm: the model and its optimizer.
        clock: seconds of all stretches.
        steps: that this rank has taken.
        train, test: indices of the images.
    """

    def __init__(self, job: Job, block: dict[str, Any]) -> None:
        torch.manual_seed(block["seed"])
        model = resnet() if block["model"] == "resnet" else plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=block["lr"], momentum=0.9, weight_decay=5e-4)
        name = block.get("algorithm", block["arm"])
        self.arm = Arm(name, model, job, optimizer, **_own(name, block))
        self.clock, self.steps = Clock(), 0
        self.train, self.test = fold(block["fold"])
        self._job, self._images, self._labels = job, digits()[0], torch.from_numpy(digits()[1])
        self._common = common(block["fold"], block["common"], block["seed"]) if "common" in block else None
        epochs = (batches(block, digits()[1], self.train, job.rank, job.size, epoch) for epoch in itertools.count())
        self._batches = itertools.chain.from_iterable(epochs)
        model.train()

    @contextlib.contextmanager
    def stretch(self) -> Iterator[Callable[[], float]]:
        """Collective: steps are taken in it; it ends with the last rank's last one. Yields what the clock shows."""
        self._job.barrier()
        began, unix = time.perf_counter(), time.time()
        yield lambda: self.clock.now + time.perf_counter() - began
        if self.arm.gossip:
            self.arm.optimizer.cut()  # ranks that wait for this one are told that it has stopped
        self._job.barrier()
        self.clock.went(unix, self._job.agree(time.perf_counter() - began))

    def step(self, rate: float, compute: float) -> None:
        """One step at this learning rate, ``compute`` s of it slept."""
        for group in self.arm.optimizer.param_groups:
            group["lr"] = rate
        recorded = None if self._common is None else self._loss(self._common)
        self.arm.train(self._loss(next(self._batches)), compute, recorded)
        self.steps += 1

    def _loss(self, indices: Indices) -> Loss:
        x, y = self._images[indices], self._labels[indices]
        return lambda model: torch.nn.functional.cross_entropy(model(x), y)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[torch.nn.Module]:
        """Collective: yields the model with what stands for all ranks; afterwards the training may go on."""
        with self.arm.consensus():
            yield self.arm.model
            self.arm.model.train()


def _own(arm: str, block: dict[str, Any]) -> dict[str, Any]:
    """Further arguments of the arm's optimizer: of those that follow a leader, those that the block has."""
    if arm in FOLLOWING:
        return {name: block[name] for name in FOLLOWING[arm] if name in block}
    return {"seed": block["seed"]} if eager(arm) else {}
