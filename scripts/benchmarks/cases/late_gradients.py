"""Remedies for late gradients, simulated: how the defaults of partial allreduce were chosen.

One process trains in place of all ranks. Gradients are real; time is counted: a step takes as long as it computes,
communication is free, and each gradient is as late as eager-SGD's rules make it. So remedies are compared at the same
speed and with the same lateness, whatever the machine does. ``digits``: the small ResNet of ``convergence``, no rank
late; ``digits-late``: one random rank takes twice as long in each step; ``clips4``, ``clips8``: the LSTM of
``sequence_lengths``, whose ranks have clips of different lengths, at 4 and 8 ranks. ``digits-late-adamw`` and the like
train with that optimizer instead of SGD.

Arms: ``synchronous``; ``none``, late gradients as they are; ``extrapolate-1`` to ``-3``, updates extrapolated by 1 to
3 rounds, of which 2 is the default; ``predict-2``, weights predicted by 2 rounds, as version 0.2.0 began. With
extrapolation by 2 as well: ``weights`` (1 + s)^-1 of a gradient that is s rounds late, ``weights-half`` (1 + s)^-0.5,
both over the mean of their rank's, ``weights-bare`` not divided; ``extrapolate-2-compensated`` (DC-ASGD);
``half-quorum``, rounds of half of the ranks. Without: ``compensated``, ``momentum-0.8`` (at the same lr / (1 - m)),
``catch-up`` (spike compensation). ``fresh``, a bound: gradients computed at the current weights, which no job can have
at this speed. --repetitions is the number of seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from typing import Any

from ..support import launch, plot
from ..support.arms import named_arms, need_arm
from ..support.blocks import everywhere, grouped, late_counts, mean_of
from ..support.intervals import Interval, mean_interval
from ..support.launch import Block, Say
from ..support.remedies import BASELINE, DEFAULT, REMEDIES, TASKS
from ..support.report import INTERVAL, Column, Report, Row, chosen, ends, ranged, row
from ..support.trainings import LEAST, POINT, score

HELP = "remedies for late gradients, simulated in one process: accuracy at the same lateness, speed-up, staleness"
QUICK = f"{BASELINE},none,{DEFAULT}"
COLUMNS = (
    Column("task", "setting.task"),
    Column("arm", "arm"),
    Column("accuracy", "value", ".4f"),
    *ranged("difference", "difference", "+.4f", INTERVAL),
    *ranged(f"to {DEFAULT}", "to_default", "+.4f", INTERVAL),
    Column("speed-up", "speedup", ".3f"),
    Column("staleness", "staleness", ".2f"),
    Column("fresh", "fresh", ".2f"),
    Column("seeds", "runs", "d"),
)
WITHIN = 0.5
"""Percentage points that the default may be less accurate than synchronous, with the whole interval."""
SECONDS = 20.0
"""A training, at the most."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=1, arms=",".join(REMEDIES), repetitions=16)
    known = {"nargs": "+", "choices": TASKS, "default": list(TASKS), "metavar": "TASK"}
    parser.add_argument("--tasks", **known, help=f"trainings, of {', '.join(TASKS)}")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.ranks != 1:
        raise ValueError(f"--ranks {args.ranks}: one process trains in place of all ranks")
    if args.quick:
        args.repetitions = 1
    arms = named_arms(args.arms, tuple(REMEDIES))
    need_arm(BASELINE, arms)
    asked = itertools.product(range(args.repetitions), dict.fromkeys(args.tasks), arms)
    blocks = [block_of(task, arm, seed, args.quick) for seed, task, arm in asked]

    def tell(block: Block) -> str:
        return f"seed {block['seed']}, {block['task']}, {block['arm']}: {score(block):.4f}"

    found = launch.measure(args, "late_gradients", blocks, say, tell, seconds=launch.START + SECONDS * len(blocks))
    report = Report("late_gradients", args.ranks, rows_of(found), COLUMNS, draw=draw)
    judge(report)
    return report


def block_of(name: str, arm: str, seed: int, quick: bool) -> Block:
    """One training."""
    task = TASKS[name]
    steps = task.steps // 8 if quick else task.steps
    asked = {"task": name, **task._asdict(), "steps": steps, "arm": arm, "seed": seed}
    return asked | {"remedy": dataclasses.asdict(REMEDIES[arm])}


