"""Seconds to an accuracy, under each kind of imbalance: Horovod, torch's and others' libraries, and every mode of ours.

Kinds: nobody is late; one random rank is, in each step; one rank is 3 times slower for good; sequences differ in
length; links have 50 Mbit/s (virtual hosts: needs root); classes are split over the ranks, and the last rank is late.
Data: the real digits, clips of them, and gratings in noise, whose best possible accuracy is known; a small ResNet, an
LSTM and networks of two layers. Computation is slept beside the real work. All arms take as many steps together, by a
learning rate that rises and falls as a cosine. Arms have their documented settings; where all ranks are averaged after
local steps, these are four.

First each arm is trained once with each rate of a grid, of which the best counts by data that are held out of the
training data; then with --repetitions seeds. Targets are shares of what Horovod's arm ends with from the same seed.
Ranks copy their weights now and then without stopping, and the copies are scored later: where ranks share weights rank
0's, else their mean. Recommended is the arm that reaches both targets soonest, of those whose accuracy is no more
than a point below Horovod's with its whole 95% interval. --resume FILE keeps each training as it ends.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_async.simulation.names import GOSSIP, LEADERS, RIVALS, read_name

from ..support import gratings, launch, plot
from ..support.arms import WARM_UP, installed, need_arm, parse_arms
from ..support.blocks import by_arm, grouped, identical
from ..support.imbalance import KINDS, block_of
from ..support.intervals import Interval, mean_interval, spread
from ..support.launch import START, Block, Progress, Say, repetitions
from ..support.options import add_numbers
from ..support.recommendation import Candidate, Choice, best_rate, choose, on_edge, reached_at
from ..support.report import INTERVAL, Column, Report, Row, chosen, ends, ranged, row, table
from ..support.trainings import curve_of
from .network import ENVIRONMENT

HELP = "seconds to two targets under each kind of imbalance, all arms with tuned rates; which one to take"
BASELINE = "horovod"
QUORUMS = ("all", "majority", "solo", "auto")
COMPRESSED = ("osgp-bf16", "dpsgd-bf16", "local-int8", "diloco-int8")
"""Arms that are trained only where the network is slow, as all whose messages are compressed."""
CORRECTED = ("dpsgd-qg", "adpsgd-qg")
"""Arms that are trained only where classes are split, as all with quasi-global momentum."""
ARMS = (*RIVALS, *QUORUMS, *GOSSIP, *LEADERS, *COMPRESSED, *CORRECTED)
QUICK = "horovod,solo,sgp"
COLUMNS = (
    Column("kind", "setting.kind"),
    Column("arm", "arm"),
    Column("rate", "lr", "g"),
    Column("", "edge"),
    Column("s to first", "first_s", ".2f"),
    Column("reached", "first_reached"),
    *ranged("s to both", "both_s", ".2f"),
    Column("reached", "both_reached"),
    Column("sooner", "speedup", ".2f"),
    *ranged("accuracy", "value", ".4f", INTERVAL),
    *ranged("difference", "difference", "+.4f", INTERVAL),
    Column("seconds", "seconds", ".2f"),
    Column("steps", "steps", "d"),
    Column("take", "take"),
)
TUNING_SEED = 1000
"""Seed of the trainings that rates are chosen by: none of those that count."""
GRID = (0.4, 1.0, 2.5)
LOOKS = 16
LEAST_TIME = 0.03
"""Seconds that a step takes beside what is slept, on few cores: a job may take several times as long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=4, arms=",".join(installed(ARMS)), repetitions=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="of imbalance")
    text = "accuracies to be reached, as shares of Horovod's"
    parser.add_argument("--targets", type=float, nargs=2, default=[0.98, 0.995], metavar="SHARE", help=text)
    text = "learning rates that are tried, as multiples of the kind's own; one: nothing is tuned"
    add_numbers(parser, "--grid", GRID, "X", text)
    parser.add_argument("--length", type=float, default=1.0, metavar="X", help="of the trainings, as a multiple")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure, recommend and judge."""
    if args.quick:
        args.kinds, args.grid, args.repetitions = args.kinds[:2], [1.0], 1
        args.length = min(args.length, 0.25)
    if not 0 < args.targets[0] < args.targets[1]:
        raise ValueError("--targets: take two shares above 0, the lower one first")
    if min(args.grid) <= 0 or args.length <= 0:
        raise ValueError("--grid and --length: take numbers above 0")
    arms = parse_arms(args.arms, args.ranks, RIVALS, gossip=True, leaders=True, reduced=True)
    need_arm(BASELINE, arms)
    plans = {kind: arms_of(kind, arms) for kind in dict.fromkeys(args.kinds)}
    tried = len(args.grid) if len(args.grid) > 1 else 0
    progress = Progress(sum(len(own) for own in plans.values()) * (tried + args.repetitions), say)
    report = Report("time_to_accuracy", args.ranks, [], COLUMNS, draw=draw)
    for kind, own in plans.items():
        tuned = measure(args, kind, tuning_blocks(args, kind, own), say, progress) if tried else []
        blocks = measure(args, kind, counting_blocks(args, kind, own, rates_of(args, kind, tuned, own)), say, progress)
        rows = rows_of(blocks, tuned, chosen(args, "targets", "grid", "length", kind=kind))
        recommend(report, rows)
        say(table(rows, COLUMNS))
        report.rows += rows
    if any(KINDS[kind].data == "gratings" for kind in plans):
        report.notes.append(f"gratings: the best possible accuracy is {gratings.best_accuracy():.3f}")
    return report


def arms_of(kind: str, arms: Sequence[str]) -> list[str]:
    """Arms of a kind: those with compression only where the network is slow, quasi-global momentum where classes
    are split."""
    slow, split = KINDS[kind].mbit is not None, KINDS[kind].split == "classes"
    names = {arm: read_name(arm) for arm in arms}
    return [arm for arm, of in names.items() if (slow or of.compression == "none") and (split or not of.quasi_global)]


def steps_of(args: argparse.Namespace, kind: str) -> int:
    """Steps of a training."""
    return max(WARM_UP + LOOKS, round(args.length * KINDS[kind].steps))


def rates(args: argparse.Namespace, kind: str) -> list[float]:
    """The rates that are tried."""
    return [round(KINDS[kind].lr * factor, 6) for factor in dict.fromkeys(args.grid)]


def tuning_blocks(args: argparse.Namespace, kind: str, arms: Sequence[str]) -> list[Block]:
    """Every arm with every rate, scored on data that are held out, and only at its end."""
    steps = steps_of(args, kind)
    return [
        block_of(kind, arm, TUNING_SEED, lr, steps, args.ranks, tuning=True) | {"looks": 1}
        for lr in rates(args, kind)
        for arm in arms
    ]


def counting_blocks(args: argparse.Namespace, kind: str, arms: Sequence[str], lr: dict[str, float]) -> list[Block]:
    """Every arm with its rate from every seed, in alternation."""
    steps = steps_of(args, kind)
    return [
        block_of(kind, arm, seed, lr[arm], steps, args.ranks, tuning=False) | {"looks": LOOKS}
        for seed, arm in repetitions(arms, args.repetitions)
    ]


def rates_of(args: argparse.Namespace, kind: str, tuned: list[Block], arms: Sequence[str]) -> dict[str, float]:
    """The rate that each arm has when it counts."""
    if not tuned:
        return dict.fromkeys(arms, rates(args, kind)[0])
    return {arm: best_rate({block["lr"]: final(block) for block in mine}) for arm, mine in by_arm(tuned).items()}


def final(block: Block) -> float:
    """The accuracy at the end."""
    return float(curve_of(block)[-1][1])


def measure(args: argparse.Namespace, kind: str, blocks: list[Block], say: Say, progress: Progress) -> list[Block]:
    """Run trainings of a kind in one job."""
    longest = sum(sum(LEAST_TIME + max(each) for each in block["times"]) for block in blocks)
    how: dict[str, Any] = {"mbit": KINDS[kind].mbit, "env": ENVIRONMENT} if KINDS[kind].mbit is not None else {}

    def tell(block: Block) -> str:
        which = f"rate {block['lr']:g}" if block["tuning"] else f"seed {block['seed']}"
        return f"{kind}, {which}, {block['arm']}: {final(block):.4f} in {curve_of(block)[-1][0]:.1f} s"

    limit = START + 4 * longest + 20 * len(blocks)
    return launch.measure(args, "time_to_accuracy", blocks, say, tell, seconds=limit, progress=progress, **how)


def rows_of(blocks: list[Block], tuned: list[Block], setting: dict[str, Any]) -> list[Row]:
    """One row an arm of a kind; differences are to the baseline from the same seed. The first is the baseline."""
    groups, tried = by_arm(blocks), by_arm(tuned)
    base = {block["seed"]: final(block) for block in groups[BASELINE]}
    until = {
        arm: [[reached_at(curve_of(b), share * base[b["seed"]]) for b in mine] for share in setting["targets"]]
        for arm, mine in groups.items()
    }
    horovods = statistics.median(until[BASELINE][1])
    rows = []
    for arm, mine in groups.items():
        pairs = [final(block) - base[block["seed"]] for block in mine]
        difference = mean_interval(pairs) if arm != BASELINE else Interval(0.0, 0.0, 0.0)
        (first, both), first_block = map(spread, until[arm]), mine[0]
        scores = {block["lr"]: final(block) for block in tried.get(arm, [])}
        lr = first_block["lr"]
        rows.append(
            row(
                arm,
                setting | {name: first_block[name] for name in ("data", "model", "split", "batch", "steps")},
                *(mean_interval([final(block) for block in mine]), "accuracy at the end, mean"),
                accuracy=statistics.fmean(final(block) for block in mine),
                lr=lr,
                edge="edge" if on_edge(lr, scores) else "",
                rates=scores,
                targets=[share * statistics.fmean(base.values()) for share in setting["targets"]],
                **ends("first_s", first),
                first_reached=_of(until[arm][0]),
                **ends("both_s", both),
                both_reached=_of(until[arm][1]),
                until=until[arm][1],
                speedup=horovods / both.value if math.isfinite(horovods) and math.isfinite(both.value) else None,
                **ends("difference", difference),
                seconds=statistics.median(curve_of(block)[-1][0] for block in mine),
                steps=statistics.median_low([sum(own["steps"] for own in block["by_rank"]) for block in mine]),
                curves=[curve_of(block) for block in mine],
                identical=identical(mine),
                take="",
            )
        )
    return rows


def _of(seconds: Sequence[float]) -> str:
    return f"{sum(map(math.isfinite, seconds))} of {len(seconds)}"


def recommend(report: Report, rows: list[Row]) -> None:
    """Mark what to take of a kind's arms, say so, and judge whether it is one of ours."""
    kind = rows[0]["setting"]["kind"]
    found = choose([candidate(each) for each in rows])
    if found is None:
        report.notes.append(f"{kind}: no arm reaches both targets and keeps its accuracy")
        return
    marks = {found.taken.arm: "take"} | {each.arm: "level" for each in found.level}
    for each in rows:
        each["take"] = marks.get(each["arm"], "")
    report.notes.append(f"{kind}: {words(found)}")
    edges = [each["arm"] for each in rows if each["edge"]]
    if edges:
        report.notes.append(f"{kind}: the best rate is at the grid's edge for {', '.join(edges)}")
    if kind != "none" and found.rival is not None:
        ours = math.inf if found.ours is None else found.ours.median
        report.at_most(f"{kind}: soonest of ours over soonest rival, to both targets", ours / found.rival.median, 1.0)


