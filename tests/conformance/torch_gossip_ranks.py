"""One rank that gossips in torch: least squares on two parameters, an optimizer by case. As ``torch_ranks``."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, Self, TypeVar

import numpy as np
import torch

import hvd_async.torch as hvd
from tests.conformance.gossip_reference import Problem
from tests.conformance.reference import Array
from tests.conformance.torch_ranks import flat, plain


class GossipTrainer:
    """One rank.

    Args:
        problem: its weights, data and optimizer.
        rank: which.
        make: another optimizer than the problem's.
        dtype: of the parameters.
        normed: whether it has batch-norm statistics.
        options: of ``GossipOptimizer``.

    Attributes:
        steps: so far, those of an earlier job included.
        before: the weights with which the last step began.
    """

    wrapper = staticmethod(hvd.GossipOptimizer)

    def __init__(
        self,
        problem: Problem,
        rank: int,
        make: Callable[[Any], Any] | None = None,
        dtype: torch.dtype = torch.float32,
        normed: bool = False,
        **options: Any,
    ) -> None:
        self.problem, self.rank, self.steps = problem, rank, 0
        first = torch.as_tensor(problem.start[rank], dtype=dtype)
        self.parameters = [torch.nn.Parameter(first[:2].clone()), torch.nn.Parameter(first[2:].clone().view(2, -1))]
        if normed:
            self.statistics = torch.nn.BatchNorm1d(2)
            options["named_buffers"] = self.statistics.named_buffers()
        self.opt = self.wrapper(
            plain(problem.case, self.parameters) if make is None else make(self.parameters), **options
        )

    def gradient(self) -> None:
        """Compute that of the next step. (By hand: backward would take half of the tests' time.)"""
        self.steps += 1
        self.before = self.weights()
        self.set_gradient(self.problem.gradient(flat(self.parameters), self.rank, self.steps))

    def set_gradient(self, gradient: Array) -> None:
        """Make this the gradient, flat."""
        values = torch.as_tensor(gradient, dtype=self.parameters[0].dtype)
        for parameter, part in zip(self.parameters, values.split((2, len(gradient) - 2)), strict=True):
            parameter.grad = part.view_as(parameter)

    def step(self) -> None:
        """Take one."""
        self.gradient()
        self.opt.step()

    def step_with(self, gradient: Any) -> None:
        """Take a step with this gradient, flat."""
        self.set_gradient(np.asarray(gradient, np.float64))
        self.opt.step()

    def train(self, steps: int) -> Self:
        """Take several."""
        for _ in range(steps):
            self.step()
        return self

    def weights(self) -> Array:
        """Flat, float64."""
        return flat(self.parameters)

    def assign(self, weights: Any) -> None:
        """Set the weights."""
        torch.nn.utils.vector_to_parameters(torch.as_tensor(weights, dtype=self.parameters[0].dtype), self.parameters)

    @property
    def mean(self) -> float:
        """Mean of the batch-norm statistics."""
        return float(self.statistics.running_mean[0])  # type: ignore[index]

    @mean.setter
    def mean(self, value: float) -> None:
        self.statistics.running_mean.fill_(value)  # type: ignore[union-attr, operator]

    def moments(self) -> Array:
        """The momentum that the optimizer has, flat."""
        return flat(self.opt.state[p]["momentum_buffer"] for p in self.parameters)

    def eager(self) -> Any:
        """An ``EagerOptimizer`` of the same weights."""
        return hvd.EagerOptimizer(plain(self.problem.case, self.parameters))

    def saved(self) -> dict[str, Any]:
        """Weights and state as a script would save them, through a file's format."""
        return saved(self)

    def resumed(self, state: dict[str, Any], done: int) -> Self:
        """Take up what was saved after so many steps."""
        return resume(state, self, done)


T = TypeVar("T", bound=GossipTrainer)


def saved(trainer: GossipTrainer) -> dict[str, Any]:
    """Weights and state as a script would save them, through a file's format."""
    file = io.BytesIO()
    torch.save({"model": [p.detach() for p in trainer.parameters], "opt": trainer.opt.state_dict()}, file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def resume(state: dict[str, Any], trainer: T, done: int) -> T:
    """A trainer that has taken up what was saved after so many steps."""
    with torch.no_grad():
        for parameter, values in zip(trainer.parameters, state["model"], strict=True):
            parameter.copy_(values)
    trainer.opt.load_state_dict(copy.deepcopy(state["opt"]))  # (torch keeps the tensors it is given)
    trainer.steps = done
    return trainer
