"""Blocks that a job has brought: put in groups, and looked at over all their ranks. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

Block = dict[str, Any]
Own = dict[str, Any]
"""Results of one rank."""
Key = TypeVar("Key", bound=Hashable)


def grouped(blocks: Iterable[Block], key: Callable[[Block], Key]) -> dict[Key, list[Block]]:
    """Return the blocks of each key, in the order in which the keys first come."""
    groups: dict[Key, list[Block]] = {}
    for block in blocks:
        groups.setdefault(key(block), []).append(block)
    return groups


def by_arm(blocks: Iterable[Block]) -> dict[str, list[Block]]:
    """Return each arm's blocks."""
    return grouped(blocks, lambda block: str(block["arm"]))


def everywhere(blocks: Iterable[Block]) -> list[Own]:
    """Return what every rank found in every block."""
    return [own for block in blocks for own in block["by_rank"]]


def identical(blocks: Iterable[Block]) -> bool:
    """Return whether all ranks ended every block with the same weights."""
    return all(own["identical"] for own in everywhere(blocks))


def median(values: Sequence[float | None]) -> float | None:
    """Return the median of those that are there; None if none is."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def late_counts(stats: Iterable[dict[str, Any]]) -> dict[int, int]:
    """Return how many gradients, or messages, were so many rounds, or steps, late, over all ranks' ``stats()``."""
    counts: dict[int, int] = {}
    for own in stats:
        for late, count in own.get("staleness", {}).items():
            counts[int(late)] = counts.get(int(late), 0) + count
    return counts


def mean_of(counts: dict[int, int]) -> float | None:
    """Return the mean of numbers of which there are so many each; None if there are none."""
    total = sum(counts.values())
    return sum(number * count for number, count in counts.items()) / total if total else None
