"""Every rank is on a virtual host of its own (needs root) whose link is slow: who trains how fast, and how well.

Computation takes a quarter of what an allreduce takes on the wire, so communication dominates; what the real work
leaves of that is slept. What a step costs at least follows from the bytes that it must send: an allreduce 2(P-1)/P
times the weights, an average each N steps an Nth of that, a message to one peer once the weights; whether these travel
while the next step computes is the algorithm's. Where links are quick it is the machine's cores that decide: "CPU ms"
is a rank's. Each run trains a small network on the real digits, for as many steps in all arms, and its accuracy stands
beside its speed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.simulation.names import IN_STEP, LEADERS, LOCAL_PERIOD, OUTER, RIVALS, gossip_of, read_name
from hvd_async.simulation.network import BYTES, PAYLOAD, power_sgd_megabytes

from ..support import launch, plot
from ..support.arms import IN_BACKWARD, WARM_UP, installed, parse_arms
from ..support.blocks import everywhere, grouped, identical
from ..support.intervals import mean_interval, quantile, spread
from ..support.launch import START, Block, Progress, Say, repetitions
from ..support.options import add_numbers
from ..support.report import INTERVAL, Column, Report, Row, chosen, ranged, row
from ..support.trainings import BATCH, score

HELP = "8 virtual hosts with slow links: seconds and bytes a step of every algorithm, with accuracy"
ARMS = (
    *("horovod", "ddp", "ddp-powersgd", "post-local-sgd", "torchft", "torchft-diloco", "decent-dp", "solo"),
    *("local-sgd", "sgp", "osgp", "dpsgd", "adpsgd", "lsgd", "easgd", "sgp-avg4", "dpsgd-avg4"),
    *("osgp-bf16", "dpsgd-bf16", "osgp-int8", "dpsgd-int8"),
    *("local", "local-bf16", "local-int8", "diloco-int8"),
)
QUICK = ",".join(installed(("horovod", "ddp", "decent-dp", "sgp", "osgp", "dpsgd")))
COLUMNS = (
    Column("Mbit/s", "setting.bandwidth_mbit", "g"),
    Column("arm", "arm"),
    *ranged("ms/step", "value", ".0f"),
    Column("90% below", "p90", ".0f"),
    Column("bytes allow", "least_ms", ".0f"),
    Column("over that", "over_least", ".3f"),
    Column("speed-up", "speedup", ".2f"),
    Column("bound", "bound", ".2f"),
    Column("MB/step", "sent_mb", ".2f"),
    Column("waited ms", "wait_ms", ".0f"),
    Column("CPU ms", "cpu_ms", ".0f"),
    *ranged("accuracy", "accuracy", ".3f", INTERVAL),
)
SHARE = 0.25
"""Computation over an allreduce's time on the wire."""
OVER = 1.1
"""How much longer than its bytes allow a step of ours may take."""
OF_BOUND = {"sgp": 0.9, "osgp": 0.89, "dpsgd": 0.89}
"""Wanted shares of the speed-up that the bytes allow: at 8 ranks that is 1.37, 1.95 and 1.95."""
BESIDE = {"dpsgd": 0.98, "dpsgd-bf16": 1.7}
"""Speed-ups over decent-dp that are wanted: it is the same algorithm."""
ENVIRONMENT = {"HOROVOD_CYCLE_TIME": "5"}
"""In all arms. Horovod's background threads look for work every 5 ms: at 1 ms eight ranks keep two cores busy. (Leaders
have no groups here: each host has one rank.)"""
SETTING = ("bandwidth_mbit", "megabytes", "compute", "steps", "batch", "lr")
"""Keys of a block that its rows tell."""


class Need(NamedTuple):
    """Megabytes that a step of an arm must send: those that travel while a step computes, and those waited for."""

    hidden: float
    waited: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case's own options."""
    parser.set_defaults(ranks=8, arms=",".join(installed(ARMS)), repetitions=3)
    add_numbers(parser, "--mbit", [50.0, 200.0, 1000.0], "X", "of each link")
    parser.add_argument(
        "--per-host", type=int, default=1, metavar="N", help="ranks on each; of more than one arms may be solo-hosts"
    )
    add_training(parser)


def add_training(parser: argparse.ArgumentParser) -> None:
    """Options of the trainings."""
    parser.add_argument("--megabytes", type=float, default=8.0, metavar="MB", help="of weights, in float32")
    parser.add_argument(
        "--compute", type=float, metavar="S", help="slept in each step; not given: a quarter of an allreduce"
    )
    parser.add_argument("--steps", type=int, default=24, help="of each training, after some that are not timed")
    parser.add_argument("--batch-size", type=int, default=BATCH, metavar="N", help="samples a rank and step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate, of all arms")


