"""Rank i always arrives i x delay late, all having begun together: how long ranks wait for their round."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from hvd_async.simulation.schedule import Schedule, even_seed, linear, replay

from ..support import plot, timed
from ..support.arms import WARM_UP, parse_arms
from ..support.blocks import by_arm, identical, median
from ..support.intervals import spread
from ..support.launch import Block, Say
from ..support.report import Column, Report, Row, chosen, ranged, row

HELP = "rank i arrives i x delay late, after a barrier before each step; seconds waited, ranks in a round"
QUICK = "horovod,majority,solo"
COLUMNS = (
    Column("arm", "arm"),
    *ranged("wait ms", "value", ".1f"),
    Column("until fired ms", "until_fired_ms", ".1f"),
    Column("replayed ms", "replayed_ms", ".1f"),
    Column("times less", "speedup", ".3f"),
    Column("bound", "bound", ".3f"),
    Column("in a round", "contributors", ".2f"),
    Column("replayed", "replayed_contributors", ".2f"),
    Column("fresh/s", "fresh_per_s", ".2f"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=8, arms="horovod,ddp,all,k7,k5,k3,majority,solo,auto", repetitions=3)
    parser.add_argument("--delay", type=float, default=0.03, metavar="S", help="between one rank and the next, in s")
    parser.add_argument("--steps", type=int, default=100, help="of each block")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.steps, args.repetitions = min(args.steps, 12), 1
    arms = parse_arms(args.arms, args.ranks)
    times = linear(args.steps, args.ranks, args.delay)
    setting = chosen(args, "delay", "steps")
    first = WARM_UP + 1
    seeds = [even_seed(args.ranks, args.steps, first, 1000 * repetition) for repetition in range(args.repetitions)]
    blocks = timed.blocks_of(arms, [(setting, times)], args.repetitions, barrier=True, seeds=seeds)
    found = timed.measure(args, blocks, say)
    report = Report("skew", args.ranks, rows_of(found, setting, times), COLUMNS, draw=draw)
    judge(report)
    return report


def rows_of(blocks: list[Block], setting: dict[str, Any], times: Schedule) -> list[Row]:
    """One row an arm. Waits in ms; the speed-up is how many times less than Horovod's arm a rank waits.

    ``value`` is until the round's result is there, by the ranks' own clocks; ``until_fired_ms`` by the coordinator's.
    ``bound`` compares what the schedule and the very draw of initiators give without any cost of communication.
    """
    ranks = times.shape[1]
    groups = by_arm(blocks)
    base = median([timed.wait_seconds(block) for block in groups.get("horovod", [])])
    seeds_are = "of majority, drawing evenly"
    synchronous = replay(times, "all", barrier=True)
    rows = []
    for arm, mine in groups.items():
        wait = spread([1e3 * timed.wait_seconds(block) for block in mine])
        replays = [_replay(block, times) for block in mine] if arm != "auto" else []
        replayed = statistics.fmean(each.wait for each in replays) if replays else None
        held = _mean([timed.held_seconds(block) for block in mine])
        rows.append(
            row(
                arm,
                {**setting, "seed": sorted({block["seed"] for block in mine}), "seeds_are": seeds_are},
                *(wait, "ms a rank and step"),
                speedup=1e3 * base / wait.value if base and wait.value > 0 else None,
                bound=synchronous.wait / replayed if replayed else None,
                until_fired_ms=held and 1e3 * held,
                replayed_ms=None if replayed is None else 1e3 * replayed,
                contributors=_mean([timed.mean_contributors(block) for block in mine]),
                replayed_contributors=statistics.fmean(each.contributors for each in replays) if replays else None,
                formula_bound=3 * ranks / (ranks + 1) if arm == "majority" else None,
                formula_contributors=(ranks + 1) / 2 if arm == "majority" else None,
                fresh_per_s=statistics.median(timed.fresh_per_second(block) for block in mine),
                step_s=statistics.median(timed.step_seconds(block) for block in mine),
                identical=identical(mine),
            )
        )
    return rows


def judge(report: Report) -> None:
    """Add what must show."""
    found = {each["arm"]: each for each in report.rows}
    formula = 3 * report.ranks / (report.ranks + 1)
    majority = found.get("majority")
    for arm in ("all", "horovod"):
        if majority is None or arm not in found:
            continue
        for key, how in (("value", "until the result is there"), ("until_fired_ms", "until the round fires")):
            if found[arm].get(key) is None or not majority.get(key):
                continue
            ratio = found[arm][key] / majority[key]
            wanted = f">= 0.9 x 3P/(P+1) = {0.9 * formula:.3f}"
            report.at_least(f"wait of {arm} over majority, {how}", ratio, 0.9 * formula, wanted)
    if majority is not None and majority["contributors"] is not None:
        share = majority["contributors"] / ((report.ranks + 1) / 2)
        report.wants("majority's ranks in a round over (P+1)/2", share, "0.9 to 1.1", 0.9 <= share <= 1.1)
    if "solo" in found and found["solo"]["contributors"] is not None:
        count = found["solo"]["contributors"]
        report.wants("solo's ranks in a round", count, "1 to 1.1", 1.0 <= count <= 1.1)
    timed.judge_auto(report, report.rows, ", skew")


def draw(figure: Any, rows: list[Row]) -> None:
    """Waits, and ranks in a round, with what the replay says."""
    axes = figure.subplots(1, 2)
    names = [each["arm"] for each in rows]
    for one, key, replayed in ((axes[0], "value", "replayed_ms"), (axes[1], "contributors", "replayed_contributors")):
        for place, each in enumerate(rows):
            if each.get(key) is None:
                continue
            one.bar(place, each[key], 0.7, **plot.fill(each["arm"], names))
            if each.get(replayed) is not None:
                one.plot(place, each[replayed], "D", color="white", markeredgecolor="black")
        one.plot([], [], "D", color="white", markeredgecolor="black", label="replayed, communication for free")
        plot.arms_below(one, names)
    plot.label(axes[0], "waiting for the round", "arm", "ms a rank and step, mean")
    plot.label(axes[1], "ranks in when a round fires", "arm", "ranks, mean over rounds")
    plot.legend(figure, axes[0])


def _replay(block: Block, times: Schedule) -> Any:
    how = {"seed": block["seed"], "first_round": timed.first_round(block)}
    return replay(times, block["arm"], barrier=True, **how)


def _mean(values: list[float | None]) -> float | None:
    """Return the mean, if no value is missing."""
    there = [value for value in values if value is not None]
    return statistics.fmean(there) if len(there) == len(values) else None
