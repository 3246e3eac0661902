"""Predictions of ``hvd_async advise`` against measurements: jobs recorded once, each mode predicted, then measured."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvd_async.advisor.advice import advise
from hvd_async.advisor.prediction import Prediction, named_modes
from hvd_async.simulation.schedule import Schedule, lengths, stalls
from hvd_async.traces.format import read_trace
from scripts.benchmarks.support.names import waits_for_none

from ..support.arms import parse_arms
from ..support.figures import Block, spread
from ..support.launch import START, Progress, block_of, measure, repetitions
from ..support.report import Case, Option, Panel, Report, Row, Say, columns, row
from ..support.schedule import one_random

GOAL, CLOSE = 10.0, 0.97
"""Per cent that a prediction may be off; the share of the best mode's speed that the one predicted best has."""


PATTERNS = {
    "even": "all alike, 5% apart",
    "straggler": "one random rank twice as long",
    "slow": "the last rank twice as long",
    "lengths": "each step's length drawn, log-normal with sigma 0.5",
    "stalls": "5% of steps take six times as long",
    "mixed": "half as in slow, half as in lengths",
}
"""Kinds of imbalance, by job."""


def draw(pattern: str, steps: int, ranks: int, compute: float, seed: int) -> Schedule:
    """Return the seconds of computation of a pattern, [steps, ranks]."""
    if pattern == "straggler":
        return one_random(steps, ranks, compute, compute, seed)
    if pattern == "lengths":
        return lengths(steps, ranks, compute, 0.5, seed)
    if pattern == "stalls":
        return stalls(steps, ranks, compute, 5 * compute, 0.05, seed)
    if pattern == "mixed":
        slow, drawn = draw("slow", steps, ranks, compute, seed), draw("lengths", steps, ranks, compute, seed + 1000)
        return 0.5 * (slow + drawn)
    times = np.random.default_rng(seed).normal(compute, compute / 20, (steps, ranks)).clip(compute / 2)
    if pattern == "slow":
        times[:, -1] *= 2
    return times


def advice(args: argparse.Namespace, say: Say) -> Report:
    """Record, predict, measure."""
    names = args.jobs.split(",")
    if unknown := {*names} - {*PATTERNS}:
        raise ValueError(f"no job {', '.join(map(repr, sorted(unknown)))}: take of {', '.join(PATTERNS)}")
    names = names[:1] if args.quick else names
    arms = parse_arms(args.arms, args.ranks, gossip=True, leaders=True)
    named_modes(args.ranks, ",".join(arms))  # refuses what cannot be predicted before anything is measured
    links: list[float | None] = [*args.mbit] or [None]
    report = ADVICE.report(args, [])
    progress = Progress(len(names) * len(links) * (1 + args.repetitions * len(arms)), say)
    for mbit in links:
        for name in names:
            with tempfile.TemporaryDirectory(prefix="hvd_async_trace_") as folder:
                found = measured(args, arms, name, mbit, Path(folder), progress, say)
                trace, modes = read_trace(folder), ",".join(arms)
                predictions = advise(trace, modes=modes, resamples=4, everything=True).predictions
            setting = {"framework": "torch", "job": name, "mbit": mbit}
            rows = rows_of(found, {each.mode.name.replace("quorum ", "k"): each for each in predictions}, setting)
            report.rows += rows
            judge(report, rows, name if mbit is None else f"{name}, {mbit:g} Mbit/s")
    return report


