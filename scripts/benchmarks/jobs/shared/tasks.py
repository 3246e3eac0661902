"""Tasks of ``time_to_accuracy``: a model, a loss for each of a rank's steps, and a score. Images, and clips."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Protocol

import numpy as np
import torch

from ...support.clips import TEST, TRAIN, Clips, clips_of, dealt_to, padded
from ...support.data_sets import images_of, parted
from ...support.imbalance import clip_lengths
from .arm import Loss
from .clip_model import Classifier
from .digit_models import batches, plain, resnet, wide
from .rank import Block, Job

MODELS = {"resnet": resnet, "plain": plain, "wide": wide}


class Task(Protocol):
    """One rank's part of a training.

    Attributes:
        model: with the same weights on all ranks.
    """

    model: torch.nn.Module

    def loss(self, step: int) -> Loss:
        """The loss of this rank's batch of a step; steps are asked for in turn."""

    def score(self) -> float:
        """The share of the scored images, or clips, that the model classifies correctly."""


def task_of(job: Job, block: Block) -> Task:
    """Return what a block asks for."""
    torch.manual_seed(block["seed"])
    return ClipTask(job, block) if block["data"] == "clips" else ImageTask(job, block)


class ImageTask:
    """Images of 8 x 8: digits or gratings."""

    def __init__(self, job: Job, block: Block) -> None:
        self.model = MODELS[block["model"]]()
        data = images_of(block["data"], block["tuning"])
        self._images, self._labels = torch.from_numpy(data.images)[:, None], torch.from_numpy(data.labels)
        self._scored = data.scored
        epochs = (batches(block, data.labels, data.train, job.rank, job.size, epoch) for epoch in itertools.count())
        self._batches = itertools.chain.from_iterable(epochs)

    def loss(self, step: int) -> Loss:
        """Cross entropy of the next batch."""
        chosen = next(self._batches)
        x, y = self._images[chosen], self._labels[chosen]
        return lambda model: torch.nn.functional.cross_entropy(model(x), y)

    @torch.no_grad()
    def score(self) -> float:
        """Accuracy."""
        self.model.eval()
        found = self.model(self._images[self._scored]).argmax(dim=1)
        self.model.train()
        return float((found == self._labels[self._scored]).float().mean())


class ClipTask:
    """Clips of different lengths."""

    def __init__(self, job: Job, block: Block) -> None:
        self.model = Classifier()
        train, test = _clips(block["seed"], block["median"])
        chosen, scored = parted(np.arange(TRAIN), np.arange(TEST), block["tuning"])
        order = dealt_to(block, clip_lengths(block), job.size)[:, job.rank]
        self._clips, self._order = train, chosen[order]
        self._scored = padded(train if block["tuning"] else test, scored)

    def loss(self, step: int) -> Loss:
        """Cross entropy of the batch that the step was dealt; after the last one it begins anew."""
        batch = padded(self._clips, self._order[step % len(self._order)])
        frames, lengths, labels = map(torch.from_numpy, (batch.frames, batch.lengths, batch.labels))
        return lambda model: torch.nn.functional.cross_entropy(model(frames, lengths), labels)

    @torch.no_grad()
    def score(self) -> float:
        """Accuracy."""
        found = self.model(torch.from_numpy(self._scored.frames), torch.from_numpy(self._scored.lengths)).argmax(dim=1)
        return float((found.numpy() == self._scored.labels).mean())


@functools.lru_cache(maxsize=8)
def _clips(seed: int, median: int) -> tuple[Clips, Clips]:
    """A seed's clips, which all arms train on."""
    return clips_of(seed, median)


def values_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """A model's weights and its statistics of batches, as they are in memory: first the weights."""
    own: list[Any] = [parameter.detach() for parameter in model.parameters()]
    return own + [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def weights_in(model: torch.nn.Module) -> int:
    """Return how many of all values are weights."""
    return sum(parameter.numel() for parameter in model.parameters())
