"""Where a step's time goes: CPU, wake-ups and fresh pages of each kind of thread, beside a step of the plain optimizer.

Steps compute next to nothing, so what is left is what an arm costs. CPU is also given in copies: what copying the
weights once costs a thread here.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from ..support import launch, plot
from ..support.arms import PLAIN, WARM_UP, parse_arms
from ..support.blocks import everywhere, grouped
from ..support.intervals import spread
from ..support.launch import START, Block, Progress, Say, repetitions
from ..support.report import Column, Report, Row, chosen, ranged, row

HELP = "CPU, wake-ups and fresh pages of one step, by thread, of every algorithm in both frameworks"
ARMS = ("horovod", "all", "solo", "sgp", "osgp", "dpsgd", "adpsgd", "lsgd", "easgd")
JOBS = {"torch": "profile", "tensorflow": "profile_keras"}
THREADS = ("training", "engine", "collectives' callers", "coordinator", "ZeroMQ", "Horovod, framework")
COLUMNS = (
    Column("framework", "setting.framework"),
    Column("arm", "arm"),
    *ranged("CPU ms", "value", ".1f"),
    Column("copies", "copies", ".1f"),
    *(Column(kind, f"ms.{kind}", ".1f") for kind in THREADS),
    Column("wake-ups", "wakeups", ".0f"),
    Column("of engine", "engine_wakeups", ".0f"),
    Column("fresh MB", "fresh_mb", ".0f"),
    Column("step ms", "step_ms", ".0f"),
)
PAGE = 4096 / 1e6
"""Megabytes of a page."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=2, arms=",".join(ARMS), repetitions=3)
    parser.add_argument("--framework", choices=JOBS, nargs="+", default=list(JOBS), help="torch, tensorflow")
    parser.add_argument("--steps", type=int, default=30, help="of each block")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of weights, in float32")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure; nothing is judged."""
    if args.quick:
        args.steps, args.repetitions = min(args.steps, 5), 1
    arms = [PLAIN, *parse_arms(args.arms, args.ranks, rivals=("horovod",), gossip=True, leaders=True)]
    found: list[Block] = []
    progress = Progress(len(args.framework) * len(arms) * args.repetitions, say)

    def tell(block: Block) -> str:
        return f"{block['framework']}, {block['arm']}: {cpu_ms(block):.1f} ms of CPU a step"

    for framework in args.framework:
        common = chosen(args, "steps", "megabytes", framework=framework)
        blocks = [{**common, "arm": arm, "repetition": i} for i, arm in repetitions(arms, args.repetitions)]
        seconds = START + len(blocks) * (20 + 2 * (args.steps + WARM_UP))
        found += launch.measure(args, JOBS[framework], blocks, say, tell, seconds=seconds, progress=progress)
    return Report("profile", args.ranks, rows_of(found), COLUMNS, draw=draw)


def cpu_ms(block: Block) -> float:
    """CPU of all threads in a step, in ms, mean over the ranks."""
    return statistics.fmean(sum(own["used"].get(kind, [0.0])[0] for kind in THREADS) for own in block["by_rank"])


def rows_of(blocks: list[Block]) -> list[Row]:
    """One row a framework and arm: means over ranks, medians over repetitions."""
    rows = []
    for (framework, arm), mine in grouped(blocks, lambda block: (block["framework"], block["arm"])).items():
        everyone = everywhere(mine)

        def mean(kind: str, place: int = 0, everyone: list[dict[str, Any]] = everyone) -> float:
            return statistics.fmean(own["used"].get(kind, [0.0, 0.0])[place] for own in everyone)

        cpu = spread([cpu_ms(block) for block in mine])
        rows.append(
            row(
                arm,
                {"framework": framework, "steps": mine[0]["steps"], "megabytes": mine[0]["megabytes"], "seed": None},
                *(cpu, "ms of CPU a step"),
                copies=cpu.value / statistics.median(own["copy_ms"] for own in everyone),
                ms={kind: mean(kind) for kind in THREADS},
                wakeups=sum(mean(kind, 1) for kind in THREADS),
                engine_wakeups=mean("engine", 1),
                fresh_mb=mean("fresh pages") * PAGE,
                step_ms=mean("step"),
            )
        )
    return rows


def draw(figure: Any, rows: list[Row]) -> None:
    """CPU of each kind of thread, one on the other, a panel a framework."""
    frameworks = list(dict.fromkeys(each["setting"]["framework"] for each in rows))
    panels = figure.subplots(1, len(frameworks), squeeze=False, sharey=True)[0]
    for axes, framework in zip(panels, frameworks, strict=True):
        mine = [each for each in rows if each["setting"]["framework"] == framework]
        below = [0.0] * len(mine)
        for kind, colour in zip(THREADS, plot.COLOURS, strict=False):
            height = [each["ms"][kind] for each in mine]
            axes.bar(range(len(mine)), height, 0.7, bottom=below, color=colour, label=kind)
            below = [a + b for a, b in zip(below, height, strict=True)]
        axes.set_xticks(range(len(mine)), [each["arm"] for each in mine], rotation=60)
        plot.label(axes, framework, "", "ms of CPU a step" if axes is panels[0] else "")
    plot.legend(figure, *panels)
