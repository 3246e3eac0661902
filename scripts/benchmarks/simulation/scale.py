"""Every algorithm at 8 to 10,000 ranks, simulated: rows of the case ``scale``. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvd_async.simulation.arms import simulate
from hvd_async.simulation.job import Outcome, Setup
from hvd_async.simulation.names import RIVALS, read_name, waits_for_nobody
from hvd_async.simulation.network import Network
from hvd_async.simulation.schedule import Schedule, one_random, slowest_work, synchronous_seconds

from ..support.report import Row, row

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
    """Return a row for each number of ranks and arm: steps a second of a rank, simulated.

    Speed-ups are over "horovod" of the same number of ranks, if it is among the arms. The bound is the speed-up that
    the schedule allows where communication is free: of ranks that take as many steps each, or each at its own pace.
    Speed-ups may be above it, since "horovod" also waits for the wire.

    Args:
        arms: names as the benchmarks' cases have them.
        sizes: numbers of ranks.
        steps: of each rank; of all together as many as if each took these, where ranks step at their own pace.
        network: what messages and collectives take.
        schedule: gives the computation, [steps, ranks], from these two numbers and the seed.
        megabytes: of gradients and weights.
        seed: of the schedule, and of what algorithms draw.
        options: of arms: those of ``job_of``.
        say: is told of each simulation.
    """
    arms, rows = list(arms), []
    for ranks in sizes:
        times = schedule(steps, ranks, seed)
        setup = Setup(times, network, megabytes, local_size=HOST, drains=False, seed=seed)
        base: Outcome | None = simulate("horovod", setup) if "horovod" in arms else None
        for arm in arms:
            started = time.perf_counter()
            own = {} if read_name(arm).base in RIVALS else dict((options or {}).get(arm, {}))
            found = simulate(arm, setup, **own)
            took = time.perf_counter() - started
            rows.append(_row(found, setup, base, took))
            say(f"{ranks} ranks, {arm}: {found.steps_per_s:.3f} steps/s, simulated in {took:.1f} s")
    return rows


def _row(found: Outcome, setup: Setup, base: Outcome | None, took: float) -> Row:
    """Return a simulation's row; ``coordinator_share`` is how much of the time the coordinator was busy."""
    setting = {"ranks": setup.ranks, "steps": setup.steps, "megabytes": setup.megabytes, "seed": setup.seed}
    work = setup.times.sum(axis=0).mean() if waits_for_nobody(found.arm) else slowest_work(setup.times)
    return row(
        found.arm,
        {**setting, "network": setup.network._asdict()},
        found.steps_per_s,
        "steps/s of a rank, simulated",
        speedup=found.steps_per_s / base.steps_per_s if base is not None else None,
        bound=float(synchronous_seconds(setup.times) / work),
        staleness=found.mean_staleness,
        staleness_most=found.max_staleness,
        wait_s=found.wait_s,
        sent_mb=found.sent_bytes / 1e6,
        contributors=found.contributors,
        coordinator_share=found.coordinator_s / found.seconds,
        simulated_in_s=took,
    )
