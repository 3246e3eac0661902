"""The real ResNet-50, no delays: what our optimizers cost or save against Horovod's own, block by block.

With --recorded: what it costs to record a run for ``hvd_async advise``, in place of that.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from hvd_async.simulation.names import SYNCHRONOUS, quorum_of

from ..support import cycles, plot, timed
from ..support.arms import RECORDED, need_arm, parse_arms
from ..support.blocks import by_arm
from ..support.intervals import Interval, spread
from ..support.launch import Block, Say
from ..support.ratios import Ratios, mean_seconds
from ..support.report import INTERVAL, Column, Report, Row, chosen, ends, ranged, row

HELP = "no delays, real ResNet-50: ratio of step times to Horovod's, repeated until it is known well enough"
QUICK = "horovod,all,solo"
COLUMNS = (
    Column("framework", "setting.framework"),
    Column("arm", "arm"),
    *ranged("s/step", "value", ".4f"),
    *ranged("over horovod", "ratio", ".4f", INTERVAL),
    Column("cycles", "cycles", "d"),
    Column("fresh/s", "fresh_per_s", ".2f"),
)
JUDGED = ("all", "solo")
BASELINE = "horovod"
DEFAULT_ARMS = "horovod,ddp,all,majority,solo,auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=2, arms=DEFAULT_ARMS, repetitions=200, limit=20.0)
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch", help="of the model")
    parser.add_argument("--recorded", action="store_true", help="Horovod's optimizer, recorded or not; torch")
    cycles.add_options(parser, steps=4, wide=0.015, pixels=64, batch=16)


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.steps, args.repetitions, args.limit = min(args.steps, 2), 2, min(args.limit, 4.0)
    keras = args.framework == "tensorflow"
    if args.recorded:
        return recorded(args, say)
    if keras and args.arms == DEFAULT_ARMS:
        args.arms = "horovod,all,majority,solo,auto"
    arms = parse_arms(args.arms, args.ranks, rivals=("horovod",) if keras else ("horovod", "ddp"))
    need_arm(BASELINE, arms)
    own = {"quorums": {arm: quorum_of(arm) for arm in arms if arm != BASELINE}} if keras else {}
    job, judged = "no_stragglers_keras" if keras else "no_stragglers", [arm for arm in arms if arm in JUDGED]
    found = cycles.measure(args, job, arms, BASELINE, judged, say, **own)
    setting = chosen(args, "framework", "image_size", "batch_size", delay=0.0, seed=0)
    report = Report("balanced", args.ranks, rows_of(found, setting), COLUMNS, draw=draw)
    judge(report, args.wide)
    return report


def recorded(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge what recording costs.

    Raises:
        ValueError: the model is to be Keras'.
    """
    if args.framework != "torch":
        raise ValueError("--recorded: it is measured in torch")
    args.wide = min(args.wide, 0.005)  # (half of what may be lost)
    found = cycles.measure(args, "no_stragglers", [BASELINE, RECORDED], BASELINE, [RECORDED], say)
    setting = chosen(args, "framework", "image_size", "batch_size", delay=0.0, seed=0)
    report = Report("balanced", args.ranks, rows_of(found, setting), COLUMNS, draw=draw)
    judge_arm(report, report.rows[1], 1.01, args.wide)
    return report


def rows_of(blocks: list[Block], setting: dict[str, Any]) -> list[Row]:
    """One row an arm; ``value`` is the median block's step time, ``ratio`` the median over cycles."""
    ratios = Ratios.of(BASELINE, blocks)
    count = max(block["cycle"] for block in blocks) + 1
    rows = []
    for arm, mine in by_arm(blocks).items():
        fresh = [sum(own["fresh"] / own["elapsed"] for own in block["by_rank"]) for block in mine]
        rows.append(
            row(
                arm,
                setting,
                *(spread([mean_seconds(block) for block in mine]), "s/step"),
                speedup=1 / ratios.median(arm).value,
                bound=1.0 if arm in (*SYNCHRONOUS, RECORDED) else None,
                **ends("ratio", ratios.median(arm)),
                **ends("ratio_mean", ratios.mean(arm)),
                cycles=count,
                fresh_per_s=statistics.median(fresh),
            )
        )
    return rows


def judge(report: Report, wide: float) -> None:
    """Add what must show."""
    found = {each["arm"]: each for each in report.rows}
    for each in (found[arm] for arm in JUDGED if arm in found):
        judge_arm(report, each, 1.03, wide)
    timed.judge_auto(report, report.rows)


def judge_arm(report: Report, each: Row, most: float, wide: float) -> None:
    """Add that an arm's ratio is at most so much, and known well enough."""
    report.at_most(f"{each['arm']}'s step over Horovod's", each["ratio"], most)
    width = Interval(each["ratio"], each["ratio_low"], each["ratio_high"]).wide / each["ratio"]
    report.at_most(f"{each['arm']}'s 95% interval, each way", width, wide)


def draw(figure: Any, rows: list[Row]) -> None:
    """Ratios with their intervals, and step times."""
    axes = figure.subplots(1, 2)
    plot.points(axes[0], rows, "ratio")
    axes[0].axhspan(0.97, 1.03, color="#56B4E9", alpha=0.2, label="within 3%")
    plot.label(axes[0], "step time over Horovod's, median and 95% interval", "arm", "ratio")
    plot.bars(axes[1], rows, "{framework}")
    plot.label(axes[1], "step time, median block and spread", "framework", "seconds a step")
    plot.legend(figure, axes[1])
