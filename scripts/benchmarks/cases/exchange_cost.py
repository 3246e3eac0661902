"""Pairs of ranks are averaged by one alltoall of all ranks, as gossip does it here, or by two-rank process sets.

Without --mbit this shows what each costs in CPU time; with it every rank is on a virtual host, and its wire decides.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from ..support import launch, plot
from ..support.arms import named_arms
from ..support.blocks import grouped
from ..support.intervals import quantile, spread
from ..support.launch import START, Block, Progress, Say, repetitions
from ..support.options import add_fewer, add_numbers
from ..support.report import Column, Report, Row, ranged, row

HELP = "one exchange of weights between pairs: one alltoall of all ranks against two-rank process sets"
ARMS = ("alltoall", "pairs", "alltoall-unaligned", "pairs-unaligned", "hop", "chunked")
"""hop: the alltoall in which each rank sends to the next one. chunked: as alltoall, in pieces, all submitted at once.
unaligned: each pair begins at a random time."""
UNALIGNED = "-unaligned"
COLUMNS = (
    Column("ranks", "setting.ranks", "d"),
    Column("MB", "setting.megabytes", "g"),
    Column("arm", "arm"),
    *ranged("ms", "value", ".1f"),
    Column("90% below", "p90", ".1f"),
    Column("slowest rank", "slowest_ms", ".1f"),
    Column("times quicker", "speedup", ".3f"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=8, arms=",".join(ARMS), repetitions=5)
    add_fewer(parser)
    add_numbers(parser, "--megabytes", [1.0, 8.0], "MB", "of weights")
    parser.add_argument("--rounds", type=int, default=20, help="of each block")
    parser.add_argument("--chunk", type=float, default=0.25, metavar="MB", help="of the arm chunked")
    parser.add_argument("--mbit", type=float, metavar="X", help="of each rank's own link, in Mbit/s (needs root)")
    parser.add_argument("--seed", type=int, default=0, help="of the random times")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.rounds, args.repetitions, args.fewer = min(args.rounds, 3), 1, 0
        args.megabytes = args.megabytes[:1]
    sizes = [args.ranks, *([args.fewer] if args.fewer else [])]
    for size in sizes:
        if size < 2 or size % 2:
            raise ValueError(f"{size} ranks cannot be parted into pairs: take an even number")
    blocks = blocks_of(args)
    progress = Progress(len(blocks) * len(sizes), say)

    def tell(block: Block) -> str:
        ms = 1e3 * statistics.median(means(block))
        return f"{len(block['by_rank'])} ranks, {block['megabytes']:g} MB, {block['arm']}: {ms:.1f} ms"

    found = []
    for size in sizes:
        how: dict[str, Any] = {"ranks": size, "progress": progress, "mbit": args.mbit}
        how |= {"seconds": START + 2.0 * args.rounds * len(blocks), "env": launch.GROUPS_ENV}
        found += launch.measure(args, "exchange_cost", blocks, say, tell, **how)
    setting = {"seed": args.seed, "bandwidth_mbit": args.mbit}
    return Report("exchange", args.ranks, rows_of(found, setting), COLUMNS, draw=draw)


def blocks_of(args: argparse.Namespace) -> list[Block]:
    """Every arm with every size, in alternation."""
    arms = named_arms(args.arms, ARMS)
    common = {"rounds": args.rounds, "seed": args.seed}
    return [
        {"arm": arm, "megabytes": size, "chunk": args.chunk, "repetition": repetition, **common}
        for size in args.megabytes
        for repetition, arm in repetitions(arms, args.repetitions)
    ]


def means(block: Block) -> list[float]:
    """Seconds of each exchange, from where a rank began to where it had its result, mean over the ranks."""
    return [statistics.fmean(each) for each in zip(*(own["seconds"] for own in block["by_rank"]), strict=True)]


def slowest(block: Block) -> list[float]:
    """Return the seconds of each exchange on the rank for which it took longest."""
    return [max(each) for each in zip(*(own["seconds"] for own in block["by_rank"]), strict=True)]


def rows_of(blocks: list[Block], setting: dict[str, Any]) -> list[Row]:
    """One row an arm, number of ranks and size. The speed-up is that over the process sets that begin alike."""
    groups = grouped(blocks, lambda block: (len(block["by_rank"]), block["megabytes"], str(block["arm"])))
    medians = {key: [1e3 * statistics.median(means(block)) for block in mine] for key, mine in groups.items()}
    rows = []
    for (ranks, size, arm), mine in groups.items():
        ms = spread(medians[ranks, size, arm])
        rival = medians.get((ranks, size, "pairs" + (UNALIGNED if arm.endswith(UNALIGNED) else "")))
        rows.append(
            row(
                arm,
                {**setting, "ranks": ranks, "megabytes": size, "rounds": mine[0]["rounds"]},
                *(ms, "ms of an exchange, mean over ranks"),
                speedup=statistics.median(rival) / ms.value if rival else None,
                p90=quantile([1e3 * each for block in mine for each in means(block)], 0.9),
                slowest_ms=statistics.median(1e3 * each for block in mine for each in slowest(block)),
                within_ms=1e3 * statistics.median(block["within"] for block in mine),
            )
        )
    return rows


def draw(figure: Any, rows: list[Row]) -> None:
    """Times by number of ranks and size; those of the slowest rank as marks."""
    axes, group = figure.subplots(1, 1), "{ranks} ranks, {megabytes:g} MB"
    rows = sorted(rows, key=lambda each: (each["setting"]["ranks"], each["setting"]["megabytes"]))
    plot.bars(axes, rows, group)
    plot.marks(axes, rows, group, "slowest_ms", "D", "the slowest rank")
    plot.label(axes, "one exchange between pairs of ranks", "", "ms, mean over ranks")
    plot.legend(figure, axes)
