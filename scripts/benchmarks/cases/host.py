"""Host cost of a step: counts of operators and calls, and CPU time, beside the plain optimizer, Horovod and DDP.

The model has as many parameters as ResNet-50, of 8 elements each (in TensorFlow 40, as one graph), so that nothing is
left but the host's work. On a GPU a step is as fast as the plain one only while the host is ahead of the device. On the
device "fake", CPU tensors count as tensors on a GPU: the optimizers do what they do there, and their waits are counted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from ..support import launch, plot
from ..support.arms import DDP_NO_OP, PLAIN, named_arms
from ..support.blocks import grouped
from ..support.intervals import spread
from ..support.launch import START, Block, Progress, Say, repetitions
from ..support.report import Column, Report, Row, chosen, ends, ranged, row

HELP = "operators, calls and CPU time of one step beside the plain optimizer's, Horovod's and DDP's, 1 rank and several"
JOBS = {"torch": "host", "tensorflow": "host_keras"}
OURS = ("all", "solo", "majority", "sgp", "dpsgd", "adpsgd", "local", "lsgd", "easgd")
DEVICES = ("cpu", "fake")
OTHERS = ("horovod", "ddp", DDP_NO_OP)
"""Rival arms, which torch alone has."""
QUICK = "horovod,all,sgp"
TIMES = ("training_ms", "other_ms", "first_ms")
COUNTS = ("aten_calls", "python_calls", "host_waits", "copies", "operators", "crossings", "buckets")
COLUMNS = (
    Column("framework", "setting.framework"),
    Column("device", "setting.device"),
    Column("ranks", "setting.ranks", "d"),
    Column("arm", "arm"),
    Column("ATen calls", "aten_calls", ".0f"),
    Column("Python + C calls", "python_calls", ".0f"),
    Column("host waits", "host_waits", ".1f"),
    Column("copies", "copies", ".1f"),
    Column("graph's operators", "operators", ".0f"),
    Column("crossings", "crossings", ".1f"),
    Column("buckets", "buckets", ".0f"),
    *ranged("training ms", "value", ".2f"),
    *ranged("over plain", "over", ".2f"),
    Column("other ms", "other_ms", ".2f"),
    Column("first step ms", "first_ms", ".0f"),
)
CALLS = {"all": 2800}
"""The most Python and C calls of a step in torch."""
TRAINING = {"all": 1.2, "solo": 1.2, "sgp": 0.8, "adpsgd": 0.8, "lsgd": 0.8}
"""The most CPU time of the training thread over the plain step's in torch, ms."""
OTHER = 1.5
"""The most CPU time of the other threads, ms."""
TRACING = 1.3
"""The most CPU time of a first step in TensorFlow, which traces, over the plain one's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=2, arms=",".join((*OTHERS, *OURS)), repetitions=5)
    parser.add_argument("--framework", choices=JOBS, nargs="+", default=list(JOBS), help="torch, tensorflow")
    parser.add_argument("--device", choices=DEVICES, nargs="+", default=list(DEVICES), help="fake: torch's alone")
    parser.add_argument("--steps", type=int, default=100, help="that are timed, of each block")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge, with one rank and with several."""
    if args.quick:
        args.steps, args.repetitions = min(args.steps, 20), 1
    arms = named_arms(args.arms, (*OTHERS, *OURS))
    both = [(framework, ranks) for framework in args.framework for ranks in sorted({1, args.ranks})]
    jobs = {(framework, ranks): there(arms, args.device, framework, ranks) for framework, ranks in both}
    progress = Progress(sum(map(len, jobs.values())) * args.repetitions, say)

    def tell(block: Block) -> str:
        of = f"{block['framework']}, {block['ranks']} ranks, {block['device']}, {block['arm']}"
        return f"{of}: {mean(block, 'training_ms'):.2f} ms"

    found: list[Block] = []
    for (framework, ranks), own in jobs.items():
        common = chosen(args, "steps", framework=framework, ranks=ranks)
        blocks = [
            {**common, "device": device, "arm": arm, "repetition": i}
            for i, (device, arm) in repetitions(own, args.repetitions)
        ]
        seconds = START + len(blocks) * (20 + 0.1 * args.steps)
        how: dict[str, Any] = {"seconds": seconds, "ranks": ranks, "progress": progress}
        found += launch.measure(args, JOBS[framework], blocks, say, tell, **how)
    report = Report("host", args.ranks, rows_of(found), COLUMNS, draw=draw)
    judge(report)
    return report


