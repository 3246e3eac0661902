"""Trouble: ranks that die, are stopped or cut off, hosts that come and go; how soon others train on, what must hold."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.support.names import gossip_of

from ..support import launch
from ..support.arms import parse_arms
from ..support.figures import Block, identical, late_counts, mean_of, slope, spread
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
UNIT = "s from a death until all survivors train on"


def check(args: argparse.Namespace, known: Sequence[str]) -> list[str]:
    """Return the arms of the command line; ValueError for one that the case does not have, or another job."""
    arms: list[str] = args.arms.split(",")
    if unknown := {*arms} - {*known}:
        raise ValueError(f"no arm {', '.join(map(repr, sorted(unknown)))} in this case: take of {', '.join(known)}")
    if args.ranks != START:
        raise ValueError(f"--ranks {args.ranks}: schedules begin with {START} ranks")
    return arms


def plan_of(args: argparse.Namespace, weights: int, schedules: Sequence[Schedule]) -> dict[str, Any]:
    """Return the plan of a job that goes through schedules with a model of this size."""
    content = [schedule.content() for schedule in schedules]
    return {"framework": args.framework, "weights": weights, "schedules": content}


# -- elastic -----------------------------------------------------------------------------------------------------------

LIMIT = 1.2
"""Times Horovod's, at most."""
PARTS = ("found_out", "restart", "state")
"""Of a recovery."""


