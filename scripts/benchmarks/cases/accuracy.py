"""Test accuracy under delays at the same number of epochs: paired differences to synchronous over folds and seeds."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Collection
from typing import Any

import numpy as np

from ..support import plot
from ..support.intervals import Interval, mean_interval, spread
from ..support.launch import Block, Progress, Say, repetitions
from ..support.launch import run as run_job
from ..support.report import Column, Goal, Report, Row, row
from ..support.schedule import gossip_of, one_random, own_pace, parse_arms, waits_for_nobody

HELP = "test accuracy with delays, all digits, 5 folds x 3 seeds: difference to synchronous with its 95%% interval"
COLUMNS = (
    Column("arm", "arm"),
    Column("accuracy", "value", ".4f"),
    Column("low", "low", ".4f"),
    Column("high", "high", ".4f"),
    Column("difference", "difference", "+.4f"),
    Column("95% from", "difference_low", "+.4f"),
    Column("to", "difference_high", "+.4f"),
    Column("s/step", "step_s", ".4f"),
    Column("speed-up", "speedup", ".2f"),
    Column("staleness", "staleness", ".2f"),
    Column("apart %", "apart_percent", ".3f"),
    Column("runs", "runs", "d"),
)
RATIOS = (2 / 3, 1.0, 4 / 3)
"""Delay over computation, by seed: those of ``straggler``, 0.2, 0.3 and 0.4 s over 0.3 s."""
TRAIN = 1437
"""Images in the training part of a fold, at the least."""
BATCH = 16
WORK = 0.02
"""Seconds a step takes beside what is slept, where ranks share cores: a job may take five times as long."""
POINT = 0.01
GOSSIP_POINTS = 1.5
"""Within which gossip must stay; others within 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=4, arms="horovod,majority,solo", repetitions=3)
    parser.add_argument("--folds", type=int, default=5, choices=range(1, 6), help="of the images to test on")
    parser.add_argument("--epochs", type=int, default=12, help="of each training")
    parser.add_argument("--lr", type=float, default=0.1, help="the highest learning rate")
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
    setting = {
        "compute": args.compute,
        "delay_over_compute": list(RATIOS),
        "epochs": args.epochs,
        "seed": "fold and run",
        "scaled": "computation and delays are straggler's times compute / 0.3 s; the real work comes on top",
    }
    report = Report("accuracy", args.ranks, rows_of(found, setting, baseline), COLUMNS, draw=draw)
    judge(report, baseline)
    return report


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
    progress = Progress(len(blocks), say)

    def on_block(block: Block) -> None:
        progress(f"fold {block['fold'] + 1}, seed {block['seed']}, {block['arm']}: {score(block):.4f}")

    longest = sum(sum(WORK + max(row) for row in block["times"]) for block in blocks)
    limit = args.limit * 60 if args.limit else 300 + 5 * longest
    return run_job("accuracy", args.ranks, {"blocks": blocks}, limit=limit, on_block=on_block, env=env)


def rows_of(blocks: list[Block], setting: dict[str, Any], baseline: str) -> list[Row]:
    """One row an arm, with its difference to the baseline on the same fold from the same seed.

    ``staleness`` is in rounds of gradients, or in steps of messages.
    """
    arms = list(dict.fromkeys(block["arm"] for block in blocks))
    by_arm = {arm: {(b["fold"], b["seed"]): b for b in blocks if b["arm"] == arm} for arm in arms}
    seconds = {arm: statistics.median(step_seconds(b) for b in mine.values()) for arm, mine in by_arm.items()}
    rows = []
    for arm, mine in by_arm.items():
        found = [score(block) for block in mine.values()]
        pairs = [score(block) - score(by_arm[baseline][key]) for key, block in mine.items()]
        gap = mean_interval(pairs) if arm != baseline else Interval(0.0, 0.0, 0.0)
        ends = spread(found)
        mean = statistics.fmean(found)
        late = [(int(k), n) for b in mine.values() for own in b["by_rank"] for k, n in own["staleness"].items()]
        gradients = sum(n for _, n in late)
        rows.append(
            row(
                arm,
                {**setting, "delay": None},
                *(mean, "share of test images, mean", ends.low, ends.high),
                accuracy=mean,
                speedup=seconds[baseline] / seconds[arm],
                difference=gap.value,
                difference_low=gap.low,
                difference_high=gap.high,
                pairs=pairs,
                scores=found,
                step_s=seconds[arm],
                staleness=sum(k * n for k, n in late) / gradients if gradients else None,
                skipped=sum(own["skipped"] for block in mine.values() for own in block["by_rank"]),
                identical=all(own["identical"] for block in mine.values() for own in block["by_rank"]),
                runs=len(found),
                **(gossip_figures(list(mine.values())) if gossip_of(arm) else {}),
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
        "averagings_per_step": statistics.fmean(
            own["averagings"] / own["steps"] for block in blocks for own in block["by_rank"]
        ),
    }


def score(block: Block) -> float:
    """A training's test accuracy."""
    return float(block["by_rank"][0]["accuracy"])


def curve_of(block: Block) -> list[list[float]]:
    """(Seconds, training loss, test accuracy) at the end of each share of a training."""
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
            value = each["value"]
            report.goals.append(Goal(f"{baseline}'s accuracy", value, ">= 0.95", value >= 0.95))
        elif arms is None or each["arm"] in arms:
            judge_close(report, each, baseline)


def judge_close(report: Report, each: Row, baseline: str) -> None:
    """The interval of an arm's difference lies within a point, or one and a half."""
    points = GOSSIP_POINTS if gossip_of(each["arm"]) else 1.0
    interval = Interval(each["difference"], each["difference_low"], each["difference_high"])
    text = f"{100 * interval.low:+.2f} to {100 * interval.high:+.2f} points"
    what = f"{each['arm']}'s accuracy less {baseline}'s, 95% interval"
    wanted = f"within {points:g} point{'s' if points > 1 else ''}"
    report.goals.append(Goal(what, text, wanted, interval.within(-points * POINT, points * POINT)))


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
