"""Simulated jobs of the case ``scale``: tables that were measured, a published study, all algorithms at many ranks.

*Tables*: ``measured.csv`` has figures of measurements.md, and of rows that the simulation misses by more than a tenth
why: the model knows no cores that ranks share, except by ``OPERATION``. All parameters are the machine's, known from
elsewhere, except for that one, which is calibrated once, from one row.

*Study*: PyTorch's blog on straggler mitigation at 64 to 256 ranks, hierarchical SGD over synchronous SGD: steps of
55 ms, in which a rank stands still for 1 s with a probability of 2% (at 64 ranks) or 1% (at 128 and 256). Its groups
and periods are not known here, so several are simulated. Communication costs nothing but the latency of messages.
"""

from __future__ import annotations

import csv
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvd_async.simulation.arms import simulate
from hvd_async.simulation.baselines import Level, averaged, synchronous
from hvd_async.simulation.job import Outcome, Setup
from hvd_async.simulation.names import RIVALS, read_name, waits_for_nobody
from hvd_async.simulation.network import PAYLOAD, Network, ring_bytes
from hvd_async.simulation.schedule import (
    Schedule,
    constant,
    even_seed,
    linear,
    one_random,
    one_slow,
    slowest_work,
    stalls,
    synchronous_seconds,
)

from .arms import WARM_UP
from .figures import grouped
from .report import Row, row

# -- tables that were measured -----------------------------------------------------------------------------------------

MEASURED = Path(__file__).resolve().parents[1] / "measured.csv"
RANKS = 8
OPERATION = 0.521 - 0.5
"""Seconds of software around a collective, 8 ranks on 2 cores: what Horovod's step takes beyond its slowest rank's
computation with a random rank 0.2 s late (the first row of "One random rank late in every step")."""
LATENCY = 0.0005
"""One way between a rank and the coordinator, s: half of what lies between a round's first arrival and the last receipt
("What a round costs")."""
LOOPBACK = 4 * 1.5 * 64e6 / (0.793 / 3.6)
"""Bytes per second that all ranks of one machine send through its loopback together: a plain allreduce of 64 MB at 4
ranks ("Leaders: what a pull costs")."""
CLOSE = 0.1
"""How far a simulated ratio may be from the measured one."""
ON_THE_MACHINE = Network(latency=LATENCY, cycle=0.001, operation=OPERATION)


class Compared(NamedTuple):
    """A row of a table, measured and simulated.

    Attributes:
        table, setting, arm: which row.
        measured, simulated: how many times as good as the table's baseline.
        figure: the simulated figure itself, in the table's unit.
        why_off: why the simulation is further off than ``CLOSE``; empty where it is not.
    """

    table: str
    setting: str
    arm: str
    measured: float
    simulated: float
    figure: float
    why_off: str

    @property
    def off(self) -> float:
        """How far the simulated ratio is from the measured one, relative to it."""
        return self.simulated / self.measured - 1

    def row(self) -> Row:
        """Return it as a row of a report."""
        setting = {"table": self.table, "of": self.setting}
        return row(self.arm, setting, self.figure, "as the table", speedup=self.simulated, measured=self.measured)


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


class Table(NamedTuple):
    """How a table is simulated: its figure by arm and setting, the arm compared with, and whether more is better."""

    figure: Callable[[str, str], float]
    baseline: str = "horovod"
    rates: bool = False


TABLES = {
    "straggler": Table(straggler),
    "skew": Table(skew, "all"),  # Horovod's arm had spun, which takes the cores from ranks that compute
    "slow rank": Table(slow_rank, rates=True),
    "slow network": Table(slow_links),
    "averages": Table(slow_links),
    "local steps": Table(functools.partial(slow_links, megabytes=2.0), "post-local-sgd"),
    "more ranks": Table(more_ranks, rates=True),
}
"""By the name that ``measured.csv`` has."""


