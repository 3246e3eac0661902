"""Simulated jobs of the case ``scale``: tables that were measured, and all algorithms with many ranks.

``measured.csv`` has figures of measurements.md, and the reason for each row that the simulation misses by more than a
tenth: the model knows no cores that ranks share, except by ``OPERATION``. All parameters are those of the machine,
known from elsewhere, except for that one, which is calibrated from one row.
"""

from __future__ import annotations

import csv
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvd_async.simulation.job import Outcome, Setup
from hvd_async.simulation.network import Network, ring_bytes
from hvd_async.simulation.schedule import constant, one_slow
from scripts.benchmarks.support.names import RIVALS, waits_for_none

from .arms import WARM_UP
from .figures import grouped
from .report import Row, Say, row
from .schedule import PAYLOAD, even_seed, linear, one_random, simulate, slowest_work, synchronous_seconds

# -- tables that were measured -----------------------------------------------------------------------------------------

MEASURED = Path(__file__).resolve().parents[1] / "measured.csv"
RANKS = 8
OPERATION = 0.521 - 0.5
"""Seconds of software around a collective, 8 ranks on 2 cores: the time of Horovod's step beyond its slowest rank's
computation with a random rank 0.2 s late (the first row of "One random rank late in every step")."""
LATENCY = 0.0005
"""Seconds one way between a rank and the coordinator: half of the time between a round's first arrival and its last
receipt ("What a round costs")."""
LOOPBACK = 4 * 1.5 * 64e6 / (0.793 / 3.6)
"""Bytes per second that all ranks of one machine send through its loopback together: a plain allreduce of 64 MB at 4
ranks ("Leaders: what a pull costs")."""
CLOSE = 0.1
"""Largest difference of a simulated ratio from the measured one that is allowed."""
ON_THE_MACHINE = Network(latency=LATENCY, cycle=0.001, operation=OPERATION)


def straggler(arm: str, setting: str) -> float:
    """Return seconds per step: one random rank late in every step, 40 steps of 0.3 s, rounds without grace."""
    times = one_random(40, RANKS, 0.3, float(setting.split()[0]), 0)
    times = np.vstack([np.zeros((WARM_UP, RANKS)), times])
    setups = [Setup(times, ON_THE_MACHINE, megabytes=0.019, untimed=WARM_UP, seed=seed) for seed in range(3)]
    return statistics.median(1 / _without_grace(arm, setup).steps_per_s for setup in setups)


def skew(arm: str, setting: str) -> float:
    """Return ms waited per step: rank i late by i x 30 ms, all having begun together, 100 steps."""
    times, seed = linear(100, RANKS, 0.03), even_seed(RANKS, 100, 1, 0)
    return 1e3 * _without_grace(arm, Setup(times, ON_THE_MACHINE, 0.019, barrier=True, seed=seed)).wait_s


def slow_rank(arm: str, setting: str) -> float:
    """Return samples per second: the last rank always slower, 0.3 s per step, 4 MB through the loopback, 20 s."""
    slow = float(setting.split()[0])
    times = one_slow(max(2, round(20 / (0.3 * slow))), RANKS, 0.3, slow)
    setup = Setup(times, ON_THE_MACHINE._replace(bandwidth=LOOPBACK / RANKS), 4.0, window=20.0)
    return 16 * RANKS * simulate(arm, setup).steps_per_s


def slow_links(arm: str, setting: str, ranks: int = RANKS, mbit: float = 50, megabytes: float = 8.0) -> float:
    """Return ms per step on virtual hosts with slow links, computation a quarter of an allreduce of 8 ranks."""
    steps = {"12 steps": 12, "8 steps": 8}.get(setting, 24)
    bandwidth = mbit / 8 * 1e6 * PAYLOAD
    compute = ring_bytes(1e6 * megabytes, RANKS) / bandwidth / 4
    network = Network(latency=LATENCY, cycle=0.005, operation=OPERATION * ranks / RANKS, bandwidth=bandwidth)
    options: dict[str, Any] = {"grace": 0.0} if arm == "solo" else {}
    setup = Setup(constant(WARM_UP + steps, ranks, compute), network, megabytes, untimed=WARM_UP)
    return 1e3 / simulate(arm, setup, **options).steps_per_s


def more_ranks(arm: str, setting: str) -> float:
    """Return samples per second of 2, 4 and 8 ranks over links of 200 Mbit/s, the computation of 8 ranks for all."""
    ranks = int(setting.split()[0])
    return 16e3 * ranks / slow_links(arm, setting, ranks, 200)


