"""Short trainings on real data: sequences of different lengths, split classes, seconds to an accuracy."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_async.simulation.schedule import Schedule
from scripts.benchmarks.support.names import GOSSIP, LEADERS, RIVALS, SYNCHRONOUS, gossip_of, read_name, waits_for_none

from ..support import data
from ..support.arms import MUTANT, WARM_UP, installed, is_eager, listed, need_arm, parse_arms
from ..support.figures import (
    Block,
    Interval,
    by_arm,
    elapsed,
    everywhere,
    identical,
    late_counts,
    mean_contributors,
    mean_interval,
    mean_of,
    mean_staleness,
    median,
    spread,
    step_seconds,
)
from ..support.launch import START, Progress, block_of, measure, repetitions
from ..support.report import Case, Option, Panel, Report, Row, Say, chosen, columns, ends, interval_of, row, table
from ..support.schedule import one_random, own_pace, synchronous_seconds
from .imbalance import bound_of, judge_busy
from .network import ENVIRONMENT

POINT = 0.01
BASELINE = "horovod"


def score(block: Block) -> float:
    """Return a training's test accuracy."""
    return float(block["by_rank"][0]["accuracy"])


def judge_close(report: Report, each: Row, baseline: str) -> None:
    """Add the goal that the interval of an arm's difference lies within a point, of gossip one and a half."""
    points = 1.5 if gossip_of(each["arm"]) else 1.0
    interval = interval_of(each, "difference")
    text = f"{100 * interval.low:+.2f} to {100 * interval.high:+.2f} points"
    what = f"{each['arm']}'s accuracy less {baseline}'s, 95% interval"
    wanted = f"within {points:g} point{'s' if points > 1 else ''}"
    report.wants(what, text, wanted, interval.within(-points * POINT, points * POINT))


# -- sequence_lengths --------------------------------------------------------------------------------------------------

JUDGED, LEAST_SPEEDUP = ("solo", "majority"), 1.3
UNTIMED = 2
"""Steps in which Horovod fills its cache; they train as the others do."""
REAL_MS = 2.0
"""Milliseconds per frame that the real computation takes at most, to limit a job by."""


