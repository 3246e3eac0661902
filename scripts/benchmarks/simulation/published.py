"""A published study of stragglers at 64 to 256 ranks, replayed: hierarchical SGD over synchronous SGD. Pure.

PyTorch's blog on straggler mitigation: steps of 55 ms, in which a rank stands still for 1 s with a probability of 2%
(at 64 ranks) or 1% (at 128 and 256). Its groups and periods are not known here, so several are simulated. Communication
costs nothing but the latency of messages: the 55 ms are a whole step's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hvd_async.simulation.arms import simulate
from hvd_async.simulation.baselines import Level, averaged, synchronous
from hvd_async.simulation.job import Outcome, Setup
from hvd_async.simulation.network import Network
from hvd_async.simulation.schedule import stalls

from ..support.report import Row, row

COMPUTE, STALL = 0.055, 1.0
SHARES = {64: 0.02, 128: 0.01, 256: 0.01}
"""Probability that a rank stands still in a step, by number of ranks."""
PUBLISHED = {64: (2.08, 2.45), 128: (2.57, 2.68), 256: (2.63, 3.25)}
"""Hierarchical SGD's speed over synchronous SGD's, from and to, by number of ranks."""
HIERARCHIES = ((8, 1, 4), (8, 1, 8), (8, 1, 16), (8, 2, 8), (8, 4, 16), (16, 2, 8), (16, 4, 16), (32, 4, 16))
"""(Ranks of a group, steps between two averages in it, steps between two of all ranks.)"""
NETWORK = Network(latency=0.0001, cycle=0.001, operation=0.0005)


class Mode(NamedTuple):
    """An arm of ours, with options."""

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
"""Ours; ``local`` averages behind the steps that follow."""


def study(ranks: int, steps: int = 400, seed: int = 0, modes: Sequence[Mode] = MODES) -> list[Row]:
    """Return a row for each arm at 64, 128 or 256 ranks: steps a second of a rank, and over synchronous SGD's.

    Args:
        ranks: of the job.
        steps: of each rank.
        seed: of the stalls.
        modes: ours that are simulated.
    """
    times = stalls(steps, ranks, COMPUTE, STALL, SHARES[ranks], seed)
    setup = Setup(times, NETWORK, local_size=8, drains=False, seed=seed)
    base = synchronous("synchronous", setup, 0.0)
    found = [base, *(_hierarchical(setup, *each) for each in HIERARCHIES)]
    for mode in modes:
        options = dict(mode.options)
        arm = f"{mode.arm}-avg{options.pop('average_every')}" if "average_every" in options else mode.arm
        found.append(simulate(arm, setup, **options)._replace(arm=str(mode)))
    nobody = base.seconds / float(times.sum(axis=0).mean())
    return [_row(each, setup, base, nobody) for each in found]


def _hierarchical(setup: Setup, group: int, inner: int, outer: int) -> Outcome:
    levels = [Level(group, inner), Level(setup.ranks, outer)]
    return averaged(f"hierarchical, {group} ranks each {inner}, all each {outer} steps", setup, 0.0, levels)


def _row(found: Outcome, setup: Setup, base: Outcome, nobody: float) -> Row:
    low, high = PUBLISHED[setup.ranks]
    setting = {"ranks": setup.ranks, "steps": setup.steps, "compute": COMPUTE, "stall": STALL, "seed": setup.seed}
    return row(
        found.arm,
        {**setting, "share": SHARES[setup.ranks]},
        found.steps_per_s,
        "steps/s of a rank, simulated",
        speedup=found.steps_per_s / base.steps_per_s,
        bound=nobody,
        staleness=found.mean_staleness,
        staleness_most=found.max_staleness,
        wait_s=found.wait_s,
        published_low=low if found.arm.startswith("hierarchical") else None,
        published_high=high if found.arm.startswith("hierarchical") else None,
    )
