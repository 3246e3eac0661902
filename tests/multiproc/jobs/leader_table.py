"""The cases of the leader jobs, as data: what the ranks run, and what the tests compare it with. No framework here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.conformance.leader_reference import NEVER_OLD, Following, several

STEPS = 24
PATIENCE = 60.0
"""Seconds that ranks continue stepping for one that waits to be pulled."""


def pairs(size: int) -> tuple[tuple[int, ...], ...]:
    """Groups of two ranks, and one that is left over."""
    return tuple(tuple(range(first, min(first + 2, size))) for first in range(0, size, 2))


def cases(size: int, sets: str) -> dict[str, Following]:
    """By name; ``sets``: which process sets the job has (``library.py``)."""
    one = Following(groups=several(size, size), local_period=2, global_period=4, loss_window=NEVER_OLD)
    grouped = dataclasses.replace(one, groups=pairs(size), local_pull=0.3, global_prox=0.0)
    if sets == "dynamic":
        return {"pairs": grouped}
    alone = dataclasses.replace(one, groups=several(size, 1), lr_spread="linear")
    found = {"one group": one, "easgd": Following("easgd", global_period=2), "alone": alone}
    return found if sets == "none" else found | {"pairs": grouped}


def process_sets(kind: str, make: Callable[[list[int]], Any]) -> Any:
    """For ``hvd.init``: none; those to come, as torch can make them; or the pairs of three ranks from the start."""
    return {"none": lambda: None, "dynamic": lambda: "dynamic", "static": lambda: [make([0, 1]), make([2])]}[kind]()