def candidate(each: Row) -> Candidate:
    """Return the part of a row that counts."""
    loss = Interval(each["difference"], each["difference_low"], each["difference_high"])
    return Candidate(each["arm"], each["until"], loss, read_name(each["arm"]).base in RIVALS)


def words(found: Choice) -> str:
    """A choice in a line."""
    parts = [f"take {found.taken.arm}, {found.taken.median:.2f} s to both targets ({_of(found.taken.seconds)} seeds)"]
    others = [each for each in (found.rival, found.ours) if each is not None and each is not found.taken]
    parts += [f"soonest {'rival' if each.rival else 'of ours'} {each.arm}, {each.median:.2f} s" for each in others]
    if found.level:
        parts.append(f"not told apart: {', '.join(each.arm for each in found.level)}")
    return "; ".join(parts)


def draw(figure: Any, rows: list[Row]) -> None:
    """Accuracy over seconds, a panel a kind: the mean of the seeds of those arms that matter, thin lines of others."""
    kinds = grouped(rows, lambda each: str(each["setting"]["kind"]))
    columns = min(2, len(kinds))
    lines = math.ceil(len(kinds) / columns)
    figure.set_size_inches(12, 0.6 + 4.6 * lines)
    panels = figure.subplots(lines, columns, squeeze=False)
    for axes in panels.flat[len(kinds) :]:
        axes.remove()
    for axes, (kind, mine) in zip(panels.flat, kinds.items(), strict=False):
        shown = highlighted(mine)
        for each in mine:
            seconds, scores = np.mean(each["curves"], axis=0).T
            if each["arm"] not in shown:
                axes.plot(seconds, scores, color="#999999", linewidth=0.7, alpha=0.7, zorder=1)
                continue
            own = plot.line(each["arm"], shown) | {"markersize": 4}
            sooner = "" if each["both_s"] is None else f", {each['both_s']:.2f} s"
            axes.plot(seconds, scores, label=f"{each['arm']}{sooner}{' (take)' * (each['take'] == 'take')}", **own)
        for target in mine[0]["targets"]:
            axes.axhline(target, color="#555555", linewidth=0.8, linestyle="--")
        least = mine[0]["targets"][0]
        axes.set_ylim(bottom=max(0.0, 1 - 4 * (1 - least)) if least > 0.75 else None)
        setting = mine[0]["setting"]
        text = f"{kind}: {KINDS[kind].text} ({setting['data']}, {setting['model']})"
        plot.label(axes, text, "seconds of training, mean", "test accuracy")
        if len(shown) < len(mine):
            axes.plot([], [], color="#999999", linewidth=0.7, label="the other arms")
        axes.legend(loc="lower right", fontsize=8, title="s to both targets (dashed)", title_fontsize=8)


def highlighted(rows: Sequence[Row], most: int = 6) -> list[str]:
    """Arms that are drawn in colour: the baseline, what to take, the soonest rivals and the soonest of ours."""

    def soonest(each: Row) -> float:
        return math.inf if each["both_s"] is None else float(each["both_s"])

    ordered = sorted(rows, key=lambda each: (each["take"] != "take", soonest(each)))
    rivals = [each["arm"] for each in ordered if read_name(each["arm"]).base in RIVALS and each["arm"] != BASELINE]
    ours = [each["arm"] for each in ordered if read_name(each["arm"]).base not in RIVALS]
    return [BASELINE, *rivals[: most // 2 - 1], *ours[: most // 2]]
