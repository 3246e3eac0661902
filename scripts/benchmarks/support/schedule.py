"""Delay schedules, the bounds on speed that follow from them, and simulations of rivals. Pure.

The bounds assume free communication, so that no job can be faster with the same schedule. Rivals are simulated from
their schedules alone, since every rank takes part in every collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_async import topology
from hvd_async.algorithms.eager.quorum import initiator, needed
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.simulation.arms import (
    EagerJob,
    GossipJob,
    LeaderJob,
    Times,
    collective,
    outcome_of,
    synchronous,
)
from hvd_async.simulation.job import Job, Outcome, Setup
from hvd_async.simulation.network import ring_bytes, sent_bytes
from hvd_async.simulation.schedule import Schedule

from .names import IN_STEP, LEADERS, LOCAL_PERIOD, RIVALS, SYNCHRONOUS, gossip_of, quorum_of, read_name

SAME = 1e-9
"""Seconds within which two events count as simultaneous."""


def one_random(steps: int, ranks: int, compute: float, delay: float, seed: int) -> Schedule:
    """Return a schedule of ``compute`` s, in which one random rank per step takes ``delay`` s more."""
    times = np.full((steps, ranks), compute)
    times[np.arange(steps), np.random.default_rng(seed).integers(ranks, size=steps)] += delay
    return times


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


# -- sizes of the network that ``network`` and ``scaling`` train -------------------------------------------------------


INPUTS, CLASSES = 64, 10
PAYLOAD = 0.956
"""Share of payload in TCP packets on Ethernet: 1448 of 1514 bytes."""


def widths(megabytes: float) -> tuple[int, ...]:
    """Return the widths of a digits classifier with two equal hidden layers and ``megabytes`` of float32 weights."""
    side = round(math.sqrt(megabytes * 1e6 / 4 + (INPUTS + CLASSES) ** 2 / 4) - (INPUTS + CLASSES) / 2)
    return (INPUTS, side, side, CLASSES)


def power_sgd_megabytes(megabytes: float) -> float:
    """Return the MB that PowerSGD reduces instead of the gradients: each matrix becomes two matrices of rank 1 if
    these have less than half as many elements; biases are unchanged."""
    elements = 0
    for into, out in itertools.pairwise(widths(megabytes)):
        factors = into + out
        elements += out + (factors if 2 * factors < into * out else into * out)
    return 4e-6 * elements


# -- rivals ------------------------------------------------------------------------------------------------------------


class Level(NamedTuple):
    """Averaging every ``period`` steps within groups of ``group`` consecutive ranks."""

    group: int
    period: int


def job_of(arm: str, setup: Setup, **options: Any) -> Job[Any]:
    """Return the job of an arm that has a state machine.

    Args:
        arm: name, such as "solo", "k7", "dpsgd-bf16", "local-int8-avg8", "lsgd".
        setup: the job to simulate.
        options: of ``EagerJob``, ``make_plan`` or ``LeaderJob``.

    Raises:
        ValueError: the arm is unknown.
    """
    name, how = read_name(arm), gossip_of(arm)
    if name.base in LEADERS:
        return LeaderJob(arm, setup, **options)
    if how is None:
        return EagerJob(arm, setup, quorum_of(name.base), compression=name.compression, **options)
    return GossipJob(arm, setup, make_plan(setup.ranks, **{**how._asdict(), **options}))


def simulate(arm: str, setup: Setup, **options: Any) -> Outcome:
    """Simulate an arm of this library, or a rival: "horovod" or "ddp", optionally compressed, post-local SGD, torchft's
    algorithms or "decent-dp".

    Raises:
        ValueError: the arm is unknown.
    """
    name = read_name(arm)
    if name.base not in RIVALS:
        found = job_of(arm, setup, **options).run()
        assert found is not None
        return found
    megabytes, compression = setup.megabytes, name.compression
    if compression == "powersgd":
        megabytes, compression = power_sgd_megabytes(megabytes), "none"
    size = sent_bytes(megabytes, compression)
    if name.base in IN_STEP:
        return averaged(arm, setup, size, [Level(setup.ranks, name.average_every or LOCAL_PERIOD)])
    return _pairs(arm, setup, size) if name.base == "decent-dp" else synchronous(arm, setup, size)


def averaged(arm: str, setup: Setup, size: float, levels: Sequence[Level]) -> Outcome:
    """Simulate local steps and averages of weights, ``size`` bytes, in groups; several levels are hierarchical SGD.

    At a step that ends several periods only the largest of these groups averages.
    """
    ranks, network = setup.ranks, setup.network
    due = [
        max((level.group for level in levels if step % level.period == 0), default=0)
        for step in range(1, setup.steps + 1)
    ]

    def end(step: int, begun: Times, computed: Times) -> Times:
        group = due[step - 1]
        if not group:
            return computed
        seconds = network.allreduce_seconds(size, group)
        last = np.maximum.reduceat(computed, np.arange(0, ranks, group))
        ended = np.array([collective(network, at, seconds, group) for at in last.tolist()])
        return np.repeat(ended, group)[:ranks]

    sent = sum(ring_bytes(size, group) for group in due if group)
    return outcome_of(arm, setup, end, sent / setup.steps, sum(group > 0 for group in due))


def _pairs(arm: str, setup: Setup, size: float) -> Outcome:
    """Simulate D-PSGD over peer-to-peer messages: a pair exchanges the weights that it had at the start of the step."""
    graph, network = topology.bipartite_exponential(setup.ranks), setup.network
    seconds = size / network.bandwidth + network.hop + network.operation

    def end(step: int, begun: Times, computed: Times) -> Times:
        ended = computed.copy()
        for rank in range(setup.ranks):
            for peer in graph.into(rank, step - 1):
                ended[rank] = max(ended[rank], max(begun[rank], begun[peer]) + seconds)
        return ended

    return outcome_of(arm, setup, end, size, setup.steps)
