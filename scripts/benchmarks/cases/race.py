"""All arms train for the same time, with a late rank and without: accuracy at the end, and when a target is reached.

The small ResNet on the real digits, one fold of five to test on; the learning rate goes by the share of the time that
has passed. Now and then the clock stops for all, and what stands for all ranks is evaluated. --repetitions is the
number of seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

from hvd_async.simulation.names import LEADERS

from ..support import launch, leadership, plot
from ..support.arms import parse_arms
from ..support.blocks import by_arm, grouped, identical
from ..support.digits import TEST_FOLD
from ..support.intervals import spread
from ..support.launch import START, Block, Progress, Say, repetitions
from ..support.options import add_compute, add_fewer, add_numbers, add_periods
from ..support.report import Column, Report, Row, chosen, ranged, row
from ..support.trainings import BATCH, POINT, curve_of

HELP = "digits, the same seconds for all arms, with and without a late rank: accuracy, and time to a target"
COLUMNS = (
    Column("ranks", "setting.ranks", "d"),
    Column("delay s", "setting.delay", "g"),
    Column("arm", "arm"),
    *ranged("accuracy", "value", ".4f"),
    Column("s to target", "target_s", ".1f"),
    Column("low", "target_low", ".1f"),
    Column("high", "target_high", ".1f"),
    Column("reached", "reached"),
    Column("sooner", "speedup", ".2f"),
    Column("steps/s, all", "steps_s", ".1f"),
    Column("late rank's", "late_steps_s", ".2f"),
    Column("pulls", "pulls", "g"),
    Column("seconds", "seconds", ".1f"),
)
LESS = 1.0
"""Percentage points that an arm's accuracy may be below Horovod's in the same time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=8, arms="horovod,lsgd,easgd", repetitions=3)
    add_fewer(parser)
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each training, evaluation aside")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="of training between two evaluations")
    parser.add_argument("--target", type=float, default=0.95, help="accuracy to be reached")
    text = "of the last rank in every step; 0 for a run in which no rank is late"
    add_numbers(parser, "--delay", [0.0, 0.2], "S", text)
    add_compute(parser, 0.05)
    parser.add_argument("--lr", type=float, default=0.1, help="the highest learning rate, of all arms")
    add_periods(parser, local=4, whole=16)
    parser.add_argument("--leadership", type=Path, metavar="FILE", help="draw who led when under lsgd (PNG)")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.seconds, args.fewer, args.repetitions = min(args.seconds, 8.0), 0, 1
        args.delay = args.delay[:1]
    sizes = [args.ranks, *([args.fewer] if args.fewer else [])]
    if args.groups < 1 or any(size % args.groups for size in sizes):
        raise ValueError(f"--groups {args.groups}: {' and '.join(map(str, sizes))} ranks cannot be parted into so many")
    if args.leadership is not None and "lsgd" not in args.arms.split(","):
        raise ValueError("--leadership: nobody leads; let lsgd be one of --arms")
    plans = {size: blocks_of(args, size) for size in sizes}
    count = sum(map(len, plans.values()))
    say(f"{count} trainings of {args.seconds:g} s")
    progress = Progress(count, say)

    def tell(block: Block) -> str:
        at = f"{len(block['by_rank'])} ranks, {block['delay']:g} s late, seed {block['seed']}"
        return f"{at}, {block['arm']}: {curve_of(block)[-1][1]:.4f}"

    found: list[Block] = []
    for size, blocks in plans.items():
        each = 2 * args.seconds + 10 + 2 * args.seconds / args.every
        how: dict[str, Any] = {"ranks": size, "progress": progress}
        how["env"] = launch.groups_env(blocks, size)
        how["seconds"] = START + each * len(blocks)
        found += launch.measure(args, "race", blocks, say, tell, **how)
    names = ("seconds", "every", "target", "compute", "lr", "groups", "local_period", "global_period")
    setting = chosen(args, *names, seed="the run's number")
    report = Report("race", args.ranks, rows_of(found, setting), COLUMNS, draw=draw)
    judge(report)
    if args.leadership is not None:
        drawn = [each for each in report.rows if each["leaders"]]
        height = 1.5 + 0.5 * sum({each["setting"]["ranks"] for each in drawn})
        plot.picture(args.leadership, "who led when, by lsgd", draw_leadership, drawn, height)
    return report


