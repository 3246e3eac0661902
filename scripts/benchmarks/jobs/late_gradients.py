"""The job of ``late_gradients``: one process trains for all ranks, one remedy after the other.

Gradients are real, and come as late as a schedule has them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hvd_async.algorithms.eager.extrapolation import factor, momentum_of
from hvd_async.simulation.schedule import Gradient, gradients_of, play, synchronous_seconds
from hvd_async.torch.update import Extrapolation

from ..support import data
from ..support.remedies import Remedy, clips_task, times_of
from .rank import Block, Job, rate
from .tasks import Task, task_of

BATCH = 16
"""Images per rank and step."""
SMOOTHING = 0.05
"""Weight of a gradient in the mean of its rank's weights."""
Parts = list[torch.Tensor]


class Learning(NamedTuple):
    """What is learned, and how.

    Attributes:
        model: the replica of all ranks; they have the same weights after the same rounds.
        loss: of a rank's batch in a step; both count from 0. Each rank asks for its steps in their order.
        rate: of a round, from 0 on.
        momentum, decay: of SGD, and the decay of Adam; AdamW and Muon have their own defaults.
        optimizer: see ``remedies.Task``.
    """

    model: torch.nn.Module
    loss: Callable[[int, int], torch.Tensor]
    rate: Callable[[int], float]
    momentum: float
    decay: float
    optimizer: str = "sgd"


class Computed(NamedTuple):
    """A gradient by parameter, and the weights that it was computed at."""

    gradient: Gradient
    values: Parts
    at: Parts


def run_block(job: Job, block: Block) -> None:
    """Run one training, and record how well and how fast it went."""
    times, remedy = times_of(block), Remedy(**block["remedy"])
    played = play(times, remedy.quorum, seed=block["seed"])
    gradients, ranks = gradients_of(played), block["ranks"]
    task = {"name": "images", "data": "digits", "model": "resnet", "batch": BATCH, "fold": block["seed"] % data.FOLDS}
    decay = 5e-4
    if block["data"] == "clips":
        task, decay = clips_task(block), 0.0
    parts: list[Task] = [task_of(task, block["seed"], rank, ranks) for rank in range(ranks)]
    model, score = parts[0].model, parts[0].score

    def round_rate(number: int) -> float:
        return rate(block["rate"], min(number, block["steps"] - 1), block["steps"])  # the drain's has the last one

    def loss(rank: int, step: int) -> torch.Tensor:
        return parts[rank].loss(step)(model)

    train(Learning(model, loss, round_rate, 0.9, decay, block["optimizer"]), gradients, ranks, remedy)
    late = Counter(0 if remedy.fresh else each.staleness for each in gradients)
    speedup = synchronous_seconds(times) / played.seconds
    assert score is not None
    job.record(block, {"accuracy": score(model), "speedup": speedup, "staleness": late})


class Weighting:
    """Weights of gradients by how late they are.

    Args:
        remedy: says which.
        ranks: how many.
    """

    def __init__(self, remedy: Remedy, ranks: int) -> None:
        self._power, self._bare, self._means = remedy.power, remedy.bare, [1.0] * ranks

    def __call__(self, gradient: Gradient) -> float:
        weight = (1.0 + gradient.staleness) ** -self._power
        if self._bare:
            return weight
        self._means[gradient.rank] += SMOOTHING * (weight - self._means[gradient.rank])
        return weight / self._means[gradient.rank]


def optimizers(
    learning: Learning, parameters: Sequence[torch.nn.Parameter], momentum: float
) -> list[torch.optim.Optimizer]:
    """Return optimizers of all parameters, which are vectors and matrices."""
    if learning.optimizer == "sgd":
        return [torch.optim.SGD(parameters, lr=1.0, momentum=momentum, weight_decay=learning.decay)]
    if learning.optimizer == "adam":
        return [torch.optim.Adam(parameters, lr=1.0, weight_decay=learning.decay)]
    if learning.optimizer == "adamw":
        return [torch.optim.AdamW(parameters, lr=1.0)]
    matrices = [p for p in parameters if p.dim() == 2]
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in parameters if p.dim() != 2], lr=1.0),
    ]


def train(learning: Learning, gradients: Sequence[Gradient], ranks: int, remedy: Remedy) -> None:
    """Train until all gradients are in the model's weights, as the remedy says.

    Optimizers are torch's, and updates are extrapolated by the library's own code. A gradient is computed as soon as
    there are the weights that its rank has when it begins, and waits for its round.
    """
    parts = list(learning.model.parameters())
    weights = [
        torch.nn.Parameter(part.detach().reshape(len(part), *((-1,) if part.dim() > 1 else ())).clone())
        for part in parts
    ]
    momentum = learning.momentum if remedy.momentum is None else remedy.momentum
    as_fast = (1 - momentum) / (1 - learning.momentum)
    steppers = [(each, Extrapolation(remedy.ahead)) for each in optimizers(learning, weights, momentum)]
    weighting = Weighting(remedy, ranks)
    if remedy.fresh:
        gradients = [each._replace(version=each.round - 1) for each in gradients]
    begun, waiting = defaultdict[int, list[Gradient]](list), defaultdict[int, list[Computed]](list)
    for each in gradients:
        begun[each.version].append(each)
    ahead = [torch.zeros_like(one) for one in weights]  # (of predicted weights)
    for number in range(1, max(each.round for each in gradients) + 1):
        now = [one.detach() + lead for one, lead in zip(weights, ahead, strict=True)]
        _write(parts, now)
        for each in sorted(begun.pop(number - 1, []), key=lambda each: each.step):
            found = torch.autograd.grad(learning.loss(each.rank, each.step), parts)
            values = [value.reshape_as(one) for value, one in zip(found, weights, strict=True)]
            waiting[each.round].append(Computed(each, values, now))
        missed = [torch.zeros_like(one) for one in weights]
        for one in weights:
            one.grad = torch.zeros_like(one)
        for one in sorted(waiting.pop(number, []), key=lambda one: one.gradient):
            values = one.values
            if remedy.compensation and one.gradient.staleness:
                moves = [new - old for new, old in zip(now, one.at, strict=True)]
                values = [v + remedy.compensation * v * v * move for v, move in zip(values, moves, strict=True)]
            left = momentum**one.gradient.staleness if remedy.catch_up else 1.0
            weight = left * weighting(one.gradient) / ranks
            for parameter, value, late in zip(weights, values, missed, strict=True):
                assert parameter.grad is not None
                parameter.grad.add_(value, alpha=weight)
                late.add_(value, alpha=(1 - left) / (1 - momentum) / ranks)
        rate = as_fast * learning.rate(number - 1)
        before = [parameter.detach().clone() for parameter in weights]
        for optimizer, extrapolation in steppers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            with extrapolation.around_update(optimizer):
                optimizer.step()
        with torch.no_grad():
            for parameter, late in zip(weights, missed, strict=True):
                parameter.sub_(late, alpha=rate)
        if remedy.predicted:
            carried = factor(momentum_of(steppers[0][0].param_groups[0]), remedy.predicted)
            ahead = [carried * (new.detach() - old) for new, old in zip(weights, before, strict=True)]
    _write(parts, weights)


def _write(parts: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    """Set a model's weights."""
    with torch.no_grad():
        for part, value in zip(parts, values, strict=True):
            part.copy_(value.view_as(part))
