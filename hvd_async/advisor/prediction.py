"""Predictions of each mode's speed, from a simulation of resampled blocks of a trace's computation. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_async.simulation.arms import simulate
from hvd_async.simulation.job import Outcome, Setup
from hvd_async.simulation.network import Network
from hvd_async.traces.format import DDP, FSDP, HOROVOD

# -- modes -------------------------------------------------------------------------------------------------------------
# For each mode: how it is simulated, the line of the script that chooses it, and its risk.


class Risk(IntEnum):
    """Change that a mode makes to training, least first."""

    NONE = 0
    LATE = 1
    OWN = 2
    PULLED = 3

    @property
    def text(self) -> str:
        """Human-readable text."""
        return RISKS[self]


RISKS: Mapping[Risk, str] = {
    Risk.NONE: "none: the same average in every step",
    Risk.LATE: "late gradients: ranks share one model, some gradients are applied steps later",
    Risk.OWN: "own weights: ranks train models of their own, which are averaged",
    Risk.PULLED: "a leader: ranks train models of their own, which are pulled towards the best one; the least accurate"
    " modes in short trainings",
}


class Mode(NamedTuple):
    """Mode to simulate.

    Attributes:
        name: for reports and messages.
        algorithm: to simulate.
        line: the call in the script that wraps ``opt``; None for the yardstick.
        risk: the change that it makes to training.
        remark: further note for the user.
        options: of ``hvd_async.simulation.arms.simulate``.
    """

    name: str
    algorithm: str
    line: str | None
    risk: Risk
    remark: str = ""
    options: Mapping[str, Any] = MappingProxyType({})

    def is_as(self, other: Mode) -> bool:
        """Return whether both modes have the same simulation."""
        return (self.algorithm, dict(self.options)) == (other.algorithm, dict(other.options))


YARDSTICK = Mode("horovod", "horovod", None, Risk.NONE)
"""Mode that all others are compared with: ranks wait for all in every step."""
BASES: Mapping[str, str] = {HOROVOD: "Horovod", DDP: "DDP", FSDP: "FSDP"}
"""Name of the yardstick, by algorithms of a trace that wait for all ranks in every step."""
EVERY = "every"
"""Name that selects all modes."""
OWN_CLASSES = "loses accuracy where ranks see different classes"


def _eager(name: str, remark: str = "", risk: Risk = Risk.LATE, **options: Any) -> Mode:
    """Return partial allreduce with these options."""
    written = ", ".join(f"{option}={json.dumps(value)}" for option, value in options.items())
    return Mode(name, "eager", f"EagerOptimizer(opt, {written})", risk, remark, options)


def _own(name: str, remark: str = "", risk: Risk = Risk.OWN, wrapper: str = "Gossip", **options: Any) -> Mode:
    """Return an algorithm of ranks with weights of their own."""
    written = "".join(f", {option}={value}" for option, value in options.items())
    return Mode(name, name, f'{wrapper}Optimizer(opt, algorithm="{name}"{written})', risk, remark, options)


SLOW_TAKE_FEWER = "slow ranks take fewer steps"
MODES: Sequence[Mode] = (
    _eager("all", risk=Risk.NONE, quorum="all"),
    _eager("majority", quorum="majority"),
    _eager("solo", "the latest gradients of these", quorum="solo"),
    _eager(
        "pace rounds",
        "each rank at its own pace, slow ones take fewer steps: end the loop by opt.rounds, in Keras by StopAtRounds",
        quorum="solo",
        pace="rounds",
    ),
    _eager("auto", "its quorum depends on what it measures", quorum="auto"),
    _own("sgp"),
    _own("osgp"),
    _own("dpsgd"),
    _own("adpsgd", f"each rank at its own pace: slow ones take fewer steps; {OWN_CLASSES}"),
    _own("local", f"averages every 4 steps; {OWN_CLASSES}", average_every=4),
    _own("lsgd", f"{SLOW_TAKE_FEWER}; call opt.record_loss(loss) before each step", risk=Risk.PULLED, wrapper="Leader"),
    _own("easgd", SLOW_TAKE_FEWER, risk=Risk.PULLED, wrapper="Leader"),
)


def quorum(ranks: int) -> Mode:
    """Return partial allreduce with a quorum of ``ranks`` ranks."""
    return _eager(f"quorum {ranks}", quorum=ranks)


def named_modes(ranks: int, names: str = EVERY) -> list[Mode]:
    """Return the modes to try, for a number of ranks.

    Args:
        ranks: of the job.
        names: separated by commas; ``k3`` is a quorum of three.

    Raises:
        ValueError: a mode is unknown.
    """
    offered = [MODES[0], *([quorum(ranks - 1)] if ranks > 2 else []), *MODES[1:]]
    known = {mode.name: mode for mode in offered}
    found: list[Mode] = []
    for name in dict.fromkeys(name.strip() for name in names.split(",")):
        if name == EVERY:
            found += offered
        elif name[:1] == "k" and name[1:].isdigit() and 0 < int(name[1:]) <= ranks:
            found.append(quorum(int(name[1:])))
        elif name in known:
            found.append(known[name])
        else:
            raise ValueError(f"there is no mode {name!r} for {ranks} ranks: pass some of {', '.join(known)}, or k3")
    return found


# -- predictions -------------------------------------------------------------------------------------------------------


Times = NDArray[np.float64]
WARM_UP = 5
"""First steps of a simulated job that do not count, since all ranks begin together."""


class Spread(NamedTuple):
    """Mean, minimum and maximum of a figure over the resamples."""

    mean: float
    low: float
    high: float


class Prediction(NamedTuple):
    """Predicted figures of a job under a mode.

    Attributes:
        mode: the mode.
        steps_per_s: steps per second of a rank, the mean over the ranks.
        gain: ratio of steps per second to the yardstick's, resample by resample.
        staleness, staleness_most: mean and maximum, in the mode's own unit: rounds, steps, averagings.
        megabytes: sent by a rank per step.
        wait_s: seconds that a rank waits per step.
    """

    mode: Mode
    steps_per_s: Spread
    gain: Spread
    staleness: float
    staleness_most: int
    megabytes: float
    wait_s: float


def resampled(work: Times, steps: int, random: np.random.Generator) -> Times:
    """Return ``steps`` steps drawn as random blocks of ``work``, [steps, ranks].

    A block has the same steps of all ranks, and sqrt(length of ``work``) steps. This keeps correlations between ranks
    and over a few steps.
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
    """Predict the speed of a job under the yardstick, then under each mode.

    Args:
        work: seconds of each rank's own work, [steps, ranks].
        network: between the ranks.
        parameter_bytes: of gradients, and of weights.
        modes: the modes to try.
        steps: of each simulated job.
        resamples: number of simulated jobs per mode; the spread is over these.
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
    """Simulate jobs under the yardstick, then under each mode; figures are the means over the jobs.

    Args:
        jobs: seconds of computation in each job, [steps, ranks].
        network, parameter_bytes, modes: see ``predict``.
        untimed: first steps that do not count.
        seed: of the modes' random draws.
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
        found.append([simulate(mode.algorithm, setup, **mode.options) for setup in setups])
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