def elastic(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    arms = check(args, (HOROVOD, *KINDS))
    if args.framework == "tensorflow" and HOROVOD in arms:
        raise ValueError("Horovod's elastic state for Keras does not work on Keras 3: leave the arm 'horovod' out")
    report = ELASTIC.report(args, [])
    progress = launch.Progress(len(args.weights) * args.repetitions * len(arms), say)
    for weights in args.weights:
        histories: list[History] = []

        def on_block(block: Block, histories: list[History] = histories) -> None:
            history = History.of(block)
            histories.append(history)
            progress(f"{history.schedule}: {', '.join(f'{one.seconds:.2f} s' for one in history.recoveries())}")

        order = launch.repetitions(arms, args.repetitions)
        schedules = [deadly(args.seed + repetition, arm) for repetition, arm in order]
        limit = args.limit * 60 if args.limit else 60 + 60 * len(schedules)
        launch.run("nemesis", START, plan_of(args, weights, schedules), limit=limit, on_block=on_block, elastic=True)
        setting = chosen(args, "framework", "seed", weights=weights)
        report.rows += [elastic_row(arm, setting, histories) for arm in arms]
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
    """Return the figures of an arm: medians over its deaths; ratios are to Horovod's with the same seed."""
    seconds = {(h.schedule.kind, h.schedule.seed): one.seconds for h in histories for one in h.recoveries()}
    own = [one for history in histories if history.schedule.kind == arm for one in history.recoveries()]
    if not own:
        raise launch.JobError(f"no survivor of a death has trained on under {arm}: see bench.py nemesis --histories")
    base = {seed: value for (kind, seed), value in seconds.items() if kind == HOROVOD}
    ratios = [value / base[seed] for (kind, seed), value in seconds.items() if kind == arm and seed in base]
    return row(
        *(arm, setting, spread([one.seconds for one in own]), UNIT),
        again=sum(one.again for one in own) / len(own),
        ratio=spread(ratios).value if ratios else None,
        ratios=ratios,
        **{part: spread([getattr(one, part) for one in own]).value for part in PARTS},
    )


ELASTIC = Case(
    name="elastic",
    help="how long after a rank's death the others train on, and what it costs, with Horovod's elastic training",
    text="""How long after a rank's death its survivors train on: ours, and Horovod's own elastic training.

In each repetition the same rank dies at the same point under every arm, in alternation. Horovod's re-initialization
(its shutdown and its rendezvous) is the same in all arms, and is shown separately.""",
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
"""A schedule, its history if it was completed, and the violations."""


def nemesis(args: argparse.Namespace, say: Say) -> Report:
    """Go through the schedules, and judge. A job that ends by force is a violation; the others go into the next job."""
    wanted = check(args, KINDS)
    seeds = args.seeds or range(args.first, args.first + args.schedules)
    left = [schedule for schedule in map(drawn, seeds) if schedule.kind in wanted]
    if not left:
        raise ValueError("none of these schedules is of these arms: give more --schedules, or other --seeds")
    found: list[Found] = []
    progress = launch.Progress(len(left), say)
    while left:
        job = left[: args.in_a_job]
        begun = len(found)
        error = one_job(args, job, found, progress, say)
        left = left[len(found) - begun :] if error is not None else left[len(job) :]
        if error is not None:
            broken, left = left[0], left[1:]
            say(f"VIOLATION {broken}: the job ended\n{error}")
            found.append((broken, None, ["the job ended"]))
            progress(f"{broken}: the job ended")
    return nemesis_report(args, found)


def one_job(
    args: argparse.Namespace, schedules: list[Schedule], found: list[Found], progress: launch.Progress, say: Say
) -> str | None:
    """Add what was found of schedules that were completed; return why the job ended before the others."""
    left = list(schedules)
    last: dict[str, str] = {}

    def on_block(block: Block) -> None:
        history, schedule = History.of(block), left.pop(0)
        wrong = history.violations()
        found.append((schedule, history, wrong))
        if wrong:
            say("\n".join([f"VIOLATION {schedule}", *wrong]))
            keep(args, schedule, {host: "\n".join(map(json.dumps, own)) for host, own in block["history"].items()})
        progress(f"{schedule}: {history.resets} resets")

    def look(folder: Path) -> None:
        last.clear()
        last.update((file.name, file.read_text()) for file in folder.glob(f"history.{len(schedules) - len(left)}.*"))
        last["output"] = (folder / "output").read_text(errors="replace")[-OUTPUT:]

    limit = args.limit * 60 if args.limit else 60 + SECONDS * len(schedules)
    how: dict[str, Any] = {"on_block": on_block, "while_running": look, "elastic": True, "virtual": args.virtual}
    try:
        launch.run("nemesis", START, plan_of(args, SLOTS * COLUMNS, schedules), limit=limit, **how)
    except launch.JobError as error:
        if left:
            keep(args, left[0], last)
            return str(error)
        say(f"the job ended badly after its last schedule:\n{error}")
    return None


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
        own = [each for each in found if each[0].kind == kind]
        histories = [history for _, history, _ in own if history is not None]
        recoveries = [one.seconds for history in histories for one in history.recoveries()]
        made = Counter(one.action for schedule, *_ in own for one in schedule.troubles)
        setting = chosen(args, "framework", seeds=[schedule.seed for schedule, *_ in own])
        setting |= {"hosts": "virtual"} if args.virtual else {}
        report.rows.append(
            row(
                *(kind, setting, spread(recoveries) if recoveries else 0.0, UNIT),
                schedules=len(own),
                resets=sum(history.resets for history in histories),
                lost=sum(history.lost for history in histories),
                violations=sum(bool(wrong) for *_, wrong in own),
                recoveries=recoveries,
                **{action: made[action] for action in ACTIONS},
            )
        )
    bad = [schedule.seed for schedule, _, wrong in found if wrong]
    summary = f"{len(bad)} of {len(found)}" + (f", of seeds {bad}" if bad else "")
    where = ", virtual hosts" if args.virtual else ""
    report.wants(f"schedules with a violation, {args.framework}{where}", summary, "none", not bad, exact=True)
    return report


NEMESIS = Case(
    name="nemesis",
    help="elastic training: ranks killed, stopped, cut off, hosts come and go; nothing lost, counted twice, hung",
    text="""Elastic training with trouble: ranks are killed, stopped, cut off, hosts come and go; what must hold, holds.

Each schedule is drawn from a seed: --seeds goes through these again. Weights count how often each gradient was applied,
so a gradient that counts twice, or that is lost although no rank that held it died, shows.""",
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


# -- soak --------------------------------------------------------------------------------------------------------------

SETTLED = 0.2
"""Share of the rounds after which memory must be flat: caches and buffers are there by then."""
FLAT, GROWS = 5.0, 5.0
"""MB in 100,000 rounds; of gossip in the whole run."""
GRAPHS = 40
"""Random graphs of arms that gossip, one after the other; a drain between them."""
WEIGHT = 1e-6
"""By how much, relatively, push-sum weights may miss the number of ranks."""
PROGRESS_EVERY = 30.0
"""Seconds between two lines of progress."""


def soak(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    report = SOAK.report(args, [])
    for arm in parse_arms(args.arms, args.ranks, rivals=(), gossip=True):
        plan = chosen(args, "rounds", "delay", "share", "seed", "uneven", arm=arm)
        plan |= {"graphs": min(GRAPHS, max(2, args.rounds // 50)), "drain_every": max(1, args.rounds // 10)}
        stopper = Stopper(args, say)
        limit = args.limit * 60 if args.limit else 300 + args.rounds * (0.2 if gossip_of(arm) else 0.05)
        [block] = launch.run("soak", args.ranks, plan, limit=limit, while_running=stopper)
        setting = chosen(args, "delay", "share", "rounds", "seed", "stop_every", "longest_stop")
        report.rows.append(soak_row(block, setting, stopper))
        judge_soak(report, report.rows[-1])
    return report


class Stopper:
    """Stops a random rank for a random time, again and again, by being called often; says how far rank 0 is.

    Args:
        args: the command line.
        say: takes a line of text.

    Attributes:
        stops, seconds: of all stops so far.
    """

    def __init__(self, args: argparse.Namespace, say: Say) -> None:
        self._args, self._say, self._draws = args, say, random.Random(args.seed)
        self._next: float | None = None
        self._reported = time.monotonic()
        self.stops, self.seconds = 0, 0.0

    def __call__(self, folder: Path) -> None:
        """Stop a rank if it is time to, once training is on, and continue it."""
        notes = [folder / f"soak.{rank}.jsonl" for rank in range(self._args.ranks)]
        if not all(file.exists() for file in notes) or (folder / "stop").exists():
            return
        now = time.monotonic()
        lines = notes[0].read_text().rpartition("\n")[0].splitlines()
        if lines and now - self._reported > PROGRESS_EVERY:
            self._reported, note, rounds = now, json.loads(lines[-1]), self._args.rounds
            left = note["s"] * (rounds - note["round"]) / max(1, note["round"]) / 60
            self._say(f"round {note['round']:.0f} of {rounds}, {note['mb']:.0f} MB; {left:.1f} min left")
        if self._next is None:
            self._next = now + self._draws.expovariate(1 / self._args.stop_every)
        if now < self._next:
            return
        self._next = None
        pid = int((folder / f"pid.{self._draws.randrange(self._args.ranks)}").read_text())
        length = self._draws.uniform(0.02, self._args.longest_stop)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                time.sleep(length)
            finally:
                os.kill(pid, signal.SIGCONT)
            self.stops += 1
            self.seconds += length


def settled(notes: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the notes of a rank's memory once it has settled."""
    return [note for note in notes if note["round"] >= SETTLED * notes[-1]["round"]]


def growth(notes: list[dict[str, float]]) -> float:
    """Return the MB per 100,000 rounds, once settled."""
    known = settled(notes)
    return 1e5 * slope([note["round"] for note in known], [note["mb"] for note in known])


def soak_row(block: Block, setting: dict[str, Any], stopper: Stopper) -> Row:
    """Return the figures of one job; memory is that of the rank whose memory grows fastest.

    ``produced`` and ``applied`` are gradients; of gossip messages sent and taken in.
    """
    ranks = block["by_rank"]
    fastest = max((own["memory"] for own in ranks), key=growth)
    stats = [own["stats"] for own in ranks]
    late, gossips = late_counts(stats), "done" in block
    rounds = block["done"] if gossips else min(own["rounds"] for own in stats)
    figures: Row = {"rounds": rounds, "staleness_mean": mean_of(late), "staleness_most": max(late, default=None)}
    if gossips:
        taken = sum(own["messages_taken"] + own["messages_left"] for own in stats)
        figures |= {"produced": sum(own["messages_sent"] for own in stats), "applied": taken}
        figures |= {name: sum(own[name] for own in stats) for name in ("steps", "averagings")}
        figures |= {"graphs": block["graphs_used"], "weights_off": max(block["weights_off"])}
        figures["grown_mb"] = growth(fastest) * rounds / 1e5
    else:
        applied = {own["gradients_applied"] for own in stats}
        figures |= {"produced": sum(own["gradients_produced"] for own in stats), "applied": min(applied)}
        figures["applied_alike"] = len(applied) == 1
    return row(
        *(block["arm"], setting, rounds / max(own["elapsed"] for own in ranks), "rounds/s"),
        **figures,
        identical=identical([block]),
        stops=stopper.stops,
        stopped_s=stopper.seconds,
        start_mb=settled(fastest)[0]["mb"],
        end_mb=fastest[-1]["mb"],
        slope_mb=growth(fastest),
        memory=[own["memory"] for own in ranks],
        curves=[[note["round"], note["mb"]] for note in fastest],
    )


def judge_soak(report: Report, each: Row) -> None:
    """Add the goals. A deadlock ends the job by force, and there is no row."""
    arm, ranks, wanted = each["arm"], report.ranks, each["setting"]["rounds"]
    alike = each["produced"] == each["applied"] and each.get("applied_alike", True)
    text, same = f"{each['applied']} of {each['produced']}", "yes" if each["identical"] else "no"
    if "graphs" in each:
        what = "pairings" if arm.startswith("adpsgd") else "steps of each rank"
        report.wants(f"{what}, {arm}", each["rounds"], f">= {wanted}", each["rounds"] >= wanted, exact=True)
        report.wants(f"messages taken in, {arm}", text, "all that were sent", alike, exact=True)
        what = f"push-sum weights' sum less {ranks}, the most at {each['graphs']} cuts, {arm}"
        off, limit = each["weights_off"], WEIGHT * ranks
        report.wants(what, off, f"<= {limit:g}", off <= limit, exact=True)
        report.at_most(f"MB that memory grew by, once settled, {arm}", each["grown_mb"], GROWS)
    else:
        report.wants(f"gradients applied, {arm}", text, "all, on every rank", alike, exact=True)
        report.at_most(f"MB in 100,000 rounds, {arm}", each["slope_mb"], FLAT)
    report.wants(f"replicas identical, {arm}", same, "bit for bit", each["identical"], exact=True)


SOAK = Case(
    name="soak",
    help="very many rounds with random pauses and stopped processes: nothing lost, replicas identical, memory flat",
    text="Very many rounds, with random pauses and ranks that are stopped and continued: nothing lost, memory flat.",
    run=soak,
    columns=columns(
        "arm | rounds/s = value .1f | rounds = rounds d | produced = produced d | applied = applied d | identical | "
        "stops = stops d | MB at start = start_mb .1f | at end = end_mb .1f | MB/100k rounds = slope_mb +.2f | "
        "staleness = staleness_mean .2f | most = staleness_most d | graphs = graphs d | weights off = weights_off .1e"
    ),
    panels=(Panel("curves", "curves"), Panel()),
    ranks=4,
    arms="solo",
    repetitions=1,
    options=(
        Option("--rounds", 100_000, "steps of each rank; of adpsgd pairings"),
        Option("--delay", 0.01, "longest random pause of a step", {"metavar": "S"}),
        Option("--share", 0.05, "of the steps that have a pause"),
        Option("--stop-every", 5.0, "mean time between two stops", {"metavar": "S"}),
        Option("--longest-stop", 1.0, "of a process", {"metavar": "S"}),
        Option("--seed", 0, "of pauses and stops"),
        Option("--uneven", 0.5, "gossip: by which share ranks take more or fewer steps than others"),
    ),
    quick={"rounds": 2000, "stop_every": 1.0},
)
