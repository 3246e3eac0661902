"""Simulation of synchronous SGD from its schedule alone, without a state machine: all ranks are in every round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hvd_async.simulation.job import Outcome, Setup
from hvd_async.simulation.network import Network, ring_bytes

Times = NDArray[np.float64]


def synchronous(arm: str, setup: Setup, size: float) -> Outcome:
    """Simulate an average of all gradients, ``size`` bytes, in every step."""
    network, ranks, buckets = setup.network, setup.ranks, setup.buckets
    seconds = network.allreduce_seconds(size / buckets, ranks)

    def end(_: int, begun: Times, computed: Times) -> Times:
        ended = float(computed.max())
        for _ in range(buckets):
            ended = collective(network, ended, seconds, ranks)
        return np.full(ranks, ended)

    return outcome_of(arm, setup, end, ring_bytes(size, ranks), buckets * setup.steps)


def collective(network: Network, at: float, seconds: float, ranks: int) -> float:
    """Return the end of a collective for which all ranks are ready at a given time."""
    start = np.ceil(at / network.cycle - 1e-9) * network.cycle if network.cycle else at
    return float(max(start, at) + network.agreement(ranks) + network.operation + seconds)


def outcome_of(
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