def measured(
    args: argparse.Namespace,
    arms: list[str],
    name: str,
    mbit: float | None,
    folder: Path,
    progress: Progress,
    say: Say,
) -> list[Block]:
    """Return the blocks of a job that was measured, after one that was recorded into the folder."""
    seen, unseen = (draw(name, args.steps, args.ranks, args.compute, args.seed + number) for number in range(2))
    task: dict[str, Any] = {"name": "small"} if mbit is None else {"name": "network", "megabytes": args.megabytes}

    def block(arm: str, repetition: int, times: Schedule, **more: Any) -> Block:
        own = {"own": {"seed": repetition}} if arm == "majority" else {}
        return block_of(arm, repetition, task, job=name, steps=args.steps, times=times.tolist(), **own, **more)

    wanted = [block("all", 0, seen, trace=str(folder))]
    wanted += [block(arm, repetition, unseen) for repetition, arm in repetitions(arms, args.repetitions)]
    slow = 1.0 if mbit is None else 1 + 64 * args.megabytes / mbit / args.compute
    longest = slow * sum(sum(max(row) for row in each["times"]) for each in wanted)

    def tell(block: Block) -> str:
        return f"{name}, {block['arm']}: {steps_per_second(block):.2f} steps/s"

    how: dict[str, Any] = {"seconds": START + 3 * longest + 10 * len(wanted), "progress": progress}
    how |= {} if mbit is None else {"mbit": mbit}
    return measure(args, "timed", wanted, say, tell, **how)[1:]


def steps_per_second(block: Block) -> float:
    """Return the steps per second of a rank: the mean over the ranks if they never wait; else the slowest's.

    Ranks that wait for others have one pace in the long run. In a short one those ahead are done before the last one,
    by as many steps as they may be ahead: the mean over the ranks would count that for speed.
    """
    paces = [len(own["ends"]) / own["ends"][-1] for own in block["by_rank"]]
    return statistics.fmean(paces) if waits_for_none(block["arm"]) else float(min(paces))


def rows_of(found: list[Block], predictions: Mapping[str, Prediction], setting: dict[str, Any]) -> list[Row]:
    """Return a row for each arm."""
    rows = []
    for arm in dict.fromkeys(block["arm"] for block in found):
        speeds = [steps_per_second(block) for block in found if block["arm"] == arm]
        own, value = predictions[arm].steps_per_s, statistics.median(speeds)
        more = {"predicted": own.mean, "predicted_low": own.low, "predicted_high": own.high}
        rows.append(row(arm, setting, spread(speeds), "steps/s", **more, off=100 * (own.mean / value - 1)))
    return rows


def judge(report: Report, rows: list[Row], where: str) -> None:
    """Add the goals: no prediction is off by more than ``GOAL``, and the one that is best is, or is close."""
    worst = max(rows, key=lambda each: abs(each["off"]))
    report.at_most(f"{where}: most that a prediction is off, % ({worst['arm']})", abs(worst["off"]), GOAL)
    chosen, best = max(rows, key=lambda each: each["predicted"]), max(each["value"] for each in rows)
    report.at_least(f"{where}: speed of what is predicted to be best, {chosen['arm']}", chosen["value"] / best, CLOSE)


ADVICE = Case(
    name="advice",
    help="jobs are recorded, what each mode would bring is predicted, then measured: steps a second, and the best mode",
    text="""Predictions of hvd_async advise against measurements: jobs recorded, each mode predicted, then measured.

A job is recorded under EagerOptimizer(quorum="all"). The modes are then measured with computation that is drawn again
from the same pattern, which the advisor has not seen.""",
    run=advice,
    columns=columns(
        "job = setting.job | Mbit/s = setting.mbit g | arm | "
        "predicted = predicted .3f | from = predicted_low .3f | to = predicted_high .3f | measured = value .3f | "
        "off % = off +.1f"
    ),
    panels=(Panel(marks=("predicted",), each="job"),),
    ranks=4,
    arms="all,majority,solo,sgp,dpsgd,local,adpsgd,lsgd",
    repetitions=1,
    options=(
        Option(
            *("--jobs", ",".join(PATTERNS)),
            "; ".join(f"{name}: {text}" for name, text in PATTERNS.items()).replace("%", "%%"),
            {"metavar": "A,B,..."},
        ),
        Option("--compute", 0.1, "of a step, slept", {"metavar": "S"}),
        Option("--steps", 80, "of each run"),
        Option("--seed", 0, "of what is recorded; what is measured has the next one"),
        Option(
            *("--mbit", []),
            "each rank on a virtual host whose link has this many Mbit/s (root), and --megabytes of weights",
            {"type": float, "nargs": "*", "metavar": "X"},
        ),
        Option("--megabytes", 2.0, "of weights, with --mbit", {"metavar": "MB"}),
    ),
    quick={"steps": 30},
)
