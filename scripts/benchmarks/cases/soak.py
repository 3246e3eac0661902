"""Very many rounds, with random pauses and ranks that are stopped and continued: nothing lost, memory flat."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from hvd_async.simulation.names import gossip_of

from ..support import launch
from ..support.arms import parse_arms
from ..support.figures import Block, identical, late_counts, mean_of, slope
from ..support.report import Case, Option, Panel, Report, Row, Say, chosen, columns, row

SETTLED = 0.2
"""Share of the rounds after which memory must be flat: caches and buffers are there by then."""
FLAT, GROWS = 5.0, 5.0
"""MB in 100,000 rounds; of gossip in the whole run."""
GRAPHS = 40
"""Random graphs of arms that gossip, one after the other; a drain between them."""
WEIGHT = 1e-6
"""By how much, relatively, push-sum weights may miss the number of ranks."""
TOLD = 30.0
"""Seconds between two lines of progress."""


def soak(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    report = SOAK.report(args, [])
    for arm in parse_arms(args.arms, args.ranks, rivals=(), gossip=True):
        gossips = gossip_of(arm) is not None
        plan = chosen(args, "rounds", "delay", "share", "seed", "uneven", arm=arm)
        plan |= {"graphs": min(GRAPHS, max(2, args.rounds // 50)), "drain_every": max(1, args.rounds // 10)}
        stopper = Stopper(args, say)
        limit = args.limit * 60 if args.limit else 300 + args.rounds * (0.2 if gossips else 0.05)
        [block] = launch.run("soak", args.ranks, plan, limit=limit, while_running=stopper)
        setting = chosen(args, "delay", "share", "rounds", "seed", "stop_every", "longest_stop")
        report.rows.append(row_of(block, setting, stopper))
        judge(report, report.rows[-1])
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
        self._told = time.monotonic()
        self.stops, self.seconds = 0, 0.0

    def __call__(self, folder: Path) -> None:
        """Stop a rank if it is time to, once training is on, and continue it."""
        notes = [folder / f"soak.{rank}.jsonl" for rank in range(self._args.ranks)]
        if not all(file.exists() for file in notes) or (folder / "stop").exists():
            return
        now = time.monotonic()
        if now - self._told > TOLD:
            self._told = now
            self._tell(notes[0])
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

    def _tell(self, file: Path) -> None:
        lines = file.read_text().rpartition("\n")[0].splitlines()
        if lines:
            note, rounds = json.loads(lines[-1]), self._args.rounds
            left = note["s"] * (rounds - note["round"]) / max(1, note["round"]) / 60
            self._say(f"round {note['round']:.0f} of {rounds}, {note['mb']:.0f} MB; {left:.1f} min left")


def settled(notes: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the notes of a rank's memory once it has settled."""
    return [note for note in notes if note["round"] >= SETTLED * notes[-1]["round"]]


def growth(notes: list[dict[str, float]]) -> float:
    """Return the MB per 100,000 rounds, once settled."""
    known = settled(notes)
    return 1e5 * slope([note["round"] for note in known], [note["mb"] for note in known])


def row_of(block: Block, setting: dict[str, Any], stopper: Stopper) -> Row:
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


def judge(report: Report, each: Row) -> None:
    """Add the goals. A deadlock ends the job by force, and there is no row."""
    arm, ranks, wanted, gossips = each["arm"], report.ranks, each["setting"]["rounds"], "graphs" in each
    if gossips:
        what = "pairings" if arm.startswith("adpsgd") else "steps of each rank"
        report.wants(f"{what}, {arm}", each["rounds"], f">= {wanted}", each["rounds"] >= wanted, exact=True)
    alike = each["produced"] == each["applied"] and each.get("applied_alike", True)
    what = f"messages taken in, {arm}" if gossips else f"gradients applied, {arm}"
    text = f"{each['applied']} of {each['produced']}"
    report.wants(what, text, "all that were sent" if gossips else "all, on every rank", alike, exact=True)
    if gossips:
        what = f"push-sum weights' sum less {ranks}, the most at {each['graphs']} cuts, {arm}"
        off, limit = each["weights_off"], WEIGHT * ranks
        report.wants(what, off, f"<= {limit:g}", off <= limit, exact=True)
    same = "yes" if each["identical"] else "no"
    what = f"replicas identical{' after each drain' if gossips else ''}, {arm}"
    report.wants(what, same, "bit for bit", each["identical"], exact=True)
    if gossips:
        report.at_most(f"MB that memory grew by, once settled, {arm}", each["grown_mb"], GROWS)
    else:
        report.at_most(f"MB in 100,000 rounds, {arm}", each["slope_mb"], FLAT)


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
