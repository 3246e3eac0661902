"""The part of ``soak`` for arms that gossip: pairings or steps over one random graph after the other."""

from __future__ import annotations

import argparse
from typing import Any

from .blocks import late_counts, mean_of
from .launch import Block
from .report import Report, Row, row

GRAPHS = 40
"""So many, one after the other; a drain between them."""
WEIGHT = 1e-6
"""By how much, relatively, push-sum weights may miss the number of ranks."""
GROWS = 5.0
"""MB in the whole run, once settled."""


def plan_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what ``jobs/soak_gossip.py`` reads. A round of AD-PSGD is a pairing, of others a step of every rank."""
    return {"graphs": min(GRAPHS, max(2, args.rounds // 50)), "uneven": args.uneven}


def row_of(block: Block, setting: dict[str, Any], figures: dict[str, Any]) -> Row:
    """The figures of one job. ``produced`` and ``applied`` are messages sent and taken in."""
    ranks = block["by_rank"]
    stats = [own["stats"] for own in ranks]
    late = late_counts(stats)
    rounds = block["done"]
    return row(
        block["arm"],
        setting,
        rounds / max(own["elapsed"] for own in ranks),
        "rounds/s",
        rounds=rounds,
        steps=sum(own["steps"] for own in stats),
        averagings=sum(own["averagings"] for own in stats),
        produced=sum(own["messages_sent"] for own in stats),
        applied=sum(own["messages_taken"] + own["messages_left"] for own in stats),
        graphs=block["graphs_used"],
        weights_off=max(block["weights_off"]),
        staleness_mean=mean_of(late),
        staleness_most=max(late) if late else None,
        grown_mb=figures["slope_mb"] * rounds / 1e5,
        **figures,
    )


def judge(report: Report, each: Row) -> None:
    """Add what must show. A deadlock ends the job by force, and there is no row."""
    arm, ranks, wanted = each["arm"], report.ranks, each["setting"]["rounds"]
    what = "pairings" if arm.startswith("adpsgd") else "steps of each rank"
    report.wants(f"{what}, {arm}", each["rounds"], f">= {wanted}", each["rounds"] >= wanted, exact=True)
    alike = each["produced"] == each["applied"]
    text = f"{each['applied']} of {each['produced']}"
    report.wants(f"messages taken in, {arm}", text, "all that were sent", alike, exact=True)
    off = each["weights_off"]
    what = f"push-sum weights' sum less {ranks}, the most at {each['graphs']} cuts, {arm}"
    report.wants(what, off, f"<= {WEIGHT * ranks:g}", off <= WEIGHT * ranks, exact=True)
    same = "yes" if each["identical"] else "no"
    report.wants(f"replicas identical after each drain, {arm}", same, "bit for bit", each["identical"], exact=True)
    report.at_most(f"MB that memory grew by, once settled, {arm}", each["grown_mb"], GROWS)