def compared() -> Iterator[Compared]:
    """Yield all rows of all tables."""
    with MEASURED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for (name, setting), mine in grouped(rows, lambda each: (each["table"], each["setting"])).items():
        table = TABLES[name]
        measured = {each["arm"]: float(each["figure"]) for each in mine}
        figures = {arm: table.figure(arm, setting) for arm in measured}
        power, base = 1 if table.rates else -1, table.baseline
        for each in mine:
            arm = each["arm"]
            if arm != base:
                ratios = [(found[arm] / found[base]) ** power for found in (measured, figures)]
                yield Compared(name, setting, arm, *ratios, figures[arm], each["why_off"])


def _without_grace(arm: str, setup: Setup) -> Outcome:
    return simulate(arm, setup, **({} if arm in RIVALS else {"grace": 0.0}))


# -- a published study -------------------------------------------------------------------------------------------------

COMPUTE_55, STALL = 0.055, 1.0
SHARES = {64: 0.02, 128: 0.01, 256: 0.01}
"""Probability that a rank stands still in a step, by number of ranks."""
PUBLISHED = {64: (2.08, 2.45), 128: (2.57, 2.68), 256: (2.63, 3.25)}
"""Hierarchical SGD's speed over synchronous SGD's, from and to, by number of ranks."""
HIERARCHIES = ((8, 1, 4), (8, 1, 8), (8, 1, 16), (8, 2, 8), (8, 4, 16), (16, 2, 8), (16, 4, 16), (32, 4, 16))
"""(Ranks of a group, steps between two averages in it, steps between two of all ranks.)"""


class Mode(NamedTuple):
    """An arm of hvd_async, with options."""

    arm: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return ", ".join([self.arm, *(f"{name}={value}" for name, value in self.options.items())])


MODES = (
    *(Mode(arm, {}) for arm in ("all", "0.9", "0.75", "majority", "solo", "auto")),
    Mode("solo", {"max_staleness": 64}),
    Mode("majority", {"pace": "rounds"}),
    Mode("solo", {"pace": "rounds"}),
    *(Mode(arm, {}) for arm in ("sgp", "osgp", "dpsgd", "adpsgd", "exact-diffusion", "noloco", "local-sgd")),
    *(Mode("local", {"average_every": every}) for every in (4, 8, 16)),
    *(Mode(arm, {}) for arm in ("slowmo", "diloco", "lsgd", "easgd")),
)


def study(ranks: int, steps: int = 400, seed: int = 0, modes: Sequence[Mode] = MODES) -> list[Row]:
    """Return a row for each arm at 64, 128 or 256 ranks: steps per second of a rank, and over synchronous SGD's.

    Args:
        ranks: of the job.
        steps: of each rank.
        seed: of the stalls.
        modes: ours that are simulated.
    """
    times = stalls(steps, ranks, COMPUTE_55, STALL, SHARES[ranks], seed)
    network = Network(latency=0.0001, cycle=0.001, operation=0.0005)
    setup = Setup(times, network, local_size=8, drains=False, seed=seed)
    base = synchronous("synchronous", setup, 0.0)
    found = [base]
    for group, inner, outer in HIERARCHIES:
        levels = [Level(group, inner), Level(ranks, outer)]
        name = f"hierarchical, {group} ranks each {inner}, all each {outer} steps"
        found.append(averaged(name, setup, 0.0, levels))
    for mode in modes:
        options = dict(mode.options)
        arm = f"{mode.arm}-avg{options.pop('average_every')}" if "average_every" in options else mode.arm
        found.append(simulate(arm, setup, **options)._replace(arm=str(mode)))
    setting = {"ranks": ranks, "steps": steps, "compute": COMPUTE_55, "stall": STALL, "seed": seed}
    setting["share"] = SHARES[ranks]
    no_waiting = base.seconds / float(times.sum(axis=0).mean())
    return [_simulated(each, setting, base, no_waiting) | _published(each, ranks) for each in found]


