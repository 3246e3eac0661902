"""1 to 8 ranks, each on a virtual host (needs root): samples a second of all, over as many times those of one.

As ``network``, at one bandwidth and one computation for all numbers of ranks; every rank has as many samples a step.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from hvd_async.simulation.names import RIVALS

from ..support import plot
from ..support.arms import WARM_UP, installed, pairs_off, parse_arms
from ..support.blocks import everywhere, grouped, identical
from ..support.intervals import spread
from ..support.launch import Block, Progress, Say
from ..support.report import Column, Report, Row, ranged, row
from ..support.trainings import score
from . import network

HELP = "1, 2, 4 and 8 virtual hosts: samples a second of all ranks, and how much of perfect scaling that is"
ARMS = ("horovod", "ddp", "decent-dp", "solo", "sgp", "osgp", "dpsgd", "adpsgd", "lsgd", "easgd")
QUICK = "horovod,dpsgd,adpsgd"
COLUMNS = (
    Column("ranks", "setting.ranks", "d"),
    Column("arm", "arm"),
    *ranged("samples/s", "value", ".1f"),
    Column("of perfect", "efficiency", ".3f"),
    Column("speed-up", "speedup", ".2f"),
    Column("bound", "bound", ".2f"),
    Column("ms/step", "step_ms", ".0f"),
    Column("MB/step", "sent_mb", ".2f"),
    Column("accuracy", "accuracy", ".3f"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    network.add_training(parser)
    parser.set_defaults(ranks=8, arms=",".join(installed(ARMS)), repetitions=3)
    parser.add_argument("--mbit", type=float, default=200.0, metavar="X", help="of each link")
    parser.add_argument(
        "--sizes", type=int, nargs="+", metavar="N", help="numbers of ranks; not given: 1, 2, 4, --ranks"
    )


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure."""
    if args.quick:
        args.repetitions, args.steps, args.sizes = 1, min(args.steps, 5), args.sizes or sorted({1, args.ranks})
    sizes = args.sizes or sorted({size for size in (1, 2, 4) if size < args.ranks} | {args.ranks})
    if args.compute is None:
        most = 2 * (max(sizes) - 1) / max(sizes) * args.megabytes
        args.compute = network.SHARE * network.wire_seconds(most, args.mbit)
    plans = {}
    for size in sizes:
        named = args.arms
        if not pairs_off(size):  # it is there where it can be
            named = ",".join(arm for arm in named.split(",") if arm.strip() != "decent-dp")
        arms = parse_arms(named, size, RIVALS, gossip=True, leaders=True, reduced=True)
        plans[size] = network.blocks_of(argparse.Namespace(**{**vars(args), "ranks": size}), arms, args.mbit)
    progress = Progress(sum(map(len, plans.values())), say)

    def tell(block: Block) -> str:
        return f"{len(block['by_rank'])} ranks, {block['arm']}: {1e3 * network.step_seconds(block):.0f} ms a step"

    found: list[Block] = []
    for size, blocks in plans.items():
        longest = sum((WARM_UP + b["steps"]) * network.least_seconds("horovod", size, b) for b in blocks)
        found += network.measure(args, blocks, say, tell, longest, ranks=size, progress=progress, mbit=args.mbit)
    return Report("scaling", max(sizes), rows_of(found), COLUMNS, draw=draw)


def samples_per_second(block: Block) -> float:
    """Return the samples of all ranks together, a second."""
    return len(block["by_rank"]) * block["batch"] / network.step_seconds(block)


def rows_of(blocks: list[Block]) -> list[Row]:
    """One row a number of ranks and arm. Perfect is the first arm's rate with fewest ranks, times how many more there
    are."""
    groups = grouped(blocks, lambda block: (len(block["by_rank"]), str(block["arm"])))
    rates = {key: spread([samples_per_second(block) for block in mine]) for key, mine in groups.items()}
    fewest = min(ranks for ranks, _ in groups)
    each_rank = next(rate.value for (ranks, _), rate in rates.items() if ranks == fewest) / fewest
    rows = []
    for (ranks, arm), mine in groups.items():
        rate, first = rates[ranks, arm], mine[0]
        base = rates.get((ranks, "horovod"))
        rows.append(
            row(
                arm,
                {"ranks": ranks} | {name: first[name] for name in network.SETTING} | {"seed": "the run's number"},
                *(rate, "samples/s of all ranks"),
                speedup=rate.value / base.value if base else None,
                bound=network.least_seconds("horovod", ranks, first) / network.least_seconds(arm, ranks, first),
                efficiency=rate.value / (ranks * each_rank),
                accuracy=statistics.fmean(score(block) for block in mine),
                step_ms=1e3 * statistics.median(network.step_seconds(block) for block in mine),
                sent_mb=statistics.fmean(own["sent"] for own in everywhere(mine)) / first["steps"] / 1e6,
                identical=identical(mine),
            )
        )
    return rows


def draw(figure: Any, rows: list[Row]) -> None:
    """How much of perfect scaling each arm keeps, by number of ranks."""
    axes = figure.subplots(1, 1)
    arms = list(dict.fromkeys(each["arm"] for each in rows))
    for arm in arms:
        points = [(each["setting"]["ranks"], each["efficiency"]) for each in rows if each["arm"] == arm]
        ranks, kept = zip(*sorted(points), strict=True)
        axes.plot(ranks, kept, **plot.line(arm, arms), label=arm)
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({each["setting"]["ranks"] for each in rows}))
    plot.label(
        axes, "samples a second, over those of one rank as often as there are ranks", "ranks", "of perfect scaling"
    )
    plot.legend(figure, axes)
