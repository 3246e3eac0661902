"""Short trainings on the real digits: what ``accuracy``, ``split_classes`` and ``convergence`` share."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Collection
from typing import Any

import numpy as np

from hvd_async.simulation.names import gossip_of, waits_for_nobody
from hvd_async.simulation.schedule import own_pace

from . import launch
from .blocks import by_arm, everywhere, identical, late_counts, mean_of
from .intervals import Interval, mean_interval
from .launch import Block, Say
from .report import Report, Row, ends, row

TRAIN = 1437
"""Images in the training part of a fold, at the least."""
BATCH = 16
WORK = 0.02
"""Seconds a step takes beside what is slept, where ranks share cores: a job may take five times as long."""
POINT = 0.01
GOSSIP_POINTS = 1.5
"""Within which gossip must stay; others within 1."""
LEAST = 0.95
"""Accuracy that the baseline must reach, for a comparison to mean something."""


def add_options(
    parser: argparse.ArgumentParser, epochs: int, lr: float, lr_help: str = "the highest learning rate"
) -> None:
    """Add the options of trainings, with these defaults."""
    parser.add_argument("--folds", type=int, default=5, choices=range(1, 6), help="of the images to test on")
    parser.add_argument("--epochs", type=int, default=epochs, help="of each training")
    parser.add_argument("--lr", type=float, default=lr, help=lr_help)


def quick(args: argparse.Namespace, epochs: int = 3) -> None:
    """Make it small if that is wanted."""
    if args.quick:
        args.folds, args.repetitions, args.epochs = 1, 1, min(args.epochs, epochs)


def steps_of(args: argparse.Namespace) -> int:
    """Steps of each training."""
    return int(args.epochs * (TRAIN // (BATCH * args.ranks)))


def block_of(
    args: argparse.Namespace, arm: str, fold: int, seed: int, model: str, split: str, times: Any
) -> dict[str, Any]:
    """One training, as ``jobs/accuracy.py`` reads it, with one evaluation at its end.

    Where nobody waits for others there are no steps that all ranks take: each takes as many as it can in the same time,
    all together as many as in other arms. (With as many each, the slowest would go on by itself when the others are at
    the end of theirs.)
    """
    times = np.asarray(times)
    return {
        "steps": own_pace(times) if waits_for_nobody(arm) else [len(times)] * times.shape[1],
        "arm": arm,
        "fold": fold,
        "seed": seed,
        "model": model,
        "split": split,
        "batch": BATCH,
        "epochs": args.epochs,
        "evaluations": 1,
        "lr": args.lr,
        "times": times.tolist(),
    }


def measure(args: argparse.Namespace, blocks: list[Block], say: Say, env: dict[str, str] | None = None) -> list[Block]:
    """Run the trainings in one job."""
    longest = sum(sum(WORK + max(row) for row in block["times"]) for block in blocks)

    def tell(block: Block) -> str:
        return f"fold {block['fold'] + 1}, seed {block['seed']}, {block['arm']}: {score(block):.4f}"

    return launch.measure(args, "accuracy", blocks, say, tell, seconds=300 + 5 * longest, env=env)


def rows_of(blocks: list[Block], setting: dict[str, Any], baseline: str) -> list[Row]:
    """One row an arm, with its difference to the baseline on the same fold from the same seed.

    ``staleness`` is in rounds of gradients, or in steps of messages.
    """
    groups = by_arm(blocks)
    base = {(block["fold"], block["seed"]): score(block) for block in groups[baseline]}
    seconds = {arm: statistics.median(map(step_seconds, mine)) for arm, mine in groups.items()}
    rows = []
    for arm, mine in groups.items():
        found = [score(block) for block in mine]
        pairs = [score(block) - base[block["fold"], block["seed"]] for block in mine]
        mean = statistics.fmean(found)
        rows.append(
            row(
                arm,
                {**setting, "delay": None},
                *(Interval(mean, min(found), max(found)), "share of test images, mean"),
                accuracy=mean,
                speedup=seconds[baseline] / seconds[arm],
                **ends("difference", mean_interval(pairs) if arm != baseline else Interval(0.0, 0.0, 0.0)),
                pairs=pairs,
                scores=found,
                step_s=seconds[arm],
                staleness=mean_of(late_counts(everywhere(mine))),
                skipped=sum(own["skipped"] for own in everywhere(mine)),
                identical=identical(mine),
                runs=len(found),
                **(gossip_figures(mine) if gossip_of(arm) else {}),
            )
        )
    return rows


def gossip_figures(blocks: list[Block]) -> dict[str, float]:
    """``distance``: of the ranks' weights from their mean before the drain (root mean square), mean over trainings;
    ``apart_percent``: the same over the norm of what the drain has made of them."""
    firsts = [block["by_rank"][0] for block in blocks]
    return {
        "distance": statistics.fmean(own["distance"] for own in firsts),
        "apart_percent": 100 * statistics.fmean(own["distance"] / own["norm"] for own in firsts),
        "averagings_per_step": statistics.fmean(own["averagings"] / own["steps"] for own in everywhere(blocks)),
    }


def score(block: Block) -> float:
    """A training's test accuracy."""
    return float(block["by_rank"][0]["accuracy"])


def curve_of(block: Block) -> list[list[float]]:
    """Return what was evaluated after each share of a training: seconds, perhaps the training loss, test accuracy."""
    curve: list[list[float]] = block["by_rank"][0]["curve"]
    return curve


def step_seconds(block: Block) -> float:
    """Seconds a step of the slowest rank."""
    steps = block["epochs"] * (TRAIN // (BATCH * len(block["by_rank"])))
    return float(max(own["elapsed"] for own in block["by_rank"])) / steps


def judge(report: Report, baseline: str, arms: Collection[str] | None = None) -> None:
    """Add what must show: of these arms beside the baseline; None: of all."""
    for each in report.rows:
        if each["arm"] == baseline:
            report.at_least(f"{baseline}'s accuracy", each["value"], LEAST)
        elif arms is None or each["arm"] in arms:
            judge_close(report, each, baseline)


def judge_close(report: Report, each: Row, baseline: str) -> None:
    """The interval of an arm's difference lies within a point, or one and a half."""
    points = GOSSIP_POINTS if gossip_of(each["arm"]) else 1.0
    interval = Interval(each["difference"], each["difference_low"], each["difference_high"])
    text = f"{100 * interval.low:+.2f} to {100 * interval.high:+.2f} points"
    what = f"{each['arm']}'s accuracy less {baseline}'s, 95% interval"
    wanted = f"within {points:g} point{'s' if points > 1 else ''}"
    report.wants(what, text, wanted, interval.within(-points * POINT, points * POINT))
