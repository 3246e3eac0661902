"""Ranks that die, are stopped or cut off, and hosts that come and go: how soon others train on, and what must hold."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ..support import launch
from ..support.figures import Block, spread
from ..support.nemesis import (
    COLUMNS,
    EVERY_BATCH,
    HOROVOD,
    KINDS,
    SLOTS,
    START,
    History,
    Schedule,
    Trouble,
    drawn,
)
from ..support.report import Case, Option, Panel, Report, Row, Say, chosen, columns, row

FRAMEWORK = Option("--framework", "torch", "of the model", {"choices": ("torch", "tensorflow")})
ACTIONS = ("kill", "stop", "cut", "join", "leave", "slow disk")


def history_of(block: Block) -> History:
    """Return the history that a job has written of a schedule."""
    return History(Schedule.of(block["schedule"]), block["history"])


def arms_of(text: str, known: tuple[str, ...]) -> list[str]:
    """Return the arms of a command line's list; ValueError for one that the case does not have."""
    arms = text.split(",")
    if unknown := {*arms} - {*known}:
        raise ValueError(f"no arm {', '.join(map(repr, sorted(unknown)))} in this case: take of {', '.join(known)}")
    return arms


# -- elastic -----------------------------------------------------------------------------------------------------------

LIMIT = 1.2
"""Times Horovod's, at most."""
PARTS = ("found_out", "restart", "state")
"""Of a recovery."""


