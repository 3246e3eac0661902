"""One rank is slower than the others for good: samples a second of all ranks together, in the same time."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from hvd_async.simulation.names import LEADERS, SYNCHRONOUS, gossip_of, waits_for_nobody

from ..support import launch, plot, timed
from ..support.arms import parse_arms
from ..support.blocks import by_arm, everywhere, grouped, identical, median
from ..support.intervals import spread
from ..support.launch import START, Block, Say, repetitions
from ..support.options import add_numbers
from ..support.report import Column, Report, Row, chosen, ends, ranged, row

HELP = "the last rank is 2, 5 or 10 times slower for good: samples a second of all ranks, averagings or pulls a step"
COLUMNS = (
    Column("slower", "setting.slowdown", "g"),
    Column("arm", "arm"),
    *ranged("samples/s", "value", ".1f"),
    Column("speed-up", "speedup", ".3f"),
    Column("bound", "bound", ".3f"),
    Column("of bound", "of_bound", ".3f"),
    Column("fast s/step", "fast_step_s", ".3f"),
    Column("slow s/step", "slow_step_s", ".3f"),
    Column("waited", "fast_wait_s", ".3f"),
    Column("averagings/step", "averagings", ".3f"),
    Column("least", "averagings_least", ".3f"),
    Column("pulls/step", "pulls", ".3f"),
    Column("exchange s", "latency_s", ".3f"),
    *ranged("others keep", "kept", ".3f"),
)
OF_BOUND, LEAST_AVERAGINGS, KEEPS = 0.9, 0.9, 0.95


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=8, arms="horovod,adpsgd", repetitions=3)
    parser.add_argument("--compute", type=float, default=0.3, metavar="S", help="a fast rank's step, slept")
    add_numbers(parser, "--slow", [2.0, 5.0, 10.0], "K", "times that the last rank is slower")
    parser.add_argument(
        "--window", type=float, default=60.0, metavar="S", help="of each block; ranks stop when it ends"
    )
    parser.add_argument("--megabytes", type=float, default=4.0, help="of weights")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="samples a rank and step")
    parser.add_argument(
        "--even",
        action="store_true",
        help="measure each arm also with no slow rank, in alternation: what the others keep of their steps a second",
    )


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.window, args.repetitions, args.slow = min(args.window, 8.0), 1, [max(args.slow)]
    arms = parse_arms(args.arms, args.ranks, gossip=True, leaders=True)
    setting = chosen(args, "compute", "window", "megabytes", batch=args.batch_size, seed=0)
    blocks = [
        {**setting, "arm": arm, "repetition": repetition, "synchronous": arm in SYNCHRONOUS, "even": even}
        | {"slow": slow, "slowdown": 1.0 if even else slow}
        for slow in dict.fromkeys(args.slow)
        for repetition, arm in repetitions(arms, args.repetitions)
        for even in ((False, True)[:: 1 - 2 * (repetition % 2)] if args.even else (False,))
    ]
    say(f"{len(blocks)} blocks of {args.window:g} s")

    def tell(block: Block) -> str:
        slow = "no slow rank" if block["even"] else f"{block['slow']:g} times slower"
        return f"{block['arm']}, {slow}: {samples_per_second(block):.1f} samples/s"

    longest = args.window + 3 * max(args.slow) * args.compute + 10
    found = launch.measure(args, "hetero", blocks, say, tell, seconds=START + 2 * longest * len(blocks))
    rows = []
    for slow, part in grouped(found, lambda block: block["slow"]).items():
        rows += rows_of(part, {**setting, "slowdown": slow})
    report = Report("hetero", args.ranks, rows, COLUMNS, draw=draw)
    judge(report)
    return report


def samples_per_second(block: Block) -> float:
    """Return the samples of all ranks together, a second, of steps that ended in the window; all, where ranks step
    together."""
    return block["batch"] * steps_per_second(block, len(block["by_rank"]))


def steps_per_second(block: Block, ranks: int) -> float:
    """Return the steps of the first ``ranks`` ranks together, a second."""
    ends = [own["ends"] for own in block["by_rank"]]
    window = max(own[-1] for own in ends) if block["synchronous"] else block["window"]
    return float(sum(end <= window for own in ends[:ranks] for end in own) / window)


def kept(slow: list[Block], even: list[Block]) -> list[float]:
    """Return the share of their steps a second that the others keep when one rank is slow, by repetition."""
    without = {block["repetition"]: block for block in even}
    fast = len(slow[0]["by_rank"]) - 1
    return [steps_per_second(block, fast) / steps_per_second(without[block["repetition"]], fast) for block in slow]


def step_seconds(own: dict[str, Any]) -> float:
    """Return one rank's mean seconds of a step."""
    return float(own["ends"][-1] / len(own["ends"]))


def averagings(block: Block) -> list[float]:
    """Return each fast rank's averagings a step."""
    fast = [own["stats"] for own in block["by_rank"][:-1]]
    return [stats["averagings"] / stats["steps"] for stats in fast]