def run(args: argparse.Namespace, say: Say) -> Report:
    """Measure and judge."""
    if args.quick:
        args.mbit, args.repetitions, args.steps = [min(args.mbit)], 1, min(args.steps, 4)
    if args.per_host < 1 or args.ranks % args.per_host:
        raise ValueError(f"--per-host {args.per_host}: {args.ranks} ranks cannot be parted so")
    arms = parse_arms(args.arms, args.ranks, RIVALS, gossip=True, leaders=True, reduced=True, local_size=args.per_host)
    if min(args.mbit) <= 0 or args.steps < 1:
        raise ValueError("--mbit and --steps: take numbers above 0")
    found: list[Block] = []
    progress = Progress(len(arms) * args.repetitions * len(args.mbit), say)

    def tell(block: Block) -> str:
        return f"{block['bandwidth_mbit']:g} Mbit/s, {block['arm']}: {1e3 * step_seconds(block):.0f} ms a step"

    for mbit in args.mbit:
        blocks = blocks_of(args, arms, mbit)
        longest = sum((WARM_UP + args.steps) * (b["compute"] + wire_seconds(2 * args.megabytes, mbit)) for b in blocks)
        found += measure(args, blocks, say, tell, longest, progress=progress, mbit=mbit, **several(args))
    report = Report("network", args.ranks, rows_of(found), COLUMNS, draw=draw)
    judge(report)
    report.notes += crossings(report.rows)
    return report


def several(args: argparse.Namespace) -> dict[str, int]:
    """Return how many ranks a host has, if it is not one. (Results kept by earlier runs know no such number.)"""
    per_host = getattr(args, "per_host", 1)
    return {"per_host": per_host} if per_host > 1 else {}


def measure(
    args: argparse.Namespace, blocks: list[Block], say: Say, tell: Callable[[Block], str], longest: float, **how: Any
) -> list[Block]:
    """Run trainings on virtual hosts, whose steps take ``longest`` s together at the most."""
    limit = START + 2 * longest + 20 * len(blocks)
    return launch.measure(args, "network", blocks, say, tell, seconds=limit, env=ENVIRONMENT, **how)


def blocks_of(args: argparse.Namespace, arms: Sequence[str], mbit: float) -> list[Block]:
    """Every arm at one bandwidth, in alternation."""
    allreduce = wire_seconds(2 * (args.ranks - 1) / args.ranks * args.megabytes, mbit)
    common = chosen(args, "megabytes", "steps", "lr", bandwidth_mbit=mbit, batch=args.batch_size)
    common["compute"] = SHARE * allreduce if args.compute is None else args.compute
    common |= several(args)
    return [{**common, "arm": arm, "repetition": repetition} for repetition, arm in repetitions(arms, args.repetitions)]


def wire_seconds(megabytes: float, mbit: float) -> float:
    """How long so many megabytes of payload travel."""
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
    """A step takes no less: computation and messages, one after the other or at a time."""
    need = need_of(arm, ranks, block["megabytes"]) if block.get("per_host", 1) == 1 else None
    if need is None:  # (of ranks that share a link what travels over it depends on who is on which host)
        return float(block["compute"])
    hidden, waited = (wire_seconds(megabytes, block["bandwidth_mbit"]) for megabytes in need)
    compute = float(block["compute"])
    if read_name(arm).base in OUTER:  # an average hides behind so many steps, and no more
        plan = make_plan(ranks, **gossip_of(arm)._asdict()).config  # type: ignore[union-attr]
        return compute + max(0.0, hidden - plan.max_staleness / plan.average_every * compute)
    return max(compute, hidden) + waited


def step_seconds(block: Block) -> float:
    """Mean seconds of a timed step, of the rank for which they took longest."""
    return max(statistics.fmean(own["seconds"]) for own in block["by_rank"])


def baseline(arms: Iterable[str]) -> str:
    """Whose steps speed-ups are over: Horovod's; with compression where there is none without."""
    found = [arm for arm in arms if read_name(arm).base == "horovod"]
    return found[0] if found and "horovod" not in found else "horovod"


