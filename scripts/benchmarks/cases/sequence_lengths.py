"""Sequences of different lengths: nobody is held up, the data itself makes ranks take longer in turn.

Li et al. (PPoPP 2020) trained an LSTM on videos of 29 to 1,776 frames, in batches of similar lengths, so that a step's
duration depended on which videos a rank had. Here an LSTM learns which digit there is most of in a clip, a sequence of
the real digits' images whose lengths are distributed like those videos' (--frames is the median; clips.py says how). It
is tested on clips made of other images. All arms have the same batches in the same steps.

The LSTM is small, and a step computes for as many milliseconds a frame of its longest clip as --ms says: what the real
computation leaves of them is slept. That stands for an accelerator a rank, since ranks that computed all the time would
wait for a machine's few cores, not for each other; the imbalance is that of the lengths. --ms 0: the real computation
alone, of which the bounds, which suppose a core a rank, say nothing where there are fewer.

In practice batches are of clips of similar length, which saves padding and sets ranks further apart; so they are here,
unless --no-bucketed draws each at random. Bounds follow from the lengths that were dealt. --repetitions is the number
of seeds, each with clips, weights and batches of its own; "over ideal" is the speed-up over a synchronous optimizer
that costs nothing, which the bounds are of too. TensorFlow's arm ``horovod`` is plain ``hvd.allreduce`` of the
gradients (Horovod's optimizer does not average on Keras 3).
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

from hvd_async.simulation.schedule import Schedule, replay, synchronous_seconds

from ..support import launch, plot, timed
from ..support.arms import need_arm, parse_arms
from ..support.blocks import by_arm, identical, median
from ..support.clips import TRAIN, dealt_to, lengths_of
from ..support.intervals import mean_interval, spread
from ..support.launch import Block, Say, repetitions
from ..support.report import INTERVAL, Column, Report, Row, chosen, ends, ranged, row
from ..support.trainings import judge_close, score

HELP = "an LSTM on sequences of different lengths: steps a second against the lengths' own bound, and test accuracy"
COLUMNS = (
    Column("framework", "setting.framework"),
    Column("arm", "arm"),
    *ranged("steps/s", "value", ".2f"),
    *ranged("speed-up", "speedup", ".3f"),
    Column("bound", "bound", ".3f"),
    Column("over ideal", "over_ideal", ".3f"),
    Column("accuracy", "accuracy", ".4f"),
    *ranged("difference", "difference", "+.4f", INTERVAL),
    Column("variation", "variation", ".3f"),
    Column("staleness", "staleness", ".2f"),
    Column("in a round", "contributors", ".2f"),
    Column("runs", "runs", "d"),
)
BASELINE = "horovod"
JUDGED, LEAST_SPEEDUP = ("solo", "majority"), 1.3
REAL_MS = 2.0
"""Milliseconds a frame that the real computation takes at the most, to limit a job by."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=4, arms="horovod,majority,solo", repetitions=3)
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch", help="of the model")
    parser.add_argument("--steps", type=int, default=480, help="of each rank in each training")
    parser.add_argument("--ms", type=float, default=5.0, help="of computation a frame, slept but for the real; 0: none")
    parser.add_argument("--frames", type=int, default=20, metavar="N", help="of a clip, median")
    parser.add_argument(
        "--bucketed", action=argparse.BooleanOptionalAction, default=True, help="batches are of similar lengths"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="clips a rank and step")
    parser.add_argument("--lr", type=float, default=0.05, help="the highest learning rate")
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.steps, args.repetitions = min(args.steps, 40), 1
    rivals = (BASELINE,) if args.framework == "tensorflow" else (BASELINE, "ddp")
    arms = parse_arms(args.arms, args.ranks, rivals=rivals)
    need_arm(BASELINE, arms)
    if not 1 <= args.batch_size <= TRAIN:
        raise ValueError(f"--batch-size {args.batch_size}: there are {TRAIN} clips")
    blocks = blocks_of(args, arms)
    longest = sum(synchronous_seconds(planned(block, args.ranks)) for block in blocks) / 1e3
    say(f"{len(blocks)} trainings of {args.steps} steps, about {longest * args.ms / 60 + 1:.0f} min at most")

    def tell(block: Block) -> str:
        return f"seed {block['seed']}, {block['arm']}: {steps_per_second(block):.2f} steps/s, {score(block):.4f}"

    job = "sequence_lengths_keras" if args.framework == "tensorflow" else "sequence_lengths"
    limit = launch.START + 2 * longest * (args.ms + REAL_MS) + 20 * len(blocks)
    found = launch.measure(args, job, blocks, say, tell, seconds=limit)
    names = ("framework", "steps", "ms", "frames", "bucketed", "batch_size", "lr", "momentum")
    setting = chosen(args, *names, seed="the run's number")
    report = Report("lengths", args.ranks, rows_of(found, setting), COLUMNS, draw=draw)
    judge(report)
    return report