def blocks_of(args: argparse.Namespace, size: int) -> list[Block]:
    """Every arm with and without delay, in alternation."""
    arms = parse_arms(args.arms, size, gossip=True, leaders=True)
    common = chosen(args, "seconds", "every", "compute", "lr", "local_period", "global_period")
    common |= {"batch": BATCH, "split": "even", "model": "resnet", "fold": TEST_FOLD, "group": size // args.groups}
    return [
        {**common, "arm": arm, "seed": seed, "delay": delay}
        for delay in dict.fromkeys(args.delay)
        for seed, arm in repetitions(arms, args.repetitions)
    ]


def reached_at(block: Block, target: float) -> float:
    """Seconds until an evaluation found the target reached; infinite if none did."""
    return next((at for at, accuracy in curve_of(block) if accuracy >= target), math.inf)


def rows_of(blocks: list[Block], setting: dict[str, Any]) -> list[Row]:
    """One row a number of ranks, delay and arm; who led is told of the first seed."""
    rows = []
    for (ranks, delay), part in grouped(blocks, lambda block: (len(block["by_rank"]), block["delay"])).items():
        groups = by_arm(part)
        soonest = {arm: spread([reached_at(b, setting["target"]) for b in mine]) for arm, mine in groups.items()}
        base = soonest["horovod"].value if "horovod" in soonest else math.inf
        for arm, mine in groups.items():
            scores, until = spread([curve_of(block)[-1][1] for block in mine]), soonest[arm]
            histories = [own["history"] for own in mine[0]["by_rank"]]
            known = [math.isfinite(reached_at(block, setting["target"])) for block in mine]
            rows.append(
                row(
                    arm,
                    {**setting, "ranks": ranks, "delay": delay, "group": mine[0]["group"]},
                    *(scores, "share of test images, median"),
                    accuracy=scores.value,
                    target_s=until.value,
                    target_low=until.low,
                    target_high=until.high,
                    reached=f"{sum(known)} of {len(known)}",
                    speedup=base / until.value if math.isfinite(base) and math.isfinite(until.value) else None,
                    steps_s=statistics.median(sum(o["steps"] for o in b["by_rank"]) / seconds_of(b) for b in mine),
                    late_steps_s=statistics.median(b["by_rank"][-1]["steps"] / seconds_of(b) for b in mine),
                    pulls=statistics.median(b["by_rank"][0]["pulls"] for b in mine) if arm in LEADERS else None,
                    seconds=statistics.median(seconds_of(block) for block in mine),
                    curves=[curve_of(block) for block in mine],
                    leaders=leadership.merged(histories, mine[0]["group"]) if arm == "lsgd" else None,
                    identical=identical(mine),
                )
            )
    return rows


def seconds_of(block: Block) -> float:
    """By the clock, at the end."""
    return float(block["by_rank"][0]["seconds"])


def judge(report: Report) -> None:
    """Add what must show: accuracy in the same time; and with a late rank, the target no later than under Horovod."""
    base = {_where(each): each for each in report.rows if each["arm"] == "horovod"}
    for each in report.rows:
        if each["arm"] not in LEADERS or _where(each) not in base:
            continue
        horovod, where = base[_where(each)], f"{each['setting']['ranks']} ranks, {each['setting']['delay']:g} s late"
        less = (each["value"] - horovod["value"]) / POINT
        what = f"{each['arm']}'s accuracy less horovod's, points, {where}"
        report.at_least(what, less, -LESS)
        if each["setting"]["delay"]:
            met = math.isfinite(each["target_s"]) and each["target_s"] <= horovod["target_s"]
            what, wanted = f"{each['arm']}'s seconds to the target, {where}", f"at most {horovod['target_s']:.1f}"
            report.wants(what, each["target_s"], wanted, met)


def _where(each: Row) -> tuple[int, float]:
    return each["setting"]["ranks"], each["setting"]["delay"]


def draw(figure: Any, rows: list[Row]) -> None:
    """Accuracy by the clock, a line a seed."""
    parts = sorted({_where(each) for each in rows})
    panels = figure.subplots(1, len(parts), squeeze=False, sharey=True)[0]
    names = list(dict.fromkeys(each["arm"] for each in rows))
    for axes, (ranks, delay) in zip(panels, parts, strict=True):
        for each in (each for each in rows if _where(each) == (ranks, delay)):
            for number, curve in enumerate(each["curves"]):
                named = {"label": each["arm"]} if not number else {}
                axes.plot(*zip(*curve, strict=True), alpha=0.85, **named, **plot.line(each["arm"], names))
        axes.axhline(rows[0]["setting"]["target"], color="#555555", linewidth=0.8, label="target")
        text = f"rank {ranks - 1} {delay:g} s late" if delay else "no rank late"
        plot.label(axes, f"{ranks} ranks, {text}", "seconds of training", "")
    panels[0].set_ylabel("share of test images")
    plot.legend(figure, panels[0])


def draw_leadership(figure: Any, rows: list[Row]) -> None:
    """A panel a number of ranks and delay."""
    delays = list(dict.fromkeys(each["setting"]["delay"] for each in rows))
    sizes = list(dict.fromkeys(each["setting"]["ranks"] for each in rows))
    panels = figure.subplots(len(sizes), len(delays), squeeze=False, height_ratios=sizes)
    for each in rows:
        ranks, delay = _where(each)
        axes = panels[sizes.index(ranks)][delays.index(delay)]
        late = ranks - 1 if delay else None
        leadership.draw(axes, each["leaders"], ranks, each["setting"]["group"], each["seconds"], late)
        axes.set_title(f"{ranks} ranks, {f'the last {delay:g} s late' if delay else 'none late'}")
        axes.set_xlabel("seconds of training")
    plot.legend(figure, panels[0][0])
