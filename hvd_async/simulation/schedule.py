"""Schedules of computation: arrays [steps, ranks] of the seconds that each rank computes in each step. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Schedule = NDArray[np.float64]


def constant(steps: int, ranks: int, compute: float) -> Schedule:
    """Return a schedule in which every rank computes for ``compute`` s in every step."""
    return np.full((steps, ranks), compute)


def one_slow(steps: int, ranks: int, compute: float, times: float) -> Schedule:
    """Return a schedule in which the last rank takes ``times`` times as long as the others."""
    found = constant(steps, ranks, compute)
    found[:, -1] *= times
    return found


def lengths(steps: int, ranks: int, compute: float, deviation: float, seed: int) -> Schedule:
    """Return a schedule that depends on the length of the data: log-normal, with the median ``compute`` s."""
    return compute * np.random.default_rng(seed).lognormal(0.0, deviation, (steps, ranks))


def stalls(steps: int, ranks: int, compute: float, stall: float, share: float, seed: int) -> Schedule:
    """Return a schedule in which each rank stalls for ``stall`` s with probability ``share`` per step."""
    found = np.full((steps, ranks), compute)
    found[np.random.default_rng(seed).random((steps, ranks)) < share] += stall
    return found
