"""Steps by a schedule, for ``straggler`` and ``skew``: blocks for ``jobs/timed.py``, and figures of their results."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from hvd_async.simulation.names import LEADERS, SYNCHRONOUS, gossip_of
from hvd_async.simulation.schedule import Schedule

from . import launch
from .blocks import late_counts, mean_of
from .launch import START, Block, Say, repetitions
from .report import Report, Row

TOO_BUSY = 1.08
"""Horovod's arm over its bound; beyond that the machine was too busy for the figures to mean much."""


def blocks_of(
    arms: Sequence[str],
    settings: Sequence[tuple[dict[str, Any], Schedule]],
    count: int,
    barrier: bool,
    seeds: Sequence[int] = (),
) -> list[Block]:
    """Every arm in every setting, ``count`` times, in alternation.

    ``seeds`` are those of majority's draw, by repetition; without them they are the repetitions' numbers.
    """
    blocks = []
    for setting, times in settings:
        for repetition, arm in repetitions(arms, count):
            seed = seeds[repetition] if seeds else repetition
            block = {"arm": arm, "repetition": repetition, "seed": seed, "barrier": barrier, "times": times.tolist()}
            blocks.append({**setting, **block})
    return blocks


def measure(args: argparse.Namespace, blocks: list[Block], say: Say) -> list[Block]:
    """Run them in one job."""
    longest = sum(sum(max(row) for row in block["times"]) for block in blocks)
    say(f"{len(blocks)} blocks of {len(blocks[0]['times'])} steps, about {longest / 60 + 1:.0f} min at most")

    def tell(block: Block) -> str:
        return f"{block['arm']}, {block['delay']:g} s: {step_seconds(block):.3f} s a step"

    limit = START + 2 * longest + 10 * len(blocks)
    return launch.measure(
        args, "timed", blocks, say, tell, seconds=limit, plan={"model": getattr(args, "model", "small")}
    )


def steps_of(block: Block) -> int:
    """Steps of each rank in a block."""
    return int(block["steps"])


def step_seconds(block: Block) -> float:
    """Seconds a step, until the last rank has done all its steps."""
    return float(max(own["elapsed"] for own in block["by_rank"])) / steps_of(block)


def wait_seconds(block: Block) -> float:
    """Seconds that a rank waited in a step, mean over ranks and steps."""
    return statistics.fmean(own["waited"] for own in block["by_rank"]) / steps_of(block)


def fresh_per_second(block: Block) -> float | None:
    """Gradients of staleness 0 a second, all ranks together; None for arms that average none."""
    elapsed = max(own["elapsed"] for own in block["by_rank"])
    if block["arm"] in SYNCHRONOUS and not block["by_rank"][0]["stats"]:
        return len(block["by_rank"]) * steps_of(block) / float(elapsed)
    if gossip_of(block["arm"]) or block["arm"] in LEADERS:
        return None
    return sum(own["stats"]["staleness"].get("0", 0) for own in block["by_rank"]) / float(elapsed)


def mean_staleness(block: Block) -> float | None:
    """Rounds that a gradient was late, on average; None for arms that are not ours."""
    return mean_of(late_counts(own["stats"] for own in block["by_rank"]))


def mean_contributors(block: Block) -> float | None:
    """Ranks that had arrived when a round fired, mean over rounds; None for arms that are not ours."""
    counts = block["by_rank"][0]["stats"].get("contributors", {})
    return mean_of({int(ranks): rounds for ranks, rounds in counts.items()})


def held_seconds(block: Block) -> float | None:
    """Return the seconds that a rank waited until its round fired, by the coordinator's clock, mean over ranks and
    steps; None for arms that are not ours."""
    held = block["by_rank"][0]["stats"].get("held_s")
    return sum(held) / len(block["by_rank"]) / steps_of(block) if held else None


def judge_busy(report: Report, what: str, over: float, more: str = "") -> bool:
    """Add what must show of Horovod's step over its bound, and a remark if the machine was too busy; return whether."""
    report.at_most(what, over, TOO_BUSY)
    if over > TOO_BUSY:
        report.notes.append(f"the machine was too busy: Horovod's arm took {over:.2f} of its bound{more}")
    return over > TOO_BUSY


def judge_auto(report: Report, rows: Sequence[Row], where: str = "") -> None:
    """Add what must show of ``auto``: its fresh gradients a second against the best fixed quorum's, if there is one."""
    fresh = {each["arm"]: each["fresh_per_s"] for each in rows}
    fixed = {arm: value for arm, value in fresh.items() if arm not in ("auto", "horovod", "ddp")}
    if "auto" in fresh and fixed:
        best = max(fixed, key=lambda arm: fixed[arm])
        what = f"auto's fresh gradients a second against {best}'s{where}"
        report.at_least(what, fresh["auto"] / fixed[best], 0.95)


def first_round(block: Block) -> int:
    """Return the number of the round of the schedule's first step, on which majority's draw depends."""
    return 1 + int(block["by_rank"][0]["rounds_before"])
