"""Arms in cycles of one block each, repeated until their ratios are known well enough: ``jobs/shared/cycles.py``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from . import launch
from .launch import Block, Say
from .ratios import Ratios, mean_seconds

LEAST = 8
"""Cycles before the interval is looked at."""


def add_options(parser: argparse.ArgumentParser, steps: int, wide: float, pixels: int, batch: int) -> None:
    """Add the options of such a case, with these defaults."""
    parser.add_argument("--steps", type=int, default=steps, help="timed steps of each block")
    parser.add_argument("--wide", type=float, default=wide, help="stop when the 95%% interval is so wide each way")
    parser.add_argument("--image-size", type=int, default=pixels, metavar="N", help="pixels")
    parser.add_argument("--batch-size", type=int, default=batch, metavar="N", help="images a rank and step")


def measure(
    args: argparse.Namespace,
    job: str,
    arms: Sequence[str],
    baseline: str,
    judged: Sequence[str],
    say: Say,
    env: dict[str, str] | None = None,
    **plan: Any,
) -> list[Block]:
    """Run cycles of these arms in one job.

    Args:
        args: the command line; ``repetitions`` is the largest number of cycles, ``limit`` the minutes that they have.
        job: the module's name in ``jobs/``.
        arms: in their order.
        baseline: the arm that ratios are to.
        judged: arms whose ratios must be known well enough.
        say: takes a line of text.
        env: added to the environment.
        plan: what the plan has beside this.
    """
    plan |= {"arms": arms, "baseline": baseline, "judged": judged, "steps": args.steps, "least": LEAST}
    plan |= {"most": args.repetitions, "wide": args.wide, "seconds": args.limit * 60}
    plan |= {"image_size": args.image_size, "batch_size": args.batch_size}
    say(f"cycles of {len(arms)} blocks of {args.steps} steps, for {args.limit:g} min at most")
    ratios = Ratios(baseline)
    cycle: dict[str, float] = {}

    def on_block(block: Block) -> None:
        if block["cycle"] is None:
            return
        cycle[block["arm"]] = mean_seconds(block)
        if len(cycle) == len(arms):
            ratios.add(cycle)
            seen = ", ".join(f"{arm} {ratios.median(arm).value:.3f}" for arm in arms)
            say(f"cycle {block['cycle'] + 1}: {seen}; interval {100 * ratios.wide(judged):.1f}% wide each way")
            cycle.clear()

    return launch.run(job, args.ranks, plan, limit=args.limit * 60 + 400, on_block=on_block, env=env)
