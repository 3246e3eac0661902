"""How long each rank computes in each step: more schedules, beside those of ``schedule``. Pure, from a seed."""

from __future__ import annotations

import numpy as np

from hvd_async.simulation.schedule import Schedule


def constant(steps: int, ranks: int, compute: float) -> Schedule:
    """Every rank computes for ``compute`` s in every step."""
    return np.full((steps, ranks), compute)


def one_slow(steps: int, ranks: int, compute: float, times: float) -> Schedule:
    """The last rank is so many times slower than the others."""
    found = constant(steps, ranks, compute)
    found[:, -1] *= times
    return found


def lengths(steps: int, ranks: int, compute: float, deviation: float, seed: int) -> Schedule:
    """Computation that depends on the length of the data: log-normal, with the median ``compute`` s."""
    return compute * np.random.default_rng(seed).lognormal(0.0, deviation, (steps, ranks))