def _published(found: Outcome, ranks: int) -> Row:
    low, high = PUBLISHED[ranks] if found.arm.startswith("hierarchical") else (None, None)
    return {"published_low": low, "published_high": high}


def _simulated(found: Outcome, setting: Mapping[str, Any], base: Outcome | None, bound: float) -> Row:
    return row(
        found.arm,
        setting,
        found.steps_per_s,
        "steps/s of a rank, simulated",
        speedup=found.steps_per_s / base.steps_per_s if base is not None else None,
        bound=bound,
        staleness=found.mean_staleness,
        staleness_most=found.max_staleness,
        wait_s=found.wait_s,
    )


# -- many ranks --------------------------------------------------------------------------------------------------------

SIZES = (8, 64, 512, 1024, 4096, 10_000)
ARMS = (
    *("horovod", "post-local-sgd", "all", "majority", "solo", "auto"),
    *("sgp", "osgp", "dpsgd", "adpsgd", "local-sgd", "local", "lsgd", "easgd"),
)
COMPUTE, DELAY, MEGABYTES = 0.3, 0.3, 100.0
STEPS = 32
"""Steps of each rank, as many at every size: how much ranks that are late hide of it depends on how many there are."""
HOST = 8
"""Ranks of a host, which share a relay, and a leader."""
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
"""A cluster whose ranks have 25 Gbit/s each, a coordinator that handles a rank's two events of a step in 5 us."""


def one_late(steps: int, ranks: int, seed: int) -> Schedule:
    """Return the schedule in which one random rank is late in every step."""
    return one_random(steps, ranks, COMPUTE, DELAY, seed)


def simulated_rows(
    arms: Iterable[str] = ARMS,
    sizes: Iterable[int] = SIZES,
    steps: int = STEPS,
    network: Network = NETWORK,
    schedule: Callable[[int, int, int], Schedule] = one_late,
    megabytes: float = MEGABYTES,
    seed: int = 0,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Return a row for each number of ranks and arm: steps per second of a rank, simulated.

    Speed-ups are over "horovod" at the same number of ranks, if it is among the arms. The bound is the speed-up that
    the schedule allows where communication is free. Speed-ups may be above it, since "horovod" also waits for the wire.
    ``coordinator_share`` is how much of the time the coordinator was busy.

    Args:
        arms: names as the benchmarks' cases have them.
        sizes: numbers of ranks.
        steps: of each rank; of all together as many as if each took these, where ranks step at their own pace.
        network: what messages and collectives take.
        schedule: gives the computation, [steps, ranks], from these two numbers and the seed.
        megabytes: of gradients and weights.
        seed: of the schedule, and of what algorithms draw.
        options: of arms: those of ``job_of``.
        say: takes a line about each simulation.
    """
    arms, rows = list(arms), []
    for ranks in sizes:
        times = schedule(steps, ranks, seed)
        setup = Setup(times, network, megabytes, local_size=HOST, drains=False, seed=seed)
        setting = {"ranks": ranks, "steps": steps, "megabytes": megabytes, "seed": seed, "network": network._asdict()}
        base: Outcome | None = simulate("horovod", setup) if "horovod" in arms else None
        for arm in arms:
            started = time.perf_counter()
            own = {} if read_name(arm).base in RIVALS else dict((options or {}).get(arm, {}))
            found = simulate(arm, setup, **own)
            took = time.perf_counter() - started
            work = times.sum(axis=0).mean() if waits_for_nobody(arm) else slowest_work(times)
            more = {"sent_mb": found.sent_bytes / 1e6, "contributors": found.contributors, "simulated_in_s": took}
            more["coordinator_share"] = found.coordinator_s / found.seconds
            rows.append(_simulated(found, setting, base, float(synchronous_seconds(times) / work)) | more)
            say(f"{ranks} ranks, {arm}: {found.steps_per_s:.3f} steps/s, simulated in {took:.1f} s")
    return rows
