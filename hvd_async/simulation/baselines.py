"""Simulations of rivals from their schedules alone: synchronous SGD, periodic averaging, pairwise exchange.

They need no state machine, since every rank takes part in every collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_async import topology
from hvd_async.simulation.job import Outcome, Setup
from hvd_async.simulation.names import IN_STEP, LOCAL_PERIOD, read_name
from hvd_async.simulation.network import Network, ring_bytes, sent_bytes

Times = NDArray[np.float64]


class Level(NamedTuple):
    """Averaging every ``period`` steps within groups of ``group`` consecutive ranks."""

    group: int
    period: int


def simulate(arm: str, setup: Setup) -> Outcome:
    """Simulate a rival: "horovod" or "ddp", optionally compressed, post-local SGD, torchft's algorithms or "decent-dp".

    Raises:
        ValueError: the rival is unknown.
    """
    name = read_name(arm)
    size = sent_bytes(setup.megabytes, name.compression)
    if name.base in IN_STEP:
        return averaged(arm, setup, size, [Level(setup.ranks, name.average_every or LOCAL_PERIOD)])
    if name.base == "decent-dp":
        return _pairs(arm, setup, size)
    if name.base not in ("horovod", "ddp"):
        raise ValueError(f"there is no arm {arm!r} to simulate")
    return synchronous(arm, setup, size)


def synchronous(arm: str, setup: Setup, size: float) -> Outcome:
    """Simulate an average of all gradients, ``size`` bytes, in every step."""
    network, ranks, buckets = setup.network, setup.ranks, setup.buckets
    seconds = network.allreduce_seconds(size / buckets, ranks)

    def end(_: int, begun: Times, computed: Times) -> Times:
        ended = float(computed.max())
        for _ in range(buckets):
            ended = collective(network, ended, seconds, ranks)
        return np.full(ranks, ended)

    return _outcome(arm, setup, end, ring_bytes(size, ranks), buckets * setup.steps)


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
    return _outcome(arm, setup, end, sent / setup.steps, sum(group > 0 for group in due))


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

    return _outcome(arm, setup, end, size, setup.steps)


def collective(network: Network, at: float, seconds: float, ranks: int) -> float:
    """Return the end of a collective for which all ranks are ready at a given time."""
    start = np.ceil(at / network.cycle - 1e-9) * network.cycle if network.cycle else at
    return float(max(start, at) + network.agreement(ranks) + network.operation + seconds)


def _outcome(
    arm: str, setup: Setup, end: Callable[[int, Times, Times], Times], sent: float, collectives: int
) -> Outcome:
    """Return the figures of all steps. ``end(step, begun, computed)`` returns when each rank ends a step."""
    begun, waited, first = np.zeros(setup.ranks), 0.0, 0.0
    for step, times in enumerate(setup.times, 1):
        if setup.barrier:
            begun = np.full(setup.ranks, begun.max())
        computed = begun + times
        ended = end(step, begun, computed)
        waited += float((ended - computed).sum())
        begun = ended
        if step == setup.untimed:
            first = float(begun.max())
    seconds, steps = float(begun.max()) - first, setup.steps - setup.untimed
    return Outcome(
        arm=arm,
        ranks=setup.ranks,
        steps=steps * setup.ranks,
        seconds=seconds,
        steps_per_s=steps / seconds,
        staleness=Counter({0: setup.times.size}),
        wait_s=waited / setup.times.size,
        sent_bytes=sent,
        collectives=collectives,
    )
