"""Weight prediction: where the weights will be when a gradient that is computed now is applied.

A gradient that comes late was computed at weights that have moved on since. So it is computed ahead of them, at

    w^ = w_t + c (w_t - w_{t-1}),   c = m + m^2 + ... + m^T

where m is the optimizer's momentum: as far as momentum alone will carry the weights in T rounds. That is linear weight
prediction (Kosson et al., "Pipelined Backpropagation at Scale", MLSys 2021) with the decay of momentum in it; T = 1 is
Nesterov's momentum. All replicas hold the same w^, and the same w: the round that comes next starts from w, and a drain
or cut ends with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AHEAD = 2.0
"""Rounds that "auto" predicts where gradients may be late: at momentum 0.9 it lost least of 0, 1, 2 and 3."""


def rounds_ahead(given: float | str, may_be_late: bool) -> float:
    """Return T, in rounds, for what a user has given: a number, or "auto"."""
    if isinstance(given, str):
        return AHEAD if may_be_late else 0.0
    return float(given)


def factor(momentum: float, rounds: float) -> float:
    """Return c for a momentum in [0, 1) and T ``rounds``, which need not be whole; 0 where nothing is predicted."""
    if not 0 < momentum < 1:
        return 0.0
    carried: float = momentum * (1 - momentum**rounds) / (1 - momentum)
    return carried


def momentum_of(hyper: Mapping[str, Any]) -> float:
    """Return the momentum among an optimizer's hyperparameters by torch's or Keras' names; 0 if there is none."""
    for name in ("momentum", "beta_1"):
        if isinstance(value := hyper.get(name), int | float):
            return float(value)
    betas = hyper.get("betas")
    return float(betas[0]) if isinstance(betas, list | tuple) and betas else 0.0
