"""A training by one process in place of all ranks: gradients are real, and come as late as a schedule has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hvd_async.simulation.schedule import Gradient
from hvd_async.torch.weight_prediction import WeightPrediction

from ...support.remedies import Remedy

SMOOTHING = 0.05
"""Weight of a gradient in the mean of its rank's weights."""


class Learning(NamedTuple):
    """A task: the data that are learned, and the model.

    Attributes:
        model: the replica of all ranks; they have the same weights after the same rounds.
        loss: of a rank's batch in a step; both count from 0.
        rate: of a round, from 0 on.
        momentum, decay: of SGD.
    """

    model: torch.nn.Module
    loss: Callable[[int, int], torch.Tensor]
    rate: Callable[[int], float]
    momentum: float
    decay: float


class Computed(NamedTuple):
    """A gradient, and the weights that it was computed at."""

    gradient: Gradient
    values: torch.Tensor
    at: torch.Tensor


class Weighting:
    """Weights of gradients by how late they are.

    Args:
        remedy: says which.
        ranks: how many.
    """

    def __init__(self, remedy: Remedy, ranks: int) -> None:
        self._power, self._bare, self._means = remedy.power, remedy.bare, [1.0] * ranks

    def __call__(self, gradient: Gradient) -> float:
        """Return a gradient's weight; it counts in the mean of its rank's."""
        weight = (1.0 + gradient.staleness) ** -self._power
        if self._bare:
            return weight
        self._means[gradient.rank] += SMOOTHING * (weight - self._means[gradient.rank])
        return weight / self._means[gradient.rank]


def train(learning: Learning, gradients: Sequence[Gradient], ranks: int, remedy: Remedy) -> None:
    """Train until all gradients are in the model's weights, as the remedy says.

    SGD is torch's, of all weights as one vector, and weights are predicted by the library's own code. A gradient is
    computed as soon as there are the weights that its rank has when it begins, and waits for its round.
    """
    parts = list(learning.model.parameters())
    weights = torch.nn.Parameter(torch.cat([part.detach().reshape(-1) for part in parts]))
    momentum = learning.momentum if remedy.momentum is None else remedy.momentum
    as_fast = (1 - momentum) / (1 - learning.momentum)
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=momentum, weight_decay=learning.decay)
    prediction, weighting = WeightPrediction(remedy.ahead), Weighting(remedy, ranks)
    if remedy.fresh:
        gradients = [each._replace(version=each.round - 1) for each in gradients]
    begun, waiting = defaultdict[int, list[Gradient]](list), defaultdict[int, list[Computed]](list)
    for each in gradients:
        begun[each.version].append(each)
    for number in range(1, max(each.round for each in gradients) + 1):
        now = weights.detach().clone()
        _write(parts, now)
        for each in begun.pop(number - 1, []):
            found = torch.autograd.grad(learning.loss(each.rank, each.step), parts)
            values = torch.cat([value.reshape(-1) for value in found])
            waiting[each.round].append(Computed(each, values, now))
        weights.grad, missed = torch.zeros_like(now), torch.zeros_like(now)
        for one in sorted(waiting.pop(number, []), key=lambda one: one.gradient):
            values = one.values
            if remedy.compensation and one.gradient.staleness:
                values = values + remedy.compensation * values * values * (now - one.at)
            left = momentum**one.gradient.staleness if remedy.catch_up else 1.0
            weights.grad.add_(values, alpha=left * weighting(one.gradient) / ranks)
            missed.add_(values, alpha=(1 - left) / (1 - momentum) / ranks)
        rate = as_fast * learning.rate(number - 1)
        optimizer.param_groups[0]["lr"] = rate
        with prediction.around_round(optimizer.param_groups):
            optimizer.step()
            with torch.no_grad():
                weights.sub_(missed, alpha=rate)
    prediction.end()
    _write(parts, weights.detach())


def _write(parts: Sequence[torch.nn.Parameter], vector: torch.Tensor) -> None:
    """Give a model these weights."""
    with torch.no_grad():
        for part, values in zip(parts, vector.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.view_as(part))