def pulls(own: dict[str, Any]) -> float:
    """Return one rank's pulls a step."""
    return float(own["stats"]["pulls"] / own["stats"]["steps"])


def bound_of(arm: str, ranks: int, slow: float) -> float | None:
    """The best speed-up in the long run: where nobody waits, each rank is as quick as it can be; where all wait for
    their neighbours, all are as slow as the slowest."""
    how = gossip_of(arm)
    if arm == "solo" or waits_for_nobody(arm):
        return (slow * (ranks - 1) + 1) / ranks
    return 1.0 if arm in SYNCHRONOUS or how else None


def rows_of(blocks: list[Block], setting: dict[str, Any]) -> list[Row]:
    """One row an arm, in the order of the first repetition. ``fast_...``: medians over the ranks that are not slow."""
    groups, even = by_arm(b for b in blocks if not b["even"]), by_arm(b for b in blocks if b["even"])
    base = median([samples_per_second(block) for block in groups.get("horovod", [])])
    rows = []
    for arm, mine in groups.items():
        rate = spread([samples_per_second(block) for block in mine])
        bound = bound_of(arm, len(mine[0]["by_rank"]), setting["slowdown"])
        speedup = rate.value / base if base else None
        own = [averagings(block) for block in mine] if gossip_of(arm) else []
        rows.append(
            row(
                arm,
                setting,
                *(rate, "samples/s of all ranks"),
                speedup=speedup,
                bound=bound,
                of_bound=speedup / bound if speedup and bound else None,
                fast_step_s=_median(mine, step_seconds),
                slow_step_s=statistics.median(step_seconds(block["by_rank"][-1]) for block in mine),
                fast_wait_s=_median(mine, lambda own: own["waited"] / len(own["ends"])),
                averagings=statistics.median(statistics.fmean(each) for each in own) if own else None,
                averagings_least=statistics.median(min(each) for each in own) if own else None,
                pulls=_median(mine, pulls) if arm in LEADERS else None,
                latency_s=median([own["latency_s"] for own in everywhere(mine)]),
                **ends("kept", spread(kept(mine, even[arm])) if arm in even else None),
                identical=identical(mine),
            )
        )
    return rows


def _median(blocks: list[Block], figure: Callable[[dict[str, Any]], float]) -> float:
    """Return the median of a figure of the fast ranks."""
    return statistics.median(figure(own) for block in blocks for own in block["by_rank"][:-1])


def judge(report: Report) -> None:
    """Add what must show."""
    for slow in dict.fromkeys(each["setting"]["slowdown"] for each in report.rows):
        _judge(report, [each for each in report.rows if each["setting"]["slowdown"] == slow], slow)


def _judge(report: Report, rows: list[Row], slow: float) -> None:
    found, where = {each["arm"]: each for each in rows}, f"one rank {slow:g} times slower"
    if "horovod" in found:
        over = found["horovod"]["slow_step_s"] / (found["horovod"]["setting"]["compute"] * slow)
        timed.judge_busy(report, f"Horovod's step over the slow rank's work, {where}", over, f", {where}")
    for each in rows:
        if waits_for_nobody(each["arm"]) and each["kept"] is not None:
            what = f"{each['arm']}: the others' steps a second, of those with no slow rank, {where}"
            report.at_least(what, each["kept"], KEEPS)
    if "adpsgd" not in found:
        return
    own = found["adpsgd"]
    if own["of_bound"] is not None:
        report.at_least(f"adpsgd's samples a second over Horovod's, of the bound, {where}", own["of_bound"], OF_BOUND)
    what = f"adpsgd's averagings a step, the fast rank that has fewest, {where}"
    report.at_least(what, own["averagings_least"], LEAST_AVERAGINGS)


def draw(figure: Any, rows: list[Row]) -> None:
    """Samples a second over Horovod's with their bounds; seconds a step of fast ranks, and of the slow one as marks;
    what the fast ranks keep."""
    compared = [each for each in rows if each["kept"] is not None]
    axes = figure.subplots(1, 3 if compared else 2)
    group = "{slowdown:g} times"
    key = "speedup" if all(each["speedup"] is not None for each in rows) else "value"
    plot.bars(axes[0], rows, group, key)
    if key == "speedup":
        plot.marks(axes[0], rows, group, "bound", "D", "bound")
    plot.label(axes[0], "all ranks together", "", "samples a second" + (", of Horovod's" if key == "speedup" else ""))
    plot.bars(axes[1], rows, group, "fast_step_s")
    plot.marks(axes[1], rows, group, "slow_step_s", "o", "the slow rank")
    plot.label(axes[1], "a step of the fast ranks", "how much slower the last rank is", "seconds")
    if compared:
        plot.bars(axes[2], compared, group, "kept")
        axes[2].axhline(KEEPS, color="black", linestyle=":", label=f"wanted: {KEEPS}")
        plot.label(axes[2], "what the fast ranks keep", "", "steps a second, over those with no slow rank")
    plot.legend(figure, *axes)
