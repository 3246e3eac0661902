"""Accuracy on the real digits after trainings in which ranks die, one after the other, and new ones take their place.

Each training is beside one of the same seed and fold in which nobody dies.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..support import launch, plot
from ..support.intervals import mean_interval
from ..support.launch import Block, Say
from ..support.nemesis import KINDS
from ..support.report import INTERVAL, Column, Report, Row, chosen, ranged, row

HELP = "accuracy on the digits with five deaths, beside that with none"
COLUMNS = (
    Column("arm", "arm"),
    Column("accuracy, %", "without", ".2f"),
    Column("with deaths", "with_deaths", ".2f"),
    *ranged("points", "value", "+.2f", INTERVAL),
    Column("ranks, mean", "ranks", ".1f"),
    Column("deaths", "deaths", "d"),
)
POINTS = 0.5
"""Of accuracy that deaths may cost."""
QUICK = "solo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=4, arms="all,majority,solo,sgp,dpsgd,local,lsgd", repetitions=3)
    parser.add_argument("--deaths", type=int, default=5, metavar="N", help="of a training")
    parser.add_argument("--steps", type=int, default=300, help="of a training")
    parser.add_argument("--pause", type=float, default=0.04, metavar="S", help="of each step: new ranks take seconds")
    parser.add_argument("--batch", type=int, default=32, help="images of a rank's step")
    parser.add_argument("--lr", type=float, default=0.1, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the first repetition")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Train, and judge.

    Raises:
        ValueError: no such arm, or no death.
    """
    arms = args.arms.split(",")
    if unknown := {*arms} - {*KINDS}:
        raise ValueError(f"no arm {', '.join(map(repr, sorted(unknown)))} in this case: take of {', '.join(KINDS)}")
    if args.deaths < 1:
        raise ValueError(f"--deaths {args.deaths}: take one at the least; trainings without any are made beside them")
    count = 1 if args.quick else args.repetitions
    if args.quick:
        args.steps = min(args.steps, 150)
    common = chosen(args, "steps", "pause", "batch", "lr")
    blocks = [
        {
            "arm": arm,
            "deaths": deaths,
            "seed": args.seed + repetition,
            "fold": repetition % 5,
            "ranks": args.ranks,
            **common,
        }
        for repetition, arm in launch.repetitions(arms, count)
        for deaths in (0, args.deaths)
    ]

    def tell(block: Block) -> str:
        own = block["by_rank"][0]
        return f"{block['arm']}, {own['deaths_seen']} deaths: {100 * own['accuracy']:.2f}%, {own['ranks']:.1f} ranks"

    limit = 60 + len(blocks) * (60 + 5 * args.steps * args.pause)
    found = launch.measure(args, "deaths", blocks, say, tell, seconds=limit, elastic=True)
    report = Report(
        "deaths", args.ranks, [row_of(arm, chosen(args, "deaths", **common), found) for arm in arms], COLUMNS
    )
    report.draw = draw
    for each in report.rows:
        report.at_least(f"points that deaths cost, {each['arm']}", each["value"], -POINTS)
        told = f"{each['deaths']} of {each['wanted']}"
        report.wants(f"deaths, {each['arm']}", told, "all", each["deaths"] == each["wanted"], exact=True)
    return report


def row_of(arm: str, setting: dict[str, Any], blocks: list[Block]) -> Row:
    """The figures of an arm: the mean difference of trainings of the same seed, with Student's interval."""
    pairs: dict[int, dict[bool, float]] = {}
    own = [block for block in blocks if block["arm"] == arm]
    for block in own:
        pairs.setdefault(block["seed"], {})[bool(block["deaths"])] = 100 * block["by_rank"][0]["accuracy"]
    shrunk = [block["by_rank"][0] for block in own if block["deaths"]]
    return row(
        arm,
        setting,
        mean_interval([pair[True] - pair[False] for pair in pairs.values()]),
        "points of accuracy",
        without=sum(pair[False] for pair in pairs.values()) / len(pairs),
        with_deaths=sum(pair[True] for pair in pairs.values()) / len(pairs),
        pairs=[[pair[False], pair[True]] for pair in pairs.values()],
        ranks=sum(one["ranks"] for one in shrunk) / len(shrunk),
        deaths=sum(one["deaths_seen"] for one in shrunk),
        wanted=sum(block["deaths"] for block in own),
    )


def draw(figure: Any, rows: list[Row]) -> None:
    """Accuracy without deaths and with them, a line a pair."""
    axes = figure.subplots()
    for place, each in enumerate(rows):
        for without, with_deaths in each["pairs"]:
            axes.plot([place - 0.15, place + 0.15], [without, with_deaths], "o-", color=plot.COLOURS[0], alpha=0.6)
    axes.set_xticks(range(len(rows)), [each["arm"] for each in rows])
    plot.label(axes, "to the left nobody dies", "", "accuracy on test images, %")
