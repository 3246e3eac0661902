"""What many ranks cost, without having them: the coordinator's state machines alone, real connections, simulated jobs.

``machines``: microseconds an event, with up to 10,000 ranks. ``connections``: the production coordinator and relays as
processes of this machine, and ranks that are connections only. ``jobs``: whole trainings, simulated on the production
state machines. ``tables``: the same simulation beside tables that were measured. ``study``: beside a published one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from ..simulation import measured, published, scale
from ..support import connections, peer_machines, plot, state_machines
from ..support.intervals import Interval, spread
from ..support.launch import Say
from ..support.report import Column, Report, Row, ranged, row

HELP = "the coordinator with up to 10,000 ranks: alone, with real connections, and in simulated trainings"
COLUMNS = (
    Column("part", "part"),
    Column("ranks", "setting.ranks", "d"),
    Column("arm", "arm"),
    *ranged("value", "value", ".2f"),
    Column("unit", "unit"),
    Column("x baseline", "speedup", ".2f"),
    Column("measured", "measured", ".2f"),
    Column("staleness", "staleness", ".2f"),
    Column("events", "events", ".0f"),
    Column("bytes in", "bytes_in", ",.0f"),
    Column("bytes out", "bytes_out", ",.0f"),
    Column("s for all ends", "ends_s", ".2f"),
)
PARTS = ("machines", "connections", "tables", "study", "jobs")
SMALL, LARGE, LONGEST_US, GROWTH = 8, 10_000, 20.0, 1.5
"""Ranks that are compared; microseconds an event at the most; how much more it may be with more ranks."""
CONNECTED, LATENCY_MS, CPU_MS, ENDS_S, OFF = 1024, 10.0, 10.0, 5.0, 0.1
"""Of so many connections: milliseconds of a round, and of the coordinator for it, at the most; seconds in which all
end; how far a simulated ratio may be from the measured one."""
QUORUMS: dict[str, Callable[[], state_machines.Family]] = {
    "solo": lambda: state_machines.eager("solo"),
    "majority": lambda: state_machines.eager("majority"),
    "all": lambda: state_machines.eager("all"),
    "auto": lambda: state_machines.eager("auto"),
    "solo, hosts of 8": lambda: state_machines.eager("solo", local_size=8),
    "solo, bucket by bucket": lambda: state_machines.eager("solo", together=False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=CONNECTED, arms=",".join(scale.ARMS), repetitions=20)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to do")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[8, 64, 1000, 10_000], metavar="N", help="ranks of state machines"
    )
    parser.add_argument(
        "--connections", type=int, nargs="+", default=[64, 256, 1024, 2048], metavar="N", help="real connections"
    )
    parser.add_argument("--jobs", type=int, nargs="+", default=list(scale.SIZES), metavar="N", help="simulated ranks")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge; ``repetitions`` are rounds with real connections."""
    if args.quick:
        args.sizes, args.connections, args.jobs, args.repetitions = [8, 64], [16], [8, 64], min(args.repetitions, 3)
    report = Report("scale", args.ranks, [], COLUMNS, draw=draw)
    parts = {
        "machines": lambda: machines(report, args.sizes, say),
        "connections": lambda: connected(report, args.connections, args.repetitions, say),
        "tables": lambda: tables(report),
        "study": lambda: study(report, [64] if args.quick else [64, 128, 256], say),
        "jobs": lambda: jobs(report, args.arms.split(","), args.jobs, say),
    }
    for part in args.parts:
        first = len(report.rows)
        parts[part]()
        for each in report.rows[first:]:
            each["part"] = part
    return report


