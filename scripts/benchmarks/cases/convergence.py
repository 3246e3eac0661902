"""All algorithms train for the same number of epochs, with delays and without: curves, and differences in accuracy.

The small ResNet on the real digits. With delays, one random rank is late in each step. At the end of each epoch the
clock stops for all, and what stands for all ranks is evaluated: its mean loss over the fold's training images, its
accuracy on the test images. (Where nobody waits for others, an epoch ends when each rank has taken its share of the
steps that all ranks take in one.) The first of --arms is what others are compared with, on the same fold from the same
seed; --repetitions is the number of seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_async.simulation.names import RIVALS
from hvd_async.simulation.schedule import one_random

from ..support import plot, trainings
from ..support.arms import parse_arms
from ..support.blocks import by_arm, grouped
from ..support.intervals import Interval, mean_interval
from ..support.launch import Block, Say, groups_env, repetitions
from ..support.options import add_compute, add_numbers, add_periods
from ..support.report import INTERVAL, Column, Report, Row, chosen, ranged
from ..support.trainings import (
    LEAST,
    POINT,
    add_options,
    block_of,
    curve_of,
    measure,
    quick,
    score,
    steps_of,
)

HELP = "digits, the same epochs for all algorithms, with and without delays: curves of accuracy and loss over time"
COLUMNS = (
    Column("delay", "setting.delay", "g"),
    Column("arm", "arm"),
    *ranged("accuracy", "value", ".4f", INTERVAL),
    *ranged("difference", "difference", "+.4f", INTERVAL),
    Column("train loss", "train_loss", ".4f"),
    Column("s/step", "step_s", ".4f"),
    Column("speed-up", "speedup", ".2f"),
    Column("runs", "runs", "d"),
)
ALL = "horovod,all,majority,solo,auto,sgp,osgp,dpsgd,adpsgd,lsgd,easgd"
QUICK = "horovod,majority,solo,sgp,dpsgd,adpsgd,lsgd"
LESS = 1.0
"""Percentage points that an arm's mean accuracy may be below the synchronous one's."""
SECONDS, LOSS, SCORE = range(3)
"""Places in a curve's point, one at the end of each epoch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=4, arms=ALL, repetitions=3)
    add_options(parser, epochs=8, lr=0.1, lr_help="the highest learning rate, of all arms")
    add_compute(parser, 0.01)
    text = "of one random rank in each step, as a multiple of what is slept; 0 for trainings without delays"
    add_numbers(parser, "--delay", [0.0, 2.0], "RATIO", text)
    add_periods(parser, local=1, whole=4)


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    quick(args, epochs=2)
    args.delay = args.delay[-1:] if args.quick else args.delay
    if args.groups < 1 or args.ranks % args.groups:
        raise ValueError(f"--groups {args.groups}: {args.ranks} ranks cannot be parted into so many")
    blocks = blocks_of(args)
    say(f"{len(blocks)} trainings of {args.epochs} epochs, {steps_of(args)} steps")
    found = measure(args, blocks, say, env=groups_env(blocks, args.ranks))
    names = ("compute", "epochs", "lr", "groups", "local_period", "global_period")
    setting = chosen(args, *names, seed="fold and run")
    report = Report("convergence", args.ranks, rows_of(found, setting), COLUMNS, draw=draw)
    judge(report)
    return report


def blocks_of(args: argparse.Namespace) -> list[Block]:
    """Every arm on every fold from every seed, with each delay, in alternation."""
    arms = parse_arms(args.arms, args.ranks, RIVALS, gossip=True, leaders=True, reduced=True)
    more = chosen(args, "local_period", "global_period", evaluations=args.epochs, group=args.ranks // args.groups)
    blocks = []
    for fold in range(args.folds):
        for seed, arm in repetitions(arms, args.repetitions):
            for ratio in dict.fromkeys(args.delay):
                times = one_random(steps_of(args), args.ranks, args.compute, args.compute * ratio, 100 * fold + seed)
                blocks.append(block_of(args, arm, fold, seed, "resnet", "even", times) | more | {"delay": ratio})
    return blocks


def rows_of(blocks: list[Block], setting: dict[str, Any]) -> list[Row]:
    """One row a delay and arm: as those of ``accuracy``, with the interval of the mean, and every training's curve."""
    rows = []
    for ratio, parts in grouped(blocks, lambda block: block["delay"]).items():
        groups = by_arm(parts)
        for each in trainings.rows_of(parts, setting, parts[0]["arm"]):
            mine = groups[each["arm"]]
            mean = mean_interval([score(block) for block in mine])
            curves = [curve_of(block) for block in mine]
            each["setting"] |= {"delay": ratio}
            each |= {"unit": "share of test images, mean", "low": mean.low, "high": mean.high, "curves": curves}
            each["train_loss"] = float(np.mean([curve[-1][LOSS] for curve in curves]))
            rows.append(each)
    return rows


def judge(report: Report) -> None:
    """Add what must show: the mean accuracy of none is more than a point below that of the first."""
    base: dict[float, str] = {}
    for each in report.rows:
        where = f"delay {each['setting']['delay']:g}"
        first = base.setdefault(each["setting"]["delay"], each["arm"])
        if each["arm"] == first:
            report.at_least(f"{first}'s accuracy, {where}", each["value"], LEAST)
            continue
        gap = Interval(*(each[key] / POINT for key in ("difference", "difference_low", "difference_high")))
        text = f"{gap.value:+.2f} points (95%: {gap.low:+.2f} to {gap.high:+.2f})"
        what = f"{each['arm']}'s mean accuracy less {first}'s, {where}"
        report.wants(what, text, f">= -{LESS:g}", gap.value >= -LESS)


def draw(figure: Any, rows: list[Row]) -> None:
    """Accuracy and loss over epochs and over seconds, a column a delay, a line an arm: the mean, with a band."""
    delays = list(dict.fromkeys(each["setting"]["delay"] for each in rows))
    names = list(dict.fromkeys(each["arm"] for each in rows))
    figure.set_size_inches(11, 15)
    panels = figure.subplots(4, len(delays), squeeze=False, sharey="row")
    for column, ratio in enumerate(delays):
        for each in (each for each in rows if each["setting"]["delay"] == ratio):
            curves = np.array(each["curves"])  # [runs, epochs, 3]
            epochs, seconds = range(1, curves.shape[1] + 1), curves[:, :, SECONDS].mean(axis=0)
            for axes, x, key in zip(panels[:, column], (epochs, seconds) * 2, (SCORE, SCORE, LOSS, LOSS), strict=True):
                line(axes, each["arm"], names, x, curves[:, :, key])
        text = f"one random rank {ratio:g} x what is slept late" if ratio else "no rank late"
        for number, axes in enumerate(panels[:, column]):
            plot.label(axes, text, ("epochs", "seconds of training, mean")[number % 2], "")
            if number % 2 == 0:
                axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in panels[:2, 0]:
        axes.set_ylabel("test accuracy (stretched near 1)")
        plot.near_one(axes)
    for axes in panels[2:, 0]:
        axes.set_ylabel("training loss (log scale)")
        plot.logarithmic(axes)
    plot.legend(figure, panels[0][0])


def line(axes: Any, arm: str, names: Sequence[str], x: Any, y: Any) -> None:
    """The mean of the runs, [runs, epochs], with a band from quartile to quartile."""
    look = plot.line(arm, names)
    axes.fill_between(x, *np.quantile(y, (0.25, 0.75), axis=0), color=look["color"], alpha=0.12, linewidth=0)
    axes.plot(x, y.mean(axis=0), label=arm, **look)
