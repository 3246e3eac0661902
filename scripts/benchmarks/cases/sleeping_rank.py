"""One training thread falls asleep while its engine lives: who goes on, who has to wait, and from which step on.

Under lsgd and easgd also: pulls that land on its engine meanwhile, and how far it is from its leader, or the center,
when it falls asleep, when it wakes, after its next step and at the end.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from hvd_async import topology
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.simulation.names import LEADERS, gossip_of, waits_for_nobody

from ..support import launch, plot
from ..support.arms import parse_arms
from ..support.blocks import by_arm
from ..support.intervals import spread
from ..support.launch import START, Block, Say, repetitions
from ..support.report import Column, Report, Row, chosen, ranged, row
from ..support.stalls import Stall, stalls

HELP = "a training thread sleeps for 60 s: steps a second of the others, and who waits for whom; pulls that land on it"
QUICK = "adpsgd"
COLUMNS = (
    Column("arm", "arm"),
    Column("rank", "setting.rank", "d"),
    Column("steps/s before", "before", ".3f"),
    Column("asleep", "during", ".3f"),
    *ranged("of that", "value", ".3f"),
    Column("longest wait s", "wait_s", ".2f"),
    Column("waits in step", "steps"),
    Column("expected", "expected_step", "+d"),
    Column("for rank", "waited_for"),
    Column("of", "expected_for"),
    Column("pulls asleep", "pulls", "g"),
)
KEEPS = 0.95
TAKES_PART = 0.9
"""Least share, of the pulls that land on others meanwhile, that must land on the sleeper's engine."""
LONG = 0.5
"""Share of the sleep that a wait must last to be one for the sleeper."""
SETTLE = 0.1
"""Share of the time before that does not count."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=8, arms="adpsgd,sgp,dpsgd", repetitions=3)
    parser.add_argument("--sleep", type=float, default=60.0, metavar="S", help="of one training thread")
    parser.add_argument("--sleeper", type=int, default=3, metavar="R", help="its rank")
    parser.add_argument("--before", type=float, default=30.0, metavar="S", help="in which all are awake")
    parser.add_argument("--after", type=float, default=5.0, metavar="S", help="in which all are awake again")
    parser.add_argument("--compute", type=float, default=0.1, metavar="S", help="a step's computation, slept")
    parser.add_argument("--megabytes", type=float, default=1.0, help="of weights")
    parser.add_argument("--topology", choices=sorted(topology.NAMED), default="ring", help="of gossip")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.sleep, args.before, args.after = min(args.sleep, 6.0), min(args.before, 6.0), min(args.after, 2.0)
        args.repetitions = 1
    if not 0 <= args.sleeper < args.ranks:
        raise ValueError(f"--sleeper {args.sleeper}: ranks are 0 to {args.ranks - 1}")
    arms = parse_arms(args.arms, args.ranks, rivals=(), gossip=True, leaders=True)
    for arm in arms:
        how = gossip_of(arm)
        if how is None and arm not in LEADERS:
            raise ValueError(
                f"the arm {arm!r} neither gossips nor follows: take some of sgp, osgp, dpsgd, adpsgd, lsgd, easgd"
            )
        if how is None:
            continue
        make_plan(args.ranks, how[0], args.topology, compression=how[1])
    names = ("sleep", "sleeper", "before", "after", "compute", "megabytes", "topology")
    setting = chosen(args, *names, seed=0)
    blocks = [
        {**setting, "arm": arm, "repetition": repetition}
        for repetition, arm in repetitions(arms, args.repetitions)
    ]  # fmt: skip
    each = args.before + args.sleep + args.after
    say(f"{len(blocks)} blocks of {each:g} s")

    def tell(block: Block) -> str:
        least = min(share(block, rank) for rank in others(block))
        return f"{block['arm']}: the others keep at least {least:.3f} of their steps a second"

    limit = START + len(blocks) * (2 * each + 30)
    found = launch.measure(args, "sleeping_rank", blocks, say, tell, seconds=limit)
    report = Report("independence", args.ranks, rows_of(found, setting), COLUMNS, draw=draw)
    judge(report)
    return report


def others(block: Block) -> list[int]:
    """All ranks but the one that sleeps."""
    return [rank for rank in range(len(block["by_rank"])) if rank != block["sleeper"]]


def rates(block: Block, rank: int) -> tuple[float, float]:
    """Steps a second of a rank: before, and while the sleeper slept."""
    slept_at, ends = block["by_rank"][block["sleeper"]]["slept_at"], block["by_rank"][rank]["ends"]

    def rate(begin: float, end: float) -> float:
        return sum(begin < each <= end for each in ends) / (end - begin)

    return rate(SETTLE * slept_at, slept_at), rate(slept_at, slept_at + block["sleep"])


def share(block: Block, rank: int) -> float:
    """Return the share that a rank keeps of its steps a second."""
    before, during = rates(block, rank)
    return during / before


def expected(block: Block) -> dict[int, Stall]:
    """Where ranks must wait, by the graph; nowhere under AD-PSGD, or where they follow a leader."""
    how = gossip_of(block["arm"])
    if how is None or waits_for_nobody(block["arm"]):
        return {}
    graph = topology.named(block["topology"], len(block["by_rank"]))
    late = make_plan(graph.size, how[0], graph).config.max_staleness
    unsent = block["by_rank"][block["sleeper"]]["slept"] + (how[0] == "dpsgd")  # it sends a step ahead
    return stalls(graph, block["sleeper"], unsent, late)


def waited(block: Block, rank: int) -> list[Stall]:
    """Where a rank did wait for long, and for whom."""
    own = block["by_rank"][rank]
    return [
        Stall(step, (sender,))
        for step, (seconds, sender) in enumerate(zip(own["waits"], own["waited_for"], strict=True), 1)
        if seconds > LONG * block["sleep"]
    ]


def as_expected(block: Block, rank: int) -> bool:
    """Return whether a rank waited just where it must, for one for whom it must."""
    found, must = waited(block, rank), expected(block).get(rank)
    if must is None:
        return not found
    return [stall.step for stall in found] == [must.step] and found[0].senders[0] in must.senders


def pulls_asleep(block: Block, rank: int) -> int:
    """How many pulls landed on a rank's engine while the sleeper slept."""
    at = block["by_rank"][block["sleeper"]]["slept_at"]
    return sum(at < each <= at + block["sleep"] for each in block["by_rank"][rank]["pulls"])


