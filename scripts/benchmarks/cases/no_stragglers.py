"""The real ResNet-50, no delays: what our optimizers cost or save against Horovod's own, block by block."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from ..support import plot
from ..support.intervals import Interval, spread
from ..support.launch import Block, Say
from ..support.launch import run as run_job
from ..support.ratios import Ratios, mean_seconds
from ..support.report import Column, Goal, Report, Row, row
from ..support.schedule import parse_arms, quorum_of

HELP = "no delays, real ResNet-50: ratio of step times to Horovod's, repeated until it is known well enough"
QUICK = "horovod,all,solo"
COLUMNS = (
    Column("framework", "setting.framework"),
    Column("arm", "arm"),
    Column("s/step", "value", ".4f"),
    Column("low", "low", ".4f"),
    Column("high", "high", ".4f"),
    Column("over horovod", "ratio", ".4f"),
    Column("95% from", "ratio_low", ".4f"),
    Column("to", "ratio_high", ".4f"),
    Column("cycles", "cycles", "d"),
    Column("fresh/s", "fresh_per_s", ".2f"),
)
JUDGED = ("all", "solo")
LEAST = 8
"""Cycles before the interval is looked at."""
DEFAULT_ARMS = "horovod,ddp,all,majority,solo,auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=2, arms=DEFAULT_ARMS, repetitions=200, limit=20.0)
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch", help="of the model")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each block")
    parser.add_argument("--wide", type=float, default=0.015, help="stop when the 95%% interval is so wide each way")
    parser.add_argument("--image-size", type=int, default=64, metavar="N", help="pixels")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="images a rank and step")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.steps, args.repetitions, args.limit = min(args.steps, 2), 2, min(args.limit, 4.0)
    keras = args.framework == "tensorflow"
    if keras and args.arms == DEFAULT_ARMS:
        args.arms = "horovod,all,majority,solo,auto"
    arms = parse_arms(args.arms, args.ranks, rivals=("horovod",) if keras else ("horovod", "ddp"))
    if "horovod" not in arms:
        raise ValueError("--arms: the case needs the arm 'horovod', to which the others are compared")
    plan = {
        "arms": arms,
        "baseline": "horovod",
        "judged": [arm for arm in arms if arm in JUDGED],
        "steps": args.steps,
        "least": LEAST,
        "most": args.repetitions,
        "wide": args.wide,
        "seconds": args.limit * 60,
        "image_size": args.image_size,
        "batch_size": args.batch_size,
    }
    if keras:
        plan["quorums"] = {arm: quorum_of(arm) for arm in arms if arm != "horovod"}
    say(f"cycles of {len(arms)} blocks of {args.steps} steps, for {args.limit:g} min at most")
    ratios = Ratios("horovod")
    cycle: dict[str, float] = {}

    def on_block(block: Block) -> None:
        cycle[block["arm"]] = mean_seconds(block)
        if len(cycle) == len(arms):
            ratios.add(cycle)
            seen = ", ".join(f"{arm} {ratios.median(arm).value:.3f}" for arm in arms)
            say(f"cycle {block['cycle'] + 1}: {seen}; interval {100 * ratios.wide(plan['judged']):.1f}% wide each way")
            cycle.clear()

    job = "no_stragglers_keras" if keras else "no_stragglers"
    found = run_job(job, args.ranks, plan, limit=args.limit * 60 + 400, on_block=on_block)
    setting = {"framework": args.framework, "delay": 0.0, "seed": 0, "image_size": args.image_size}
    report = Report(
        "balanced", args.ranks, rows_of(found, {**setting, "batch_size": args.batch_size}), COLUMNS, draw=draw
    )
    judge(report, args.wide)
    return report


def rows_of(blocks: list[Block], setting: dict[str, Any]) -> list[Row]:
    """One row an arm; ``value`` is the median block's step time, ``ratio`` the median over cycles."""
    arms = list(dict.fromkeys(block["arm"] for block in blocks if block["cycle"] == 0))
    ratios = Ratios.of("horovod", blocks)
    cycles = max(block["cycle"] for block in blocks) + 1
    rows = []
    for arm in arms:
        mine = [block for block in blocks if block["arm"] == arm]
        seconds = spread([mean_seconds(block) for block in mine])
        middle, mean = ratios.median(arm), ratios.mean(arm)
        fresh = [sum(own["fresh"] / own["elapsed"] for own in block["by_rank"]) for block in mine]
        rows.append(
            row(
                arm,
                setting,
                *(seconds.value, "s/step", seconds.low, seconds.high),
                speedup=1 / middle.value,
                bound=1.0 if arm in ("horovod", "ddp", "all") else None,
                ratio=middle.value,
                ratio_low=middle.low,
                ratio_high=middle.high,
                ratio_mean=mean.value,
                ratio_mean_low=mean.low,
                ratio_mean_high=mean.high,
                cycles=cycles,
                fresh_per_s=statistics.median(fresh),
            )
        )
    return rows


def judge(report: Report, wide: float) -> None:
    """Add what must show."""
    by_arm = {each["arm"]: each for each in report.rows}
    for arm in JUDGED:
        if arm not in by_arm:
            continue
        each = by_arm[arm]
        report.goals.append(Goal(f"{arm}'s step over Horovod's", each["ratio"], "<= 1.03", each["ratio"] <= 1.03))
        width = Interval(each["ratio"], each["ratio_low"], each["ratio_high"]).wide / each["ratio"]
        report.goals.append(Goal(f"{arm}'s 95% interval, each way", width, f"<= {wide:g}", width <= wide))
    fixed = {a: r["fresh_per_s"] for a, r in by_arm.items() if a not in ("auto", "horovod", "ddp")}
    if "auto" in by_arm and fixed:
        best = max(fixed, key=lambda arm: fixed[arm])
        share = by_arm["auto"]["fresh_per_s"] / fixed[best]
        report.goals.append(Goal(f"auto's fresh gradients a second against {best}'s", share, ">= 0.95", share >= 0.95))


def draw(figure: Any, rows: list[Row]) -> None:
    """Ratios with their intervals, and step times."""
    axes = figure.subplots(1, 2)
    names = [each["arm"] for each in rows]
    for place, each in enumerate(rows):
        fill, _ = plot.colour(each["arm"], names)
        ratio = each["ratio"]
        sides = plot.sides(ratio, each["ratio_low"], each["ratio_high"])
        style = {"color": fill, "markeredgecolor": "black", "ecolor": "black", "capsize": 5, "markersize": 9}
        axes[0].errorbar(place, ratio, yerr=sides, fmt="o", **style)
    axes[0].axhspan(0.97, 1.03, color="#56B4E9", alpha=0.2, label="within 3%")
    axes[0].set_xticks(range(len(names)), names)
    plot.label(axes[0], "step time over Horovod's, median and 95% interval", "arm", "ratio")
    plot.bars(axes[1], rows, [rows[0]["setting"]["framework"]], lambda each: each["setting"]["framework"])
    plot.label(axes[1], "step time, median block and spread", "framework", "seconds a step")
    plot.legend(figure, axes[1])