def sequence_lengths(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    arms = parse_arms(args.arms, args.ranks)
    need_arm(BASELINE, arms)
    if not 1 <= args.batch_size <= data.CLIPS:
        raise ValueError(f"--batch-size {args.batch_size}: there are {data.CLIPS} clips")
    blocks = length_blocks(args, arms)
    longest = sum(synchronous_seconds(frames_of(block, args.ranks)) for block in blocks) / 1e3
    say(f"{len(blocks)} trainings of {args.steps} steps, about {longest * args.ms / 60 + 1:.0f} min at most")

    def tell(block: Block) -> str:
        return f"seed {block['seed']}, {block['arm']}: {steps_per_second(block):.2f} steps/s, {score(block):.4f}"

    limit = START + 2 * longest * (args.ms + REAL_MS) + 20 * len(blocks)
    found = measure(args, "timed", blocks, say, tell, seconds=limit)
    names = ("steps", "ms", "frames", "bucketed", "batch_size", "lr", "momentum")
    report = LENGTHS.report(args, length_rows(found, chosen(args, *names, framework="torch", seed="the run's number")))
    judge_lengths(report)
    return report


def length_blocks(args: argparse.Namespace, arms: Sequence[str]) -> list[Block]:
    """Return every arm with every seed, in alternation; a step computes by the longest clip that was dealt."""
    task = {"name": "clips", "median": args.frames, "batch": args.batch_size, "bucketed": args.bucketed}
    task["steps"] = args.steps
    blocks = []
    for seed, arm in repetitions(arms, args.repetitions):
        frames = data.longest_of(task | {"seed": seed}, args.ranks)[UNTIMED:]
        more = chosen(args, "ms", "lr", "momentum", cosine=True, exact=True, scored=True, seed=seed)
        more |= {"untimed": UNTIMED, "steps": args.steps - UNTIMED, "times": (args.ms / 1e3 * frames).tolist()}
        blocks.append(block_of(arm, seed, task, **more, own={"seed": seed} if is_eager(arm) else {}))
    return blocks


def frames_of(block: Block, ranks: int) -> Schedule:
    """Return the frames of the longest clip of each rank in each timed step: the schedule, up to its unit."""
    return data.longest_of(block["task"] | {"seed": block["seed"]}, ranks)[UNTIMED:]


def steps_per_second(block: Block) -> float:
    """Return the steps per second of all ranks together, until the last has done its own."""
    return len(block["by_rank"]) / step_seconds(block)


def variation(block: Block) -> float:
    """Return the ranks' standard deviation over their mean, of a step's computation, mean over the steps."""
    seconds = np.array([own["computed"] for own in block["by_rank"]])
    return float((seconds.std(axis=0) / seconds.mean(axis=0)).mean())


def over_ideal(block: Block) -> float | None:
    """Return the speed-up over a synchronous optimizer that costs nothing; None without a duration of a frame."""
    slept = block["ms"] / 1e3 * synchronous_seconds(frames_of(block, len(block["by_rank"])))
    return slept / elapsed(block) if slept else None


def length_rows(blocks: list[Block], setting: Mapping[str, Any]) -> list[Row]:
    """Return a row for each arm; speed-ups and differences are to the baseline with the same seed."""
    groups = by_arm(blocks)
    base, rows = {block["seed"]: block for block in groups[BASELINE]}, []
    for arm, mine in groups.items():
        scores = [score(block) for block in mine]
        pairs = [score(block) - score(base[block["seed"]]) for block in mine]
        rows.append(
            row(
                *(arm, setting, spread([steps_per_second(block) for block in mine]), "steps/s of all ranks"),
                **ends("speedup", spread([steps_per_second(b) / steps_per_second(base[b["seed"]]) for b in mine])),
                bound=median(bound_of(block, frames_of(block, len(block["by_rank"]))) for block in mine),
                over_ideal=median(map(over_ideal, mine)),
                accuracy=statistics.fmean(scores),
                accuracies=scores,
                **ends("difference", mean_interval(pairs) if arm != BASELINE else None),
                variation=statistics.median(map(variation, mine)),
                staleness=median(map(mean_staleness, mine)),
                contributors=median(map(mean_contributors, mine)),
                computed=[own["computed"] for own in mine[0]["by_rank"]],
                identical=identical(mine),
                runs=len(mine),
            )
        )
    return rows


def judge_lengths(report: Report) -> None:
    """Add the goals."""
    base = next(each for each in report.rows if each["arm"] == BASELINE)
    if base["over_ideal"] is not None:
        more = ", so that speed-ups over it say too much; those over ideal do not"
        judge_busy(report, "Horovod's step over its own bound", 1 / base["over_ideal"], more)
    for each in report.rows:
        if each["arm"] in JUDGED:
            what, wanted = f"{each['arm']}'s steps a second over Horovod's", f">= {LEAST_SPEEDUP:g}"
            wanted += f"; the lengths allow {each['bound']:.2f}"
            report.at_least(what, each["speedup"], LEAST_SPEEDUP, wanted)
        if each["arm"] != BASELINE:
            judge_close(report, each, BASELINE)


LENGTHS = Case(
    name="sequence_lengths",
    old_name="lengths",
    help="an LSTM on sequences of different lengths: steps a second against the lengths' own bound, and test accuracy",
    text="""Sequences of different lengths: no delays are injected, the data itself makes ranks take longer in turn.

Li et al. (PPoPP 2020) trained an LSTM on videos of 29 to 1,776 frames, in batches of similar lengths, so that a step's
duration depended on which videos a rank had. Here an LSTM learns which digit there is most of in a clip, a sequence of
the real digits' images whose lengths are distributed like those videos' (--frames is the median). It is tested on clips
made of other images. All arms have the same batches in the same steps.

The LSTM is small, and a step computes for --ms milliseconds per frame of its longest clip: the real computation, and a
sleep for the rest. That is an accelerator for each rank, since ranks that computed all the time would wait for a
machine's few cores, not for each other. --ms 0: the real computation alone. Bounds assume a core for each rank.

Batches are of clips of similar length, as in practice, unless --no-bucketed. --repetitions is the number of seeds, each
with clips, weights and batches of its own; "over ideal" is the speed-up over a synchronous optimizer that costs
nothing, which the bounds are of too.""",
    run=sequence_lengths,
    columns=columns(
        "arm | steps/s = value .2f ~ | speed-up = speedup .3f ~ | bound = bound .3f | "
        "over ideal = over_ideal .3f | accuracy = accuracy .4f | difference = difference +.4f 95% | "
        "variation = variation .3f | staleness = staleness .2f | in a round = contributors .2f | runs = runs d"
    ),
    panels=(Panel("speedup", marks=("bound", "over_ideal")), Panel("accuracy"), Panel("difference", "points")),
    ranks=4,
    arms="horovod,majority,solo",
    repetitions=3,
    options=(
        Option("--steps", 480, "of each rank in each training"),
        Option("--ms", 5.0, "of computation per frame, real or slept; 0: none"),
        Option("--frames", 20, "of a clip, median", {"metavar": "N"}),
        Option("--bucketed", True, "batches are of similar lengths"),
        Option("--batch-size", 8, "clips a rank and step", {"metavar": "N"}),
        Option("--lr", 0.05, "the highest learning rate"),
        Option("--momentum", 0.9, "of SGD"),
    ),
    quick={"steps": 40, "repetitions": 1},
)


# -- split_classes -----------------------------------------------------------------------------------------------------

TRAIN = 1437
"""Images in the training part of a fold, at least."""
BATCH = 16
WORK = 0.02
"""Seconds of a step without sleep, if ranks share cores: a job may take five times as long."""
LEAST = 0.95
"""Accuracy that the baseline must reach, for a comparison to mean something."""


def split_classes(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge; others are compared with the first arm. ``--repetitions`` is the number of seeds."""
    named = listed(args.arms)
    known = ",".join(arm for arm in named if arm != MUTANT)
    arms = [*parse_arms(known, args.ranks, gossip=True, leaders=True), *(MUTANT for arm in named if arm == MUTANT)]
    steps = int(args.epochs * (TRAIN // (BATCH * args.ranks)))
    blocks = split_blocks(args, arms, steps)
    longest = len(blocks) * steps * (WORK + args.compute + args.delay)

    def tell(block: Block) -> str:
        return f"fold {block['task']['fold'] + 1}, seed {block['seed']}, {block['arm']}: {score(block):.4f}"

    found = measure(args, "timed", blocks, say, tell, seconds=300 + 5 * longest)
    setting = chosen(args, "compute", "epochs", late_rank_delay=args.delay, seed="fold and run", delay=None)
    setting["classes"] = "0 to 7 shared by the first ranks, 8 and 9 on the last alone"
    setting["own"] = {MUTANT: {"algorithm": "solo"}} if MUTANT in arms else {}
    report = SPLIT.report(args, split_rows(found, setting, arms[0], steps))
    for each in report.rows:
        if each["arm"] == arms[0]:
            report.at_least(f"{arms[0]}'s accuracy", each["value"], LEAST)
        elif each["arm"] == MUTANT:
            loss = -each["difference_high"]
            what = f"accuracy that the mutant loses at least (95%), of {arms[0]}'s"
            report.wants(what, loss, "> 0.05", loss > 5 * POINT)
        elif each["arm"] not in LEADERS and not gossip_of(each["arm"]):
            judge_close(report, each, arms[0])
    return report


def split_blocks(args: argparse.Namespace, arms: list[str], steps: int) -> list[Block]:
    """Return every arm on every fold from every seed, in alternation.

    If ranks do not wait for others, each takes as many steps as it can in the same time, all together as many as in
    other arms. (With as many each, the slowest would continue alone when the others are done.)
    """
    times = np.full((steps, args.ranks), args.compute)
    times[:, -1] += args.delay
    blocks = []
    for fold in range(args.folds):
        for seed, arm in repetitions(arms, args.repetitions):
            task = {"name": "images", "data": "digits", "model": "plain", "split": "classes", "batch": BATCH}
            block = block_of(arm, seed, task | {"fold": fold}, seed=seed, lr=args.lr, momentum=0.9, weight_decay=5e-4)
            block |= {"cosine": True, "untimed": 0, "scored": True, "times": times[:1].tolist()}
            block |= {"own": {"seed": seed} if is_eager(arm) else {}}
            block |= {"apart": "mean" if arm in LEADERS else "distance"}
            block["steps"] = own_pace(times) if waits_for_none(arm) else [steps] * args.ranks
            blocks.append(block)
    return blocks


def split_rows(blocks: list[Block], setting: Mapping[str, Any], baseline: str, steps: int) -> list[Row]:
    """Return a row for each arm, with its difference to the baseline on the same fold from the same seed.

    ``staleness`` is in rounds of gradients, or in steps of messages; ``distance`` of the ranks' weights from their mean
    before the drain (root mean square), mean over trainings; ``apart_percent`` the same over the norm of the weights;
    ``pulls`` completed pulls, over a rank's steps; ``of_mean`` the accuracy of the mean of all ranks' weights.
    """
    groups = by_arm(blocks)
    base = {(block["task"]["fold"], block["seed"]): score(block) for block in groups[baseline]}
    seconds = {arm: statistics.median(elapsed(block) / steps for block in mine) for arm, mine in groups.items()}
    rows = []
    for arm, mine in groups.items():
        found, everyone = [score(block) for block in mine], everywhere(mine)
        pairs = [score(block) - base[block["task"]["fold"], block["seed"]] for block in mine]
        mean, firsts = statistics.fmean(found), [block["by_rank"][0] for block in mine]
        more: Row = {}
        if gossip_of(arm):
            more["distance"] = statistics.fmean(own["distance"] for own in firsts)
            more["apart_percent"] = 100 * statistics.fmean(own["distance"] / own["norm"] for own in firsts)
            averagings = (own["stats"]["averagings"] / len(own["ends"]) for own in everyone)
            more["averagings_per_step"] = statistics.fmean(averagings)
        if arm in LEADERS:
            totals = [[(own["stats"]["pulls"], len(own["ends"])) for own in block["by_rank"]] for block in mine]
            pulls = [sum(pulled for pulled, _ in each) / sum(taken for _, taken in each) for each in totals]
            more |= {"pulls": pulls, "pulls_per_step": statistics.fmean(pulls)}
            more["of_mean"] = statistics.fmean(own["of_mean"] for own in firsts)
        rows.append(
            row(
                *(arm, setting, Interval(mean, min(found), max(found)), "share of test images, mean"),
                accuracy=mean,
                speedup=seconds[baseline] / seconds[arm],
                **ends("difference", mean_interval(pairs) if arm != baseline else Interval(0.0, 0.0, 0.0)),
                pairs=pairs,
                scores=found,
                step_s=seconds[arm],
                staleness=mean_of(late_counts(own["stats"] for own in everyone)),
                skipped=sum(own["stats"].get("gradients_skipped", 0) for own in everyone),
                identical=identical(mine),
                runs=len(found),
                **more,
            )
        )
    return rows


SPLIT = Case(
    name="split_classes",
    old_name="hard",
    help="classes split over ranks, the only rank with two of them late; with a mutant that drops late gradients",
    text="""Classes split over the ranks, and the rank that alone holds two of them always late; no batch norm.

Also a mutant of this library's optimizer that loses late gradients, as the code published with the paper does. Of arms
whose ranks' weights differ, that gossip or follow a leader, the accuracy is reported, not judged.""",
    run=split_classes,
    columns=columns(
        "arm | accuracy = value .4f ~ | difference = difference +.4f 95% | s/step = step_s .4f | "
        "speed-up = speedup .2f | staleness = staleness .2f | apart % = apart_percent .3f | runs = runs d | "
        "pulls/step = pulls_per_step .2f | of mean = of_mean .4f"
    ),
    panels=(Panel("difference", "points"), Panel()),
    ranks=4,
    arms=f"horovod,majority,solo,{MUTANT}",
    repetitions=3,
    options=(
        Option("--folds", 5, "of the images to test on", {"choices": range(1, 6)}),
        Option("--epochs", 12, "of each training"),
        Option("--lr", 0.05, "the highest learning rate"),
        Option("--compute", 0.006, "slept in each step", {"metavar": "S"}),
        Option("--delay", 0.006, "of the last rank, in every step", {"metavar": "S"}),
    ),
    quick={"folds": 1, "repetitions": 1, "epochs": 3},
)


# -- time_to_accuracy --------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of imbalance, with a training that is short enough for many of them.

    Attributes:
        data: "digits", "gratings" or "clips".
        model: "resnet", "plain" (two layers), "wide" (two layers, for a slow network) or "lstm".
        steps: that ranks take, those at their own pace as many together.
        batch: samples a rank and step.
        compute: seconds slept in a step in addition to the work; of clips, for each frame of the batch's longest.
        lr: the middle of the rates that are tried.
        late: seconds that a rank sleeps more.
        who: of them: "none", "any" (one rank, drawn in each step) or "last".
        split: "even", or "classes": each rank sees classes that others do not.
        mbit: of each rank's link; None: all are on one machine.
        paced: whether quorums have ``pace="rounds"``, as is documented for a rank that is slow for good.
    """

    data: str
    model: str
    steps: int
    batch: int
    compute: float
    lr: float
    late: float = 0.0
    who: str = "none"
    split: str = "even"
    mbit: float | None = None
    paced: bool = False

    def times(self, task: Mapping[str, Any], steps: int, ranks: int) -> Schedule:
        """Return the seconds that each rank sleeps in each step, the same of all arms with the same seed."""
        if self.data == "clips":
            return self.compute * data.longest_of(task, ranks)
        if self.who == "any":
            return one_random(steps, ranks, self.compute, self.late, task["seed"])
        times = np.full((steps, ranks), self.compute)
        times[:, -1] += self.late if self.who == "last" else 0.0
        return times


KINDS = {
    "none": Kind("gratings", "wide", 110, 16, 0.006, 0.06),
    "stragglers": Kind("gratings", "resnet", 160, 16, 0.006, 0.15, late=0.012, who="any"),
    "slow-rank": Kind("digits", "resnet", 120, 16, 0.008, 0.1, late=0.016, who="last", paced=True),
    "lengths": Kind("clips", "lstm", 140, 8, 0.002, 0.1),
    "network": Kind("gratings", "wide", 110, 16, 0.01, 0.06, mbit=50.0),
    "classes": Kind("digits", "plain", 150, 16, 0.006, 0.125, late=0.006, who="last", split="classes"),
}
"""By the name on the command line; the case's text says what they are."""
CLIP_FRAMES = 8
"""Frames of a clip, median."""
COMPRESSED = ("osgp-bf16", "dpsgd-bf16", "local-int8", "diloco-int8")
"""Arms that are trained only where the network is slow, as all whose messages are compressed."""
CORRECTED = ("dpsgd-qg", "adpsgd-qg")
"""Arms that are trained only where classes are split, as all with quasi-global momentum."""
ARMS = (*RIVALS, "all", "majority", "solo", "auto", *GOSSIP, *LEADERS, *COMPRESSED, *CORRECTED)
TUNING_SEED = 1000
"""Seed of the trainings by which rates are chosen; no training that counts has it."""
LOOKS = 16
LEAST_TIME = 0.03
"""Seconds of a step without sleep, on few cores: a job may take several times as long."""
LOSS = 0.01
"""Accuracy that an arm to take may lose against the synchronous one, with its whole interval."""


def time_to_accuracy(args: argparse.Namespace, say: Say) -> Report:
    """Measure, recommend and judge."""
    if not 0 < args.targets[0] < args.targets[1]:
        raise ValueError("--targets: take two shares above 0, the lower one first")
    if min(args.grid) <= 0 or args.length <= 0:
        raise ValueError("--grid and --length: take numbers above 0")
    arms = parse_arms(args.arms, args.ranks, RIVALS, gossip=True, leaders=True, compressed=True)
    need_arm(BASELINE, arms)
    plans = {kind: arms_of(kind, arms) for kind in dict.fromkeys(args.kinds)}
    grid = list(dict.fromkeys(args.grid))
    tried = len(grid) if len(grid) > 1 else 0
    progress = Progress(sum(len(own) for own in plans.values()) * (tried + args.repetitions), say)
    report = TIME_TO_ACCURACY.report(args, [])
    for kind, own in plans.items():
        rates = [round(KINDS[kind].lr * factor, 6) for factor in grid]
        tuning = [kind_block(args, kind, arm, TUNING_SEED, lr, True) for lr in rates for arm in own] if tried else []
        tuned = train(args, kind, tuning, say, progress) if tuning else []
        lr = dict.fromkeys(own, rates[0]) | best_rates(tuned)
        order = repetitions(own, args.repetitions)
        counting = [kind_block(args, kind, arm, seed, lr[arm], False) for seed, arm in order]
        found = train(args, kind, counting, say, progress)
        rows = rows_of(found, tuned, chosen(args, "targets", "grid", "length", kind=kind))
        recommend(report, rows)
        say(table(rows, TIME_TO_ACCURACY.columns))
        report.rows += rows
    if any(KINDS[kind].data == "gratings" for kind in plans):
        report.notes.append(f"gratings: the best possible accuracy is {data.BEST_ACCURACY:.3f}")
    return report


def arms_of(kind: str, arms: Sequence[str]) -> list[str]:
    """Return the arms of a kind; see ``COMPRESSED`` and ``CORRECTED``."""
    slow, split = KINDS[kind].mbit is not None, KINDS[kind].split == "classes"
    names = {arm: read_name(arm) for arm in arms}
    return [arm for arm, of in names.items() if (slow or of.compression == "none") and (split or not of.quasi_global)]


def kind_block(args: argparse.Namespace, kind: str, arm: str, seed: int, lr: float, tuning: bool) -> Block:
    """Return one training; of ``tuning`` it is scored on data that are held out, and only at its end.

    Ranks at their own pace train for the same time, with as many steps together.
    """
    how, steps = KINDS[kind], max(WARM_UP + LOOKS, round(args.length * KINDS[kind].steps))
    task = {"name": "images", "data": how.data, "model": how.model, "split": how.split, "batch": how.batch}
    if how.data == "clips":
        task = {"name": "clips", "median": CLIP_FRAMES, "bucketed": True, "batch": how.batch, "steps": steps}
    task["tuning"] = tuning
    times = how.times(task | {"seed": seed}, steps, args.ranks)
    pace = "rounds" if how.paced and read_name(arm).base not in SYNCHRONOUS else "steps"
    eager = is_eager(arm)
    mine = own_pace(times) if waits_for_none(arm) or (eager and pace == "rounds") else [steps] * args.ranks
    more: dict[str, Any] = {"own": {"seed": seed, "pace": pace} if eager else {}, "looks": 1 if tuning else LOOKS}
    more |= {"momentum": 0.9, "weight_decay": 5e-4, "cosine": True, "steps": [max(1, own - WARM_UP) for own in mine]}
    more |= {"kind": kind, "seed": seed, "lr": lr, "tuning": tuning, "times": np.round(times[WARM_UP:], 5).tolist()}
    return block_of(arm, seed, task, **more)


def best_rates(tuned: list[Block]) -> dict[str, float]:
    """Return the rate of the best score of each arm, of several the lowest."""
    return {arm: max(sorted(mine, key=lambda b: b["lr"]), key=final)["lr"] for arm, mine in by_arm(tuned).items()}


def train(args: argparse.Namespace, kind: str, blocks: list[Block], say: Say, progress: Progress) -> list[Block]:
    """Run trainings of a kind in one job."""
    longest = sum(sum(LEAST_TIME + max(each) for each in block["times"]) for block in blocks)
    how: dict[str, Any] = {"mbit": KINDS[kind].mbit, "env": ENVIRONMENT} if KINDS[kind].mbit is not None else {}

    def tell(block: Block) -> str:
        which = f"rate {block['lr']:g}" if block["tuning"] else f"seed {block['seed']}"
        return f"{kind}, {which}, {block['arm']}: {final(block):.4f} in {curve_of(block)[-1][0]:.1f} s"

    limit = START + 4 * longest + 20 * len(blocks)
    return measure(args, "timed", blocks, say, tell, seconds=limit, progress=progress, **how)


def curve_of(block: Block) -> list[list[float]]:
    """Return (seconds, accuracy) of each look at a training."""
    curve: list[list[float]] = block["by_rank"][0]["curve"]
    return curve


def final(block: Block) -> float:
    """Return the accuracy at the end."""
    return float(curve_of(block)[-1][1])


def reached_at(curve: Sequence[Sequence[float]], target: float) -> float:
    """Return the seconds until a target is reached: between two looks in proportion; infinite if it never was."""
    if curve[0][1] >= target:
        return curve[0][0]
    for (before, low), (at, high) in itertools.pairwise(curve):
        if high >= target:
            return before + (at - before) * (target - low) / (high - low)
    return math.inf


def rows_of(blocks: list[Block], tuned: list[Block], setting: Mapping[str, Any]) -> list[Row]:
    """Return a row for each arm of a kind; differences are to the baseline from the same seed."""
    groups, tried = by_arm(blocks), by_arm(tuned)
    base = {block["seed"]: final(block) for block in groups[BASELINE]}
    until = {
        arm: [[reached_at(curve_of(b), share * base[b["seed"]]) for b in mine] for share in setting["targets"]]
        for arm, mine in groups.items()
    }
    horovods, kind = statistics.median(until[BASELINE][1]), KINDS[setting["kind"]]
    setting = {**setting, "data": kind.data, "model": kind.model, "split": kind.split, "batch": kind.batch}
    setting["steps"] = max(blocks[0]["steps"]) + WARM_UP
    rows = []
    for arm, mine in groups.items():
        pairs = [final(block) - base[block["seed"]] for block in mine]
        difference = mean_interval(pairs) if arm != BASELINE else Interval(0.0, 0.0, 0.0)
        first, both = map(spread, until[arm])
        scores, lr = {block["lr"]: final(block) for block in tried.get(arm, [])}, mine[0]["lr"]
        rows.append(
            row(
                *(arm, setting, mean_interval([final(block) for block in mine]), "accuracy at the end, mean"),
                accuracy=statistics.fmean(final(block) for block in mine),
                lr=lr,
                edge="edge" if len(scores) > 1 and lr in (min(scores), max(scores)) else "",
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
                steps=statistics.median_low([sum(block["steps"]) + WARM_UP * len(block["steps"]) for block in mine]),
                curves=[curve_of(block) for block in mine],
                identical=identical(mine),
                take="",
            )
        )
    return rows


def _of(seconds: Sequence[float]) -> str:
    return f"{sum(map(math.isfinite, seconds))} of {len(seconds)}"


def choose(rows: Collection[Row]) -> list[Row]:
    """Return the arms that may be chosen, the fastest to both targets first: arms that reach them in half of the
    seeds or more, and whose accuracy is no more than ``LOSS`` below the baseline's with its whole interval."""
    fit = [each for each in rows if math.isfinite(each["both_s"]) and each["difference_low"] >= -LOSS]
    return sorted(fit, key=lambda each: float(each["both_s"]))


def is_level(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether the seeds leave open who is sooner: by the 95% interval of their differences, of those seeds in
    which both reached the target."""
    pairs = [b - a for a, b in zip(first, second, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if not pairs:
        return True
    found = mean_interval(pairs)
    return found.low <= 0.0 <= found.high


def recommend(report: Report, rows: list[Row]) -> None:
    """Mark the best of a kind's arms, print it, and judge whether it is one of this library."""
    kind, fit = rows[0]["setting"]["kind"], choose(rows)
    if not fit:
        report.notes.append(f"{kind}: no arm reaches both targets and keeps its accuracy")
        return
    taken, *others = fit
    level = [each for each in others if is_level(taken["until"], each["until"])]
    for each in (taken, *level):
        each["take"] = "take" if each is taken else "level"
    is_rival = {each["arm"]: read_name(each["arm"]).base in RIVALS for each in fit}
    rival, ours = (next((each for each in fit if is_rival[each["arm"]] is theirs), None) for theirs in (True, False))
    parts = [f"take {taken['arm']}, {taken['both_s']:.2f} s to both targets ({_of(taken['until'])} seeds)"]
    for each in (rival, ours):
        if each is not None and each is not taken:
            parts.append(f"soonest {'rival' if each is rival else 'own'} {each['arm']}, {each['both_s']:.2f} s")
    parts += [f"not distinguishable: {', '.join(each['arm'] for each in level)}"] if level else []
    report.notes.append(f"{kind}: {'; '.join(parts)}")
    edges = [each["arm"] for each in rows if each["edge"]]
    if edges:
        report.notes.append(f"{kind}: the best rate is at the grid's edge for {', '.join(edges)}")
    if kind != "none" and rival is not None:
        soonest = math.inf if ours is None else ours["both_s"]
        report.at_most(f"{kind}: soonest own arm over soonest rival, to both targets", soonest / rival["both_s"], 1.0)


TIME_TO_ACCURACY = Case(
    name="time_to_accuracy",
    help="seconds to two targets under each kind of imbalance, all arms with tuned rates; which one to take",
    text="""Seconds to an accuracy, under each kind of imbalance: Horovod, other libraries, all modes of hvd_async.

Kinds: no rank is late; one random rank is, in each step; one rank is 3 times slower for good; sequences differ in
length; links have 50 Mbit/s (virtual hosts: needs root); classes are split over the ranks, and the last rank is late.
Data: the real digits, clips of them, and gratings in noise, whose best possible accuracy is known; a small ResNet, an
LSTM and networks of two layers. Computation is slept in addition to the real work. All arms take as many steps
together, by a learning rate that rises and falls as a cosine. Arms have their documented settings; where all ranks are
averaged after local steps, these are four.

First each arm is trained once with each rate of a grid, of which the best counts by data that are held out of the
training data; then with --repetitions seeds. Targets are shares of what Horovod's arm ends with from the same seed.
Ranks copy their weights now and then without stopping, and the copies are scored later: where ranks share weights rank
0's, else their mean. Recommended is the arm that reaches both targets soonest, of those whose accuracy is no more
than a point below Horovod's with its whole 95% interval. --resume FILE keeps each training as it ends.""",
    run=time_to_accuracy,
    columns=columns(
        "kind = setting.kind | arm | rate = lr g |  = edge | s to first = first_s .2f | reached = first_reached | "
        "s to both = both_s .2f ~ | reached = both_reached | sooner = speedup .2f | accuracy = value .4f 95% | "
        "difference = difference +.4f 95% | seconds = seconds .2f | steps = steps d | take"
    ),
    panels=(Panel("curves", "curves", ("targets",), each="kind"),),
    ranks=4,
    arms=",".join(installed(ARMS)),
    repetitions=5,
    options=(
        Option("--kinds", list(KINDS), "of imbalance", {"choices": KINDS, "metavar": "KIND"}),
        Option(
            *("--targets", [0.98, 0.995], "accuracies to be reached, as shares of Horovod's"),
            {"nargs": 2, "metavar": "SHARE"},
        ),
        Option(
            *("--grid", [0.4, 1.0, 2.5]),
            "learning rates that are tried, as multiples of the kind's own; one: nothing is tuned",
            {"metavar": "X"},
        ),
        Option("--length", 1.0, "of the trainings, as a multiple", {"metavar": "X"}),
    ),
    quick={
        "arms": "horovod,solo,sgp",
        "kinds": ["none", "stragglers"],
        "grid": [1.0],
        "repetitions": 1,
        "length": 0.25,
    },
)
