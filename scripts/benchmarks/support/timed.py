"""What ``straggler`` and ``skew`` share: blocks for ``jobs/timed.py``, and what their results say."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from .launch import Block, Progress, Say, repetitions, run
from .schedule import SYNCHRONOUS, Schedule

START = 180.0
"""Seconds that a job may take to start: eight processes import torch."""


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
    progress = Progress(len(blocks), say)

    def on_block(block: Block) -> None:
        progress(f"{block['arm']}, {block['delay']:g} s: {step_seconds(block):.3f} s a step")

    limit = args.limit * 60 if args.limit else START + 2 * longest + 10 * len(blocks)
    plan = {"blocks": blocks, "model": getattr(args, "model", "small")}
    return run("timed", args.ranks, plan, limit=limit, on_block=on_block)


def steps_of(block: Block) -> int:
    """Steps of each rank in a block."""
    return int(block["steps"])


def step_seconds(block: Block) -> float:
    """Seconds a step, until the last rank has done all its steps."""
    return float(max(own["elapsed"] for own in block["by_rank"])) / steps_of(block)


def wait_seconds(block: Block) -> float:
    """Seconds that a rank waited in a step, mean over ranks and steps."""
    return statistics.fmean(own["waited"] for own in block["by_rank"]) / steps_of(block)


def fresh_per_second(block: Block) -> float:
    """Gradients of staleness 0 a second, all ranks together."""
    elapsed = max(own["elapsed"] for own in block["by_rank"])
    if block["arm"] in SYNCHRONOUS and not block["by_rank"][0]["stats"]:
        return len(block["by_rank"]) * steps_of(block) / float(elapsed)
    return sum(own["stats"]["staleness"].get("0", 0) for own in block["by_rank"]) / float(elapsed)


def mean_staleness(block: Block) -> float | None:
    """Rounds that a gradient was late, on average; None for arms that are not ours."""
    pairs = [(int(k), n) for own in block["by_rank"] for k, n in own["stats"].get("staleness", {}).items()]
    total = sum(n for _, n in pairs)
    return sum(k * n for k, n in pairs) / total if total else None


def mean_contributors(block: Block) -> float | None:
    """Ranks that had arrived when a round fired, mean over rounds; None for arms that are not ours."""
    counts = block["by_rank"][0]["stats"].get("contributors", {})
    total = sum(counts.values())
    return sum(int(k) * n for k, n in counts.items()) / total if total else None


def held_seconds(block: Block) -> float | None:
    """As ``wait_seconds``, but until the round fired, by the coordinator's clock; None for arms that are not ours."""
    held = block["by_rank"][0]["stats"].get("held_s")
    return sum(held) / len(block["by_rank"]) / steps_of(block) if held else None


def median(values: list[float | None]) -> float | None:
    """Of those that are there."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def judge_auto(fresh: dict[str, float], where: str) -> tuple[str, float] | None:
    """What is said of ``auto``: its fresh gradients a second against the best fixed quorum's; None without one."""
    fixed = {arm: value for arm, value in fresh.items() if arm not in ("auto", "horovod", "ddp")}
    if "auto" not in fresh or not fixed:
        return None
    best = max(fixed, key=lambda arm: fixed[arm])
    return f"auto's fresh gradients a second against {best}'s, {where}", fresh["auto"] / fixed[best]