def there(arms: Sequence[str], devices: Sequence[str], framework: str, ranks: int) -> list[tuple[str, str]]:
    """Return a job's arms with their devices, the plain optimizer first. (With one rank there is no majority; only our
    arms do other things on a GPU.)"""
    if framework == "tensorflow":
        devices = DEVICES[:1]
    named = [arm for arm in arms if ranks > 1 or arm != "majority"]
    other = () if framework == "tensorflow" else OTHERS
    own = {"cpu": [arm for arm in named if arm in (*OURS, *other)], "fake": [arm for arm in named if arm in OURS]}
    return [(device, arm) for device in devices for arm in (PLAIN, *own[device])]


def mean(block: Block, key: str) -> float:
    """Return a figure's mean over the ranks."""
    return statistics.fmean(own[key] for own in block["by_rank"])


def place_of(setting: dict[str, Any]) -> tuple[str, int, str]:
    """Return framework, number of ranks and device of a block or a row's setting."""
    return setting["framework"], setting["ranks"], setting["device"]


def rows_of(blocks: list[Block]) -> list[Row]:
    """Return one row for each framework, number of ranks, device and arm: medians over repetitions, for times of the
    mean over the ranks, for counts of the highest rank. ``over`` is the training thread's time minus the plain arm's in
    the same repetition."""
    plain = {(place_of(block), block["repetition"]): block for block in blocks if block["arm"] == PLAIN}
    rows = []
    for ((framework, ranks, device), arm), mine in grouped(
        blocks, lambda block: (place_of(block), block["arm"])
    ).items():
        pairs = [(block, plain[place_of(block), block["repetition"]]) for block in mine]
        told = mine[0]["by_rank"][0]
        times = {key: spread([mean(block, key) for block in mine]) for key in TIMES if key in told}
        over = spread([mean(own, "training_ms") - mean(one, "training_ms") for own, one in pairs])
        figures: Row = dict.fromkeys(COUNTS) | ends("over", over)
        for key in COUNTS:
            if told.get(key) is not None:
                figures[key] = statistics.median(max(own[key] for own in block["by_rank"]) for block in mine)
        for key, found in times.items():
            figures |= ends(key, found)
        if "first_ms" in times:
            figures["first_over"] = statistics.median(
                mean(own, "first_ms") / mean(one, "first_ms") for own, one in pairs
            )
        setting = {"framework": framework, "ranks": ranks, "device": device, "steps": mine[0]["steps"], "seed": None}
        rows.append(row(arm, setting, times["training_ms"], "ms of CPU a step", **figures))
    return rows


def judge(report: Report) -> None:
    """Add the limits that our arms must meet. Counts are exact; times are not."""
    plain = {place_of(each["setting"]): each for each in report.rows if each["arm"] == PLAIN}
    for each in (one for one in report.rows if one["arm"] in OURS):
        arm, (framework, ranks, device) = each["arm"], place_of(each["setting"])
        of = f"{framework}, {arm}, {ranks} rank{'s' if ranks > 1 else ''}, {device}"
        if framework == "tensorflow":
            report.at_most(f"CPU time of the first step over plain Keras': {of}", each["first_over"], TRACING)
            continue
        calls, most = each["aten_calls"] - plain[framework, ranks, device]["aten_calls"], most_operators(each)
        report.wants(f"ATen calls over plain torch's: {of}", calls, f"<= {most:g}", calls <= most, exact=True)
        if arm in CALLS and device == "cpu":  # (a fake GPU makes calls of its own)
            calls, most = each["python_calls"], CALLS[arm]
            report.wants(f"Python and C calls: {of}", calls, f"<= {most}", calls <= most, exact=True)
        if arm in TRAINING:
            report.at_most(f"training thread over plain torch's, ms: {of}", each["over"], TRAINING[arm])
            report.at_most(f"other threads, ms: {of}", each["other_ms"], OTHER)


def most_operators(each: Row) -> float:
    """Return the limit of an arm's operators over plain torch's: 8 a bucket, plus 12 to extrapolate updates; 12 in all
    where ranks have weights of their own."""
    if each["buckets"] is None:
        return 12
    return float(8 * each["buckets"] + 12 * (each["arm"] != "all" and each["setting"]["ranks"] > 1))


def draw(figure: Any, rows: list[Row]) -> None:
    """CPU time of the training thread and of the others, and counts: a panel each."""
    shown = {
        "training_ms": "training thread, ms of CPU a step",
        "other_ms": "other threads, ms of CPU a step",
        "aten_calls": "ATen calls a step",
        "python_calls": "Python and C calls a step",
        "operators": "operators of a step's graph",
        "first_ms": "first step, ms of CPU",
    }
    found = {key: title for key, title in shown.items() if any(plot.has(each, key) for each in rows)}
    panels = list(figure.subplots(len(found) // 2, 2).flat)
    for axes, (key, title) in zip(panels, found.items(), strict=True):
        mine = [each for each in rows if plot.has(each, key)]
        plot.bars(axes, mine, "{framework}, {ranks}, {device}", key)
        plot.label(axes, title, "framework, ranks, device", "")
    plot.legend(figure, *panels)
