"""The job of ``late_gradients``: one process trains in place of all ranks, one remedy after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from hvd_async.simulation.schedule import gradients_of, play, synchronous_seconds

from ..support.clips import clips_of, padded
from ..support.digits import FOLDS, fold
from ..support.remedies import CLIPS, Remedy, clips_dealt, times_of
from .shared.clip_model import Classifier
from .shared.digit_models import accuracy, batches, digits, resnet
from .shared.late_training import Learning, train
from .shared.rank import Block, Job, rate

BATCH = 16
"""Images a rank and step."""


def run_block(job: Job, block: Block) -> None:
    """One training, and how well and how fast it went."""
    torch.manual_seed(block["seed"])
    times, remedy = times_of(block), Remedy(**block["remedy"])
    played = play(times, remedy.quorum, seed=block["seed"])
    gradients = gradients_of(played)
    learning, score = (clips if block["data"] == "clips" else images)(block)
    train(learning, gradients, block["ranks"], remedy)
    late = Counter(0 if remedy.fresh else each.staleness for each in gradients)
    speedup = synchronous_seconds(times) / played.seconds
    job.record(block, {"accuracy": score(), "speedup": speedup, "staleness": late})


def images(block: Block) -> tuple[Learning, Callable[[], float]]:
    """The small ResNet on a fold of the digits, as ``convergence`` trains it: (what is learned, test accuracy)."""
    usable, test = fold(block["seed"] % FOLDS)
    pixels, labels = digits()
    targets, model = torch.from_numpy(labels), resnet()
    per_epoch = len(usable) // (BATCH * block["ranks"])
    how = {"batch": BATCH, "seed": block["seed"], "split": "even"}

    def loss(rank: int, step: int) -> torch.Tensor:
        epoch, number = divmod(step, per_epoch)
        chosen = batches(how, labels, usable, rank, block["ranks"], epoch)[number]
        return torch.nn.functional.cross_entropy(model(pixels[chosen]), targets[chosen])

    return Learning(model, loss, rate_of(block), 0.9, 5e-4, block["optimizer"]), lambda: accuracy(model, test)


def clips(block: Block) -> tuple[Learning, Callable[[], float]]:
    """The LSTM on clips, as ``sequence_lengths`` trains it: (what is learned, test accuracy)."""
    usable, test = clips_of(block["seed"], CLIPS["median"])
    dealt, model = clips_dealt(block, usable.lengths), Classifier()

    def loss(rank: int, step: int) -> torch.Tensor:
        batch = padded(usable, dealt[step, rank])
        logits = model(torch.from_numpy(batch.frames), torch.from_numpy(batch.lengths))
        return torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch.labels))

    def score() -> float:
        batch = padded(test, np.arange(len(test.labels)))
        with torch.no_grad():
            found = model(torch.from_numpy(batch.frames), torch.from_numpy(batch.lengths)).argmax(dim=1)
        return float((found.numpy() == batch.labels).mean())

    return Learning(model, loss, rate_of(block), 0.9, 0.0, block["optimizer"]), score


def rate_of(block: Block) -> Callable[[int], float]:
    """Return the learning rate by round; the drain's has the last one."""
    return lambda number: rate(block["rate"], min(number, block["steps"] - 1), block["steps"])
