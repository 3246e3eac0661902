"""What the benchmarks have measured (scripts/benchmarks/measurements.md), and the same set-ups simulated: ratios side by side. Pure.

All parameters are the machine's, known from elsewhere, but for one: what the software around a collective takes of 8
ranks that share 2 cores. It is calibrated once, from one row.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_async.simulation.arms import simulate
from hvd_async.simulation.job import Outcome, Setup
from hvd_async.simulation.names import gossip_of, waits_for_nobody
from hvd_async.simulation.network import PAYLOAD, Network, ring_bytes
from hvd_async.simulation.schedule import Schedule, constant, even_seed, linear, one_random, one_slow

from ..support.arms import WARM_UP
from ..support.report import Row, row

RANKS = 8
OPERATION = 0.521 - 0.5
"""Seconds of software around a collective, 8 ranks on 2 cores: what Horovod's step takes beyond its slowest rank's
computation with a random rank 0.2 s late (the first row of "One random rank late in every step")."""
LATENCY = 0.0005
"""One way between a rank and the coordinator, s: half of what lies between a round's first arrival and the last receipt
("What a round costs")."""
LOOPBACK = 4 * 1.5 * 64e6 / (0.793 / 3.6)
"""Bytes a second that all ranks of one machine send through its loopback together: a plain allreduce of 64 MB at 4
ranks ("Leaders: what a pull costs")."""
CLOSE = 0.1
"""How far a simulated ratio may be from the measured one."""
OFF: Mapping[tuple[str, str, str], str] = {
    ("straggler", "0.4 s late", "auto"): "what it learns depends on noise, and 40 steps are few",
    ("skew", "0.03 s apart", "solo"): "2 ms were measured, of which a tenth is beyond the table's digits",
    ("slow network", "12 steps", "osgp-int8"): "encoding to 8 bits takes the cores",
    ("slow network", "12 steps", "dpsgd-int8"): "encoding to 8 bits takes the cores",
    ("averages", "8 steps", "dpsgd-int8"): "encoding to 8 bits takes the cores",
    ("averages", "8 steps", "ddp-powersgd"): "its products of matrices take the cores",
    ("local steps", "2 MB", "local-bf16"): "another run, in which it took 1.28 times what its bytes allow",
} | {
    ("more ranks", "8 ranks", arm): "8 ranks that step every 150 ms wait for the 2 cores"
    for arm in ("sgp", "osgp", "adpsgd", "lsgd", "easgd")
}
"""Rows that are further off, and why: the model knows no cores that ranks share, but for ``OPERATION``."""

STRAGGLER = {
    0.2: {"horovod": 0.521, "k7": 0.419, "majority": 0.405, "solo": 0.347, "auto": 0.442},
    0.3: {"horovod": 0.622, "k7": 0.472, "majority": 0.451, "solo": 0.368, "auto": 0.461},
    0.4: {"horovod": 0.719, "k7": 0.525, "majority": 0.491, "solo": 0.387, "auto": 0.506},
}
"""Seconds a step, by seconds that one random rank is late."""
SKEW = {"all": 119.0, "ddp": 117.0, "majority": 48.0, "solo": 2.0}
"""Milliseconds that a rank waits in a step. Horovod's arm (153) had spun, which takes the cores from those that
compute, so ``all`` is compared with."""
SLOW_RANK = {
    2.0: {"horovod": 197.1, "adpsgd": 373.6},
    5.0: {"horovod": 82.7, "adpsgd": 359.2},
    10.0: {"horovod": 42.0, "adpsgd": 353.6},
}
"""Samples a second of all ranks, by how much slower the last rank is."""
SLOW_NETWORK = {
    "horovod": 2993.0,
    "ddp": 2929.0,
    "post-local-sgd": 1196.0,
    "torchft": 1238.0,
    "decent-dp": 1422.0,
    "solo": 2996.0,
    "sgp": 2055.0,
    "osgp": 1420.0,
    "dpsgd": 1403.0,
    "adpsgd": 663.0,
    "lsgd": 596.0,
    "easgd": 589.0,
    "osgp-bf16": 735.0,
    "dpsgd-bf16": 758.0,
    "osgp-int8": 665.0,
    "dpsgd-int8": 675.0,
}
"""Milliseconds a step, 8 MB over links of 50 Mbit/s."""
AVERAGES = {
    "horovod": 2942.0,
    "post-local-sgd": 1171.0,
    "torchft": 1193.0,
    "torchft-diloco": 1198.0,
    "decent-dp": 1363.0,
    "ddp-powersgd": 688.0,
    "local-sgd": 1194.0,
    "dpsgd": 1354.0,
    "dpsgd-avg4": 1948.0,
    "sgp-avg4": 2597.0,
    "dpsgd-bf16": 700.0,
    "dpsgd-int8": 677.0,
    "osgp-bf16": 703.0,
    "osgp-int8": 610.0,
}
"""The same on another machine."""
LOCAL_STEPS = {
    "post-local-sgd": 295.0,
    "torchft": 305.0,
    "osgp-bf16": 179.0,
    "osgp-int8": 156.0,
    "local": 225.0,
    "local-int8": 149.0,
    "local-int8-avg8": 148.0,
    "local-bf16": 187.0,
    "diloco-int8": 153.0,
}
"""Milliseconds a step, 2 MB; post-local SGD is compared with."""
MORE_RANKS = {
    2: {"horovod": 65.0, "ddp": 66.0, "decent-dp": 94.0, "solo": 65.0, "sgp": 63.0, "osgp": 91.0, "dpsgd": 92.0}
    | {"adpsgd": 204.0, "lsgd": 206.0, "easgd": 209.0},
    4: {"horovod": 96.0, "ddp": 99.0, "decent-dp": 183.0, "solo": 96.0, "sgp": 122.0, "osgp": 177.0, "dpsgd": 179.0}
    | {"adpsgd": 402.0, "lsgd": 429.0, "easgd": 413.0},
    8: {"horovod": 163.0, "ddp": 173.0, "decent-dp": 353.0, "solo": 160.0, "sgp": 213.0, "osgp": 309.0, "dpsgd": 321.0}
    | {"adpsgd": 548.0, "lsgd": 732.0, "easgd": 977.0},
}
"""Samples a second of all ranks, 8 MB over links of 200 Mbit/s, by number of ranks."""


class Compared(NamedTuple):
    """A row of a table beside the same, simulated.

    Attributes:
        table: its name.
        setting: what its rows differ by, beside the arm.
        arm: whose.
        measured, simulated: how many times as good as the table's baseline.
        figure: the simulated figure itself, in the table's unit.
    """

    table: str
    setting: str
    arm: str
    measured: float
    simulated: float
    figure: float

    @property
    def off(self) -> float:
        """How far the simulated ratio is from the measured one, of it."""
        return self.simulated / self.measured - 1

    def row(self) -> Row:
        """Return it as a row of a report."""
        setting = {"table": self.table, "of": self.setting}
        return row(self.arm, setting, self.figure, "as the table", speedup=self.simulated, measured=self.measured)


def straggler() -> list[Compared]:
    """One random rank late in every step: 40 steps of 0.3 s, rounds without grace."""
    found: list[Compared] = []
    for delay, table in STRAGGLER.items():
        times = _with_warm_up(one_random(40, RANKS, 0.3, delay, 0))

        def seconds(arm: str, times: Schedule = times) -> float:
            network = Network(latency=LATENCY, cycle=0.001, operation=OPERATION)
            setups = [Setup(times, network, megabytes=0.019, untimed=WARM_UP, seed=seed) for seed in range(3)]
            return statistics.median(1 / _without_grace(arm, setup).steps_per_s for setup in setups)

        found += _beside("straggler", f"{delay:g} s late", table, seconds)
    return found


def skew() -> list[Compared]:
    """Rank i late by i x 30 ms, all having begun together: 100 steps; the ratio is of seconds waited."""
    times, seed = linear(100, RANKS, 0.03), even_seed(RANKS, 100, 1, 0)

    def wait(arm: str) -> float:
        network = Network(latency=LATENCY, cycle=0.001, operation=OPERATION)
        return 1e3 * _without_grace(arm, Setup(times, network, 0.019, barrier=True, seed=seed)).wait_s

    return _beside("skew", "0.03 s apart", SKEW, wait, base="all")


def slow_rank() -> list[Compared]:
    """The last rank is always slower: 0.3 s a step, 4 MB through the loopback, 20 s."""
    found: list[Compared] = []
    network = Network(latency=LATENCY, cycle=0.001, operation=OPERATION, bandwidth=LOOPBACK / RANKS)
    for slow, table in SLOW_RANK.items():

        def rate(arm: str, slow: float = slow) -> float:
            steps = max(2, round(20 / (0.3 * slow)))
            setup = Setup(one_slow(steps, RANKS, 0.3, slow), network, 4.0, window=20.0)
            return 16 * RANKS * simulate(arm, setup).steps_per_s

        found += _beside("slow rank", f"{slow:g} times", table, rate, rates=True)
    return found


def slow_network() -> list[Compared]:
    """8 MB over links of 50 Mbit/s, computation a quarter of an allreduce: 12 steps; 8 on another machine."""
    on_links = functools.partial(_on_links, ranks=RANKS, mbit=50, megabytes=8.0)
    return [
        *_beside("slow network", "12 steps", SLOW_NETWORK, functools.partial(on_links, steps=12)),
        *_beside("averages", "8 steps", AVERAGES, functools.partial(on_links, steps=8)),
    ]


def local_steps() -> list[Compared]:
    """2 MB over links of 50 Mbit/s, averages behind local steps: 24 steps."""
    figure = functools.partial(_on_links, ranks=RANKS, mbit=50, megabytes=2.0, steps=24)
    return _beside("local steps", "2 MB", LOCAL_STEPS, figure, base="post-local-sgd")


def more_ranks() -> list[Compared]:
    """2, 4 and 8 ranks, 8 MB over links of 200 Mbit/s, the computation of 8 ranks for all: 24 steps."""
    found: list[Compared] = []
    for ranks, table in MORE_RANKS.items():

        def rate(arm: str, ranks: int = ranks) -> float:
            return 16 * ranks / _on_links(arm, ranks, 200, 8.0, 24) * 1e3

        found += _beside("more ranks", f"{ranks} ranks", table, rate, rates=True)
    return found


TABLES: Mapping[str, Callable[[], list[Compared]]] = {
    each.__name__: each for each in (straggler, skew, slow_rank, slow_network, local_steps, more_ranks)
}
"""What simulates each table."""


def compared() -> list[Compared]:
    """Return all rows of all tables."""
    return [each for table in TABLES.values() for each in table()]


def _on_links(arm: str, ranks: int, mbit: float, megabytes: float, steps: int) -> float:
    """Return the milliseconds of a step on virtual hosts, as the case ``network`` measures them."""
    bandwidth = mbit / 8 * 1e6 * PAYLOAD
    compute = ring_bytes(1e6 * megabytes, RANKS) / bandwidth / 4
    network = Network(latency=LATENCY, cycle=0.005, operation=OPERATION * ranks / RANKS, bandwidth=bandwidth)
    times = constant(WARM_UP + steps, ranks, compute)
    options: dict[str, Any] = {"grace": 0.0} if arm == "solo" else {}
    return 1e3 / simulate(arm, Setup(times, network, megabytes, untimed=WARM_UP), **options).steps_per_s


def _without_grace(arm: str, setup: Setup) -> Outcome:
    rival = arm in ("horovod", "ddp")
    assert rival or not (gossip_of(arm) or waits_for_nobody(arm))
    return simulate(arm, setup, **({} if rival else {"grace": 0.0}))


def _with_warm_up(times: Schedule) -> Schedule:
    """Return a schedule with the steps before it, whose computation does not count."""
    return np.vstack([np.zeros((WARM_UP, times.shape[1])), times])


def _beside(
    table: str,
    setting: str,
    measured: Mapping[str, float],
    figure: Callable[[str], float],
    base: str = "horovod",
    rates: bool = False,
) -> list[Compared]:
    """Return a table's rows beside simulated ones.

    Args:
        table, setting: for people.
        measured: by arm.
        figure: simulates one.
        base: the arm that others are compared with.
        rates: whether more is better.
    """
    simulated = {arm: figure(arm) for arm in measured}
    power = 1 if rates else -1
    return [
        Compared(
            table,
            setting,
            arm,
            (measured[arm] / measured[base]) ** power,
            (simulated[arm] / simulated[base]) ** power,
            simulated[arm],
        )
        for arm in measured
        if arm != base
    ]


def text(rows: Sequence[Compared]) -> str:
    """Return a table for people."""
    lines = [f"{'table':14}{'setting':14}{'arm':16}{'measured':>9}{'simulated':>10}{'off':>8}  figure"]
    for each in rows:
        flag = "" if abs(each.off) <= CLOSE else "  <--"
        lines.append(
            f"{each.table:14}{each.setting:14}{each.arm:16}{each.measured:9.2f}{each.simulated:10.2f}{each.off:+8.1%}"
            f"  {each.figure:.4g}{flag}"
        )
    return "\n".join(lines)
