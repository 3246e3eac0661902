"""How many copies of its gradients a rank holds at most, beside the model's own: by our count and by its memory."""

from __future__ import annotations

import argparse
from typing import Any

from hvd_async.simulation.schedule import one_random

from ..support import launch, plot
from ..support.arms import parse_arms
from ..support.blocks import everywhere, grouped
from ..support.intervals import spread
from ..support.launch import Block, Say
from ..support.report import Column, Report, Row, chosen, ranged, row

HELP = "most bytes of gradients held, as copies of the model's gradients; what a rank keeps that is done"
QUICK = "horovod,solo"
COLUMNS = (
    Column("mode", "setting.mode"),
    Column("arm", "arm"),
    *ranged("copies", "value", ".2f"),
    Column("rounds waiting", "waiting", "d"),
    Column("allowed", "allowed", "d"),
    Column("by memory", "resident", ".2f"),
    Column("done: most", "serving_most", ".2f"),
    Column("keeps", "keeps", ".2f"),
    Column("after drain", "after", ".2f"),
)
MODES = {
    "together": "no delays",
    "delays": "one random rank held up in every step",
    "done": "the last rank is done after a quarter of the steps and serves the others",
    "two": "the same in a process that has an older optimizer, which is at rest",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=4, arms="horovod,all,majority,solo", repetitions=3)
    parser.add_argument("--megabytes", type=float, default=50.0, help="of gradients")
    parser.add_argument("--steps", type=int, default=24, help="of each block")
    parser.add_argument("--compute", type=float, default=0.15, metavar="S", help="a step's computation, slept")
    parser.add_argument("--delay", type=float, default=0.6, metavar="S", help="of the random rank")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.steps, args.repetitions, args.megabytes = min(args.steps, 5), 1, min(args.megabytes, 20.0)
    arms = parse_arms(args.arms, args.ranks, rivals=("horovod",))
    blocks = []
    for repetition in range(args.repetitions):
        for mode in MODES:
            delay = args.delay if mode == "delays" else 0.0
            compute = 3 * args.compute if mode in ("done", "two") else args.compute
            times = one_random(args.steps, args.ranks, compute, delay, args.seed).tolist()
            # Horovod's ranks cannot be done before the others (its join() is for other optimizers than ours).
            here = [arm for arm in arms if mode in ("together", "delays") or arm != "horovod"]
            blocks += [{"arm": arm, "mode": mode, "repetition": repetition, "times": times} for arm in here]

    def tell(block: Block) -> str:
        most = max(own["peak"] for own in block["by_rank"])
        return f"{block['mode']}, {block['arm']}: {most:.2f} copies"

    found = launch.measure(
        *(args, "memory", blocks, say, tell),
        seconds=launch.START + 3 * len(blocks) * args.steps * (args.compute + args.delay),
        plan={"megabytes": args.megabytes},
        # Large blocks go back to the system when they are freed, so that the process's memory says what is held.
        env={"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"},
    )
    setting = chosen(args, "megabytes", "compute", "seed")
    report = Report("memory", args.ranks, rows_of(found, setting, args.delay), COLUMNS, draw=draw)
    judge(report)
    return report


def rows_of(blocks: list[Block], setting: dict[str, Any], delay: float) -> list[Row]:
    """One row a mode and arm. The fullest rank counts: the one that comes nearest to what it is allowed."""
    rows = []
    for (mode, arm), mine in grouped(blocks, lambda block: (block["mode"], block["arm"])).items():
        fullest = [max(block["by_rank"], key=lambda own: own["peak"] - own["waiting"]) for block in mine]
        worst = max(fullest, key=lambda own: own["peak"] - own["waiting"])
        ours, everyone = arm != "horovod", everywhere(mine)
        left = [own for own in everyone if own["left"]]
        rows.append(
            row(
                arm,
                {**setting, "mode": mode, "delay": delay if mode == "delays" else 0.0},
                *(spread([own["peak"] for own in fullest]), "copies of the gradients"),
                waiting=worst["waiting"] if ours else None,
                allowed=2 + worst["waiting"] if ours else None,
                over=worst["peak"] - worst["waiting"] if ours else None,
                resident=max(own["resident"] for own in everyone),
                serving_most=max((own["serving_most"] for own in left), default=None),
                keeps=max((own["keeps"] for own in left), default=None),
                after=max(own["after"] for own in everyone),
            )
        )
    return rows


def judge(report: Report) -> None:
    """Add what must show."""
    for each in report.rows:
        if each["over"] is None:
            continue
        where = f"{each['arm']}, {MODES[each['setting']['mode']]}"
        # A bucket's few counting elements are not gradients.
        report.at_most(f"copies beyond one a waiting round: {where}", each["over"], 2.01, "<= 2")
        if each["keeps"] is not None:
            report.at_most(f"copies a done rank keeps: {each['arm']}", each["keeps"], 0.1)


def draw(figure: Any, rows: list[Row]) -> None:
    """Copies by mode and arm, by our count and by the process's memory."""
    axes = figure.subplots(1, 2)
    ours = [each for each in rows if each["allowed"] is not None]
    plot.bars(axes[0], ours, "{mode}")
    plot.marks(axes[0], ours, "{mode}", "allowed", "D", "allowed: 2 and one a waiting round")
    plot.label(axes[0], "most gradients held, by stats()", "mode", "copies of the model's gradients")
    plot.bars(axes[1], rows, "{mode}", key="resident")
    plot.marks(axes[1], rows, "{mode}", "keeps", "v", "kept by the rank that is done")
    plot.label(axes[1], "growth of the process", "mode", "copies of the model's gradients")
    plot.legend(figure, *axes)
