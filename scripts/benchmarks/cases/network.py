"""Slow links: who trains how fast, and how well, where every rank is on a virtual host of its own."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.simulation.network import BYTES
from scripts.benchmarks.support.names import IN_STEP, LEADERS, LOCAL_PERIOD, OUTER, RIVALS, gossip_of, read_name

from ..support.arms import IN_BACKWARD, WARM_UP, installed, parse_arms
from ..support.figures import Block, everywhere, grouped, identical, mean_interval, spread
from ..support.launch import START, Progress, block_of, measure, repetitions
from ..support.report import Case, Option, Panel, Report, Row, Say, chosen, columns, ends, row
from ..support.schedule import PAYLOAD, power_sgd_megabytes

ARMS = (
    *("horovod", "ddp", "ddp-powersgd", "post-local-sgd", "torchft", "torchft-diloco", "decent-dp", "solo"),
    *("local-sgd", "sgp", "osgp", "dpsgd", "adpsgd", "lsgd", "easgd", "sgp-avg4", "dpsgd-avg4"),
    *("osgp-bf16", "dpsgd-bf16", "osgp-int8", "dpsgd-int8"),
    *("local", "local-bf16", "local-int8", "diloco-int8"),
)
SHARE = 0.25
"""Computation over an allreduce's time on the wire."""
OVER = 1.1
"""Limit of a step of this library, over the time that its bytes need."""
OF_BOUND = {"sgp": 0.9, "osgp": 0.89, "dpsgd": 0.89}
"""Wanted shares of the speed-up that the bytes allow: at 8 ranks that is 1.37, 1.95 and 1.95."""
OVER_DECENT_DP = {"dpsgd": 0.98, "dpsgd-bf16": 1.7}
"""Wanted speed-ups over decent-dp, which has the same algorithm."""
ENVIRONMENT = {"HOROVOD_CYCLE_TIME": "5"}
"""In all arms. Horovod's background threads look for work every 5 ms: at 1 ms eight ranks keep two cores busy."""
SETTING = ("bandwidth_mbit", "megabytes", "compute", "steps", "batch", "lr", "per_host")
"""Keys of a block that its rows have; ``per_host`` if it is not 1."""


class Need(NamedTuple):
    """Megabytes that a step of an arm must send: during its computation, and while ranks wait."""

    hidden: float
    waited: float


