"""Files of a run that are whole or not there, as what is read again after a crash must be; and its logs as CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PERCENTS = range(101)
Pull = tuple[float, int, int]
"""Unix time in s; group, or -1 for all ranks; leader, or -1 for the centre."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, then put it in place at once; on an error the old file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Keras chooses a file's format by its ending, so the ending is kept.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # else the new name may reach the disk before the contents do
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_rows(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write CSV, whole or not at all."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    write_atomically(path, lambda place: place.write_text(text.getvalue(), newline=""))


def write_step_times(path: Path, ranks: Sequence[Sequence[float]]) -> None:
    """Write percentiles of each rank's step times as CSV: `percent` from 0 to 100, and the seconds of `rank0`, `rank1`
    and so on (empty: it took no step).

    Args:
        ranks: the seconds of each rank's steps.
    """
    columns = [
        [f"{each:.6f}" for each in np.percentile(times, PERCENTS)] if times else [""] * len(PERCENTS) for times in ranks
    ]
    head = ["percent", *(f"rank{rank}" for rank in range(len(ranks)))]
    write_rows(path, [head, *zip(PERCENTS, *columns, strict=True)])


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