def rows_of(blocks: list[Block]) -> list[Row]:
    """One row a bandwidth and arm."""
    groups = grouped(blocks, lambda block: (block["bandwidth_mbit"], str(block["arm"])))
    base = baseline(arm for _, arm in groups)
    rows = []
    for (mbit, arm), mine in groups.items():
        first, ranks, steps = mine[0], len(mine[0]["by_rank"]), mine[0]["steps"]
        ms = spread([1e3 * step_seconds(block) for block in mine])
        least = 1e3 * least_seconds(arm, ranks, first)
        rival = groups.get((mbit, base))
        scores, everyone = mean_interval([score(block) for block in mine]), everywhere(mine)
        rows.append(
            row(
                arm,
                {**{name: first[name] for name in (*SETTING, "per_host") if name in first}, "seed": "the run's number"},
                *(ms, "ms a step, of the slowest rank"),
                speedup=statistics.median(1e3 * step_seconds(b) for b in rival) / ms.value if rival else None,
                bound=1e3 * least_seconds(base, ranks, first) / least,
                accuracy=scores.value,
                accuracy_low=scores.low if math.isfinite(scores.low) else None,
                accuracy_high=scores.high if math.isfinite(scores.high) else None,
                least_ms=least,
                over_least=ms.value / least,
                p90=quantile([1e3 * seconds for own in everyone for seconds in own["seconds"]], 0.9),
                sent_mb=statistics.fmean(own["sent"] for own in everyone) / steps / 1e6,
                wait_ms=None
                if read_name(arm).base in IN_BACKWARD
                else 1e3 * statistics.fmean(own["waited"] for own in everyone) / steps,
                cpu_ms=1e3 * statistics.fmean(own["cpu"] for own in everyone) / steps,
                identical=identical(mine),
            )
        )
    return rows


def judge(report: Report) -> None:
    """Add what must show, of one rank a host, where the links are slowest: there the wire decides, and not this
    machine's cores."""
    if any(each["setting"].get("per_host", 1) > 1 for each in report.rows):
        return
    slowest = min(each["setting"]["bandwidth_mbit"] for each in report.rows)
    by_arm = {each["arm"]: each for each in report.rows if each["setting"]["bandwidth_mbit"] == slowest}
    base = baseline(by_arm)
    for arm, each in by_arm.items():
        need = need_of(arm, report.ranks, each["setting"]["megabytes"])
        if gossip_of(arm) and need is not None:
            report.at_most(f"{arm}'s step over what its bytes allow", each["over_least"], OVER)
        if arm in OF_BOUND and each["speedup"] is not None:
            least = OF_BOUND[arm] * each["bound"]
            report.at_least(f"{arm}'s speed-up over {base}", each["speedup"], least, f">= {least:.3g}")
        if arm in BESIDE and "decent-dp" in by_arm:
            gain = by_arm["decent-dp"]["value"] / each["value"]
            report.at_least(f"{arm}'s speed-up over decent-dp", gain, BESIDE[arm])


def crossings(rows: Sequence[Row]) -> list[str]:
    """From which bandwidth on Horovod's allreduce is quicker, for each arm; between two measured ones in proportion of
    the logarithms."""
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
    """Where speed-ups, by bandwidth, pass through 1."""
    found = []
    for (slow, before), (fast, after) in itertools.pairwise(points):
        if (before >= 1) != (after >= 1):
            way = math.log(before) / (math.log(before) - math.log(after))
            found.append(math.exp(math.log(slow) + way * (math.log(fast) - math.log(slow))))
    return found


def draw(figure: Any, rows: list[Row]) -> None:
    """Steps over Horovod's and what their bytes allow, a panel a bandwidth; then accuracies."""
    speeds = sorted({each["setting"]["bandwidth_mbit"] for each in rows})
    arms = list(dict.fromkeys(each["arm"] for each in rows))
    panels = figure.subplots(1, len(speeds) + 1, sharey=True)
    for axes, mbit in zip(panels, speeds, strict=False):
        mine = [each for each in rows if each["setting"]["bandwidth_mbit"] == mbit]
        base = next((each["value"] for each in mine if each["arm"] == baseline(arms)), None)
        for each in mine:
            value, low, high, least = (each[key] / (base or 1e3) for key in ("value", "low", "high", "least_ms"))
            place, look = arms.index(each["arm"]), plot.fill(each["arm"], arms)
            axes.barh(place, value, 0.75, xerr=[[value - low], [high - value]], ecolor="#555555", capsize=2, **look)
            axes.plot(least, place, "D", color="white", markeredgecolor="black", markersize=6)
            axes.annotate(f"{value:.2f}", (high, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_xlim(right=1.15 * max(each["high"] / (base or 1e3) for each in mine))
        plot.label(axes, f"{mbit:g} Mbit/s", "a step, of Horovod's" if base else "s a step", "")
        axes.grid(axis="x", alpha=0.3)
    panels[0].plot([], [], "D", color="white", markeredgecolor="black", label="what the bytes allow")
    for mbit, mark in zip(speeds, plot.MARKERS, strict=False):
        mine = [each for each in rows if each["setting"]["bandwidth_mbit"] == mbit]
        places = [arms.index(each["arm"]) for each in mine]
        panels[-1].plot([each["accuracy"] for each in mine], places, mark, markersize=5, label=f"at {mbit:g} Mbit/s")
    plot.label(panels[-1], "after as many steps", "accuracy (axis cut off)", "")
    panels[0].set_yticks(range(len(arms)), arms)
    panels[0].invert_yaxis()
    plot.legend(figure, *panels)
