"""What is simulated: remedies for late gradients, and many ranks, whose coordinator and connections are real."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

from ..support import connections, peer_machines, simulated, state_machines
from ..support.arms import named_arms, need_arm
from ..support.figures import Block, Interval, everywhere, grouped, late_counts, mean_interval, mean_of, spread
from ..support.launch import START, measure
from ..support.remedies import BASELINE, DEFAULT, REMEDIES, TASKS
from ..support.report import Case, Option, Panel, Report, Row, Say, columns, ends, interval_of, row
from .trainings import LEAST, POINT, score

# -- late_gradients ----------------------------------------------------------------------------------------------------

WITHIN = 0.5
"""Percentage points that the default may be less accurate than synchronous, with the whole interval."""
SECONDS = 20.0
"""A training takes at most this long."""
SHORTER = 8
"""Times that a quick training is shorter."""


def late_gradients(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.ranks != 1:
        raise ValueError(f"--ranks {args.ranks}: one process trains for all ranks")
    arms = named_arms(args.arms, tuple(REMEDIES))
    need_arm(BASELINE, arms)
    asked = itertools.product(range(args.repetitions), dict.fromkeys(args.tasks), arms)
    blocks = [late_block(task, arm, seed, args.quick) for seed, task, arm in asked]

    def tell(block: Block) -> str:
        return f"seed {block['seed']}, {block['task']}, {block['arm']}: {score(block):.4f}"

    found = measure(args, "late_gradients", blocks, say, tell, seconds=START + SECONDS * len(blocks))
    report = LATE_GRADIENTS.report(args, late_rows(found))
    for each in report.rows:
        task = each["setting"]["task"]
        if each["arm"] == BASELINE:
            report.at_least(f"{BASELINE}, {task}: accuracy", each["value"], LEAST)
        elif each["arm"] == DEFAULT:
            gap = Interval(*(value / POINT for value in interval_of(each, "difference")))
            text = f"{gap.value:+.2f} points (95%: {gap.low:+.2f} to {gap.high:+.2f})"
            what = f"{DEFAULT} less {BASELINE}, {task}: accuracy"
            report.wants(what, text, f"whole interval >= -{WITHIN:g}", gap.low >= -WITHIN)
    return report


def late_block(name: str, arm: str, seed: int, quick: bool) -> Block:
    """Return one training."""
    task = TASKS[name]
    steps = task.steps // SHORTER if quick else task.steps
    return {"task": name, **task._asdict(), "steps": steps, "arm": arm, "seed": seed, "remedy": REMEDIES[arm]._asdict()}


def late_rows(blocks: list[Block]) -> list[Row]:
    """Return a row for each task and arm; differences are paired by seed."""
    scores = {(block["task"], block["arm"], block["seed"]): score(block) for block in blocks}

    def gain_over(mine: list[Block], other: str) -> Interval | None:
        """Return by how much an arm's accuracy is above another's."""
        pairs = [(score(block), scores.get((block["task"], other, block["seed"]))) for block in mine]
        known = [own - its for own, its in pairs if its is not None]
        return mean_interval(known) if known and other != mine[0]["arm"] else None

    rows = []
    for (task, arm), mine in grouped(blocks, lambda block: (block["task"], block["arm"])).items():
        found, late = [score(block) for block in mine], late_counts(everywhere(mine))
        setting = {"ranks": mine[0]["ranks"], "steps": mine[0]["steps"], "task": task, "seed": "the run's number"}
        rows.append(
            row(
                *(arm, setting, mean_interval(found), "share of the test set, mean"),
                accuracy=statistics.fmean(found),
                speedup=statistics.median(own["speedup"] for own in everywhere(mine)),
                **ends("difference", gain_over(mine, BASELINE)),
                **ends("to_default", gain_over(mine, DEFAULT)),
                scores=found,
                staleness=mean_of(late),
                fresh=late.get(0, 0) / sum(late.values()),
                runs=len(mine),
            )
        )
    return rows


LATE_GRADIENTS = Case(
    name="late_gradients",
    help="remedies for late gradients, simulated in one process: accuracy at the same lateness, speed-up, staleness",
    text="""Remedies for late gradients, simulated: how the defaults of partial allreduce were chosen.