def rows_of(blocks: list[Block]) -> list[Row]:
    """One row a task and arm; differences are paired by seed."""
    scores = {(block["task"], block["arm"], block["seed"]): score(block) for block in blocks}

    def beside(mine: list[Block], other: str) -> Interval | None:
        """Return by how much an arm's accuracy is above another's."""
        pairs = [(score(block), scores.get((block["task"], other, block["seed"]))) for block in mine]
        there = [own - its for own, its in pairs if its is not None]
        return mean_interval(there) if there and other != mine[0]["arm"] else None

    rows = []
    for (task, arm), mine in grouped(blocks, lambda block: (block["task"], block["arm"])).items():
        found, late = [score(block) for block in mine], late_counts(everywhere(mine))
        setting = chosen(argparse.Namespace(**mine[0]), "ranks", "steps", task=task, seed="the run's number")
        rows.append(
            row(
                arm,
                setting,
                *(mean_interval(found), "share of the test set, mean"),
                accuracy=statistics.fmean(found),
                speedup=statistics.median(own["speedup"] for own in everywhere(mine)),
                **ends("difference", beside(mine, BASELINE)),
                **ends("to_default", beside(mine, DEFAULT)),
                scores=found,
                staleness=mean_of(late),
                fresh=late.get(0, 0) / sum(late.values()),
                runs=len(mine),
            )
        )
    return rows


def judge(report: Report) -> None:
    """Add what must show: the default costs little on every task."""
    for each in report.rows:
        task = each["setting"]["task"]
        if each["arm"] == BASELINE:
            report.at_least(f"{BASELINE}, {task}: accuracy", each["value"], LEAST)
        elif each["arm"] == DEFAULT:
            gap = Interval(*(each[key] / POINT for key in ("difference", "difference_low", "difference_high")))
            text = f"{gap.value:+.2f} points (95%: {gap.low:+.2f} to {gap.high:+.2f})"
            what = f"{DEFAULT} less {BASELINE}, {task}: accuracy"
            report.wants(what, text, f"whole interval >= -{WITHIN:g}", gap.low >= -WITHIN)


def draw(figure: Any, rows: list[Row]) -> None:
    """Differences from synchronous with their intervals, a panel a task, a line an arm, with its speed-up."""
    tasks = list(dict.fromkeys(each["setting"]["task"] for each in rows))
    columns = min(4, len(tasks))
    lines = -(-len(tasks) // columns)
    figure.set_size_inches(3.2 * columns + 2.0, 0.5 + lines * (1.5 + 0.3 * len({each["arm"] for each in rows})))
    panels = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for empty in panels[len(tasks) :]:
        empty.remove()
    panels = panels[: len(tasks)]
    names = list(dict.fromkeys(each["arm"] for each in rows if each["arm"] != BASELINE))
    for axes, task in zip(panels, tasks, strict=True):
        axes.axvspan(-WITHIN, WITHIN, color="#56B4E9", alpha=0.2, label=f"within {WITHIN:g} points")
        axes.axvline(0.0, color="#555555", linewidth=1.0)
        for each in (each for each in rows if each["setting"]["task"] == task and each["arm"] in names):
            middle, low, high = (each[key] for key in ("difference", "difference_low", "difference_high"))
            sides = [[side[0] / POINT] for side in plot.sides(middle, low, high)]
            look = {"color": "#D55E00" if each["arm"] == DEFAULT else "black", "capsize": 4, "fmt": "o"}
            axes.errorbar(middle / POINT, names.index(each["arm"]), xerr=sides, **look)
        quick = next((each for each in rows if each["setting"]["task"] == task and each["arm"] == DEFAULT), rows[-1])
        plot.label(axes, f"{task}: {quick['speedup']:.2f} times as fast", "points from synchronous, 95%", "")
        axes.grid(axis="both", alpha=0.3)
    panels[0].errorbar([], [], xerr=[], fmt="o", color="#D55E00", label=f"the default, {DEFAULT}")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    plot.legend(figure, panels[0])