def apart(blocks: list[Block]) -> dict[str, float | None]:
    """Medians of how far the sleeper was from its leader: as it fell asleep, as it woke, after its step, at the end."""
    ways = [block["by_rank"][block["sleeper"]]["apart"] for block in blocks]
    found = {when: [way[when] for way in ways if way.get(when) is not None] for when in ways[0]}
    return {when: statistics.median(each) if each else None for when, each in found.items()}


def rows_of(blocks: list[Block], setting: dict[str, Any]) -> list[Row]:
    """A row for each rank under each arm. Steps are counted from the one in which the sleeper slept."""
    rows = []
    for arm, mine in by_arm(blocks).items():
        for rank in range(len(mine[0]["by_rank"])):
            kept = spread([share(block, rank) for block in mine])
            slept = [block["by_rank"][setting["sleeper"]]["slept"] for block in mine]
            found = [[stall.step - k for stall in waited(block, rank)] for block, k in zip(mine, slept, strict=True)]
            whom = sorted({sender for block in mine for stall in waited(block, rank) for sender in stall.senders})
            must = expected(mine[0]).get(rank)
            rows.append(
                row(
                    arm,
                    {**setting, "rank": rank},
                    *(kept, "of the steps a second before"),
                    before=statistics.median(rates(block, rank)[0] for block in mine),
                    during=statistics.median(rates(block, rank)[1] for block in mine),
                    wait_s=statistics.median(max(block["by_rank"][rank]["waits"]) for block in mine),
                    waits=found,
                    steps=_listed({offset for offsets in found for offset in offsets}, "+d"),
                    expected_step=None if must is None else must.step - slept[0],
                    waited_for=_listed(whom, "d"),
                    expected_for=_listed(() if must is None else must.senders, "d"),
                    as_expected=all(as_expected(block, rank) for block in mine) if rank != setting["sleeper"] else None,
                    pulls=statistics.median(pulls_asleep(block, rank) for block in mine) if arm in LEADERS else None,
                    apart=apart(mine) if arm in LEADERS and rank == setting["sleeper"] else None,
                    slept_at=mine[0]["by_rank"][setting["sleeper"]]["slept_at"],
                    ends=[round(end, 3) for end in mine[0]["by_rank"][rank]["ends"]],
                    identical=all(block["by_rank"][rank]["identical"] for block in mine),
                )
            )
    return rows


