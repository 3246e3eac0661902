"""The real digits for torch: images, batches by rank, networks, losses and accuracies."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...support.digits import images


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
    return two_layers(96)


def wide() -> torch.nn.Module:
    """The same with 180 KB of weights, for slow networks."""
    return two_layers(600)


def two_layers(hidden: int) -> torch.nn.Module:
    """A classifier of images of 8 x 8 with so many hidden units."""
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


@functools.cache
def digits() -> tuple[torch.Tensor, NDArray[np.int64]]:
    """All 1,797 images, [n, 1, 8, 8], normalised, and their labels."""
    pixels, labels = images()
    return torch.from_numpy(pixels)[:, None], labels


def batches(
    block: dict[str, Any], labels: NDArray[np.int64], train: NDArray[np.int64], rank: int, size: int, epoch: int
) -> list[NDArray[np.int64]]:
    """This rank's batches of an epoch: its share of the images, or of the images of its classes, in a new order."""
    batch = block["batch"]
    steps = len(train) // (batch * size)
    random = np.random.default_rng([block["seed"], epoch])
    if block["split"] == "even":
        order = random.permutation(train)[: steps * batch * size]
        return list(order.reshape(steps, size, batch)[:, rank])
    own = train[np.isin(labels[train], classes_of(rank, size))]
    return list(np.resize(np.random.default_rng([block["seed"], epoch, rank]).permutation(own), (steps, batch)))


def classes_of(rank: int, size: int) -> list[int]:
    """The last rank alone has the digits 8 and 9; the others share the rest."""
    return [8, 9] if rank == size - 1 else [digit for digit in range(8) if digit % (size - 1) == rank]


@torch.no_grad()
def accuracy(model: torch.nn.Module, test: NDArray[np.int64]) -> float:
    """The share of the test images that the model classifies correctly."""
    pixels, labels = digits()
    model.eval()
    found = model(pixels[test]).argmax(dim=1).numpy()
    return float((found == labels[test]).mean())


@torch.no_grad()
def loss(model: torch.nn.Module, indices: NDArray[np.int64]) -> float:
    """The sum of these images' losses."""
    pixels, labels = digits()
    model.eval()
    found, wanted = model(pixels[indices]), torch.from_numpy(labels[indices])
    return float(torch.nn.functional.cross_entropy(found, wanted, reduction="sum"))
