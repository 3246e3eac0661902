"""Ranks that are late: one random rank in every step, or one that is slower for good."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_async.simulation.schedule import Schedule
from scripts.benchmarks.support.names import LEADERS, SYNCHRONOUS, gossip_of, waits_for_none

from ..support.arms import is_eager, parse_arms
from ..support.figures import (
    Block,
    by_arm,
    elapsed,
    everywhere,
    grouped,
    identical,
    mean_contributors,
    mean_staleness,
    median,
    spread,
    step_seconds,
)
from ..support.launch import START, block_of, measure, repetitions
from ..support.report import Case, Option, Panel, Report, Row, Say, chosen, columns, ends, row
from ..support.schedule import one_random, replay, slowest_work, synchronous_seconds

TOO_BUSY = 1.08
"""Horovod's arm over its bound; beyond that the machine was too busy for the figures to mean much."""


def fresh_per_second(block: Block) -> float:
    """Return the gradients of staleness 0 per second, all ranks together."""
    if block["arm"] in SYNCHRONOUS and not block["by_rank"][0]["stats"]:
        return len(block["by_rank"]) / step_seconds(block)
    return sum(own["stats"]["staleness"].get("0", 0) for own in block["by_rank"]) / elapsed(block)


def bound_of(block: Block, times: Schedule) -> float | None:
    """Return the best speed-up over synchronous that a schedule allows an arm, with its draw of initiators; None for
    ``auto``, which cannot be replayed."""
    if block["arm"] == "auto":
        return None
    how = {"seed": block["seed"], "first_round": 1 + int(block["by_rank"][0]["rounds_before"])}
    return synchronous_seconds(times) / replay(times, block["arm"], **how).seconds


def judge_busy(report: Report, what: str, over: float, more: str = "") -> bool:
    """Add the goal of Horovod's step over its bound, and a note if the machine was too busy; return whether."""
    report.at_most(what, over, TOO_BUSY)
    if over > TOO_BUSY:
        report.notes.append(f"the machine was too busy: Horovod's arm took {over:.2f} of its bound{more}")
    return over > TOO_BUSY


def judge_auto(report: Report, rows: Sequence[Row], where: str = "") -> None:
    """Add the goal of ``auto``: its fresh gradients per second against the best fixed quorum's, if there is one."""
    fresh = {each["arm"]: each["fresh_per_s"] for each in rows}
    fixed = {arm: value for arm, value in fresh.items() if arm not in ("auto", "horovod", "ddp")}
    if "auto" in fresh and fixed:
        best = max(fixed, key=lambda arm: fixed[arm])
        what = f"auto's fresh gradients a second against {best}'s{where}"
        report.at_least(what, fresh["auto"] / fixed[best], 0.95)


# -- straggler ---------------------------------------------------------------------------------------------------------