def blocks_of(args: argparse.Namespace, arms: list[str]) -> list[Block]:
    """Every arm with every seed, in alternation."""
    names = ("steps", "ms", "bucketed", "lr", "momentum")
    common = chosen(args, *names, median=args.frames, batch=args.batch_size)
    return [{**common, "arm": arm, "seed": seed} for seed, arm in repetitions(arms, args.repetitions)]


def planned(block: Block, ranks: int) -> Schedule:
    """Frames of the longest clip that each rank will have in each step."""
    lengths = lengths_of(block["seed"], block["median"])
    return lengths[dealt_to(block, lengths, ranks)].max(axis=2).astype(np.float64)


def frames_of(block: Block) -> Schedule:
    """Frames of the longest clip that each rank has had in each timed step: the schedule, up to its unit."""
    return np.array([own["longest"] for own in block["by_rank"]], dtype=np.float64).T


def steps_per_second(block: Block) -> float:
    """Return the steps of all ranks together, a second, until the last has done its own."""
    return len(block["by_rank"]) / seconds_per_step(block)


def seconds_per_step(block: Block) -> float:
    """Until the last rank has done its steps."""
    return float(max(own["elapsed"] for own in block["by_rank"])) / len(frames_of(block))


def bound_of(block: Block) -> float | None:
    """The best speed-up over synchronous that the lengths allow; None for ``auto``, which cannot be replayed."""
    if block["arm"] == "auto":
        return None
    frames, how = frames_of(block), {"seed": block["seed"], "first_round": timed.first_round(block)}
    return synchronous_seconds(frames) / replay(frames, block["arm"], **how).seconds


def variation(block: Block) -> float:
    """The ranks' standard deviation over their mean, of a step's computation, mean over the steps."""
    seconds = np.array([own["computed"] for own in block["by_rank"]])
    return float((seconds.std(axis=0) / seconds.mean(axis=0)).mean())


def over_ideal(block: Block) -> float | None:
    """Speed-up over a synchronous optimizer that costs nothing; None without a duration of a frame."""
    slept = block["ms"] / 1e3 * synchronous_seconds(frames_of(block))
    return slept / (seconds_per_step(block) * len(frames_of(block))) if slept else None