def _without_grace(arm: str, setup: Setup) -> Outcome:
    return simulate(arm, setup, **({} if arm in RIVALS else {"grace": 0.0}))


class Table(NamedTuple):
    """Simulation of a table: its figure by arm and setting, the arm compared with, and whether more is better."""

    figure: Callable[[str, str], float]
    baseline: str = "horovod"
    rates: bool = False


TABLES = {
    "straggler": Table(straggler),
    "skew": Table(skew, "all"),  # Horovod's arm polled without pause, which takes the cores from ranks that compute
    "slow rank": Table(slow_rank, rates=True),
    "slow network": Table(slow_links),
    "averages": Table(slow_links),
    "local steps": Table(functools.partial(slow_links, megabytes=2.0), "post-local-sgd"),
    "more ranks": Table(more_ranks, rates=True),
}
"""By the name in ``measured.csv``."""


def compared() -> Iterator[Row]:
    """Yield a row for each measured figure: ``measured`` and ``speedup``, which is simulated, are ratios to the table's
    baseline, ``off`` the relative error of the second, ``why_off`` the reason for one above ``CLOSE``."""
    with MEASURED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for (name, setting), mine in grouped(rows, lambda each: (each["table"], each["setting"])).items():
        table = TABLES[name]
        found = {each["arm"]: float(each["figure"]) for each in mine}
        figures = {arm: table.figure(arm, setting) for arm in found}
        power = 1 if table.rates else -1
        for each in mine:
            arm = each["arm"]
            if arm != table.baseline:
                measured, ratio = ((of[arm] / of[table.baseline]) ** power for of in (found, figures))
                more = {"speedup": ratio, "measured": measured, "off": ratio / measured - 1, "why_off": each["why_off"]}
                yield row(arm, {"table": name, "of": setting}, figures[arm], "as the table", **more)


# -- many ranks --------------------------------------------------------------------------------------------------------

SIZES = (8, 64, 512, 1024, 4096, 10_000)
ARMS = (
    *("horovod", "post-local-sgd", "all", "majority", "solo", "auto"),
    *("sgp", "osgp", "dpsgd", "adpsgd", "local-sgd", "local", "lsgd", "easgd"),
)
COMPUTE, DELAY, MEGABYTES = 0.3, 0.3, 100.0
STEPS = 32
"""Steps of each rank, as many at every size: how much of a delay late ranks hide depends on the number of steps."""
HOST = 8
"""Ranks of a host, which share a relay and a leader."""
NETWORK = Network(
    latency=0.0001,
    relay=HOST,
    relay_latency=0.00005,
    event=2.5e-6,
    sending=5e-6,
    bandwidth=25e9 / 8,
    hop=20e-6,
    cycle=0.001,
    operation=0.001,
    peer=2e-6,
    allreduce="best",
)
"""Cluster with 25 Gbit/s per rank, whose coordinator handles the two events of a rank's step in 5 us."""


def jobs(arms: Sequence[str], sizes: Sequence[int], say: Say, steps: int = STEPS) -> list[Row]:
    """Return a row for each number of ranks and arm: steps per second of a rank, one random rank late in each step.

    Speed-ups are over "horovod" with the same number of ranks, if it is among the arms. ``bound`` is the speed-up that
    the schedule allows where communication is free; a speed-up may exceed it: "horovod" also waits for the wire.
    ``coordinator_share`` is the share of the time in which the coordinator is busy.
    """
    rows = []
    for ranks in sizes:
        times = one_random(steps, ranks, COMPUTE, DELAY, 0)
        setup = Setup(times, NETWORK, MEGABYTES, local_size=HOST, drains=False)
        setting = {"ranks": ranks, "steps": steps, "megabytes": MEGABYTES, "seed": 0, "network": NETWORK._asdict()}
        base = simulate("horovod", setup).steps_per_s if "horovod" in arms else None
        for arm in arms:
            found = simulate(arm, setup)
            work = times.sum(axis=0).mean() if waits_for_none(arm) else slowest_work(times)
            rows.append(
                row(
                    *(arm, setting, found.steps_per_s, "steps/s of a rank, simulated"),
                    speedup=found.steps_per_s / base if base is not None else None,
                    bound=float(synchronous_seconds(times) / work),
                    staleness=found.mean_staleness,
                    staleness_most=found.max_staleness,
                    wait_s=found.wait_s,
                    sent_mb=found.sent_bytes / 1e6,
                    contributors=found.contributors,
                    coordinator_share=found.coordinator_s / found.seconds,
                )
            )
            say(f"{ranks} ranks, {arm}: {found.steps_per_s:.3f} steps/s")
    return rows
