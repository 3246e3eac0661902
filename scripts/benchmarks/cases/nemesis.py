"""Elastic training with trouble: ranks are killed, stopped, cut off, hosts come and go; what must hold, holds.

Each schedule is drawn from a seed. Weights count how often each gradient was applied, so a gradient that counts twice,
or that is lost with nobody who held it, shows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ..support import launch, plot
from ..support.history import History
from ..support.intervals import spread
from ..support.launch import Block, JobError, Say
from ..support.nemesis import COLUMNS as BATCHES
from ..support.nemesis import KINDS, SLOTS, START, Schedule, drawn
from ..support.report import Column, Report, Row, row

HELP = (
    "elastic training: ranks killed, stopped, cut off at random, hosts come and go; nothing lost, counted twice, hung"
)
COLUMNS = (
    Column("arm", "arm"),
    Column("schedules", "schedules", "d"),
    Column("killed", "kill", "d"),
    Column("stopped", "stop", "d"),
    Column("cut off", "cut", "d"),
    Column("joined", "join", "d"),
    Column("left", "leave", "d"),
    Column("slow disks", "slow disk", "d"),
    Column("resets", "resets", "d"),
    Column("gradients lost with the dead", "lost", "d"),
    Column("s from a death", "value", ".2f"),
    Column("violations", "violations", "d"),
)
OUTPUT = 100_000
"""Characters of a job's output that are kept: stacks of all its processes."""
SECONDS = 60.0
"""A schedule takes at the most, on a slow machine, in the mean."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=START, arms=",".join(KINDS), repetitions=1)
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch", help="of the model")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="of the schedules; else from --first on")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="of the first schedule")
    parser.add_argument("--schedules", type=int, default=200, metavar="N", help="how many, seed by seed")
    parser.add_argument("--in-a-job", type=int, default=20, metavar="N", help="schedules that one job goes through")
    parser.add_argument(
        "--virtual",
        action="store_true",
        help="on virtual hosts (root): every second rank that is killed takes its host along, a cut is of the link",
    )
    parser.add_argument("--histories", type=Path, metavar="DIR", help="keep the histories of violations there")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Go through the schedules, and judge.

    Raises:
        ValueError: other ranks than the schedules are for, or no schedule of these arms.
    """
    if args.ranks != START:
        raise ValueError(f"--ranks {args.ranks}: schedules begin with {START} ranks")
    wanted = args.arms.split(",")
    if unknown := {*wanted} - {*KINDS}:
        raise ValueError(f"no arm {', '.join(map(repr, sorted(unknown)))} in this case: take of {', '.join(KINDS)}")
    count = min(args.schedules, len(KINDS)) if args.quick else args.schedules
    seeds = args.seeds or range(args.first, args.first + count)
    left = [schedule for schedule in map(drawn, seeds) if schedule.kind in wanted]
    if not left:
        raise ValueError("none of these schedules is of these arms: give more --schedules, or other --seeds")
    found: list[tuple[Schedule, History | None, list[str]]] = []
    progress = launch.Progress(len(left), say)
    while left:
        job, left = left[: args.in_a_job], left[args.in_a_job :]
        done, error = one_job(args, job, progress, say)
        found += done
        if error is not None:
            broken = job[len(done)]
            say(f"VIOLATION {broken}: the job ended\n{error}")
            found.append((broken, None, ["the job ended"]))
            progress(f"{broken}: the job ended")
            left = job[len(done) + 1 :] + left
    return report_of(args, found)


def one_job(
    args: argparse.Namespace, schedules: list[Schedule], progress: launch.Progress, say: Say
) -> tuple[list[tuple[Schedule, History | None, list[str]]], str | None]:
    """Return what was found of schedules that came to their end, and why the job ended before the others."""
    done: list[tuple[Schedule, History | None, list[str]]] = []
    last: dict[str, str] = {}

    def on_block(block: Block) -> None:
        history = History(Schedule.of(block["schedule"]), block["history"])
        schedule, wrong = schedules[len(done)], history.violations()
        done.append((schedule, history, wrong))
        if wrong:
            told = "\n".join(wrong)
            say(f"VIOLATION {schedule}\n{told}")
            keep(args, schedule, {host: "\n".join(map(json.dumps, own)) for host, own in block["history"].items()})
        progress(f"{schedule}: {history.resets} resets")

    def look(folder: Path) -> None:
        last.clear()
        last.update((file.name, file.read_text()) for file in folder.glob(f"history.{len(done)}.*"))
        last["output"] = (folder / "output").read_text(errors="replace")[-OUTPUT:]

    plan = {"framework": args.framework, "weights": SLOTS * BATCHES, "schedules": [one.content() for one in schedules]}
    limit = args.limit * 60 if args.limit else 60 + SECONDS * len(schedules)
    started = time.monotonic()
    try:
        launch.run(
            "nemesis",
            START,
            plan,
            limit=limit,
            on_block=on_block,
            while_running=look,
            elastic=True,
            virtual=args.virtual,
        )
    except JobError as error:
        if len(done) == len(schedules):
            say(f"the job ended badly after its last schedule, after {time.monotonic() - started:.0f} s:\n{error}")
            return done, None
        keep(args, schedules[len(done)], last)
        return done, str(error)
    return done, None


def keep(args: argparse.Namespace, schedule: Schedule, texts: dict[str, str]) -> None:
    """Write a history where it was asked for."""
    if args.histories is not None:
        folder = args.histories / f"{args.framework}.{schedule.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text)


def report_of(args: argparse.Namespace, found: list[tuple[Schedule, History | None, list[str]]]) -> Report:
    """Return the figures of each kind, and what must show."""
    report = Report("nemesis", START, [], COLUMNS, draw=draw)
    for kind in dict.fromkeys(schedule.kind for schedule, *_ in found):
        own = [(schedule, history, wrong) for schedule, history, wrong in found if schedule.kind == kind]
        histories = [history for _, history, _ in own if history is not None]
        recoveries = [one.seconds for history in histories for one in history.recoveries()]
        made = Counter(one.action for schedule, *_ in own for one in schedule.troubles)
        setting = {
            "framework": args.framework,
            "seeds": [schedule.seed for schedule, *_ in own],
            **({"hosts": "virtual"} if args.virtual else {}),
        }
        report.rows.append(
            row(
                kind,
                setting,
                spread(recoveries) if recoveries else 0.0,
                "s from a death until all survivors train on",
                schedules=len(own),
                resets=sum(history.resets for history in histories),
                lost=sum(history.lost for history in histories),
                violations=sum(bool(wrong) for *_, wrong in own),
                recoveries=recoveries,
                **{action: made[action] for action in ("kill", "stop", "cut", "join", "leave", "slow disk")},
            )
        )
    bad = [schedule.seed for schedule, _, wrong in found if wrong]
    told = f"{len(bad)} of {len(found)}" + (f", of seeds {bad}" if bad else "")
    where = ", virtual hosts" if args.virtual else ""
    report.wants(f"schedules with a violation, {args.framework}{where}", told, "none", not bad, exact=True)
    return report


def draw(figure: Any, rows: list[Row]) -> None:
    """Seconds from each death until all survivors train on, by kind."""
    axes = figure.subplots()
    for place, each in enumerate(rows):
        axes.plot([place] * len(each["recoveries"]), each["recoveries"], "o", alpha=0.5, color=plot.COLOURS[0])
    axes.set_xticks(range(len(rows)), [each["arm"] for each in rows])
    axes.set_ylim(bottom=0)
    plot.label(axes, "each dot is a death", "", "s until all survivors train on")