def rows_of(blocks: list[Block], setting: dict[str, Any]) -> list[Row]:
    """One row an arm; speed-ups and differences are to the baseline with the same seed."""
    groups = by_arm(blocks)
    base, rows = {block["seed"]: block for block in groups[BASELINE]}, []
    for arm, mine in groups.items():
        scores = [score(block) for block in mine]
        pairs = [score(block) - score(base[block["seed"]]) for block in mine]
        rows.append(
            row(
                arm,
                setting,
                *(spread([steps_per_second(block) for block in mine]), "steps/s of all ranks"),
                **ends("speedup", spread([steps_per_second(b) / steps_per_second(base[b["seed"]]) for b in mine])),
                bound=median([bound_of(block) for block in mine]),
                over_ideal=median([over_ideal(block) for block in mine]),
                accuracy=statistics.fmean(scores),
                accuracies=scores,
                **ends("difference", mean_interval(pairs) if arm != BASELINE else None),
                variation=statistics.median(variation(block) for block in mine),
                staleness=median([timed.mean_staleness(block) for block in mine]),
                contributors=median([timed.mean_contributors(block) for block in mine]),
                computed=[own["computed"] for own in mine[0]["by_rank"]],
                identical=identical(mine),
                runs=len(mine),
            )
        )
    return rows


def judge(report: Report) -> None:
    """Add what must show."""
    base = next(each for each in report.rows if each["arm"] == BASELINE)
    if base["over_ideal"] is not None:
        more = ", so that speed-ups over it say too much; those over ideal do not"
        timed.judge_busy(report, "Horovod's step over its own bound", 1 / base["over_ideal"], more)
    for each in report.rows:
        if each["arm"] in JUDGED:
            gain, bound = each["speedup"], each["bound"]
            what, wanted = f"{each['arm']}'s steps a second over Horovod's", f">= {LEAST_SPEEDUP:g}"
            report.at_least(what, gain, LEAST_SPEEDUP, f"{wanted}; the lengths allow {bound:.2f}")
        if each["arm"] != BASELINE:
            judge_close(report, each, BASELINE)


def draw(figure: Any, rows: list[Row]) -> None:
    """Speed-ups with their bounds, accuracies of all seeds, and how long the ranks' steps computed."""
    axes = figure.subplots(1, 3, width_ratios=(3, 3, 4))
    names, framework = [each["arm"] for each in rows], rows[0]["setting"]["framework"]
    for place, each in enumerate(rows):
        gain, look = each["speedup"], plot.fill(each["arm"], names)
        sides = [[gain - each["speedup_low"]], [each["speedup_high"] - gain]]
        axes[0].bar(place, gain, 0.7, yerr=sides, capsize=3, ecolor="#555555", **look)
        if each["bound"] is not None:
            axes[0].hlines(each["bound"], place - 0.42, place + 0.42, colors="#D55E00", linewidth=2)
        if each["over_ideal"] is not None:
            axes[0].plot(place, each["over_ideal"], "D", color="white", markeredgecolor="black", markersize=7)
        shifts = np.arange(each["runs"]) - (each["runs"] - 1) / 2
        axes[1].plot(
            place + 0.12 * shifts, each["accuracies"], "o", color=look["color"], markeredgecolor="black", markersize=7
        )
        axes[1].hlines(each["accuracy"], place - 0.3, place + 0.3, colors="#555555", linewidth=1.5)
    axes[0].plot([], [], color="#D55E00", linewidth=2, label="what the lengths allow")
    axes[0].plot([], [], "D", color="white", markeredgecolor="black", label="over an optimizer that costs nothing")
    axes[1].plot([], [], "o", color="white", markeredgecolor="black", label="a seed's accuracy")
    axes[1].plot([], [], color="#555555", label="mean accuracy")
    for one in axes[:2]:
        plot.arms_below(one, names)
    plot.label(axes[0], f"steps a second over Horovod's, {framework}", "arm", "ratio, median and spread")
    plot.label(axes[1], "test accuracy", "arm", "share of test clips (axis cut off)")
    seconds = rows[0]["computed"]
    look = {"color": [plot.COLOURS[(rank + 1) % len(plot.COLOURS)] for rank in range(len(seconds))]}
    look |= {"label": [f"rank {rank}" for rank in range(len(seconds))], "edgecolor": "black", "linewidth": 0.3}
    axes[2].hist(seconds, 12, **look)
    plot.label(axes[2], "computation of a step, first seed", "seconds", "steps")
    plot.legend(figure, *axes)
