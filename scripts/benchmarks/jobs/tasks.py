"""Tasks of torch jobs: models, and the loss of a rank's batch in each step; of real data also a score."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..support import data
from ..support.schedule import CLASSES, INPUTS, widths
from .arm import Loss

HIDDEN = 48
"""Units of the LSTM."""
VECTORS = 16
"""Parameters of the task ``vectors``."""
cross_entropy = torch.nn.functional.cross_entropy

# -- models ------------------------------------------------------------------------------------------------------------


class Residual(torch.nn.Module):
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
        return torch.relu(self.body(x) + self.around(x))


def resnet() -> torch.nn.Module:
    """Return a ResNet for images of 8 x 8: seven layers, with batch norm."""
    nn = torch.nn
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
        *(Residual(12, 12, 1), Residual(12, 24, 2)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10)),
    )


def layers(*units: int) -> torch.nn.Module:
    """Return a classifier of images of 8 x 8 without batch norm, whose statistics would tell a rank's own classes."""
    nn = torch.nn
    parts = [part for a, b in itertools.pairwise(units) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *parts[:-1])


def network(megabytes: float) -> torch.nn.Module:
    """Return a classifier of digits whose weights, float32, have this size."""
    return layers(*widths(megabytes))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "resnet": resnet,
    "plain": lambda: layers(INPUTS, 96, CLASSES),
    "wide": lambda: layers(INPUTS, 600, CLASSES),  # 180 KB, for slow networks
}


class Classifier(torch.nn.Module):
    """LSTM, and a linear layer on its output at a clip's last frame."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(data.PIXELS, HIDDEN, batch_first=True)
        self.out = torch.nn.Linear(HIDDEN, data.CLASSES)

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(frames)
        logits: torch.Tensor = self.out(outputs[torch.arange(len(lengths)), lengths - 1])
        return logits


def resnet50(classes: int) -> torch.nn.Module:
    """Return the runner's own ResNet-50."""
    sys.path.append(str(Path(__file__).resolve().parents[3] / "torch_models"))
    import vision

    model: torch.nn.Module = vision.build("resnet50", classes, 0.9)
    return model


# -- tasks -------------------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """One rank's part of a training.

    Attributes:
        model: with the same weights on all ranks.
        loss: returns the loss of this rank's batch of a step; called for one step after the other.
        score: returns the share of the scored data that a model classifies correctly; None of random data.
    """

    model: torch.nn.Module
    loss: Callable[[int], Loss]
    score: Callable[[torch.nn.Module], float] | None = None


def task_of(task: Mapping[str, Any], seed: int, rank: int, size: int) -> Task:
    """Return the task that a block names.

    Args:
        task: ``name``, "images", "clips", "resnet50" or one of ``random_task``, with what it takes.
        seed: of weights and data.
        rank, size: of the job.
    """
    torch.manual_seed(seed)
    task = {**task, "seed": seed}
    if task["name"] == "images":
        return images(task, rank, size)
    if task["name"] == "clips":
        return clips(task, rank, size)
    return resnet50_task(task, rank) if task["name"] == "resnet50" else random_task(task)


def images(task: Mapping[str, Any], rank: int, size: int) -> Task:
    """Return a classifier of the digits or the gratings, with ``megabytes`` of weights or one of ``MODELS``."""
    model = network(task["megabytes"]) if "megabytes" in task else MODELS[task["model"]]()
    found = data.images_of(task["data"], task.get("tuning", False), task.get("fold", data.TEST_FOLD))
    pixels, labels = torch.from_numpy(found.images)[:, None], torch.from_numpy(found.labels)
    epochs = (data.batches(task, found, rank, size, epoch) for epoch in itertools.count())
    mine = itertools.chain.from_iterable(epochs)

    def loss_of(chosen: data.Indices) -> Loss:
        x, y = pixels[chosen], labels[chosen]
        return lambda model: cross_entropy(model(x), y)

    def score(model: torch.nn.Module) -> float:
        return share_of(model, (pixels[found.scored],), found.labels[found.scored])

    return Task(model, lambda _: loss_of(next(mine)), score)


def clips(task: Mapping[str, Any], rank: int, size: int) -> Task:
    """Return an LSTM on clips of different lengths; after the last step that was dealt they start again."""
    model = Classifier()
    train, test = data.clips_of(task["seed"], task["median"])
    chosen, lengths = data.trained_lengths(task)
    order = chosen[data.deal(task, lengths, size)[:, rank]]
    tuning = task.get("tuning", False)
    scored = data.parted(np.arange(data.CLIPS), np.arange(data.CLIPS_TEST), tuning)[1]

    def loss(step: int) -> Loss:
        batch = data.padded(train, order[step % len(order)])
        frames, ends, labels = map(torch.from_numpy, batch)
        return lambda model: cross_entropy(model(frames, ends), labels)

    def score(model: torch.nn.Module) -> float:
        batch = data.padded(train if tuning else test, scored)
        return share_of(model, (torch.from_numpy(batch.frames), torch.from_numpy(batch.lengths)), batch.labels)

    return Task(model, loss, score)


@torch.no_grad()
def share_of(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], labels: data.Indices) -> float:
    """Return the share of these data that a model classifies correctly."""
    model.eval()
    found = model(*inputs).argmax(dim=1).numpy()
    model.train()
    return float((found == labels).mean())


def random_task(task: Mapping[str, Any]) -> Task:
    """Return a model of random inputs, or of none: "small", whose computation and messages do not count, "network",
    "dense", one square layer, or "vectors", few large parameters whose gradients are 1."""
    elements = task.get("megabytes", 0.0) * 1e6 / 4
    loss: Loss = lambda model: model(inputs).square().mean()  # noqa: E731
    if task["name"] == "small":
        model, inputs = layers(64, 64, 10), torch.randn(8, 64)
    elif task["name"] == "network":
        model, inputs = network(task["megabytes"]), torch.randn(1, INPUTS)
    elif task["name"] == "dense":
        side = round(math.sqrt(elements))
        model, inputs = torch.nn.Linear(side, side, bias=False), torch.randn(task["batch"], side)
    else:
        vectors = [torch.nn.Parameter(torch.zeros(int(elements / VECTORS))) for _ in range(VECTORS)]
        model, loss = torch.nn.ParameterList(vectors), lambda model: torch.stack([p.sum() for p in model]).sum()
    return Task(model, lambda _: loss)


def resnet50_task(task: Mapping[str, Any], rank: int) -> Task:
    """The real ResNet-50 on random images, on a GPU in half precision if the task has a ``dtype``."""
    device = torch.device("cuda", torch.cuda.current_device()) if "dtype" in task else torch.device("cpu")
    form = torch.channels_last if "dtype" in task else torch.contiguous_format
    model = resnet50(1000).to(device, memory_format=form)
    torch.manual_seed(rank)
    shape = (task["batch"], 3, task["image_size"], task["image_size"])
    pixels = torch.randn(shape, device=device).contiguous(memory_format=form)
    labels = torch.randint(1000, shape[:1], device=device)

    def loss(model: torch.nn.Module) -> torch.Tensor:
        if "dtype" not in task:
            return cross_entropy(model(pixels), labels)
        with torch.autocast("cuda", {"bf16": torch.bfloat16, "fp16": torch.float16}[task["dtype"]]):
            return cross_entropy(model(pixels), labels)

    return Task(model, lambda _: loss)