def machines(report: Report, sizes: list[int], say: Say) -> None:
    """Add what state machines cost alone, in this thread's CPU time."""
    unit = "us an event"
    for name, family in QUORUMS.items():
        for size in sizes:
            cost = state_machines.measure(family(), size, clock=time.thread_time)
            weights = {"events": cost.events, "bytes_in": cost.bytes_in, "bytes_out": cost.bytes_out}
            report.rows.append(row(name, {"ranks": size}, cost.event_us, unit, ends_s=cost.ends_s, **weights))
            say(f"{size} ranks, {name}: {cost.event_us:.1f} us an event")
            if size == max(sizes):
                report.at_most(f"s for all ends of {size:,} ranks, {name}", cost.ends_s, ENDS_S)
    for kinds_of, kinds in peer_machines.KINDS.items():
        for kind in kinds:
            for size in sizes:
                found = peer_machines.cost(kinds_of, kind, size, clock=time.thread_time)
                weights = {"events": found.events, "bytes_in": found.bytes_in, "bytes_out": found.bytes_out}
                report.rows.append(row(kind, {"ranks": size}, found.microseconds, unit, **weights))
                say(f"{size} ranks, {kind}: {found.microseconds:.1f} us an event")
    if {SMALL, LARGE} <= {*sizes}:
        by_arm: dict[str, dict[int, float]] = {}
        for each in report.rows:
            if each["unit"] == unit:
                by_arm.setdefault(each["arm"], {})[each["setting"]["ranks"]] = each["value"]
        for arm, found_by in by_arm.items():
            report.at_most(f"us an event at {LARGE:,} ranks, {arm}", found_by[LARGE], LONGEST_US)
            report.at_most(f"times that at {SMALL}, {arm}", found_by[LARGE] / found_by[SMALL], GROWTH)


def connected(report: Report, sizes: list[int], rounds: int, say: Say) -> None:
    """Add what real connections cost, without relays and with them."""
    for size in sizes:
        for relays in (False, True):
            found = connections.measure(size, relays, rounds=rounds)
            setting = {"ranks": size, "relays": found.relays}
            how = "relays" if relays else "direct"
            more = {"connect_s": found.connect_s, "kib": found.kib, "files": found.files}
            for what, values in (("solo", found.solo_ms), ("all", found.all_ms), ("coordinator's CPU", found.cpu_ms)):
                mean = what == "coordinator's CPU"  # (the kernel counts it in steps of 10 ms)
                value: Interval | float = statistics.fmean(values) if mean else spread(values)
                unit = "ms of CPU a round" if mean else "ms from first arrival to last receipt"
                report.rows.append(row(f"{what}, {how}", setting, value, unit, ends_s=found.end_s, **more))
            told = f"connected in {found.connect_s:.2f} s, solo {statistics.median(found.solo_ms):.1f} ms"
            say(f"{size} ranks, {how}: {told}, {found.kib:.0f} KiB a rank, {found.files} descriptors")
            if size == CONNECTED and relays:
                cpu = statistics.fmean(found.cpu_ms)
                report.at_most("ms of the coordinator's CPU, a round of 4 buckets, 1,024 ranks", cpu, CPU_MS)
                latency = statistics.median(found.solo_ms)
                report.at_most(
                    "ms from first arrival to last receipt, solo, 1,024 ranks by relays", latency, LATENCY_MS
                )


def tables(report: Report) -> None:
    """Add simulations of what was measured, and judge how near they are."""
    rows = measured.compared()
    report.rows += [each.row() for each in rows]
    off = [each for each in rows if abs(each.off) > OFF]
    near = f"{len(rows) - len(off)} of {len(rows)}"
    report.wants("simulated ratios within 10% of the measured ones", near, "all", not off, exact=True)


def study(report: Report, sizes: list[int], say: Say) -> None:
    """Add the published study of stalls, and all modes of ours beside it."""
    for size in sizes:
        say(f"the study of stalls at {size} ranks")
        report.rows += published.study(size)


def jobs(report: Report, arms: list[str], sizes: list[int], say: Say) -> None:
    """Add simulated trainings."""
    report.rows += scale.simulated_rows(arms, sizes, say=say)


def draw(figure: Any, rows: list[Row]) -> None:
    """Microseconds an event, and steps a second, by the number of ranks; as far as they are there."""
    wanted = {"machines": "us an event", "jobs": "steps/s of a rank, simulated"}
    there = [(part, unit) for part, unit in wanted.items() if any(each["part"] == part for each in rows)]
    panels = figure.subplots(1, max(1, len(there)), squeeze=False)[0]
    for axes, (part, unit) in zip(panels, there, strict=False):
        own = [each for each in rows if each["part"] == part]
        for number, arm in enumerate(dict.fromkeys(each["arm"] for each in own)):
            points = sorted((each["setting"]["ranks"], each["value"]) for each in own if each["arm"] == arm)
            style = ("-", "--", ":")[number // len(plot.COLOURS) % 3]
            axes.plot(*zip(*points, strict=True), style, color=plot.COLOURS[number % len(plot.COLOURS)], label=arm)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=6)
        plot.label(axes, part, "ranks", unit)