One process trains for all ranks. Gradients are real; time is counted: a step takes as long as it computes,
communication is free, and each gradient is as late as eager-SGD's rules make it. So remedies are compared at the same
speed and with the same lateness, whatever the machine does. digits: a small ResNet, no rank late; digits-late: one
random rank takes twice as long in each step; clips4, clips8: the LSTM of sequence_lengths, whose ranks have clips of
different lengths, at 4 and 8 ranks. digits-late-adamw and the like train with that optimizer instead of SGD.

Arms: synchronous; none, late gradients as they are; extrapolate-1 to -3, updates extrapolated by 1 to 3 rounds, of
which 2 is the default; predict-2, weights predicted by 2 rounds, as version 0.2.0 began. With extrapolation by 2 as
well: weights (1 + s)^-1 of a gradient that is s rounds late, weights-half (1 + s)^-0.5, both over the mean of their
rank's, weights-bare not divided; extrapolate-2-compensated (DC-ASGD); half-quorum, rounds of half of the ranks.
Without: compensated, momentum-0.8 (at the same lr / (1 - m)), catch-up (spike compensation). fresh, a bound: gradients
computed at the current weights, which no job can have at this speed. --repetitions is the number of seeds.""",
    run=late_gradients,
    columns=columns(
        "task = setting.task | arm | accuracy = value .4f | difference = difference +.4f 95% | "
        f"to {DEFAULT} = to_default +.4f 95% | speed-up = speedup .3f | staleness = staleness .2f | "
        "fresh = fresh .2f | seeds = runs d"
    ),
    panels=(Panel("difference", "points", each="task"),),
    group="{task}",
    ranks=1,
    arms=",".join(REMEDIES),
    repetitions=16,
    options=(
        Option("--tasks", list(TASKS), f"trainings, of {', '.join(TASKS)}", {"choices": TASKS, "metavar": "TASK"}),
    ),
    quick={"arms": f"{BASELINE},none,{DEFAULT}", "repetitions": 1},
)


# -- scale -------------------------------------------------------------------------------------------------------------

PARTS = ("machines", "connections", "tables", "study", "jobs")
SMALL, LARGE, LONGEST_US, GROWTH = 8, 10_000, 20.0, 1.5
"""Ranks that are compared; microseconds per event at most; how much more it may be with more ranks."""
CONNECTED, LATENCY_MS, CPU_MS, ENDS_S, OFF = 1024, 10.0, 10.0, 5.0, simulated.CLOSE
"""Of these connections: milliseconds of a round, and of the coordinator for it, at most; seconds in which all end; how
far a simulated ratio may be from the measured one."""
QUORUMS: dict[str, Callable[[], state_machines.Family]] = {
    **{name: lambda name=name: state_machines.eager(name) for name in ("solo", "majority", "all", "auto")},
    "solo, hosts of 8": lambda: state_machines.eager("solo", local_size=8),
    "solo, bucket by bucket": lambda: state_machines.eager("solo", together=False),
}
UNIT = "us an event"


def scale(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge; ``repetitions`` are rounds with real connections."""
    report = SCALE.report(args, [])
    parts: dict[str, Callable[[], None]] = {
        "machines": lambda: machines(report, args.sizes, say),
        "connections": lambda: connected(report, args.connections, args.repetitions, say),
        "tables": lambda: tables(report),
        "study": lambda: study(report, args.study, say),
        "jobs": lambda: report.rows.extend(simulated.simulated_rows(args.arms.split(","), args.jobs, say=say)),
    }
    for part in args.parts:
        first = len(report.rows)
        parts[part]()
        for each in report.rows[first:]:
            each["part"] = part
    return report


