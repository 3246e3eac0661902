"""The job of ``accuracy`` and ``hard``: many short trainings on the real digits, one after the other in one process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_async.eager import EagerWorker
from hvd_async.events import Command, Go
from hvd_async.protocols import Vector

from ..digits import fold, images
from ..schedule import eager
from . import arms
from .common import Job, rate


class Forgetful(EagerWorker):
    """The mutant: what comes too late for its own round is lost, as in the code published with the paper.

    Its late gradients go into a buffer that is emptied, or written over, before the next round takes it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gone: dict[int, int] = {}

    def obey(self, command: Command) -> None:
        """Note which round has gone."""
        if isinstance(command, Go):
            self._gone[command.bucket] = command.round
        super().obey(command)

    def hand_over(self, bucket: int, vector: Vector | None) -> None:
        """Hand over nothing if it is too late."""
        super().hand_over(bucket, self._kept(bucket, vector))

    def step(self, vectors: Mapping[int, Vector | None], *args: Any, **kwargs: Any) -> Any:
        """As ``hand_over``, for the buckets that are left."""
        kept = {bucket: self._kept(bucket, vector) for bucket, vector in vectors.items()}
        return super().step(kept, *args, **kwargs)

    def _kept(self, bucket: int, vector: Vector | None) -> Vector | None:
        late = self._gone.get(bucket, 0) >= self._steps + self._base + 1
        return None if late else vector


class Block(torch.nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        nn = torch.nn
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        same = stride == 1 and inputs == outputs
        self.around = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""
        return torch.relu(self.body(x) + self.around(x))


def resnet() -> torch.nn.Module:
    """A ResNet for images of 8 x 8: seven layers, with batch norm."""
    nn = torch.nn
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
        *(Block(12, 12, 1), Block(12, 24, 2)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10)),
    )


def plain() -> torch.nn.Module:
    """A network without batch norm, whose statistics would tell a rank's own classes."""
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))


@functools.cache
def digits() -> tuple[torch.Tensor, NDArray[np.int64]]:
    """All 1,797 images, [n, 1, 8, 8], normalised, and their labels."""
    pixels, labels = images()
    return torch.from_numpy(pixels)[:, None], labels


def batches(
    block: dict[str, Any], train: NDArray[np.int64], rank: int, size: int, epoch: int
) -> list[NDArray[np.int64]]:
    """This rank's batches of an epoch: its share of the images, or of the images of its classes, in a new order."""
    batch = block["batch"]
    steps = len(train) // (batch * size)
    random = np.random.default_rng([block["seed"], epoch])
    if block["split"] == "even":
        order = random.permutation(train)[: steps * batch * size]
        return list(order.reshape(steps, size, batch)[:, rank])
    own = train[np.isin(digits()[1][train], classes_of(rank, size))]
    return list(np.resize(np.random.default_rng([block["seed"], epoch, rank]).permutation(own), (steps, batch)))


def classes_of(rank: int, size: int) -> list[int]:
    """The last rank alone has the digits 8 and 9; the others share the rest."""
    return [8, 9] if rank == size - 1 else [digit for digit in range(8) if digit % (size - 1) == rank]


def run_block(job: Job, block: dict[str, Any]) -> None:
    """One training, and the accuracy on its fold's test images."""
    torch.manual_seed(block["seed"])
    model = resnet() if block["model"] == "resnet" else plain()
    train, test = fold(block["fold"])
    optimizer = torch.optim.SGD(model.parameters(), lr=block["lr"], momentum=0.9, weight_decay=5e-4)
    name = "solo" if block["arm"] == "drops_late" else block["arm"]
    more = {"seed": block["seed"]} if eager(name) else {}
    delays = np.resize([row[job.rank] for row in block["times"]], block["steps"][job.rank]).tolist()
    with forgetful(block["arm"] == "drops_late"):
        arm = arms.Arm(name, model, optimizer, job, **more)
        job.barrier()
        started = time.perf_counter()
        fit(job, arm, block, train, delays)
        elapsed = time.perf_counter() - started
    distance = arm.distance()
    arm.drain()
    stats = arm.stats()
    own = {
        "elapsed": elapsed,
        "accuracy": accuracy(model, test) if job.rank == 0 else None,
        "identical": arm.identical(),
        "distance": distance,
        "norm": arm.norm(),
        "averagings": stats.get("averagings"),
        "steps": len(delays),
        "staleness": stats.get("staleness", {}),
        "skipped": stats.get("gradients_skipped", 0),
    }
    arm.close()
    job.record({key: value for key, value in block.items() if key != "times"}, own)


def fit(job: Job, arm: arms.Arm, block: dict[str, Any], train: NDArray[np.int64], delays: list[float]) -> None:
    """Train for as many steps as there are delays, epoch by epoch."""
    pixels, labels = digits()[0], torch.from_numpy(digits()[1])
    arm.model.train()
    epochs = (batches(block, train, job.rank, job.size, epoch) for epoch in itertools.count())
    for step, (delay, indices) in enumerate(zip(delays, itertools.chain.from_iterable(epochs), strict=False)):
        x, y = pixels[indices], labels[indices]
        for group in arm.optimizer.param_groups:
            group["lr"] = rate(block["lr"], step, len(delays))
        arm.train(lambda model, x=x, y=y: torch.nn.functional.cross_entropy(model(x), y), delay)  # type: ignore[misc]


@torch.no_grad()
def accuracy(model: torch.nn.Module, test: NDArray[np.int64]) -> float:
    """The share of the test images that the model classifies correctly."""
    pixels, labels = digits()
    model.eval()
    found = model(pixels[test]).argmax(dim=1).numpy()
    return float((found == labels[test]).mean())


@contextlib.contextmanager
def forgetful(wanted: bool) -> Iterator[None]:
    """Inside it, optimizers that take their first step lose what is late, if this is wanted."""
    if not wanted:
        yield
        return
    with mock.patch("hvd_async.torch.stepping.EagerWorker", Forgetful):
        yield


def main() -> None:
    """Run the plan's blocks."""
    job = arms.start()
    for block in job.plan["blocks"]:
        run_block(job, block)
    arms.finish(job)


if __name__ == "__main__":
    main()
