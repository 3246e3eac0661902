"""Classes split over the ranks, and the rank that alone holds two of them always late; no batch norm.

Beside it a mutant of our own optimizer that loses late gradients, as the code published with the paper does. Of gossip
the accuracy is reported, not judged.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from . import accuracy
from .accuracy import POINT, block_of, draw, measure, quick, rows_of, steps_of
from .launch import Say, repetitions
from .report import Goal, Report
from .schedule import MUTANT, parse_arms

HELP = "classes split over ranks, the only rank with two of them always late; with a mutant that drops late gradients"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=4, arms=f"horovod,majority,solo,{MUTANT}", repetitions=3)
    parser.add_argument("--folds", type=int, default=5, choices=range(1, 6), help="of the images to test on")
    parser.add_argument("--epochs", type=int, default=12, help="of each training")
    parser.add_argument("--lr", type=float, default=0.05, help="the highest learning rate")
    parser.add_argument("--compute", type=float, default=0.006, metavar="S", help="slept in each step")
    parser.add_argument("--delay", type=float, default=0.006, metavar="S", help="of the last rank, in every step")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge. ``--repetitions`` is the number of seeds."""
    quick(args)
    names = [arm for arm in args.arms.split(",") if arm != MUTANT]
    arms = parse_arms(",".join(names), args.ranks, gossip=True)
    baseline = arms[0]
    if MUTANT in args.arms.split(","):
        arms = [*arms, MUTANT]
    times = np.full((steps_of(args), args.ranks), args.compute)
    times[:, -1] += args.delay
    blocks = [
        block_of(args, arm, fold, seed, "plain", "classes", times)
        for fold in range(args.folds)
        for seed, arm in repetitions(arms, args.repetitions)
    ]
    found = measure(args, blocks, say)
    setting: dict[str, Any] = {
        "compute": args.compute,
        "late_rank_delay": args.delay,
        "epochs": args.epochs,
        "seed": "fold and run",
        "classes": "0 to 7 shared by the first ranks, 8 and 9 on the last alone",
    }
    report = Report("hard", args.ranks, rows_of(found, setting, baseline), accuracy.COLUMNS, draw=draw)
    accuracy.judge(report, baseline, gossip=False)
    for each in report.rows:
        if each["arm"] == MUTANT:
            loss = -each["difference_high"]
            what = f"accuracy that the mutant loses at least (95%), of {baseline}'s"
            report.goals.append(Goal(what, loss, "> 0.05", loss > 5 * POINT))
    return report
