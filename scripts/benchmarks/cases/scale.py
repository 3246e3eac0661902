"""Many ranks: the coordinator's state machines alone, its real connections, and simulated jobs."""

from __future__ import annotations

import argparse
import itertools
import statistics

from ..support import connections, events, simulated
from ..support.figures import grouped, spread
from ..support.report import Case, Option, Panel, Report, Say, columns, row

PARTS = ("machines", "connections", "tables", "jobs")
SMALL, LARGE, LONGEST_US, GROWTH, ENDS_S = 8, 10_000, 20.0, 1.5, 5.0
"""Numbers of ranks that are compared; limits of the microseconds per event, of their growth with more ranks, and of the
seconds in which all ranks register and end."""
CONNECTED, LATENCY_MS, CPU_MS = 1024, 10.0, 10.0
"""Number of connections; limits of the milliseconds of a round, and of the coordinator's CPU time for it."""


def scale(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge; ``repetitions`` are rounds with real connections."""
    report = SCALE.report(args, [])
    for part in args.parts:
        first = len(report.rows)
        if part == "machines":
            machines(report, args.sizes, say)
        elif part == "connections":
            connected(report, args.connections, args.repetitions, say)
        elif part == "tables":
            report.rows += simulated.compared()
            off = [abs(each["off"]) > simulated.CLOSE for each in report.rows[first:]]
            near = f"{len(off) - sum(off)} of {len(off)}"
            report.wants("simulated ratios within 10% of the measured ones", near, "all", not any(off), exact=True)
        else:
            report.rows += simulated.jobs(args.arms.split(","), args.jobs, say)
        for each in report.rows[first:]:
            each["part"] = part
    return report


def machines(report: Report, sizes: list[int], say: Say) -> None:
    """Add what state machines cost alone, in this thread's CPU time."""
    for kind, size in itertools.product(events.KINDS, sizes):
        cost = events.measure(kind, size)._asdict()
        report.rows.append(row(kind, {"ranks": size}, cost.pop("microseconds"), "us an event", **cost))
        say(f"{size} ranks, {kind}: {report.rows[-1]['value']:.1f} us an event")
        if size == max(sizes) and cost["ends_s"] is not None:
            report.at_most(f"s for all ends of {size:,} ranks, {kind}", cost["ends_s"], ENDS_S)
    if {SMALL, LARGE} <= {*sizes}:
        for arm, rows in grouped(report.rows, lambda each: str(each["arm"])).items():
            found = {each["setting"]["ranks"]: each["value"] for each in rows}
            report.at_most(f"us an event at {LARGE:,} ranks, {arm}", found[LARGE], LONGEST_US)
            report.at_most(f"times that at {SMALL}, {arm}", found[LARGE] / found[SMALL], GROWTH)


def connected(report: Report, sizes: list[int], rounds: int, say: Say) -> None:
    """Add what real connections cost, without relays and with them."""
    for size, relays in itertools.product(sizes, (False, True)):
        found = connections.measure(size, relays, rounds=rounds)
        setting, how = {"ranks": size, "relays": found.relays}, "relays" if relays else "direct"
        more = {"connect_s": found.connect_s, "kib": found.kib, "files": found.files, "ends_s": found.end_s}
        cpu = statistics.fmean(found.cpu_ms)  # (a median would be 0: the kernel counts CPU time in steps of 10 ms)
        for what, values in (("solo", found.solo_ms), ("all", found.all_ms)):
            unit = "ms from first arrival to last receipt"
            report.rows.append(row(f"{what}, {how}", setting, spread(values), unit, **more))
        report.rows.append(row(f"coordinator's CPU, {how}", setting, cpu, "ms of CPU a round", **more))
        latency = statistics.median(found.solo_ms)
        say(f"{size} ranks, {how}: connected in {found.connect_s:.2f} s, solo {latency:.1f} ms")
        if size == CONNECTED and relays:
            report.at_most("ms of the coordinator's CPU, a round of 4 buckets, 1,024 ranks", cpu, CPU_MS)
            report.at_most("ms from first arrival to last receipt, solo, 1,024 ranks by relays", latency, LATENCY_MS)


SCALE = Case(
    name="scale",
    help="the coordinator with up to 10,000 ranks: alone, with real connections, and in simulated trainings",
    text="""Cost of many ranks on one machine: state machines alone, real connections, simulated jobs.

machines: microseconds per event, with up to 10,000 ranks. connections: the production coordinator and relays as
processes of this machine, and ranks that are connections only. jobs: whole trainings, simulated with the production
ranks and state machines. tables: the same simulation, compared with measured tables.""",
    run=scale,
    columns=columns(
        "part | ranks = setting.ranks d | arm | value = value .2f ~ | unit | x baseline = speedup .2f | "
        "measured = measured .2f | staleness = staleness .2f | events = events .0f | bytes in = bytes_in ,.0f | "
        "bytes out = bytes_out ,.0f | s for all ends = ends_s .2f"
    ),
    panels=(Panel(each="ranks"),),
    ranks=CONNECTED,
    arms=",".join(simulated.ARMS),
    repetitions=20,
    options=(
        Option("--parts", list(PARTS), "what to do", {"choices": PARTS}),
        Option("--sizes", [8, 64, 1000, 10_000], "ranks of state machines", {"metavar": "N"}),
        Option("--connections", [64, 256, 1024, 2048], "real connections", {"metavar": "N"}),
        Option("--jobs", list(simulated.SIZES), "simulated ranks", {"metavar": "N"}),
    ),
    quick={"sizes": [8, 64], "connections": [16], "jobs": [8, 64], "repetitions": 3},
)
