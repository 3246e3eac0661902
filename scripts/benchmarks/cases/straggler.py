"""One random rank held up in every step, or each now and then: step times against the bounds of that very schedule."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from hvd_async.simulation.schedule import Schedule, one_random, replay, slowest_work, stalls, synchronous_seconds

from ..support import plot, timed
from ..support.arms import parse_arms
from ..support.blocks import by_arm, grouped, identical, median
from ..support.intervals import spread
from ..support.launch import Block, Say
from ..support.options import add_numbers
from ..support.report import Column, Report, Row, chosen, ranged, row

HELP = "one random rank is held up in every step; step time against the schedule's own bounds"
QUICK = "horovod,majority,solo"
COLUMNS = (
    Column("delay s", "setting.delay", "g"),
    Column("arm", "arm"),
    *ranged("s/step", "value", ".4f"),
    Column("speed-up", "speedup", ".3f"),
    Column("bound", "bound", ".3f"),
    Column("of bound", "of_bound", ".3f"),
    Column("over own work", "over_own_work", ".3f"),
    Column("fresh/s", "fresh_per_s", ".2f"),
    Column("staleness", "staleness", ".2f"),
    Column("in a round", "contributors", ".2f"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=8, arms="horovod,ddp,all,k7,k4,majority,solo,auto", repetitions=3)
    add_numbers(parser, "--delay", [0.2, 0.3, 0.4], "S", "how late, in s")
    parser.add_argument("--compute", type=float, default=0.3, metavar="S", help="a step's computation, slept")
    parser.add_argument("--steps", type=int, default=100, help="of each block")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument(
        "--stalls",
        type=float,
        metavar="P",
        help="not one rank in every step: each rank stands still for --delay with this probability, in each step (then "
        "arms that gossip or follow a leader are there too)",
    )
    parser.add_argument(
        "--model",
        choices=("small", "resnet50"),
        default="small",
        help="resnet50: real computation beside the sleeping (then say --compute 0); there is no bound for it",
    )


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.delay, args.steps, args.repetitions = args.delay[:1], min(args.steps, 10), 1
    any_family = args.stalls is not None
    if any_family and not 0 <= args.stalls <= 1:
        raise ValueError(f"--stalls {args.stalls:g} is no probability: say one from 0 to 1, such as 0.02")
    arms = parse_arms(args.arms, args.ranks, gossip=any_family, leaders=any_family)
    named, settings = ["stalls"] if any_family else [], []
    for delay in args.delay:
        key = chosen(args, "compute", "steps", *named, delay=delay, schedule_seed=args.seed)
        settings.append((key, schedule_of(args, delay)))
    found = timed.measure(args, timed.blocks_of(arms, settings, args.repetitions, barrier=False), say)
    report = Report("straggler", args.ranks, [], COLUMNS, draw=draw)
    groups = grouped(found, lambda block: block["delay"])
    for setting, times in settings:
        rows = rows_of(groups.get(setting["delay"], []), setting, times, real=args.model != "small")
        report.rows += rows
        if args.model == "small" and args.stalls is None:
            judge(report, rows, f"{setting['delay']:g} s")
    return report


def schedule_of(args: argparse.Namespace, delay: float) -> Schedule:
    """Who is late when."""
    if args.stalls is None:
        return one_random(args.steps, args.ranks, args.compute, delay, args.seed)
    return stalls(args.steps, args.ranks, args.compute, delay, args.stalls, args.seed)


def rows_of(blocks: list[Block], setting: dict[str, Any], times: Schedule, real: bool = False) -> list[Row]:
    """One row an arm, in the order of the first repetition."""
    groups = by_arm(blocks)
    base = median([timed.step_seconds(block) for block in groups.get("horovod", [])])
    work = slowest_work(times) / len(times)
    rows = []
    for arm, mine in groups.items():
        seconds = spread([timed.step_seconds(block) for block in mine])
        speedup = base / seconds.value if base else None
        unbound = real or arm == "auto" or setting.get("stalls") is not None
        best = None if unbound else statistics.median(_bound(block, times) for block in mine)
        rows.append(
            row(
                arm,
                {**setting, "model": "resnet50" if real else "small", "seed": setting["schedule_seed"]},
                *(seconds, "s/step"),
                speedup=speedup,
                bound=best,
                of_bound=speedup / best if speedup and best else None,
                over_own_work=None if real else seconds.value / work,
                slowest_rank_s=work,
                synchronous_s=synchronous_seconds(times) / len(times),
                fresh_per_s=median([timed.fresh_per_second(block) for block in mine]),
                staleness=median([timed.mean_staleness(block) for block in mine]),
                contributors=median([timed.mean_contributors(block) for block in mine]),
                wait_s=statistics.median(timed.wait_seconds(block) for block in mine),
                identical=identical(mine),
                repetitions=[timed.step_seconds(block) for block in mine],
            )
        )
    return rows


def judge(report: Report, rows: list[Row], where: str) -> None:
    """Add what must show in one setting."""
    found = {each["arm"]: each for each in rows}
    if "horovod" in found:
        over = found["horovod"]["value"] / found["horovod"]["synchronous_s"]
        what = f"Horovod's step over its own bound, delay {where}"
        busy = timed.judge_busy(report, what, over, f", delay {where}")
        for each in rows:
            each["machine_too_busy"] = busy
    if "solo" in found:
        solo = found["solo"]
        report.at_most(f"solo's step over the slowest rank's work, delay {where}", solo["over_own_work"], 1.05)
        if solo["of_bound"] is not None:
            report.at_least(f"solo's speed-up over its bound, delay {where}", solo["of_bound"], 0.97)
    if {"solo", "majority", "horovod"} <= found.keys():
        values = [found[arm]["value"] for arm in ("solo", "majority", "horovod")]
        report.wants(f"majority between solo and Horovod, delay {where}", values[1], "s/step", values == sorted(values))
    timed.judge_auto(report, rows, f", delay {where}")


def draw(figure: Any, rows: list[Row]) -> None:
    """Step times by delay, with the least that the schedule allows."""
    axes = figure.subplots(1, 2)
    plot.bars(axes[0], rows, "{delay:g} s")
    for place, (each, *_) in enumerate(grouped(rows, lambda each: each["setting"]["delay"]).values()):
        for key, style in (("synchronous_s", "--"), ("slowest_rank_s", ":")):
            axes[0].hlines(each[key], place - 0.45, place + 0.45, colors="black", linestyles=style, linewidth=1.2)
    axes[0].plot([], [], "k--", label="bound, synchronous")
    axes[0].plot([], [], "k:", label="slowest rank's own work")
    plot.label(axes[0], "step time", "delay of one random rank a step", "seconds a step")
    plot.bars(axes[1], rows, "{delay:g} s", key="fresh_per_s")
    plot.label(axes[1], "gradients of staleness 0", "delay of one random rank a step", "gradients a second, all ranks")
    plot.legend(figure, axes[0])


def _bound(block: Block, times: Schedule) -> float:
    how = {"seed": block["seed"], "first_round": timed.first_round(block)}
    return synchronous_seconds(times) / replay(times, block["arm"], **how).seconds
