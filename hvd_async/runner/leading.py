"""Who led when, as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .files import write_rows

Pull = tuple[float, int, int]
"""Unix time in s; group, or -1 for all ranks; leader, or -1 for the centre."""


def write_leaders(path: Path, histories: Sequence[Sequence[Pull]]) -> None:
    """Write the pulls of all groups as CSV: `time_s` since the first, `group` (empty: all ranks), `leader` (empty: the
    centre).

    Args:
        histories: what each rank has seen; of a group's pulls the lowest rank's word counts.
    """
    pulls: list[Pull] = []
    told: set[int] = set()
    for history in histories:
        pulls += [pull for pull in history if pull[1] not in told]
        told |= {group for _, group, _ in history}
    first = min((time for time, _, _ in pulls), default=0.0)
    rows = [
        (f"{time - first:.6f}", "" if group < 0 else group, "" if leader < 0 else leader)
        for time, group, leader in sorted(pulls)
    ]
    write_rows(path, [("time_s", "group", "leader"), *rows])
