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

from ..support import launch, plot, soak_gossip
from ..support.arms import parse_arms
from ..support.blocks import identical, late_counts, mean_of
from ..support.intervals import slope
from ..support.launch import Block, Say
from ..support.report import Column, Report, Row, chosen, row

HELP = "very many rounds with random pauses and stopped processes: nothing lost, replicas identical, memory flat"
COLUMNS = (
    Column("arm", "arm"),
    Column("rounds/s", "value", ".1f"),
    Column("rounds", "rounds", "d"),
    Column("produced", "produced", "d"),
    Column("applied", "applied", "d"),
    Column("identical", "identical"),
    Column("stops", "stops", "d"),
    Column("MB at start", "start_mb", ".1f"),
    Column("at end", "end_mb", ".1f"),
    Column("MB/100k rounds", "slope_mb", "+.2f"),
    Column("staleness", "staleness_mean", ".2f"),
    Column("most", "staleness_most", "d"),
    Column("graphs", "graphs", "d"),
    Column("weights off", "weights_off", ".1e"),
)
SETTLED = 0.2
"""Share of the rounds after which memory must be flat: caches and buffers are there by then."""
FLAT = 5.0
"""MB in 100,000 rounds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=4, arms="solo", repetitions=1)
    parser.add_argument("--rounds", type=int, default=100_000, help="steps of each rank; of adpsgd pairings")
    parser.add_argument("--delay", type=float, default=0.01, metavar="S", help="longest random pause of a step")
    parser.add_argument("--share", type=float, default=0.05, help="of the steps that have a pause")
    parser.add_argument("--stop-every", type=float, default=5.0, metavar="S", help="mean time between two stops")
    parser.add_argument("--longest-stop", type=float, default=1.0, metavar="S", help="of a process")
    parser.add_argument("--seed", type=int, default=0, help="of pauses and stops")
    parser.add_argument(
        "--uneven", type=float, default=0.5, help="gossip: by which share ranks take more or fewer steps than others"
    )


class Stopper:
    """Stops a random rank for a random time, again and again, by being called often. Continues whom it stopped.

    Args:
        ranks: of the job.
        every: mean seconds between two stops.
        longest: seconds.
        seed: of the draws.
    """

    def __init__(self, ranks: int, every: float, longest: float, seed: int) -> None:
        self._ranks, self._every, self._longest = ranks, every, longest
        self._draws = random.Random(seed)
        self._next: float | None = None
        self.stops = 0
        self.seconds = 0.0

    def __call__(self, folder: Path) -> None:
        """Stop a rank if it is time to, once training is on, and see it through."""
        begun = all((folder / f"soak.{rank}.jsonl").exists() for rank in range(self._ranks))
        if not begun or (folder / "stop").exists():
            return
        now = time.monotonic()
        if self._next is None:
            self._next = now + self._draws.expovariate(1 / self._every)
        if now < self._next:
            return
        self._next = None
        pid = int((folder / f"pid.{self._draws.randrange(self._ranks)}").read_text())
        length = self._draws.uniform(0.02, self._longest)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                time.sleep(length)
            finally:
                os.kill(pid, signal.SIGCONT)
            self.stops += 1
            self.seconds += length


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.rounds, args.stop_every = min(args.rounds, 2000), min(args.stop_every, 1.0)
    report = Report("soak", args.ranks, [], COLUMNS, draw=draw)
    for arm in parse_arms(args.arms, args.ranks, rivals=(), gossip=True):
        gossips = gossip_of(arm) is not None
        plan = chosen(args, "rounds", "delay", "share", "seed", arm=arm)
        plan |= soak_gossip.plan_of(args) if gossips else {"drain_every": max(1, args.rounds // 10)}
        stopper = Stopper(args.ranks, args.stop_every, args.longest_stop, args.seed)
        watch = Watch(say, args.rounds)

        def often(folder: Path, stopper: Stopper = stopper, watch: Watch = watch) -> None:
            watch(folder)
            stopper(folder)

        limit = args.limit * 60 if args.limit else 300 + args.rounds * (0.2 if gossips else 0.05)
        job = "soak_gossip" if gossips else "soak"
        [block] = launch.run(job, args.ranks, plan, limit=limit, while_running=often)
        setting = chosen(args, "delay", "share", "rounds", "seed", "stop_every", "longest_stop")
        make, check = (soak_gossip.row_of, soak_gossip.judge) if gossips else (row_of, judge)
        report.rows.append(make(block, setting, common(block, stopper)))
        check(report, report.rows[-1])
    return report


class Watch:
    """Says how far rank 0 is, twice a minute."""

    def __init__(self, say: Say, rounds: int) -> None:
        self._say, self._rounds, self._last = say, rounds, time.monotonic()

    def __call__(self, folder: Path) -> None:
        """Look."""
        notes = folder / "soak.0.jsonl"
        if time.monotonic() - self._last < 30 or not notes.exists():
            return
        self._last = time.monotonic()
        lines = notes.read_text().rpartition("\n")[0].splitlines()
        if not lines:
            return
        note = json.loads(lines[-1])
        left = note["s"] * (self._rounds - note["round"]) / max(1, note["round"]) / 60
        self._say(f"round {note['round']:.0f} of {self._rounds}, {note['mb']:.0f} MB; {left:.1f} min left")


def common(block: Block, stopper: Stopper) -> dict[str, Any]:
    """Figures of every job. Of memory, those of the rank whose memory grows fastest."""
    fastest = max(block["by_rank"], key=lambda own: growth(own["memory"]))["memory"]
    settled = [note for note in fastest if note["round"] >= SETTLED * fastest[-1]["round"]]
    return {
        "identical": identical([block]),
        "stops": stopper.stops,
        "stopped_s": stopper.seconds,
        "start_mb": settled[0]["mb"],
        "end_mb": settled[-1]["mb"],
        "slope_mb": growth(fastest),
        "memory": [own["memory"] for own in block["by_rank"]],
    }


def row_of(block: Block, setting: dict[str, Any], figures: dict[str, Any]) -> Row:
    """The figures of one job of an arm that does not gossip."""
    ranks = block["by_rank"]
    rounds = min(own["stats"]["rounds"] for own in ranks)
    late = late_counts(own["stats"] for own in ranks)
    return row(
        block["arm"],
        setting,
        rounds / max(own["elapsed"] for own in ranks),
        "rounds/s",
        rounds=rounds,
        produced=sum(own["stats"]["gradients_produced"] for own in ranks),
        applied=min(own["stats"]["gradients_applied"] for own in ranks),
        applied_alike=len({own["stats"]["gradients_applied"] for own in ranks}) == 1,
        staleness_mean=mean_of(late),
        staleness_most=max(late),
        **figures,
    )


def growth(notes: list[dict[str, float]]) -> float:
    """MB in 100,000 rounds, once settled."""
    settled = [note for note in notes if note["round"] >= SETTLED * notes[-1]["round"]]
    return 1e5 * slope([note["round"] for note in settled], [note["mb"] for note in settled])


def judge(report: Report, each: Row) -> None:
    """Add what must show."""
    alike = each["produced"] == each["applied"] and each["applied_alike"]
    text = f"{each['applied']} of {each['produced']}"
    report.wants(f"gradients applied, {each['arm']}", text, "all, on every rank", alike, exact=True)
    same = "yes" if each["identical"] else "no"
    report.wants(f"replicas identical, {each['arm']}", same, "bit for bit", each["identical"], exact=True)
    report.at_most(f"MB in 100,000 rounds, {each['arm']}", each["slope_mb"], FLAT)


def draw(figure: Any, rows: list[Row]) -> None:
    """Memory over rounds, a line a rank: all of it, and what it grew by once settled."""
    axes = figure.subplots(len(rows), 2, squeeze=False)
    for (whole, grown), each in zip(axes, rows, strict=True):
        for rank, notes in enumerate(each["memory"]):
            colour = plot.COLOURS[(0, 1, 5, 7, 3, 6, 2, 4)[rank % 8]]
            look = {"color": colour, "linestyle": ("-", "--", "-.", ":")[rank % 4]}
            rounds, megabytes = [note["round"] for note in notes], [note["mb"] for note in notes]
            begin = next(i for i, round_ in enumerate(rounds) if round_ >= SETTLED * rounds[-1])
            whole.plot(rounds, megabytes, label=f"rank {rank}", **look)
            grown.plot(rounds[begin:], [mb - megabytes[begin] for mb in megabytes[begin:]], **look)
        whole.set_ylim(0, 1.15 * max(note["mb"] for notes in each["memory"] for note in notes))
        plot.label(whole, f"{each['arm']}: {each['stops']} stops of a rank", "round", "memory of the process, MB")
        steady = f"{each['slope_mb']:+.2f} MB in 100,000 rounds"
        if "grown_mb" in each:
            steady = f"{each['grown_mb']:+.2f} MB in all rounds, over {each['graphs']} graphs"
        plot.label(grown, steady, "round", "grown since settled, MB")
    plot.legend(figure, axes[0][0])
