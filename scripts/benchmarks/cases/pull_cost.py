"""Cost of a pull towards a leader, or a center: bytes at the network interface; seconds, beside a plain collective.

wire: every rank is on a virtual host (needs root), and its interface's counts are read around some pulls, less what
goes to and fro while nothing happens. seconds: all ranks on this machine; each pull from its submission by the engine
until it has landed, in turn with plain collectives from where all ranks begin; training threads are idle.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from hvd_async.simulation.names import LEADERS

from ..support import launch, plot
from ..support.arms import named_arms
from ..support.blocks import everywhere
from ..support.intervals import spread
from ..support.launch import START, Block, Progress, Say
from ..support.ratios import Ratios
from ..support.report import INTERVAL, Column, Report, Row, chosen, ends, ranged, row

HELP = "one pull of 64 MB: bytes at each rank's network interface, seconds against a plain broadcast or allreduce"
PLAIN = {"lsgd": "broadcast", "easgd": "allreduce", "in-place": "broadcast"}
"""The rival of each: of a pull the collective that carries it. in-place: the broadcast that makes no memory for its
result."""
ARMS = ("lsgd", "easgd", "broadcast", "in-place", "allreduce")
ROOTED = ("lsgd", "broadcast", "in-place")
"""One rank gives, and receives nothing."""
PARTS = ("wire", "seconds")
COLUMNS = (
    Column("part", "setting.part"),
    Column("arm", "arm"),
    *ranged("received/M", "received", ".4f"),
    Column("expected", "expected", ".4f"),
    Column("sent/M, mean", "sent", ".4f"),
    Column("most", "sent_most", ".4f"),
    Column("own count/M", "counted", ".4f"),
    Column("idle kB/s", "idle_kb", ".0f"),
    *ranged("ms", "ms", ".1f"),
    Column("over", "rival"),
    *ranged("ratio", "ratio", ".3f", INTERVAL),
)
LONGEST = 1.1
"""A pull's seconds over the plain broadcast's."""
NEAR = 0.1
"""How far bytes may be from what they should be: headers, acknowledgements, and words between the ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=4, arms=",".join(ARMS), repetitions=4)
    parser.add_argument("--parts", default=",".join(PARTS), metavar="P,...", help="of wire (needs root), seconds")
    parser.add_argument("--megabytes", type=float, default=64.0, metavar="MB", help="of weights")
    parser.add_argument("--rounds", type=int, default=8, help="pulls of each arm in each repetition")
    parser.add_argument("--idle", type=float, default=10.0, metavar="S", help="in which bytes are counted for nothing")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge. In each repetition another rank leads."""
    if args.quick:
        args.megabytes, args.rounds = min(args.megabytes, 8.0), min(args.rounds, 4)
        args.idle, args.repetitions = min(args.idle, 2.0), 1
    arms, parts = named_arms(args.arms, ARMS), named_arms(args.parts, PARTS)
    progress = Progress(args.repetitions * len(parts), say)
    setting = chosen(args, "megabytes", "rounds")

    def tell(block: Block) -> str:
        return f"{block['part']}, rank {block['root']} leads"

    rows: list[Row] = []
    for part in parts:
        longest = args.idle + args.rounds * len(arms) * (1.0 + 0.1 * args.megabytes)
        how: dict[str, Any] = {"progress": progress, "seconds": START + args.repetitions * longest}
        how |= {"plan": {"arms": arms, "megabytes": args.megabytes}, "virtual": part == "wire"}
        blocks = launch.measure(args, "pull_cost", blocks_of(args, part, arms), say, tell, **how)
        rows += (wire_rows if part == "wire" else seconds_rows)(blocks, {**setting, "part": part})
    report = Report("pull", args.ranks, rows, COLUMNS, draw=draw)
    judge(report)
    return report


def blocks_of(args: argparse.Namespace, part: str, arms: list[str]) -> list[Block]:
    """One a repetition."""
    common = {"part": part, "arms": arms, "rounds": args.rounds, "idle": args.idle}
    return [
        {**common, "repetition": repetition, "root": repetition % args.ranks} for repetition in range(args.repetitions)
    ]


# -- bytes ----------------------------------------------------------------------------------------------------


def carried(block: Block, arm: str, way: str) -> list[float]:
    """Bytes that each rank has ``received`` or ``sent`` in one pull, less what is so when nothing happens."""
    found = []
    for own in block["by_rank"]:
        idle = own["idle"][way] / own["idle"]["seconds"]
        found.append((own[arm][way] - idle * own[arm]["seconds"]) / block["rounds"])
    return found


def pulled(block: Block, arm: str) -> list[int]:
    """The ranks to which something has to come."""
    return [rank for rank in range(len(block["by_rank"])) if arm not in ROOTED or rank != block["root"]]


def expected(arm: str, ranks: int) -> float:
    """Return how often such a rank receives the model's bytes at the least; in a ring where all are added up."""
    return 1.0 if arm in ROOTED else 2 * (ranks - 1) / ranks