def network(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.per_host < 1 or args.ranks % args.per_host:
        raise ValueError(f"--per-host {args.per_host}: {args.ranks} ranks cannot be divided so")
    how = {"gossip": True, "leaders": True, "compressed": True}
    arms = parse_arms(args.arms, args.ranks, RIVALS, **how, local_size=args.per_host)
    if min(args.mbit) <= 0 or args.steps < 1:
        raise ValueError("--mbit and --steps: take numbers above 0")
    found: list[Block] = []
    progress = Progress(len(arms) * args.repetitions * len(args.mbit), say)

    def tell(block: Block) -> str:
        return f"{block['bandwidth_mbit']:g} Mbit/s, {block['arm']}: {1e3 * slowest_step(block):.0f} ms a step"

    hosts = {"per_host": args.per_host} if args.per_host > 1 else {}
    for mbit in args.mbit:
        blocks = blocks_of(args, arms, mbit)
        longest = sum((WARM_UP + args.steps) * (b["compute"] + wire_seconds(2 * args.megabytes, mbit)) for b in blocks)
        limit = START + 2 * longest + 20 * len(blocks)
        more = {"seconds": limit, "env": ENVIRONMENT, "progress": progress, "mbit": mbit, **hosts}
        found += measure(args, "timed", blocks, say, tell, **more)
    report = NETWORK.report(args, rows_of(found))
    judge(report)
    report.notes += crossings(report.rows)
    return report


def blocks_of(args: argparse.Namespace, arms: Sequence[str], mbit: float) -> list[Block]:
    """Return every arm at one bandwidth, in alternation."""
    allreduce = wire_seconds(2 * (args.ranks - 1) / args.ranks * args.megabytes, mbit)
    compute = SHARE * allreduce if args.compute is None else args.compute
    task = {"name": "images", "data": "digits", "megabytes": args.megabytes, "batch": args.batch_size}
    common = {**chosen(args, "megabytes", "lr"), "steps": args.steps + 1, "bandwidth_mbit": mbit}
    common |= {"batch": args.batch_size}
    common |= {"compute": compute, "times": [[compute] * args.ranks], "exact": True, "momentum": 0.9, "scored": True}
    common |= {"per_host": args.per_host} if args.per_host > 1 else {}
    return [
        block_of(arm, repetition, task, **common)
        | {"seed": repetition, "own": {"hierarchical": args.per_host} if read_name(arm).hosts else {}}
        for repetition, arm in repetitions(arms, args.repetitions)
    ]


# -- what the bytes allow ----------------------------------------------------------------------------------------------


def wire_seconds(megabytes: float, mbit: float) -> float:
    """Return how long payload travels."""
    return 8 * megabytes / mbit / PAYLOAD


def need_of(arm: str, ranks: int, megabytes: float) -> Need | None:
    """Return what a step of an arm must send; None where ranks do not wait for it: AD-PSGD, LSGD, EASGD."""
    base, compression, every = read_name(arm)[:3]
    if base in LEADERS or base == "adpsgd":
        return None
    allreduce, hidden, waited = 2 * (ranks - 1) / ranks, 0.0, 0.0
    if compression == "powersgd":
        return Need(0.0, allreduce * power_sgd_megabytes(megabytes))
    message = BYTES[compression] / BYTES["none"] * megabytes * (ranks > 1)
    if base == "sgp":
        waited = message
    elif base in ("osgp", "dpsgd", "decent-dp"):
        hidden = message
    elif base in OUTER:
        return Need(allreduce * BYTES[compression] / BYTES["none"] * megabytes / every, 0.0)
    elif base in IN_STEP:
        every = LOCAL_PERIOD
    elif base != "local-sgd":
        waited = allreduce * BYTES[compression] / BYTES["none"] * megabytes
    return Need(hidden, waited + (allreduce * megabytes / every if every else 0.0))


def least_seconds(arm: str, ranks: int, block: Block) -> float:
    """Return the least time of a step: computation and messages, one after the other or at a time."""
    need = need_of(arm, ranks, block["megabytes"]) if block.get("per_host", 1) == 1 else None
    compute = float(block["compute"])
    if need is None:  # (of ranks that share a link what travels over it depends on who is on which host)
        return compute
    hidden, waited = (wire_seconds(megabytes, block["bandwidth_mbit"]) for megabytes in need)
    if read_name(arm).base in OUTER:  # an average hides behind some steps, and no more
        plan = make_plan(ranks, **gossip_of(arm)._asdict()).config  # type: ignore[union-attr]
        return compute + max(0.0, hidden - plan.max_staleness / plan.average_every * compute)
    return max(compute, hidden) + waited


# -- rows and goals ----------------------------------------------------------------------------------------------------


def durations(own: dict[str, list[float]]) -> list[float]:
    """Return the seconds of a rank's steps after the first, which begins with no message on its way: in it some
    algorithms wait for a message that nothing hides, and others for none."""
    return [b - a for a, b in itertools.pairwise(own["ends"])]


def slowest_step(block: Block) -> float:
    """Return the mean seconds of a timed step, of the rank for which they took longest."""
    return max(statistics.fmean(durations(own)) for own in block["by_rank"])


def baseline(arms: Iterable[str]) -> str:
    """Return the arm that speed-ups are over: Horovod's; with compression where there is none without."""
    found = [arm for arm in arms if read_name(arm).base == "horovod"]
    return found[0] if found and "horovod" not in found else "horovod"


def rows_of(blocks: list[Block]) -> list[Row]:
    """Return a row for each bandwidth and arm."""
    groups = grouped(blocks, lambda block: (block["bandwidth_mbit"], str(block["arm"])))
    base = baseline(arm for _, arm in groups)
    rows = []
    for (mbit, arm), mine in groups.items():
        first, ranks, steps = mine[0], len(mine[0]["by_rank"]), mine[0]["steps"]
        ms = spread([1e3 * slowest_step(block) for block in mine])
        least, rival = 1e3 * least_seconds(arm, ranks, first), groups.get((mbit, base))
        scores, everyone = mean_interval([block["by_rank"][0]["accuracy"] for block in mine]), everywhere(mine)
        waited = 1e3 * statistics.fmean(own["waited"] for own in everyone) / steps
        every = [seconds for own in everyone for seconds in durations(own)]
        rows.append(
            row(
                *(arm, {name: first[name] for name in SETTING if name in first} | {"seed": "the run's number"}),
                *(ms, "ms a step, of the slowest rank"),
                speedup=statistics.median(1e3 * slowest_step(b) for b in rival) / ms.value if rival else None,
                bound=1e3 * least_seconds(base, ranks, first) / least,
                **ends("accuracy", scores),
                least_ms=least,
                over_least=ms.value / least,
                p90=float(1e3 * np.quantile(every, 0.9, method="inverted_cdf")),
                sent_mb=statistics.fmean(own["sent"] for own in everyone) / steps / 1e6,
                wait_ms=None if read_name(arm).base in IN_BACKWARD else waited,
                cpu_ms=1e3 * statistics.fmean(own["cpu"] for own in everyone) / steps,
                identical=identical(mine),
            )
        )
    return rows


def judge(report: Report) -> None:
    """Add the goals of one rank per host, where links are slowest: there the wire decides, and not the cores."""
    if any(each["setting"].get("per_host", 1) > 1 for each in report.rows):
        return
    slowest = min(each["setting"]["bandwidth_mbit"] for each in report.rows)
    by_arm = {each["arm"]: each for each in report.rows if each["setting"]["bandwidth_mbit"] == slowest}
    for arm, each in by_arm.items():
        need = need_of(arm, report.ranks, each["setting"]["megabytes"])
        if gossip_of(arm) and need is not None:
            report.at_most(f"{arm}'s step over what its bytes allow", each["over_least"], OVER)
        if arm in OF_BOUND and each["speedup"] is not None:
            least = OF_BOUND[arm] * each["bound"]
            report.at_least(f"{arm}'s speed-up over {baseline(by_arm)}", each["speedup"], least, f">= {least:.3g}")
        if arm in OVER_DECENT_DP and "decent-dp" in by_arm:
            gain = by_arm["decent-dp"]["value"] / each["value"]
            report.at_least(f"{arm}'s speed-up over decent-dp", gain, OVER_DECENT_DP[arm])


def crossings(rows: Sequence[Row]) -> list[str]:
    """Return from which bandwidth on Horovod's allreduce is quicker, for each arm."""
    base, notes = baseline(each["arm"] for each in rows), []
    for arm in dict.fromkeys(each["arm"] for each in rows if each["arm"] != base and each["speedup"] is not None):
        points = sorted((each["setting"]["bandwidth_mbit"], each["speedup"]) for each in rows if each["arm"] == arm)
        if len(points) < 2:
            continue
        levels = [f"{at:.0f}" for at in crossing(points)]
        if levels:
            notes.append(f"{arm} and {base} are level at {', '.join(levels)} Mbit/s")
        else:
            notes.append(f"{arm}: {'quicker' if points[0][1] >= 1 else 'slower'} than {base} at all of these")
    return notes


def crossing(points: Sequence[tuple[float, float]]) -> list[float]:
    """Return where speed-ups, by bandwidth, pass through 1: between two in proportion of the logarithms."""
    found = []
    for (slow, before), (fast, after) in itertools.pairwise(points):
        if (before >= 1) != (after >= 1):
            way = math.log(before) / (math.log(before) - math.log(after))
            found.append(math.exp(math.log(slow) + way * (math.log(fast) - math.log(slow))))
    return found


NETWORK = Case(
    name="network",
    help="8 virtual hosts with slow links: seconds and bytes a step of every algorithm, with accuracy",
    text="""Every rank is on a virtual host (needs root) whose link is slow: who trains how fast, and how well.

Computation takes a quarter of what an allreduce takes on the wire, so communication dominates; what the real work
leaves of that is slept. The bytes that a step must send say what it costs at least: an allreduce 2(P-1)/P times the
weights, an average each N steps an Nth of that, a message to one peer once the weights. Where links are quick the
machine's cores decide: "CPU ms" is a rank's. Each run trains a small network on the real digits, for as many steps in
all arms, and its accuracy is shown with its speed.""",
    run=network,
    columns=columns(
        "Mbit/s = setting.bandwidth_mbit g | arm | ms/step = value .0f ~ | 90% below = p90 .0f | "
        "bytes allow = least_ms .0f | over that = over_least .3f | speed-up = speedup .2f | bound = bound .2f | "
        "MB/step = sent_mb .2f | waited ms = wait_ms .0f | CPU ms = cpu_ms .0f | accuracy = accuracy .3f 95%"
    ),
    panels=(Panel(marks=("least_ms",), each="bandwidth_mbit"), Panel("accuracy", "points")),
    group="{bandwidth_mbit:g} Mbit/s",
    ranks=8,
    arms=",".join(installed(ARMS)),
    repetitions=3,
    options=(
        Option("--mbit", [50.0, 200.0, 1000.0], "of each link", {"metavar": "X"}),
        Option("--per-host", 1, "ranks on each; with more than one arms may be solo-hosts", {"metavar": "N"}),
        Option("--megabytes", 8.0, "of weights, in float32", {"metavar": "MB"}),
        Option(
            *("--compute", None, "computed in each step; not given: a quarter of an allreduce"),
            {"type": float, "metavar": "S"},
        ),
        Option("--steps", 24, "timed ones of each training; the one before, after a drain, is not timed"),
        Option("--batch-size", 16, "samples a rank and step", {"metavar": "N"}),
        Option("--lr", 0.05, "learning rate, of all arms"),
    ),
    quick={
        "arms": ",".join(installed(("horovod", "ddp", "decent-dp", "sgp", "osgp", "dpsgd"))),
        "mbit": [50.0],
        "steps": 4,
        "repetitions": 1,
    },
)