def _listed(numbers: Any, form: str) -> str | None:
    return ",".join(format(number, form) for number in sorted(numbers)) or None


def judge(report: Report) -> None:
    """Add what must show."""
    for arm in dict.fromkeys(each["arm"] for each in report.rows):
        mine = [each for each in report.rows if each["arm"] == arm and each["as_expected"] is not None]
        if waits_for_nobody(arm):
            least = min(each["value"] for each in mine)
            what = f"{arm}: the others' steps a second while one sleeps, of those before, the least"
            report.at_least(what, least, KEEPS)
        if arm in LEADERS:
            judge_pulls(report, arm)
        right = sum(each["as_expected"] for each in mine)
        text, what = f"{right} of {len(mine)} ranks", f"{arm}: waits where the graph says, and nowhere else"
        report.wants(what, text, "all but the sleeper", right == len(mine), exact=True)


def judge_pulls(report: Report, arm: str) -> None:
    """The sleeper's engine takes part in pulls; how far that leaves the sleeper behind is told."""
    [sleeper] = [each for each in report.rows if each["arm"] == arm and each["apart"] is not None]
    awake = statistics.median(each["pulls"] for each in report.rows if each["arm"] == arm and each is not sleeper)
    share = sleeper["pulls"] / awake if awake else 0.0
    what = f"{arm}: pulls that landed on the sleeper's engine meanwhile, of those on others"
    report.at_least(what, share, TAKES_PART)
    woke, stepped = sleeper["apart"]["as it woke"], sleeper["apart"]["after its next step"]
    if woke and stepped is not None:
        what = f"{arm}: the sleeper's distance after its next step, of that as it woke"
        report.wants(what, stepped / woke, "< 1", stepped < woke)
    told = [f"{'-' if far is None else format(far, '.4g')} {when}" for when, far in sleeper["apart"].items()]
    whom = "the centre" if arm == "easgd" else "its leader"
    report.notes.append(f"{arm}: the sleeper's distance to {whom}: {', '.join(told)}")


def draw(figure: Any, rows: list[Row]) -> None:
    """When steps ended, of the first repetition: how many over the whole time, and each of those around the start."""
    arms = list(dict.fromkeys(each["arm"] for each in rows))
    axes = figure.subplots(2, len(arms), squeeze=False)
    for (whole, near), arm in zip(axes.T, arms, strict=True):
        mine = [each for each in rows if each["arm"] == arm]
        at, setting = mine[0]["slept_at"], mine[0]["setting"]
        for rank, each in enumerate(mine):
            colour = plot.COLOURS[rank % len(plot.COLOURS)]
            style = {"color": colour, "linestyle": ("-", "--")[rank // len(plot.COLOURS) % 2]}
            whole.plot(
                [end - at for end in each["ends"]], range(1, len(each["ends"]) + 1), label=f"rank {rank}", **style
            )
            near.plot([end - at for end in each["ends"]], [rank] * len(each["ends"]), "|", color=colour, markersize=10)
        whole.axvspan(0, setting["sleep"], color="#56B4E9", alpha=0.2)
        steps = len(mine) + 4
        near.axvspan(0, setting["sleep"], color="#56B4E9", alpha=0.2)
        near.set_xlim(-5 * setting["compute"], steps * 1.3 * setting["compute"])
        near.set_ylim(len(mine) - 0.5, -0.5)
        plot.label(whole, f"{arm}: rank {setting['sleeper']} sleeps (blue)", "seconds", "steps done")
        plot.label(near, "each step's end, at first", "seconds", "rank")
    plot.legend(figure, axes[0][0])
