"""Predictions of ``hvd_async advise`` beside measurements: jobs recorded once, each mode predicted, then measured.

A job is recorded under ``EagerOptimizer(quorum="all")``. The modes are then measured with computation that is drawn
anew from the same pattern, which the advisor has not seen.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvd_async.advisor.advice import advise
from hvd_async.advisor.prediction import Prediction, named_modes
from hvd_async.simulation.names import waits_for_nobody
from hvd_async.simulation.schedule import Schedule, one_random, stalls
from hvd_async.traces.format import read_trace

from ..support import launch, plot, timed
from ..support.arms import parse_arms
from ..support.intervals import spread
from ..support.launch import Block, Say
from ..support.report import Column, Report, Row, row

HELP = "jobs are recorded, what each mode would bring is predicted, then measured: steps a second, and the best mode"
JOBS = {"torch": "timed", "keras": "timed_keras"}
COLUMNS = (
    Column("framework", "setting.framework"),
    Column("job", "setting.job"),
    Column("Mbit/s", "setting.mbit", "g"),
    Column("arm", "arm"),
    Column("predicted", "predicted", ".3f"),
    Column("from", "predicted_low", ".3f"),
    Column("to", "predicted_high", ".3f"),
    Column("measured", "value", ".3f"),
    Column("off %", "off", "+.1f"),
)
GOAL, CLOSE = 10.0, 0.97
"""Per cent that a prediction may be off; the share of the best mode's speed that the one predicted best has."""
LINKS = (50.0, 200.0, 1000.0)
"""Mbit/s of the jobs on slow links."""


class Pattern(NamedTuple):
    """A kind of imbalance.

    Attributes:
        draw: makes a schedule of steps, ranks, computation (s) and a seed.
        what: it is, in words.
    """

    draw: Callable[[int, int, float, int], Schedule]
    what: str


def _slow(steps: int, ranks: int, compute: float, seed: int) -> Schedule:
    times = np.random.default_rng(seed).normal(compute, compute / 20, (steps, ranks)).clip(compute / 2)
    times[:, -1] *= 2
    return times


def _lengths(steps: int, ranks: int, compute: float, seed: int) -> Schedule:
    return compute * np.random.default_rng(seed).lognormal(0.0, 0.5, (steps, ranks))


def _mixed(steps: int, ranks: int, compute: float, seed: int) -> Schedule:
    return 0.5 * (_slow(steps, ranks, compute, seed) + _lengths(steps, ranks, compute, seed + 1000))


def _even(steps: int, ranks: int, compute: float, seed: int) -> Schedule:
    return np.random.default_rng(seed).normal(compute, compute / 20, (steps, ranks)).clip(compute / 2)


