"""Delay schedules, and the bounds on speed that follow from them. Pure.

A schedule is an array [steps, ranks]: the seconds that each rank computes in each step. The bounds assume free
communication, so that no job can be faster with the same schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_async.algorithms.eager.quorum import initiator, needed
from hvd_async.simulation.names import SYNCHRONOUS, quorum_of

Schedule = NDArray[np.float64]
SAME = 1e-9
"""Seconds within which two events count as simultaneous."""


def one_random(steps: int, ranks: int, compute: float, delay: float, seed: int) -> Schedule:
    """Return a schedule of ``compute`` s, in which one random rank per step takes ``delay`` s more."""
    times = np.full((steps, ranks), compute)
    times[np.arange(steps), np.random.default_rng(seed).integers(ranks, size=steps)] += delay
    return times


def stalls(steps: int, ranks: int, compute: float, stall: float, share: float, seed: int) -> Schedule:
    """Return a schedule in which each rank stalls for ``stall`` s with probability ``share`` per step."""
    found = np.full((steps, ranks), compute)
    found[np.random.default_rng(seed).random((steps, ranks)) < share] += stall
    return found


def linear(steps: int, ranks: int, delay: float) -> Schedule:
    """Return a schedule in which rank i takes i x ``delay`` s in each step."""
    return np.tile(np.arange(ranks) * delay, (steps, 1))


def own_pace(times: Schedule) -> list[int]:
    """Return the steps of each rank if all train for the same time and together take the schedule's number of steps."""
    speeds = 1.0 / times.mean(axis=0)
    return [max(1, round(share * times.size)) for share in (speeds / speeds.sum()).tolist()]


def synchronous_seconds(times: Schedule) -> float:
    """Return the sum over the steps of the slowest rank's time: the lower bound of a synchronous job."""
    return float(times.max(axis=1).sum())


def slowest_work(times: Schedule) -> float:
    """Return the largest sum of one rank's times: the lower bound of a job in which every rank takes every step."""
    return float(times.sum(axis=0).max())


@dataclass(frozen=True)
class Played:
    """Times in a schedule that was replayed under a quorum, s.

    Attributes:
        begun, arrived: start and end of each rank's computation, [steps, ranks].
        fired: start of each step's round, [steps].
    """

    begun: NDArray[np.float64]
    arrived: NDArray[np.float64]
    fired: NDArray[np.float64]

    @property
    def seconds(self) -> float:
        """Time at which every rank has taken all its steps."""
        return float(max(self.arrived[-1].max(), self.fired[-1]))


@dataclass(frozen=True)
class Replay:
    """Figures of a schedule that was replayed under a quorum.

    Attributes:
        seconds: until every rank has taken all its steps.
        wait: seconds that a rank waited per step, mean over ranks and steps.
        contributors: ranks that had arrived when a round started, mean over the rounds.
    """

    seconds: float
    wait: float
    contributors: float


def replay(times: Schedule, arm: str, **how: Any) -> Replay:
    """Replay a schedule, and return its figures. For the arguments see ``play``."""
    played = play(times, arm, **how)
    waited = np.maximum(played.fired[:, None] - played.arrived, 0.0)
    there = played.arrived <= played.fired[:, None] + SAME
    return Replay(played.seconds, float(waited.mean()), float(there.sum(axis=1).mean()))


def play(
    times: Schedule, arm: str, *, max_staleness: int = 16, seed: int = 0, first_round: int = 1, barrier: bool = False
) -> Played:
    """Replay a schedule by eager-SGD's rules, with free communication.

    A rank arrives at step t once it has computed; its step returns when round t has started. Round t starts when the
    quorum has arrived and no rank is more than ``max_staleness`` steps behind.

    Args:
        times: the schedule.
        arm: the quorum; not "auto", which depends on measurements.
        max_staleness: rounds.
        seed: of majority's draw.
        first_round: number of the round of the schedule's first step, on which majority's draw depends.
        barrier: whether all ranks begin every step together.
    """
    steps, ranks = times.shape
    begun, arrived, fired = np.zeros((steps, ranks)), np.zeros((steps, ranks)), np.zeros(steps)
    for step in range(steps):
        if step:
            begun[step] = np.maximum(arrived[step - 1], fired[step - 1])
        if barrier:
            begun[step] = begun[step].max()
        arrived[step] = begun[step] + times[step]
        fired[step] = _quorum_at(arrived[step], arm, first_round + step, seed)
        if step + 1 > max_staleness:
            fired[step] = max(fired[step], arrived[step - max_staleness].max())
    return Played(begun, arrived, fired)


class Gradient(NamedTuple):
    """Gradient of a replayed schedule. Ranks and steps count from 0, rounds from 1.

    Attributes:
        version: the round whose weights it was computed at; 0: the initial weights.
        round: the round that carries it; after the last step's round there is one more, the drain's.
    """

    rank: int
    step: int
    version: int
    round: int

    @property
    def staleness(self) -> int:
        """Rounds between the weights that it was computed at and the weights that it is applied to."""
        return self.round - 1 - self.version


def gradients_of(played: Played) -> list[Gradient]:
    """Return all gradients, by step and rank; a round carries all gradients that have arrived when it starts."""
    versions = np.searchsorted(played.fired, played.begun + SAME, side="right").tolist()
    rounds = np.searchsorted(played.fired, played.arrived - SAME).tolist()
    return [
        Gradient(rank, step, version, before + 1)
        for step, row in enumerate(zip(versions, rounds, strict=True))
        for rank, (version, before) in enumerate(zip(*row, strict=True))
    ]


def _quorum_at(arrived: NDArray[np.float64], arm: str, round_: int, seed: int) -> float:
    """Return the time at which the quorum of a round has arrived."""
    ranks = len(arrived)
    quorum = "all" if arm in SYNCHRONOUS else quorum_of(arm)
    if quorum == "majority":
        return float(arrived[initiator(round_, seed, set(range(ranks)), range(ranks))])
    if isinstance(quorum, str):
        if quorum == "auto":
            raise ValueError("the quorum 'auto' cannot be replayed: it depends on what is measured at run time")
        return float(arrived.min() if quorum == "solo" else arrived.max())
    return float(np.sort(arrived)[needed(quorum, ranks) - 1])


def even_seed(ranks: int, rounds: int, first_round: int, start: int, tries: int = 300) -> int:
    """Return the seed, of ``tries`` from ``start`` on, with which majority draws the ranks most evenly in these rounds.

    An even draw comes close to the expectation in few rounds. It is even in the mean of the drawn rank, on which
    contributors depend, and in the mean of its square, on which waits depend.
    """

    def unevenness(seed: int) -> float:
        drawn = np.array([initiator(t, seed, everyone, range(ranks)) for t in range(first_round, first_round + rounds)])
        return float(abs(drawn.mean() / own.mean() - 1) + abs((drawn**2).mean() / (own**2).mean() - 1))

    everyone, own = set(range(ranks)), np.arange(ranks)
    return start if ranks < 2 else min(range(start, start + tries), key=unevenness)


# -- workloads by name -------------------------------------------------------------------------------------------------


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
