"""Extrapolated updates: the weights are ahead, where a gradient that is computed now will be applied.

A late gradient was computed at weights that have changed since. So every update is extended by its change,

    x_t = x_{t-1} + u_t + (c_t u_t - c_{t-1} u_{t-1}),   c = m + m^2 + ... + m^T

where u_t is the wrapped optimizer's update, m its momentum and T the number of rounds to look ahead. The sum
telescopes: x_t is c_t u_t ahead of the weights that the updates alone give, which is as far as momentum alone carries
the weights in T rounds.
Where updates do not depend on the weights, gradients are computed at the same weights as under linear weight prediction
(Kosson et al., "Pipelined Backpropagation at Scale", MLSys 2021) with decaying momentum; T = 1 is Nesterov's momentum.
Here the extrapolated weights are the weights: hooks, constraints, averages and checkpoints see them, and they are never
reset. All replicas hold the same weights and the same last term c_t u_t, the *lead*, which is state
like the momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AHEAD = 2.0
"""Rounds to look ahead under "auto" if gradients may be late."""


def rounds_ahead(given: float | str, may_be_late: bool) -> float:
    """Return T, in rounds, for the option's value: a number, or "auto"."""
    if isinstance(given, str):
        return AHEAD if may_be_late else 0.0
    return float(given)


def factor(momentum: float, rounds: float) -> float:
    """Return c for a momentum in [0, 1) and T ``rounds``, which may be fractional; 0 without momentum."""
    if not 0 < momentum < 1:
        return 0.0
    carried: float = momentum * (1 - momentum**rounds) / (1 - momentum)
    return carried


def momentum_of(hyper: Mapping[str, Any]) -> float:
    """Return the momentum among an optimizer's hyperparameters by torch's or Keras' names.

    Returns 0 if there is none, and for schedule-free optimizers, whose ``betas`` interpolate between averages that they
    derive from the weights.
    """
    if "train_mode" in hyper:
        return 0.0
    for name in ("momentum", "beta_1"):
        if isinstance(value := hyper.get(name), int | float):
            return float(value)
    betas = hyper.get("betas")
    return float(betas[0]) if isinstance(betas, list | tuple) and betas else 0.0
