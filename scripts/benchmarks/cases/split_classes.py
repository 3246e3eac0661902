"""Classes split over the ranks, and the rank that alone holds two of them always late; no batch norm.

Beside it a mutant of our own optimizer that loses late gradients, as the code published with the paper does. Of those
whose weights differ, that gossip or follow a leader, the accuracy is reported, not judged.

lsgd and easgd have the optimizer's defaults. ``-close``: they are pulled as often as ranks step, and farther.
``-common``: the loss that says who leads is that of a few training images which are the same on all ranks.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

from hvd_async.simulation.names import LEADERS, gossip_of

from ..support.arms import MUTANT, parse_arms
from ..support.blocks import by_arm
from ..support.launch import Block, Say, repetitions
from ..support.report import Column, Report, chosen
from ..support.trainings import POINT, add_options, block_of, judge, measure, quick, rows_of, steps_of
from . import accuracy
from .accuracy import draw

HELP = "classes split over ranks, the only rank with two of them always late; with a mutant that drops late gradients"
COLUMNS = (*accuracy.COLUMNS, Column("pulls/step", "pulls_per_step", ".2f"), Column("of mean", "of_mean", ".4f"))
COMMON = 64
"""Images whose loss says who leads."""
CLOSE: dict[str, Any] = {"algorithm": "lsgd", "global_period": 1, "global_pull": 0.3}
OWN: dict[str, dict[str, Any]] = {
    MUTANT: {"algorithm": "solo"},
    "lsgd-close": CLOSE,
    "lsgd-common": {"algorithm": "lsgd", "common": COMMON},
    "lsgd-common-close": {**CLOSE, "common": COMMON},
    "easgd-close": {"algorithm": "easgd", "global_period": 1, "alpha": 0.4, "beta": 0.9},
}
"""Arms that this case alone has, and what they say of their trainings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=4, arms=f"horovod,majority,solo,{MUTANT}", repetitions=3)
    add_options(parser, epochs=12, lr=0.05)
    parser.add_argument("--compute", type=float, default=0.006, metavar="S", help="slept in each step")
    parser.add_argument("--delay", type=float, default=0.006, metavar="S", help="of the last rank, in every step")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge. ``--repetitions`` is the number of seeds."""
    quick(args)
    arms = arms_of(args.arms, args.ranks)
    baseline = arms[0]
    found = measure(args, blocks_of(args, arms), say)
    setting = chosen(args, "compute", "epochs", late_rank_delay=args.delay, seed="fold and run")
    setting["classes"] = "0 to 7 shared by the first ranks, 8 and 9 on the last alone"
    setting["own"] = {arm: own for arm, own in OWN.items() if arm in arms}
    rows, groups = rows_of(found, setting, baseline), by_arm(found)
    for each in rows:
        each |= leader_figures(groups[each["arm"]])
    report = Report("hard", args.ranks, rows, COLUMNS, draw=draw)
    judge(report, baseline, [arm for arm in arms if arm not in OWN and not apart(arm)])
    for each in report.rows:
        if each["arm"] == MUTANT:
            loss = -each["difference_high"]
            what = f"accuracy that the mutant loses at least (95%), of {baseline}'s"
            report.wants(what, loss, "> 0.05", loss > 5 * POINT)
    return report


def arms_of(text: str, ranks: int) -> list[str]:
    """The arms of the command line's list, the case's own last; the first is what others are compared with.

    Raises:
        ValueError: as ``parse_arms``.
    """
    named = [arm.strip() for arm in text.split(",")]
    known = parse_arms(",".join(arm for arm in named if arm not in OWN), ranks, gossip=True, leaders=True)
    return [*known, *(arm for arm in OWN if arm in named)]


def apart(algorithm: str) -> bool:
    """Return whether its ranks' weights differ."""
    return algorithm in LEADERS or gossip_of(algorithm) is not None


def blocks_of(args: argparse.Namespace, arms: list[str]) -> list[Block]:
    """Every arm on every fold from every seed, in alternation."""
    times = np.full((steps_of(args), args.ranks), args.compute)
    times[:, -1] += args.delay
    blocks = []
    for fold in range(args.folds):
        for seed, arm in repetitions(arms, args.repetitions):
            own = {"algorithm": arm} | OWN.get(arm, {})
            block = block_of(args, own["algorithm"], fold, seed, "plain", "classes", times)
            blocks.append(block | own | {"arm": arm, "mean": own["algorithm"] in LEADERS})
    return blocks


def leader_figures(blocks: list[Block]) -> dict[str, Any]:
    """``pulls``: that came, by a rank's steps, of each training, and ``pulls_per_step``, their mean; ``of_mean``: the
    accuracy of the mean of all ranks' weights at the end, in place of the leader's or the center, mean over trainings.
    Nothing where ranks follow none."""
    if not blocks[0]["mean"]:
        return {}
    ranks = [block["by_rank"] for block in blocks]
    pulls = [sum(own["pulls"] for own in each) / sum(own["steps"] for own in each) for each in ranks]
    mean = statistics.fmean(each[0]["of_mean"] for each in ranks)
    return {"pulls": pulls, "pulls_per_step": statistics.fmean(pulls), "of_mean": mean}