def straggler(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    arms = parse_arms(args.arms, args.ranks)
    schedules = {delay: one_random(args.steps, args.ranks, args.compute, delay, args.seed) for delay in args.delay}
    blocks = [
        block_of(
            *(arm, repetition, {"name": "small"}),
            delay=delay,
            steps=args.steps,
            times=times.tolist(),
            seed=repetition,
            own={"seed": repetition} if arm == "majority" else {},
        )
        for delay, times in schedules.items()
        for repetition, arm in repetitions(arms, args.repetitions)
    ]
    longest = sum(synchronous_seconds(schedules[block["delay"]]) for block in blocks)
    say(f"{len(blocks)} blocks of {args.steps} steps, about {longest / 60 + 1:.0f} min at most")

    def tell(block: Block) -> str:
        return f"{block['arm']}, {block['delay']:g} s: {step_seconds(block):.3f} s a step"

    found = measure(args, "timed", blocks, say, tell, seconds=START + 2 * longest + 10 * len(blocks))
    report = STRAGGLER.report(args, [])
    for delay, part in grouped(found, lambda block: block["delay"]).items():
        setting = chosen(args, "compute", "steps", "seed", model="small", delay=delay, schedule_seed=args.seed)
        rows = straggler_rows(part, setting, schedules[delay])
        report.rows += rows
        judge_straggler(report, rows, f"{delay:g} s")
    return report


def straggler_rows(blocks: list[Block], setting: Mapping[str, Any], times: Schedule) -> list[Row]:
    """Return a row for each arm, in the order of the first repetition."""
    groups, work = by_arm(blocks), slowest_work(times) / len(times)
    base = median(step_seconds(block) for block in groups.get("horovod", []))
    rows = []
    for arm, mine in groups.items():
        seconds = spread([step_seconds(block) for block in mine])
        speedup = base / seconds.value if base else None
        best = median(bound_of(block, times) for block in mine)
        waits = [statistics.fmean(own["waited"] / len(own["ends"]) for own in block["by_rank"]) for block in mine]
        rows.append(
            row(
                *(arm, setting, seconds, "s/step"),
                speedup=speedup,
                bound=best,
                of_bound=speedup / best if speedup and best else None,
                over_own_work=seconds.value / work,
                slowest_rank_s=work,
                synchronous_s=synchronous_seconds(times) / len(times),
                fresh_per_s=median(map(fresh_per_second, mine)),
                staleness=median(map(mean_staleness, mine)),
                contributors=median(map(mean_contributors, mine)),
                wait_s=statistics.median(waits),
                identical=identical(mine),
                repetitions=[step_seconds(block) for block in mine],
            )
        )
    return rows


def judge_straggler(report: Report, rows: list[Row], where: str) -> None:
    """Add the goals of one delay."""
    found = {each["arm"]: each for each in rows}
    if "horovod" in found:
        over = found["horovod"]["value"] / found["horovod"]["synchronous_s"]
        busy = judge_busy(report, f"Horovod's step over its own bound, delay {where}", over, f", delay {where}")
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
    judge_auto(report, rows, f", delay {where}")


STRAGGLER = Case(
    name="straggler",
    help="one random rank is held up in every step; step time against the schedule's own bounds",
    text="One random rank held up in every step: step times against that very schedule's bounds.",
    run=straggler,
    columns=columns(
        "delay s = setting.delay g | arm | s/step = value .4f ~ | speed-up = speedup .3f | bound = bound .3f | "
        "of bound = of_bound .3f | over own work = over_own_work .3f | fresh/s = fresh_per_s .2f | "
        "staleness = staleness .2f | in a round = contributors .2f"
    ),
    panels=(Panel(marks=("synchronous_s", "slowest_rank_s")), Panel("fresh_per_s")),
    group="{delay:g} s",
    ranks=8,
    arms="horovod,ddp,all,k7,k4,majority,solo,auto",
    repetitions=3,
    options=(
        Option("--delay", [0.2, 0.3, 0.4], "how late, in s", {"metavar": "S"}),
        Option("--compute", 0.3, "a step's computation, slept", {"metavar": "S"}),
        Option("--steps", 100, "of each block"),
        Option("--seed", 0, "of the schedule"),
    ),
    quick={"arms": "horovod,majority,solo", "delay": [0.2], "steps": 10, "repetitions": 1},
)


# -- hetero ------------------------------------------------------------------------------------------------------------

OF_BOUND, LEAST_AVERAGINGS, KEEPS = 0.9, 0.9, 0.95
"""Goals: of the bound, averagings per step, and the share of their steps that the fast ranks keep."""


def hetero(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    arms = parse_arms(args.arms, args.ranks, gossip=True, leaders=True)
    setting = chosen(args, "compute", "window", "megabytes", batch=args.batch_size, seed=0)
    blocks = [
        hetero_block(args, arm, repetition, slow, even)
        for slow in dict.fromkeys(args.slow)
        for repetition, arm in repetitions(arms, args.repetitions)
        for even in ((False, True)[:: 1 - 2 * (repetition % 2)] if args.even else (False,))
    ]
    say(f"{len(blocks)} blocks of {args.window:g} s")

    def tell(block: Block) -> str:
        slow = "no slow rank" if block["even"] else f"{block['slow']:g} times slower"
        return f"{block['arm']}, {slow}: {samples_per_second(block):.1f} samples/s"

    longest = args.window + 3 * max(args.slow) * args.compute + 10
    found = measure(args, "timed", blocks, say, tell, seconds=START + 2 * longest * len(blocks))
    report = HETERO.report(args, [])
    for slow, part in grouped(found, lambda block: block["slow"]).items():
        rows = hetero_rows(part, {**setting, "slowdown": slow})
        report.rows += rows
        judge_hetero(report, rows, slow)
    return report


def hetero_block(args: argparse.Namespace, arm: str, repetition: int, slow: float, even: bool) -> Block:
    """Return a block: ranks that step together take as many steps as the slowest has time for, others all they can."""
    slowest = args.compute * (1.0 if even else slow)
    task = {"name": "dense", "megabytes": args.megabytes, "batch": args.batch_size}
    block = block_of(arm, repetition, task, slow=slow, even=even, momentum=0.9)
    block["times"] = [[*[args.compute] * (args.ranks - 1), slowest]]
    if arm in SYNCHRONOUS:
        return block | {"steps": max(1, round(args.window / slowest))}
    return block | {"window": args.window, "own": {"pace": "rounds"} if is_eager(arm) else {}}


def samples_per_second(block: Block) -> float:
    """Return the samples per second of all ranks, of steps that ended in the window; all, where ranks step together."""
    return float(block["task"]["batch"]) * steps_per_second(block, len(block["by_rank"]))


def steps_per_second(block: Block, ranks: int) -> float:
    """Return the steps per second of the first ``ranks`` ranks together."""
    laps = [own["ends"] for own in block["by_rank"]]
    window = block.get("window", max(own[-1] for own in laps))
    return float(sum(end <= window for own in laps[:ranks] for end in own) / window)


def kept(slow: list[Block], even: list[Block]) -> list[float]:
    """Return the share of their steps per second that the others keep when one rank is slow, by repetition."""
    without = {block["repetition"]: block for block in even}
    fast = len(slow[0]["by_rank"]) - 1
    return [steps_per_second(block, fast) / steps_per_second(without[block["repetition"]], fast) for block in slow]


def best_speedup(arm: str, ranks: int, slow: float) -> float | None:
    """Return the best speed-up in the long run: if no rank waits, each is as fast as it can be; where all wait
    for their neighbors, all are as slow as the slowest."""
    if arm == "solo" or waits_for_none(arm):
        return (slow * (ranks - 1) + 1) / ranks
    return 1.0 if arm in SYNCHRONOUS or gossip_of(arm) else None


def hetero_rows(blocks: list[Block], setting: Mapping[str, Any]) -> list[Row]:
    """Return a row for each arm. ``fast_...``: medians over the ranks that are not slow."""
    groups, even = by_arm(b for b in blocks if not b["even"]), by_arm(b for b in blocks if b["even"])
    base = median(samples_per_second(block) for block in groups.get("horovod", []))
    rows = []
    for arm, mine in groups.items():

        def fast(figure: Callable[[Any], float], mine: list[Block] = mine) -> float:
            return statistics.median(figure(own) for block in mine for own in block["by_rank"][:-1])

        rate = spread([samples_per_second(block) for block in mine])
        bound = best_speedup(arm, len(mine[0]["by_rank"]), setting["slowdown"])
        speedup = rate.value / base if base else None
        averagings = [
            [own["stats"]["averagings"] / own["stats"]["steps"] for own in block["by_rank"][:-1]]
            for block in mine
            if gossip_of(arm)
        ]
        rows.append(
            row(
                *(arm, setting, rate, "samples/s of all ranks"),
                speedup=speedup,
                bound=bound,
                of_bound=speedup / bound if speedup and bound else None,
                fast_step_s=fast(lambda own: own["ends"][-1] / len(own["ends"])),
                slow_step_s=statistics.median(
                    block["by_rank"][-1]["ends"][-1] / len(block["by_rank"][-1]["ends"]) for block in mine
                ),
                fast_wait_s=fast(lambda own: own["waited"] / len(own["ends"])),
                averagings=median(map(statistics.fmean, averagings)),
                averagings_least=median(map(min, averagings)),
                pulls=fast(lambda own: own["stats"]["pulls"] / own["stats"]["steps"]) if arm in LEADERS else None,
                latency_s=median(own["latency_s"] for own in everywhere(mine)),
                **ends("kept", spread(kept(mine, even[arm])) if arm in even else None),
                identical=identical(mine),
            )
        )
    return rows


def judge_hetero(report: Report, rows: list[Row], slow: float) -> None:
    """Add the goals of one slowdown."""
    found, where = {each["arm"]: each for each in rows}, f"one rank {slow:g} times slower"
    if "horovod" in found:
        over = found["horovod"]["slow_step_s"] / (found["horovod"]["setting"]["compute"] * slow)
        judge_busy(report, f"Horovod's step over the slow rank's work, {where}", over, f", {where}")
    for each in rows:
        if waits_for_none(each["arm"]) and each["kept"] is not None:
            what = f"{each['arm']}: the others' steps a second, of those with no slow rank, {where}"
            report.at_least(what, each["kept"], KEEPS)
    if "adpsgd" in found:
        own = found["adpsgd"]
        if own["of_bound"] is not None:
            what = f"adpsgd's samples a second over Horovod's, of the bound, {where}"
            report.at_least(what, own["of_bound"], OF_BOUND)
        what = f"adpsgd's averagings a step, the fast rank that has fewest, {where}"
        report.at_least(what, own["averagings_least"], LEAST_AVERAGINGS)


HETERO = Case(
    name="hetero",
    help="the last rank is 2, 5 or 10 times slower for good: samples a second of all ranks, averagings or pulls a step",
    text="One rank is slower than the others for good: samples a second of all ranks together, in the same time.",
    run=hetero,
    columns=columns(
        "slower = setting.slowdown g | arm | samples/s = value .1f ~ | speed-up = speedup .3f | bound = bound .3f | "
        "of bound = of_bound .3f | fast s/step = fast_step_s .3f | slow s/step = slow_step_s .3f | "
        "waited = fast_wait_s .3f | averagings/step = averagings .3f | least = averagings_least .3f | "
        "pulls/step = pulls .3f | exchange s = latency_s .3f | others keep = kept .3f ~"
    ),
    panels=(Panel("speedup", marks=("bound",)), Panel("fast_step_s", marks=("slow_step_s",)), Panel("kept")),
    group="{slowdown:g} times",
    ranks=8,
    arms="horovod,adpsgd",
    repetitions=3,
    options=(
        Option("--compute", 0.3, "a fast rank's step, slept", {"metavar": "S"}),
        Option("--slow", [2.0, 5.0, 10.0], "times that the last rank is slower", {"metavar": "K"}),
        Option("--window", 60.0, "of each block; ranks stop when it ends", {"metavar": "S"}),
        Option("--megabytes", 4.0, "of weights"),
        Option("--batch-size", 16, "samples a rank and step", {"metavar": "N"}),
        Option(
            *("--even", False),
            "measure each arm also with no slow rank, in alternation: what the others keep of their steps a second",
        ),
    ),
    quick={"window": 8.0, "repetitions": 1, "slow": [10.0]},
)
