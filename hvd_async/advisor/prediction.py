"""Predicts each mode's speed: a trace's computation, resampled in blocks of steps, through the simulation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_async.advisor.modes import YARDSTICK, Mode
from hvd_async.simulation.arms import simulate
from hvd_async.simulation.network import Network
from hvd_async.simulation.outcome import Outcome, Setup

Times = NDArray[np.float64]
WARM_UP = 5
"""Steps of a simulated job that do not count: ranks begin together."""


class Spread(NamedTuple):
    """A figure's mean over the resamples, with the least and the most."""

    mean: float
    low: float
    high: float


class Prediction(NamedTuple):
    """A mode's figures for a job, as they are expected.

    Attributes:
        mode: which.
        steps_per_s: of a rank, the mean over the ranks.
        gain: steps a second over Horovod's, resample by resample.
        staleness, staleness_most: mean and longest, in the mode's own unit: rounds, steps, averagings.
        megabytes: that a rank sends in a step.
        wait_s: that a rank waits in a step.
    """

    mode: Mode
    steps_per_s: Spread
    gain: Spread
    staleness: float
    staleness_most: int
    megabytes: float
    wait_s: float


def resampled(work: Times, steps: int, random: np.random.Generator) -> Times:
    """Return a series of so many steps, put together of blocks of the given one, [steps, ranks].

    A block is the same steps of all ranks, as many as the root of the series' length: what ranks have in common, and
    what lasts a few steps, stays together.
    """
    block = max(1, round(len(work) ** 0.5))
    starts = random.integers(len(work), size=-(-steps // block))
    index = (starts[:, None] + np.arange(block)) % len(work)
    series: Times = work[index.ravel()[:steps]]
    return series


def predict(
    work: Times,
    network: Network,
    parameter_bytes: float,
    modes: Sequence[Mode],
    steps: int = 200,
    resamples: int = 8,
    seed: int = 0,
    local_size: int = 1,
) -> list[Prediction]:
    """Predict what modes would do with a job, Horovod's optimizer first.

    Args:
        work: seconds of each rank's own work, [steps, ranks].
        network: between the ranks.
        parameter_bytes: of gradients, and of weights.
        modes: to try.
        steps: of each simulated job.
        resamples: jobs to simulate of each mode; the spread is over these.
        seed: of the resampling.
        local_size: ranks of a host, which are a group under a leader.
    """
    random = np.random.default_rng(seed)
    jobs = [resampled(work, steps + WARM_UP, random) for _ in range(resamples)]
    return simulated(jobs, network, parameter_bytes, modes, WARM_UP, seed, local_size)


def simulated(
    jobs: Sequence[Times],
    network: Network,
    parameter_bytes: float,
    modes: Sequence[Mode],
    untimed: int = 0,
    seed: int = 0,
    local_size: int = 1,
) -> list[Prediction]:
    """Simulate jobs under modes, Horovod first; figures are the means over the jobs.

    Args:
        jobs: of each the seconds that ranks compute, [steps, ranks].
        network, parameter_bytes, modes: see ``predict``.
        untimed: steps at the start that do not count.
        seed: of what the modes draw.
        local_size: see ``predict``.
    """
    found: list[list[Outcome]] = []
    for mode in (YARDSTICK, *modes):
        setups = [
            Setup(
                times,
                network,
                parameter_bytes / 1e6,
                local_size=local_size,
                drains=False,
                untimed=untimed,
                seed=seed + number,
            )
            for number, times in enumerate(jobs)
        ]
        found.append([simulate(mode.arm, setup, **mode.options) for setup in setups])
    base = [each.steps_per_s for each in found[0]]
    return [_prediction(mode, each, base) for mode, each in zip((YARDSTICK, *modes), found, strict=True)]


def _prediction(mode: Mode, found: Sequence[Outcome], base: Sequence[float]) -> Prediction:
    return Prediction(
        mode=mode,
        steps_per_s=_spread([each.steps_per_s for each in found]),
        gain=_spread([each.steps_per_s / own for each, own in zip(found, base, strict=True)]),
        staleness=float(np.mean([each.mean_staleness for each in found])),
        staleness_most=max(each.max_staleness for each in found),
        megabytes=float(np.mean([each.sent_bytes for each in found])) / 1e6,
        wait_s=float(np.mean([each.wait_s for each in found])),
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(float(np.mean(values)), min(values), max(values))
