"""Weight prediction in torch: parameters hold predicted weights between rounds, and rounds start from the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from hvd_async.algorithms.eager.weight_prediction import factor, momentum_of


class _Predicted(NamedTuple):
    """The weights of a parameter that holds predicted ones, and a copy of these."""

    weights: torch.Tensor
    predicted: torch.Tensor


class WeightPrediction:
    """One optimizer's.

    Args:
        rounds: how many rounds ahead; 0 predicts nothing. May be set at any time.
    """

    def __init__(self, rounds: float = 0.0) -> None:
        self.rounds = rounds
        self._predicted: dict[torch.Tensor, _Predicted] = {}

    @contextlib.contextmanager
    def around_round(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Around the application of a round: it starts from the weights, and leaves predicted ones.

        Args:
            groups: the optimizer's parameter groups, with the round's hyperparameters; parameters without a gradient
                are left alone.
        """
        factors = [(group, factor(momentum_of(group), self.rounds)) for group in groups]
        # (one that is ahead starts from its weights also where a round has no momentum, and stays there)
        moved = [
            (p, ahead)
            for group, ahead in factors
            for p in group["params"]
            if p.grad is not None and (ahead or p in self._predicted)
        ]
        with torch.no_grad():
            held = [self._at_weights(p) for p, _ in moved]
        yield
        with torch.no_grad():
            for (p, ahead), (weights, predicted) in zip(moved, held, strict=True):
                torch.lerp(weights, p, 1 + ahead, out=predicted)
                weights.copy_(p)
                p.copy_(predicted)

    def end(self) -> None:
        """Let the parameters hold the weights again."""
        with torch.no_grad():
            for p in self._predicted:
                self._at_weights(p)
        self._predicted.clear()

    def _at_weights(self, parameter: torch.Tensor) -> _Predicted:
        """Let a parameter hold its weights; those that user code has written into it meanwhile are its weights.

        Its values tell whether any has, and no count of writes: ``.data`` and Horovod's broadcasts are not counted, and
        what one rank writes and puts back (to try other weights) must not set it apart from the others.
        """
        held = self._predicted.get(parameter)
        if held is None:
            held = self._predicted[parameter] = _Predicted(parameter.clone(), torch.empty_like(parameter))
        else:
            as_left = (parameter == held.predicted).all()  # (on its device: Python would wait for a GPU here)
            torch.where(as_left, held.weights, parameter, out=held.weights)
            parameter.copy_(held.weights)
        return held