def elastic(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    arms = arms_of(args.arms, (HOROVOD, *KINDS))
    if args.ranks != START:
        raise ValueError(f"--ranks {args.ranks}: {START} begin, of which one dies")
    if args.framework == "tensorflow" and HOROVOD in arms:
        raise ValueError("Horovod's elastic state for Keras does not work on Keras 3: leave the arm 'horovod' out")
    report = ELASTIC.report(args, [])
    progress = launch.Progress(len(args.weights) * args.repetitions * len(arms), say)

    def on_block(block: Block) -> None:
        history = history_of(block)
        progress(f"{history.schedule}: {', '.join(f'{one.seconds:.2f} s' for one in history.recoveries())}")

    for weights in args.weights:
        order = launch.repetitions(arms, args.repetitions)
        schedules = [deadly(args.seed + repetition, arm) for repetition, arm in order]
        plan = {"framework": args.framework, "weights": weights}
        plan["schedules"] = [schedule.content() for schedule in schedules]
        limit = args.limit * 60 if args.limit else 60 + 60 * len(schedules)
        blocks = launch.run("nemesis", START, plan, limit=limit, on_block=on_block, elastic=True)
        setting = chosen(args, "framework", "seed", weights=weights)
        report.rows += [elastic_row(arm, setting, list(map(history_of, blocks))) for arm in arms]
    for each in report.rows:
        if each["arm"] != HOROVOD:
            if each["ratio"] is not None:
                what = f"s from death to training over Horovod's, {each['arm']}, {each['setting']['weights']:,} weights"
                report.at_most(what, each["ratio"], LIMIT)
            again = f"{each['again']:g}"
            report.wants(f"steps taken again, {each['arm']}", again, "none", not each["again"], exact=True)
    return report


def deadly(seed: int, arm: str) -> Schedule:
    """Return a schedule in which one rank dies; of the same seed at the same point, whatever the arm."""
    draws = random.Random(seed)
    point = draws.choice([point for point in EVERY_BATCH if point != "apply"])
    death = Trouble(0, "kill", point, draws.randint(8, 16), draws.randrange(START), draws.uniform(0.0, 0.01))
    return Schedule(seed, arm, (death,))


def elastic_row(arm: str, setting: dict[str, Any], histories: list[History]) -> Row:
    """Return the figures of an arm: medians over its deaths."""
    by_seed: dict[int, dict[str, float]] = {}
    for history in histories:
        for one in history.recoveries():
            by_seed.setdefault(history.schedule.seed, {})[history.schedule.kind] = one.seconds
    own = [one for history in histories if history.schedule.kind == arm for one in history.recoveries()]
    if not own:
        raise launch.JobError(f"no survivor of a death has trained on under {arm}: see bench.py nemesis --histories")
    ratios = [seconds[arm] / seconds[HOROVOD] for seconds in by_seed.values() if {arm, HOROVOD} <= {*seconds}]
    return row(
        *(arm, setting, spread([one.seconds for one in own]), "s from a death until all survivors train on"),
        again=sum(one.again for one in own) / len(own),
        ratio=spread(ratios).value if ratios else None,
        ratios=ratios,
        **{part: spread([getattr(one, part) for one in own]).value for part in PARTS},
    )


ELASTIC = Case(
    name="elastic",
    help="how long after a rank's death the others train on, and what it costs, beside Horovod's elastic training",
    text="""How long after a rank's death its survivors train on: ours, and Horovod's own elastic training.

In each repetition the same rank dies at the same point under every arm, in alternation. Horovod's re-initialization
(its shutdown and its rendezvous) is the same in all arms, and is told apart.""",
    run=elastic,
    columns=columns(
        "arm | weights = setting.weights ,d | s from death to training = value .2f ~ | found out = found_out .2f | "
        "Horovod's restart = restart .2f | state = state .3f | steps taken again = again .1f | x Horovod = ratio .2f"
    ),
    panels=(Panel(), *map(Panel, PARTS)),
    group="{weights:,} weights",
    ranks=START,
    arms=",".join((HOROVOD, *KINDS)),
    repetitions=10,
    options=(
        FRAMEWORK,
        Option("--weights", [SLOTS * COLUMNS, 5_000_000], "of the models"),
        Option("--seed", 0, "of points and victims"),
    ),
    quick={"arms": "horovod,solo", "weights": [SLOTS * COLUMNS], "repetitions": 1},
)


# -- nemesis -----------------------------------------------------------------------------------------------------------

OUTPUT = 100_000
"""Characters of a job's output that are kept: stacks of all its processes."""
SECONDS = 60.0
"""A schedule takes at most, on a slow machine, on average."""
Found = tuple[Schedule, History | None, list[str]]
"""A schedule, its history if it came to its end, and what should not have been."""


def nemesis(args: argparse.Namespace, say: Say) -> Report:
    """Go through the schedules, and judge."""
    if args.ranks != START:
        raise ValueError(f"--ranks {args.ranks}: schedules begin with {START} ranks")
    wanted = arms_of(args.arms, KINDS)
    seeds = args.seeds or range(args.first, args.first + args.schedules)
    left = [schedule for schedule in map(drawn, seeds) if schedule.kind in wanted]
    if not left:
        raise ValueError("none of these schedules is of these arms: give more --schedules, or other --seeds")
    found: list[Found] = []
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
    return nemesis_report(args, found)


def one_job(
    args: argparse.Namespace, schedules: list[Schedule], progress: launch.Progress, say: Say
) -> tuple[list[Found], str | None]:
    """Return what was found of schedules that came to their end, and why the job ended before the others."""
    done: list[Found] = []
    last: dict[str, str] = {}

    def on_block(block: Block) -> None:
        history = history_of(block)
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

    plan = {"framework": args.framework, "weights": SLOTS * COLUMNS, "schedules": [one.content() for one in schedules]}
    limit = args.limit * 60 if args.limit else 60 + SECONDS * len(schedules)
    how: dict[str, Any] = {"on_block": on_block, "while_running": look, "elastic": True, "virtual": args.virtual}
    started = time.monotonic()
    try:
        launch.run("nemesis", START, plan, limit=limit, **how)
    except launch.JobError as error:
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


def nemesis_report(args: argparse.Namespace, found: list[Found]) -> Report:
    """Return the figures of each kind, and what must show."""
    report = NEMESIS.report(args, [])
    for kind in dict.fromkeys(schedule.kind for schedule, *_ in found):
        own = [(schedule, history, wrong) for schedule, history, wrong in found if schedule.kind == kind]
        histories = [history for _, history, _ in own if history is not None]
        recoveries = [one.seconds for history in histories for one in history.recoveries()]
        made = Counter(one.action for schedule, *_ in own for one in schedule.troubles)
        setting = chosen(args, "framework", seeds=[schedule.seed for schedule, *_ in own])
        setting |= {"hosts": "virtual"} if args.virtual else {}
        value = spread(recoveries) if recoveries else 0.0
        report.rows.append(
            row(
                *(kind, setting, value, "s from a death until all survivors train on"),
                schedules=len(own),
                resets=sum(history.resets for history in histories),
                lost=sum(history.lost for history in histories),
                violations=sum(bool(wrong) for *_, wrong in own),
                recoveries=recoveries,
                **{action: made[action] for action in ACTIONS},
            )
        )
    bad = [schedule.seed for schedule, _, wrong in found if wrong]
    told = f"{len(bad)} of {len(found)}" + (f", of seeds {bad}" if bad else "")
    where = ", virtual hosts" if args.virtual else ""
    report.wants(f"schedules with a violation, {args.framework}{where}", told, "none", not bad, exact=True)
    return report


NEMESIS = Case(
    name="nemesis",
    help="elastic training: ranks killed, stopped, cut off, hosts come and go; nothing lost, counted twice, hung",
    text="""Elastic training with trouble: ranks are killed, stopped, cut off, hosts come and go; what must hold, holds.

Each schedule is drawn from a seed: --seeds goes through these again. Weights count how often each gradient was applied,
so a gradient that counts twice, or that is lost with nobody who held it, shows.""",
    run=nemesis,
    columns=columns(
        "arm | schedules = schedules d | killed = kill d | stopped = stop d | cut off = cut d | joined = join d | "
        "left = leave d | resets = resets d | gradients lost with the dead = lost d | s from a death = value .2f | "
        "violations = violations d"
    ),
    panels=(Panel(), Panel("violations")),
    ranks=START,
    arms=",".join(KINDS),
    repetitions=1,
    options=(
        FRAMEWORK,
        Option(
            *("--seeds", None, "of the schedules; else from --first on"), {"type": int, "nargs": "+", "metavar": "SEED"}
        ),
        Option("--first", 0, "of the first schedule", {"metavar": "SEED"}),
        Option("--schedules", 200, "how many, seed by seed", {"metavar": "N"}),
        Option("--in-a-job", 20, "schedules that one job goes through", {"metavar": "N"}),
        Option(
            *("--virtual", False),
            "on virtual hosts (root): every second rank that is killed takes its host along, a cut is of the link",
        ),
        Option("--histories", None, "keep the histories of violations there", {"type": Path, "metavar": "DIR"}),
    ),
    quick={"schedules": len(KINDS)},
)