PATTERNS: Mapping[str, Pattern] = {
    "even": Pattern(_even, "all alike, 5% apart"),
    "straggler": Pattern(lambda n, p, c, seed: one_random(n, p, c, c, seed), "one random rank twice as long"),
    "slow": Pattern(_slow, "the last rank twice as long"),
    "lengths": Pattern(_lengths, "each step's length drawn, log-normal with sigma 0.5"),
    "stalls": Pattern(lambda n, p, c, seed: stalls(n, p, c, 5 * c, 0.05, seed), "5% of steps take six times as long"),
    "mixed": Pattern(_mixed, "half as in slow, half as in lengths"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=4, arms="all,majority,solo,sgp,dpsgd,local,adpsgd,lsgd", repetitions=1)
    parser.add_argument("--framework", choices=JOBS, default="torch", help="of the jobs; Keras' train by fit()")
    named = "; ".join(f"{name}: {pattern.what}" for name, pattern in PATTERNS.items())
    parser.add_argument("--jobs", default=",".join(PATTERNS), metavar="A,B,...", help=named.replace("%", "%%"))
    parser.add_argument("--compute", type=float, default=0.1, metavar="S", help="of a step, slept")
    parser.add_argument("--steps", type=int, default=80, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of what is recorded; what is measured has the next one")
    parser.add_argument(
        "--mbit",
        type=float,
        nargs="*",
        default=[],
        metavar="X",
        help="each rank on a virtual host whose link has so many Mbit/s (root), and --megabytes of weights",
    )
    parser.add_argument("--megabytes", type=float, default=2.0, metavar="MB", help="of weights, with --mbit")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Record, predict, measure.

    Raises:
        ValueError: a job of that name is not known.
    """
    names = args.jobs.split(",")
    if unknown := {*names} - {*PATTERNS}:
        raise ValueError(f"no job {', '.join(map(repr, sorted(unknown)))}: take of {', '.join(PATTERNS)}")
    if args.quick:
        names, args.steps = names[:1], min(args.steps, 30)
    arms = parse_arms(args.arms, args.ranks, gossip=True, leaders=True)
    named_modes(args.ranks, ",".join(arms))  # refuses what cannot be predicted before anything is measured
    links: list[float | None] = [*args.mbit] or [None]
    report = Report("advice", args.ranks, [], COLUMNS, draw=draw)
    progress = launch.Progress(len(names) * len(links) * (1 + args.repetitions * len(arms)), say)
    for mbit in links:
        for name in names:
            with tempfile.TemporaryDirectory(prefix="hvd_async_trace_") as folder:
                found = blocks(args, arms, name, mbit, Path(folder), progress, say)
                predictions = advise(read_trace(folder), modes=",".join(arms), resamples=4).predictions
            setting = {"framework": args.framework, "job": name, "mbit": mbit}
            rows = rows_of(found, {each.mode.name.replace("quorum ", "k"): each for each in predictions}, setting)
            report.rows += rows
            judge(report, rows, name if mbit is None else f"{name}, {mbit:g} Mbit/s")
    return report


def blocks(
    args: argparse.Namespace,
    arms: list[str],
    name: str,
    mbit: float | None,
    folder: Path,
    progress: launch.Progress,
    say: Say,
) -> list[Block]:
    """Return the blocks of a job that was measured, after one that was recorded into the folder."""
    draw = PATTERNS[name].draw
    seen, unseen = (draw(args.steps, args.ranks, args.compute, args.seed + number) for number in range(2))
    setting = {"delay": 0.0, "job": name, "steps": args.steps}
    recorded = timed.blocks_of(["all"], [({**setting, "trace": str(folder)}, seen)], 1, barrier=False)
    wanted = recorded + timed.blocks_of(arms, [(setting, unseen)], args.repetitions, barrier=False)
    slow = 1.0 if mbit is None else 1 + 64 * args.megabytes / mbit / args.compute
    longest = slow * sum(sum(max(row) for row in block["times"]) for block in wanted)

    def tell(block: Block) -> str:
        return f"{name}, {block['arm']}: {steps_per_second(block):.2f} steps/s"

    how: dict[str, Any] = {} if mbit is None else {"mbit": mbit}
    plan = {"model": "small"} if mbit is None else {"model": "network", "megabytes": args.megabytes}
    found = launch.measure(
        args,
        JOBS[args.framework],
        wanted,
        say,
        tell,
        seconds=launch.START + 3 * longest + 10 * len(wanted),
        progress=progress,
        plan=plan,
        **how,
    )
    return found[1:]


def steps_per_second(block: Block) -> float:
    """Steps a second of a rank: the mean over the ranks, where they wait for nobody; else the slowest rank's.

    Ranks that wait for others have one pace in the long run. In a short one those ahead are done before the last one,
    by as many steps as they may be ahead: the mean over the ranks would count that for speed.
    """
    elapsed = [own["elapsed"] for own in block["by_rank"]]
    steps = timed.steps_of(block)
    return statistics.fmean(steps / own for own in elapsed) if waits_for_nobody(block["arm"]) else steps / max(elapsed)


def rows_of(found: list[Block], predictions: Mapping[str, Prediction], setting: dict[str, Any]) -> list[Row]:
    """One row an arm."""
    rows = []
    for arm in dict.fromkeys(block["arm"] for block in found):
        measured = [steps_per_second(block) for block in found if block["arm"] == arm]
        own, value = predictions[arm].steps_per_s, statistics.median(measured)
        rows.append(
            row(
                arm,
                setting,
                *(spread(measured), "steps/s"),
                predicted=own.mean,
                predicted_low=own.low,
                predicted_high=own.high,
                off=100 * (own.mean / value - 1),
            )
        )
    return rows


def judge(report: Report, rows: list[Row], where: str) -> None:
    """Add what must show: no prediction is off by more than ``GOAL``, and the one that is best is, or is close."""
    worst = max(rows, key=lambda each: abs(each["off"]))
    report.at_most(f"{where}: most that a prediction is off, % ({worst['arm']})", abs(worst["off"]), GOAL)
    chosen, best = max(rows, key=lambda each: each["predicted"]), max(each["value"] for each in rows)
    report.at_least(f"{where}: speed of what is predicted to be best, {chosen['arm']}", chosen["value"] / best, CLOSE)


def draw(figure: Any, rows: list[Row]) -> None:
    """Draw predictions over measurements, with a tenth to each side."""
    axes, arms = figure.subplots(), list(dict.fromkeys(each["arm"] for each in rows))
    for arm in arms:
        own = [each for each in rows if each["arm"] == arm]
        look = plot.line(arm, arms) | {"linestyle": "none"}
        axes.plot([each["value"] for each in own], [each["predicted"] for each in own], **look)
    top = 1.1 * max(max(each["value"], each["predicted"]) for each in rows)
    axes.plot([0, top], [0, top], "k-", linewidth=1)
    axes.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color="black", alpha=0.1, label="10% off")
    plot.label(axes, "steps a second of a rank", "measured", "predicted")
    plot.legend(figure, axes)
