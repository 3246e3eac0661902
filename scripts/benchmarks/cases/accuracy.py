"""Test accuracy under delays at the same number of epochs: paired differences to synchronous over folds and seeds."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from hvd_async.simulation.names import gossip_of
from hvd_async.simulation.schedule import one_random

from ..support import plot
from ..support.arms import parse_arms
from ..support.launch import Say, repetitions
from ..support.report import INTERVAL, Column, Report, Row, chosen, ranged
from ..support.trainings import (
    GOSSIP_POINTS,
    add_options,
    block_of,
    judge,
    measure,
    quick,
    rows_of,
    steps_of,
)

HELP = "test accuracy with delays, all digits, 5 folds x 3 seeds: difference to synchronous with its 95%% interval"
COLUMNS = (
    Column("arm", "arm"),
    *ranged("accuracy", "value", ".4f"),
    *ranged("difference", "difference", "+.4f", INTERVAL),
    Column("s/step", "step_s", ".4f"),
    Column("speed-up", "speedup", ".2f"),
    Column("staleness", "staleness", ".2f"),
    Column("apart %", "apart_percent", ".3f"),
    Column("runs", "runs", "d"),
)
RATIOS = (2 / 3, 1.0, 4 / 3)
"""Delay over computation, by seed: those of ``straggler``, 0.2, 0.3 and 0.4 s over 0.3 s."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=4, arms="horovod,majority,solo", repetitions=3)
    add_options(parser, epochs=12, lr=0.1)
    parser.add_argument(
        "--compute", type=float, default=0.02, metavar="S", help="slept in each step; delays scale with it"
    )


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge. ``--repetitions`` is the number of seeds."""
    quick(args)
    baseline, *_ = arms = parse_arms(args.arms, args.ranks, gossip=True)
    blocks = []
    for fold in range(args.folds):
        for seed, arm in repetitions(arms, args.repetitions):
            delay = args.compute * RATIOS[seed % len(RATIOS)]
            times = one_random(steps_of(args), args.ranks, args.compute, delay, 100 * fold + seed)
            blocks.append(block_of(args, arm, fold, seed, "resnet", "even", times))
    found = measure(args, blocks, say)
    setting = chosen(args, "compute", "epochs", delay_over_compute=list(RATIOS), seed="fold and run")
    setting["scaled"] = "computation and delays are straggler's times compute / 0.3 s; the real work comes on top"
    report = Report("accuracy", args.ranks, rows_of(found, setting, baseline), COLUMNS, draw=draw)
    judge(report, baseline)
    return report


def draw(figure: Any, rows: list[Row]) -> None:
    """Differences with their intervals, every pair a point, and accuracies."""
    axes = figure.subplots(1, 2)
    names = [each["arm"] for each in rows]
    for place, each in enumerate(rows[1:]):
        fill, _ = plot.colour(each["arm"], names)
        shift = np.linspace(-0.15, 0.15, len(each["pairs"]))
        axes[0].plot(place + shift, [100 * pair for pair in each["pairs"]], ".", color=fill, markeredgecolor="black")
        interval = (each[key] for key in ("difference", "difference_low", "difference_high"))
        middle, sides = 100 * each["difference"], 100 * np.array(plot.sides(*interval))
        axes[0].errorbar(place + 0.3, middle, sides, fmt="D", color="black", capsize=5)
    within = [GOSSIP_POINTS if gossip_of(name) else 1.0 for name in names[1:]]
    for points in sorted(set(within)):
        axes[0].axhspan(-points, points, color="#56B4E9", alpha=0.2, label=f"within {points:g} point(s)")
    axes[0].plot([], [], "k.", label="a fold and seed")
    axes[0].plot([], [], "kD", label="mean and 95% interval")
    axes[0].set_xticks(range(len(names) - 1), names[1:])
    plot.label(axes[0], f"test accuracy less {names[0]}'s", "arm", "percentage points")
    plot.legend(figure, axes[0])
    for place, each in enumerate(rows):
        sides = plot.sides(each["value"], each["low"], each["high"])
        axes[1].bar(place, each["value"], 0.7, yerr=sides, capsize=4, **plot.fill(each["arm"], names))
    axes[1].set_xticks(range(len(names)), names)
    axes[1].set_ylim(bottom=max(0.0, min(each["low"] for each in rows) - 0.02))
    plot.label(axes[1], "test accuracy: mean, least and greatest", "arm", "share of test images (axis cut off)")