def machines(report: Report, sizes: list[int], say: Say) -> None:
    """Add what state machines cost alone, in this thread's CPU time."""
    for name, family in QUORUMS.items():
        for size in sizes:
            cost = state_machines.measure(family(), size, clock=time.thread_time)
            weights = {"events": cost.events, "bytes_in": cost.bytes_in, "bytes_out": cost.bytes_out}
            report.rows.append(row(name, {"ranks": size}, cost.event_us, UNIT, ends_s=cost.ends_s, **weights))
            say(f"{size} ranks, {name}: {cost.event_us:.1f} us an event")
            if size == max(sizes):
                report.at_most(f"s for all ends of {size:,} ranks, {name}", cost.ends_s, ENDS_S)
    kinds = [(family, kind) for family, names in peer_machines.KINDS.items() for kind in names]
    for (family_name, kind), size in itertools.product(kinds, sizes):
        found = peer_machines.cost(family_name, kind, size, clock=time.thread_time)
        weights = {"events": found.events, "bytes_in": found.bytes_in, "bytes_out": found.bytes_out}
        report.rows.append(row(kind, {"ranks": size}, found.microseconds, UNIT, **weights))
        say(f"{size} ranks, {kind}: {found.microseconds:.1f} us an event")
    if {SMALL, LARGE} <= {*sizes}:
        mine = [each for each in report.rows if each["unit"] == UNIT]
        for arm, rows in grouped(mine, lambda each: str(each["arm"])).items():
            found_by = {each["setting"]["ranks"]: each["value"] for each in rows}
            report.at_most(f"us an event at {LARGE:,} ranks, {arm}", found_by[LARGE], LONGEST_US)
            report.at_most(f"times that at {SMALL}, {arm}", found_by[LARGE] / found_by[SMALL], GROWTH)


def connected(report: Report, sizes: list[int], rounds: int, say: Say) -> None:
    """Add what real connections cost, without relays and with them."""
    for size, relays in itertools.product(sizes, (False, True)):
        found = connections.measure(size, relays, rounds=rounds)
        setting, how = {"ranks": size, "relays": found.relays}, "relays" if relays else "direct"
        more = {"connect_s": found.connect_s, "kib": found.kib, "files": found.files, "ends_s": found.end_s}
        cpu, unit = statistics.fmean(found.cpu_ms), "ms from first arrival to last receipt"
        for what, values in (("solo", found.solo_ms), ("all", found.all_ms)):
            report.rows.append(row(f"{what}, {how}", setting, spread(values), unit, **more))
        # (a mean: the kernel counts CPU time in steps of 10 ms)
        report.rows.append(row(f"coordinator's CPU, {how}", setting, cpu, "ms of CPU a round", **more))
        latency = statistics.median(found.solo_ms)
        figures = f"connected in {found.connect_s:.2f} s, solo {latency:.1f} ms"
        say(f"{size} ranks, {how}: {figures}, {found.kib:.0f} KiB a rank, {found.files} descriptors")
        if size == CONNECTED and relays:
            report.at_most("ms of the coordinator's CPU, a round of 4 buckets, 1,024 ranks", cpu, CPU_MS)
            report.at_most("ms from first arrival to last receipt, solo, 1,024 ranks by relays", latency, LATENCY_MS)


def tables(report: Report) -> None:
    """Add simulations of what was measured, and judge how near they are."""
    rows = list(simulated.compared())
    report.rows += [each.row() for each in rows]
    off = [each for each in rows if abs(each.off) > OFF]
    near = f"{len(rows) - len(off)} of {len(rows)}"
    report.wants("simulated ratios within 10% of the measured ones", near, "all", not off, exact=True)


def study(report: Report, sizes: list[int], say: Say) -> None:
    """Add the published study of stalls, and all modes of this library."""
    for size in sizes:
        say(f"the study of stalls at {size} ranks")
        report.rows += simulated.study(size)


SCALE = Case(
    name="scale",
    help="the coordinator with up to 10,000 ranks: alone, with real connections, and in simulated trainings",
    text="""What many ranks cost, without having them: state machines alone, real connections, simulated jobs.

machines: microseconds an event, with up to 10,000 ranks. connections: the production coordinator and relays as
processes of this machine, and ranks that are connections only. jobs: whole trainings, simulated on the production state
machines. tables: the same simulation, with measured tables. study: with a published one.""",
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
        Option("--study", [64, 128, 256], "ranks of the study", {"choices": simulated.SHARES}),
        Option("--jobs", list(simulated.SIZES), "simulated ranks", {"metavar": "N"}),
    ),
    quick={"sizes": [8, 64], "connections": [16], "study": [64], "jobs": [8, 64], "repetitions": 3},
)
