"""Who is slow when, and what that costs at best: delay schedules and the bounds that follow from them. Pure.

A schedule is an array [steps, ranks] of seconds: how long each rank computes in each step. All bounds take
communication for free, so nothing can be faster with the same schedule.
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
"""Seconds within which two things happen at once."""


def one_random(steps: int, ranks: int, compute: float, delay: float, seed: int) -> Schedule:
    """Every rank computes for ``compute`` s; in each step one rank, drawn from the seed, takes ``delay`` s more."""
    times = np.full((steps, ranks), compute)
    times[np.arange(steps), np.random.default_rng(seed).integers(ranks, size=steps)] += delay
    return times


def stalls(steps: int, ranks: int, compute: float, stall: float, share: float, seed: int) -> Schedule:
    """In each step each rank stands still for ``stall`` s more with the probability ``share``."""
    found = np.full((steps, ranks), compute)
    found[np.random.default_rng(seed).random((steps, ranks)) < share] += stall
    return found


def linear(steps: int, ranks: int, delay: float) -> Schedule:
    """Rank i takes i x ``delay`` s in each step."""
    return np.tile(np.arange(ranks) * delay, (steps, 1))


def own_pace(times: Schedule) -> list[int]:
    """How many steps each rank takes if all train for the same time, together as many as the schedule has."""
    speeds = 1.0 / times.mean(axis=0)
    return [max(1, round(share * times.size)) for share in (speeds / speeds.sum()).tolist()]


def synchronous_seconds(times: Schedule) -> float:
    """The sum over the steps of the slowest rank's time: what no synchronous job can beat."""
    return float(times.max(axis=1).sum())


def slowest_work(times: Schedule) -> float:
    """The largest sum of one rank's own times: what no job can beat in which every rank does every step."""
    return float(times.sum(axis=0).max())


def solo_bound(times: Schedule) -> float:
    """The best speed-up over synchronous that this very schedule allows."""
    return synchronous_seconds(times) / slowest_work(times)


@dataclass(frozen=True)
class Played:
    """When all happened in a schedule that was played under a quorum.

    Attributes:
        begun, arrived: when each rank began to compute each step, and had computed it, [steps, ranks].
        fired: when each step's round fired, [steps].
    """

    begun: NDArray[np.float64]
    arrived: NDArray[np.float64]
    fired: NDArray[np.float64]

    @property
    def seconds(self) -> float:
        """Until every rank has done all its steps."""
        return float(max(self.arrived[-1].max(), self.fired[-1]))


@dataclass(frozen=True)
class Replay:
    """Figures of a schedule that was played under a quorum.

    Attributes:
        seconds: until every rank has done all its steps.
        wait: seconds that a rank waited in its steps, mean over ranks and steps.
        contributors: ranks that had arrived when a round fired, mean over the rounds.
    """

    seconds: float
    wait: float
    contributors: float


def replay(times: Schedule, arm: str, **how: Any) -> Replay:
    """Play a schedule, and return its figures; the arguments are those of ``play``."""
    played = play(times, arm, **how)
    waited = np.maximum(played.fired[:, None] - played.arrived, 0.0)
    there = played.arrived <= played.fired[:, None] + SAME
    return Replay(played.seconds, float(waited.mean()), float(there.sum(axis=1).mean()))


def play(
    times: Schedule, arm: str, *, max_staleness: int = 16, seed: int = 0, first_round: int = 1, barrier: bool = False
) -> Played:
    """Play a schedule by eager-SGD's rules, with free communication.

    A rank arrives for step t once it has computed; its step returns when round t has fired. Round t fires when the
    quorum is there and no rank is further back than ``max_staleness`` steps.

    Args:
        times: the schedule.
        arm: its quorum; not "auto", which depends on what is measured.
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
    """A gradient of a schedule that was played: rank and step from 0 on, rounds from 1 on.

    Attributes:
        version: the round after which its rank began to compute it, whose weights it was computed at; 0: the first.
        round: that which carries it; after the last step's there is one more, that of the drain.
    """

    rank: int
    step: int
    version: int
    round: int

    @property
    def staleness(self) -> int:
        """Rounds between the weights that it was computed at and those that it is applied to."""
        return self.round - 1 - self.version


def gradients_of(played: Played) -> list[Gradient]:
    """All gradients, rank by rank in each step: a round carries what has arrived until it fires."""
    versions = np.searchsorted(played.fired, played.begun + SAME, side="right").tolist()
    rounds = np.searchsorted(played.fired, played.arrived - SAME).tolist()
    return [
        Gradient(rank, step, version, before + 1)
        for step, row in enumerate(zip(versions, rounds, strict=True))
        for rank, (version, before) in enumerate(zip(*row, strict=True))
    ]


def _quorum_at(arrived: NDArray[np.float64], arm: str, round_: int, seed: int) -> float:
    """When the quorum of a round is there."""
    ranks = len(arrived)
    quorum = "all" if arm in SYNCHRONOUS else quorum_of(arm)
    if quorum == "majority":
        return float(arrived[initiator(round_, seed, set(range(ranks)), range(ranks))])
    if isinstance(quorum, str):
        if quorum == "auto":
            raise ValueError("the quorum 'auto' cannot be replayed: it depends on what is measured")
        return float(arrived.min() if quorum == "solo" else arrived.max())
    return float(np.sort(arrived)[needed(quorum, ranks) - 1])


def even_seed(ranks: int, rounds: int, first_round: int, start: int, tries: int = 300) -> int:
    """The seed, of ``tries`` from ``start`` on, by which majority draws the ranks most evenly in these rounds.

    What is expected of majority is so of infinitely many rounds; an even draw comes near to it with few. Even in the
    mean of the rank drawn, which is what contributors depend on, and of its square, which waits depend on.
    """

    def unevenness(seed: int) -> float:
        drawn = np.array([initiator(t, seed, everyone, range(ranks)) for t in range(first_round, first_round + rounds)])
        return float(abs(drawn.mean() / own.mean() - 1) + abs((drawn**2).mean() / (own**2).mean() - 1))

    everyone, own = set(range(ranks)), np.arange(ranks)
    return start if ranks < 2 else min(range(start, start + tries), key=unevenness)


# -- workloads by name -------------------------------------------------------------------------------------------------


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
