"""The torch job of ``no_stragglers``: the real ResNet-50 under every arm, in alternation."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import hvd_async.torch as hvd

from ..support import digits
from ..support.arms import RECORDED
from .shared.arm import Arm, resnet50
from .shared.cycles import alternate
from .shared.rank import Job

BASE = "horovod"
"""The arm whose optimizer is recorded in ``RECORDED``."""


class TorchStepper:
    """A ResNet-50 of its own under one arm."""

    def __init__(self, name: str, job: Job) -> None:
        torch.manual_seed(0)
        self._arm = Arm(BASE if name == RECORDED else name, resnet50(1000), job)
        if name == RECORDED:
            hvd.record(self._arm.optimizer, Path(os.environ[digits.FOLDER]) / "trace")
        torch.manual_seed(job.rank)
        size = job.plan["image_size"]
        self._images = torch.randn(job.plan["batch_size"], 3, size, size)
        self._labels = torch.randint(1000, (job.plan["batch_size"],))

    def step(self) -> None:
        """Forward, backward, update."""
        self._arm.train(lambda model: torch.nn.functional.cross_entropy(model(self._images), self._labels))

    def drain(self) -> None:
        """Leave nothing on its way."""
        if self._arm.ours:
            self._arm.drain()

    def fresh(self) -> int | None:
        """Return how many gradients of staleness 0 were carried so far; None where all are."""
        return int(self._arm.stats()["staleness"].get("0", 0)) if self._arm.ours else None


def work(job: Job) -> None:
    """Run the plan's cycles."""
    alternate(job, TorchStepper)
