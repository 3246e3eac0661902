"""How long after a rank's death its survivors train on: ours, and Horovod's own elastic training.

In each repetition the same rank dies at the same point under every arm, in alternation. Horovod's re-initialisation
(its shutdown and its rendezvous) is the same in all arms, and is told apart.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from ..support import launch, plot
from ..support.history import History
from ..support.intervals import spread
from ..support.launch import Block, Say
from ..support.nemesis import COLUMNS as BATCHES
from ..support.nemesis import EVERY_BATCH, HOROVOD, KINDS, SLOTS, START, Schedule, Trouble
from ..support.report import Column, Report, Row, chosen, ranged, row

HELP = "how long after a rank's death the others train on, and what it costs, beside Horovod's elastic training"
COLUMNS = (
    Column("arm", "arm"),
    Column("weights", "setting.weights", ",d"),
    *ranged("s from death to training", "value", ".2f"),
    Column("found out", "found_out", ".2f"),
    Column("Horovod's restart", "restart", ".2f"),
    Column("state", "state", ".3f"),
    Column("steps taken again", "again", ".1f"),
    Column("x Horovod", "ratio", ".2f"),
)
LIMIT = 1.2
"""Times Horovod's, at the most."""
PARTS = ("found_out", "restart", "state")
"""Of a recovery."""
QUICK = "horovod,solo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=START, arms=",".join((HOROVOD, *KINDS)), repetitions=10)
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch", help="of the model")
    parser.add_argument("--weights", type=int, nargs="+", default=[SLOTS * BATCHES, 5_000_000], help="of the models")
    parser.add_argument("--seed", type=int, default=0, help="of points and victims")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge.

    Raises:
        ValueError: no such arm, or other ranks than schedules are for.
    """
    arms = args.arms.split(",")
    if unknown := {*arms} - {HOROVOD, *KINDS}:
        raise ValueError(f"no arm {', '.join(map(repr, sorted(unknown)))} in this case: take of {HOROVOD}, {KINDS}")
    if args.ranks != START:
        raise ValueError(f"--ranks {args.ranks}: {START} begin, of which one dies")
    if args.framework == "tensorflow" and HOROVOD in arms:
        raise ValueError("Horovod's elastic state for Keras does not work on Keras 3: leave the arm 'horovod' out")
    count = 1 if args.quick else args.repetitions
    sizes = args.weights[:1] if args.quick else args.weights
    report = Report("elastic", START, [], COLUMNS, draw=draw)
    progress = launch.Progress(len(sizes) * count * len(arms), say)
    for weights in sizes:
        schedules = [deadly(args.seed + repetition, arm) for repetition, arm in launch.repetitions(arms, count)]

        def on_block(block: Block) -> None:
            history = History(Schedule.of(block["schedule"]), block["history"])
            progress(f"{history.schedule}: {', '.join(f'{one.seconds:.2f} s' for one in history.recoveries())}")

        plan = {
            "framework": args.framework,
            "weights": weights,
            "schedules": [schedule.content() for schedule in schedules],
        }
        limit = args.limit * 60 if args.limit else 60 + 60 * len(schedules)
        blocks = launch.run("nemesis", START, plan, limit=limit, on_block=on_block, elastic=True)
        histories = [History(Schedule.of(block["schedule"]), block["history"]) for block in blocks]
        setting = chosen(args, "framework", "seed", weights=weights)
        report.rows += [row_of(arm, setting, histories) for arm in arms]
    for each in report.rows:
        if each["ratio"] is not None and each["arm"] != HOROVOD:
            what = f"s from death to training over Horovod's, {each['arm']}, {each['setting']['weights']:,} weights"
            report.at_most(what, each["ratio"], LIMIT)
        if each["arm"] != HOROVOD:
            again = f"{each['again']:g}"
            report.wants(f"steps taken again, {each['arm']}", again, "none", not each["again"], exact=True)
    return report


def deadly(seed: int, arm: str) -> Schedule:
    """Return a schedule in which one rank dies; of the same seed at the same point, whatever the arm."""
    draws = random.Random(seed)
    point = draws.choice([point for point in EVERY_BATCH if point != "apply"])
    death = Trouble(0, "kill", point, draws.randint(8, 16), draws.randrange(START), draws.uniform(0.0, 0.01))
    return Schedule(seed, arm, (death,))


def row_of(arm: str, setting: dict[str, Any], histories: list[History]) -> Row:
    """The figures of an arm: medians over its deaths."""
    by_seed: dict[int, dict[str, float]] = {}
    for history in histories:
        for one in history.recoveries():
            by_seed.setdefault(history.schedule.seed, {})[history.schedule.kind] = one.seconds
    own = [one for history in histories if history.schedule.kind == arm for one in history.recoveries()]
    if not own:
        raise launch.JobError(f"no survivor of a death has trained on under {arm}: see bench.py nemesis --histories")
    ratios = [seconds[arm] / seconds[HOROVOD] for seconds in by_seed.values() if {arm, HOROVOD} <= {*seconds}]
    return row(
        arm,
        setting,
        spread([one.seconds for one in own]),
        "s from a death until all survivors train on",
        again=sum(one.again for one in own) / len(own),
        ratio=spread(ratios).value if ratios else None,
        ratios=ratios,
        **{part: spread([getattr(one, part) for one in own]).value for part in PARTS},
    )


def draw(figure: Any, rows: list[Row]) -> None:
    """The parts of a recovery, an arm beside the other, for each size."""
    sizes = list(dict.fromkeys(each["setting"]["weights"] for each in rows))
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    names = {"found_out": "the death is found out", "restart": "Horovod starts again", "state": "state, first step"}
    for axes, size in zip(panels, sizes, strict=True):
        own = [each for each in rows if each["setting"]["weights"] == size]
        base = [0.0] * len(own)
        for number, part in enumerate(PARTS):
            heights = [each[part] for each in own]
            axes.bar(range(len(own)), heights, bottom=base, color=plot.COLOURS[number], label=names[part])
            base = [low + high for low, high in zip(base, heights, strict=True)]
        axes.set_xticks(range(len(own)), [each["arm"] for each in own], rotation=60)
        plot.label(axes, f"{size:,} weights", "", "s from a death to training")
    plot.legend(figure, panels[0])
