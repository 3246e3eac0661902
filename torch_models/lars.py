"""LARS for torch: SGD with momentum whose learning rate follows each layer's ratio of weights to gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg, 2017, arXiv:1708.03888, algorithm 1).

    For a layer's weights w with gradient g, velocity v, learning rate gamma, momentum m, decay beta, trust eta:
    ``local = eta |w| / (|g| + beta |w|)``, ``v <- m v + gamma local (g + beta w)``, ``w <- w - v``. Where |w| or |g| is
    0 local is 1. In groups with ``"adapt": False`` (biases, batch norm) local is 1 too.

    Args:
        params: parameters, or groups of them, as for every torch optimizer.
        lr: gamma. momentum: m. weight_decay: beta. trust: eta. adapt: whether the rate is local.

    Raises:
        ValueError: a number below 0, or a momentum of 1 or more.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        adapt: bool = True,
    ) -> None:
        if min(lr, momentum, weight_decay, trust) < 0 or momentum >= 1:
            raise ValueError("LARS wants lr, weight_decay and trust of 0 or more, and a momentum in [0, 1)")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": adapt}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's value, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update(parameter, self.state[parameter], group)
        return loss


def update(parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One update of one parameter, which has a gradient, with its optimizer's state and its group's settings."""
    assert parameter.grad is not None
    decay = group["weight_decay"]
    change = parameter.grad.add(parameter, alpha=decay)
    rate = torch.as_tensor(group["lr"], dtype=change.dtype, device=change.device)
    if group["adapt"]:
        weights, gradient = parameter.norm(), parameter.grad.norm()
        local = group["trust"] * weights / (gradient + decay * weights)
        # No branch on the values: on a GPU that would wait for the device.
        rate = rate * torch.where((weights > 0) & (gradient > 0), local, torch.ones_like(local))
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    velocity = state["momentum_buffer"]
    velocity.mul_(group["momentum"]).add_(change.mul_(rate))
    parameter.sub_(velocity)
