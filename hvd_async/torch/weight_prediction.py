"""Weight prediction in torch: parameters hold predicted weights between rounds, and rounds start from the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from hvd_async.algorithms.eager.weight_prediction import factor, momentum_of


class _Predicted(NamedTuple):
    """The weights of a parameter that holds predicted ones, and its version counter since it does."""

    weights: torch.Tensor
    version: int


class WeightPrediction:
    """One optimizer's.

    Args:
        rounds: how many rounds ahead; 0 predicts nothing.
    """

    def __init__(self, rounds: float) -> None:
        self._rounds = rounds
        self._predicted: dict[torch.Tensor, _Predicted] = {}

    @contextlib.contextmanager
    def around_round(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Around the application of a round: it starts from the weights, and leaves predicted ones.

        Args:
            groups: the optimizer's parameter groups, with the round's hyperparameters; parameters without a gradient
                are left alone.
        """
        factors = [(group, factor(momentum_of(group), self._rounds)) for group in groups]
        moved = [(p, ahead) for group, ahead in factors for p in group["params"] if p.grad is not None and ahead]
        with torch.no_grad():
            before = [self._weights(p) for p, _ in moved]
        yield
        with torch.no_grad():
            for (p, ahead), weights in zip(moved, before, strict=True):
                change = p - weights
                weights.copy_(p)
                p.add_(change, alpha=ahead)
                self._predicted[p] = _Predicted(weights, p._version)

    def end(self) -> None:
        """Let the parameters hold the weights again."""
        with torch.no_grad():
            for p in list(self._predicted):
                self._weights(p)

    def _weights(self, parameter: torch.Tensor) -> torch.Tensor:
        """Let a parameter hold its weights again; returns a copy of them. Those that user code has written into it
        meanwhile are its weights."""
        held = self._predicted.pop(parameter, None)
        if held is None:
            return parameter.clone()
        if held.version != parameter._version:
            return held.weights.copy_(parameter)
        parameter.copy_(held.weights)
        return held.weights