def wire_rows(blocks: list[Block], setting: dict[str, Any]) -> list[Row]:
    """One row an arm: bytes over the model's; spreads are over ranks that are pulled and repetitions."""
    size, rows = setting["megabytes"] * 1e6, []
    for arm in blocks[0]["arms"]:
        came = spread([carried(block, arm, "received")[rank] / size for block in blocks for rank in pulled(block, arm)])
        sent = [[each / size for each in carried(block, arm, "sent")] for block in blocks]
        counts = [
            block["by_rank"][rank][arm]["counted"] / block["rounds"] / size
            for block in blocks
            for rank in pulled(block, arm)
            if "counted" in block["by_rank"][rank][arm]
        ]
        idle = [own["idle"]["received"] / own["idle"]["seconds"] / 1e3 for own in everywhere(blocks)]
        rows.append(
            row(
                arm,
                setting,
                *(came, "models received by a rank in a pull"),
                **ends("received", came),
                expected=expected(arm, len(blocks[0]["by_rank"])),
                sent=statistics.median(statistics.fmean(each) for each in sent),
                sent_most=statistics.median(max(each) for each in sent),
                counted=statistics.median(counts) if counts else None,
                idle_kb=statistics.median(idle),
            )
        )
    return rows


# -- seconds --------------------------------------------------------------------------------------------------


def rounds_of(block: Block) -> list[dict[str, float]]:
    """Return each round's seconds by arm, mean over the ranks."""
    return [
        {arm: statistics.fmean(own[arm][number] for own in block["by_rank"]) for arm in block["arms"]}
        for number in range(block["rounds"])
    ]


def seconds_rows(blocks: list[Block], setting: dict[str, Any]) -> list[Row]:
    """One row an arm: medians of repetitions with their spread; the ratio is taken round by round."""
    rows = []
    for arm in blocks[0]["arms"]:
        ms = spread([1e3 * statistics.median(each[arm] for each in rounds_of(block)) for block in blocks])
        rival = PLAIN.get(arm)
        more: dict[str, Any] = {}
        if rival in blocks[0]["arms"]:
            ratios = Ratios(rival)
            for block in blocks:
                for each in rounds_of(block):
                    ratios.add(each)
            ratio = ratios.median(arm)
            more = {"rival": rival, **ends("ratio", ratio)}
        rows.append(row(arm, setting, ms, "ms of a pull, mean over ranks", **ends("ms", ms), **more))
    return rows


def judge(report: Report) -> None:
    """Add what must show."""
    came = {each["arm"]: each for each in report.rows if each["setting"]["part"] == "wire"}
    for arm, rival in PLAIN.items():
        if arm not in LEADERS:
            continue
        if arm in came:
            share = came[arm]["received"] / came[arm]["expected"]
            what = f"{arm}: bytes that a rank receives in a pull, of {came[arm]['expected']:g} times the model's"
            report.wants(what, share, f"1 within {NEAR:.0%}", abs(share - 1) <= NEAR)
        if arm in came and rival in came:
            share = came[arm]["received"] / came[rival]["received"]
            what = f"{arm}: bytes that a rank receives in a pull, of a plain {rival}'s"
            report.wants(what, share, f"1 within {NEAR:.0%}", abs(share - 1) <= NEAR)
    for each in report.rows:
        if each["arm"] == "lsgd" and each.get("ratio") is not None:
            what = "lsgd: a pull's seconds over a plain broadcast's, median of rounds"
            report.at_most(what, each["ratio"], LONGEST)


def draw(figure: Any, rows: list[Row]) -> None:
    """Bytes received and sent; seconds."""
    parts = [part for part in PARTS if any(each["setting"]["part"] == part for each in rows)]
    panels = figure.subplots(1, len(parts), squeeze=False)[0]
    for axes, part in zip(panels, parts, strict=True):
        mine = [each for each in rows if each["setting"]["part"] == part]
        size = "{megabytes:g} MB"
        plot.bars(axes, mine, size)
        if part == "wire":
            for key, marker, text in (("expected", "D", "expected"), ("sent_most", "^", "most sent by a rank")):
                plot.marks(axes, mine, size, key, marker, text)
            plot.label(axes, "a rank receives in a pull", "of weights", "models")
        else:
            plot.label(axes, "a pull takes, mean over ranks", "of weights", "ms")
    plot.legend(figure, *panels)
