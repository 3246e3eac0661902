"""The control plane alone: from a round's first arrival to the last engine's command; and the engine's own CPU time."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from ..support import launch, plot
from ..support.arms import parse_arms
from ..support.blocks import by_arm, everywhere
from ..support.intervals import quantile, spread
from ..support.launch import Block, Progress, Say
from ..support.report import Column, Report, Row, ranged, row

HELP = "milliseconds from a round's first arrival to its last receipt; the engine thread's CPU time per round"
COLUMNS = (
    Column("what", "setting.what"),
    Column("ranks", "setting.ranks", "d"),
    Column("arm", "arm"),
    *ranged("ms", "value", ".3f"),
    Column("95% below", "p95", ".3f"),
    Column("round s", "step_s", ".3f"),
)
ASLEEP, BUSY, CPU = "latency, trainers asleep", "latency, trainers busy", "engine's CPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=8, arms="all,solo", repetitions=3)
    parser.add_argument("--rounds", type=int, default=300, help="without tensors, of each block")
    parser.add_argument("--cpu-ranks", type=int, default=2, metavar="N", help="of the job that measures CPU time")
    parser.add_argument("--cpu-rounds", type=int, default=30, help="with tensors, of each block")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of gradients, for CPU time")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.rounds, args.cpu_rounds, args.repetitions = min(args.rounds, 60), min(args.cpu_rounds, 6), 1
    arms = parse_arms(args.arms, args.cpu_ranks, rivals=())
    latencies = [
        {"what": "latency", "busy": busy, "rounds": args.rounds, "repetition": repetition}
        for repetition in range(args.repetitions)
        for busy in (False, True)
    ]
    cpu = [
        {"what": "engine", "arm": arm, "rounds": args.cpu_rounds, "megabytes": args.megabytes, "repetition": repetition}
        for repetition in range(args.repetitions)
        for arm in arms
    ]
    progress = Progress(len(latencies) + len(cpu), say)

    def tell(block: Block) -> str:
        if block["what"] == "engine":
            return f"engine's CPU, {block['arm']}: {1e3 * engine_seconds(block):.2f} ms a round"
        text = "busy" if block["busy"] else "asleep"
        return f"trainers {text}: median {1e3 * statistics.median(last_receipts(block)):.2f} ms"

    how: dict[str, Any] = {"progress": progress}
    found = launch.measure(args, "activation", latencies, say, tell, seconds=600, **how)
    found += launch.measure(args, "activation", cpu, say, tell, seconds=900, ranks=args.cpu_ranks, **how)
    report = Report("activation", args.ranks, rows_of(found), COLUMNS, draw=draw)
    judge(report)
    return report


def last_receipts(block: Block) -> list[float]:
    """Seconds from each round's first arrival to the last engine's receipt of its command."""
    first = block["by_rank"][0]["first"]
    return [
        max(own["received"][round_] for own in block["by_rank"]) - begun
        for round_, begun in enumerate(first)
    ]  # fmt: skip


def engine_seconds(block: Block) -> float:
    """CPU seconds of an engine's thread per round, mean over the ranks."""
    return statistics.fmean(own["engine_s"] for own in block["by_rank"])


def rows_of(blocks: list[Block]) -> list[Row]:
    """Latencies with trainers asleep and busy, then CPU times by arm. ``low`` and ``high`` are over repetitions."""
    rows = []
    for what, busy in ((ASLEEP, False), (BUSY, True)):
        mine = [block for block in blocks if block["what"] == "latency" and block["busy"] is busy]
        if not mine:
            continue
        medians = spread([1e3 * statistics.median(last_receipts(block)) for block in mine])
        every = [1e3 * seconds for block in mine for seconds in last_receipts(block)]
        setting = {"what": what, "ranks": len(mine[0]["by_rank"]), "curve": True, "seed": None}
        # Every share from 1 to 99%, for the plot.
        shares = [quantile(every, percent / 100) for percent in range(1, 100)]
        more = {"p95": quantile(every, 0.95), "p99": quantile(every, 0.99), "percentiles": shares, "rounds": len(every)}
        rows.append(row("solo", setting, medians, "ms", **more))
    for arm, mine in by_arm(block for block in blocks if block["what"] == "engine").items():
        used = spread([1e3 * engine_seconds(block) for block in mine])
        setting = {"what": CPU, "ranks": len(mine[0]["by_rank"]), "megabytes": mine[0]["megabytes"], "seed": None}
        whole = statistics.median(own["process_s"] for own in everywhere(mine))
        step = statistics.median(own["step_s"] for own in everywhere(mine))
        more = {"process_cpu_ms": 1e3 * whole, "step_s": step}
        rows.append(row(arm, setting, used, "ms of CPU a round", **more))
    return rows


def judge(report: Report) -> None:
    """Add what must show."""
    for each in report.rows:
        what, value = each["setting"]["what"], each["value"]
        if what == ASLEEP:
            report.at_most("median latency, trainers asleep", value, 1.0, "<= 1 ms")
        elif what == CPU:
            size = each["setting"]["megabytes"]
            report.at_most(f"engine's own CPU a round of {size:g} MB, {each['arm']}, ms", value, 5.0, "<= 5 ms")


def draw(figure: Any, rows: list[Row]) -> None:
    """How latencies are spread, and CPU times."""
    axes = figure.subplots(1, 2)
    latencies = [each for each in rows if "percentiles" in each]
    for each, (colour, style) in zip(latencies, (("#0072B2", "-"), ("#D55E00", "--")), strict=False):
        text = each["setting"]["what"].removeprefix("latency, ")
        axes[0].plot(each["percentiles"], range(1, 100), style, color=colour, label=text)
    axes[0].axvline(1.0, color="black", linestyle=":", label="goal, 1 ms asleep")
    axes[0].set_xscale("log")
    plot.label(axes[0], "first arrival to last receipt", "ms", "% of rounds below")
    axes[0].legend(frameon=False)
    used = [each for each in rows if each["setting"]["what"] == CPU]
    plot.bars(axes[1], used, "{megabytes:g} MB, {ranks} ranks")
    axes[1].axhline(5.0, color="black", linestyle=":", label="goal, 5 ms")
    plot.label(axes[1], "engine thread's own CPU time", "gradients", "ms of CPU a round")
    axes[1].legend(frameon=False)
