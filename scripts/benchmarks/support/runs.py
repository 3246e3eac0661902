"""Runs of the runners, read from their ``--log-dir`` or ``--summary`` for ``scripts/plot.py``."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_async.runner.report import KEYS

from .leadership import ALL, Pull

Row = dict[str, Any]
NAMES = ("metrics.csv", "step_times.csv", "leaders.csv")
BY_RANK = ("wait_s", "held_s")
"""Columns of metrics.csv with a number a rank, a space between two."""
EMPTY = "no epoch had ended, no step was taken, or nobody led (easgd has a centre)"
HINT = "give a runner's --log-dir, CSV files of it, its --summary, or one JSON file of scripts/bench.py --json"


@dataclass
class Run:
    """A run, as far as it is known.

    Attributes:
        place: the folder or the file.
        epochs: the lines of metrics.csv: numbers, tuples of numbers by rank, None where there is nothing.
        step_times: of step_times.csv, by rank: percentiles of the seconds of a step, from 0 to 100.
        pulls: of leaders.csv; none of EASGD, which has no leaders.
        summary: as the runner has written it.
        size: ranks, if the files do not tell.
    """

    place: Path
    epochs: list[Row] = field(default_factory=list)
    step_times: list[list[float]] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0

    @property
    def arm(self) -> str | None:
        """The run's arm by its name in the benchmarks: a quorum, an algorithm, "horovod"; None if it is not known."""
        if not self.summary:
            return None
        algorithm, quorum = self.summary["algorithm"], self.summary["quorum"]
        if algorithm == "eager":
            return f"k{quorum}" if isinstance(quorum, int) else str(quorum)
        return "horovod" if algorithm == "allreduce" else str(algorithm)

    @property
    def ranks(self) -> int:
        """How many there were, as far as is known; of a lone leaders.csv, as far as the leaders go."""
        return max(self._told, 1 + max((pull[2] for pull in self.pulls), default=0))

    @property
    def _told(self) -> int:
        """The number of ranks without asking who led; 0 if nothing else says."""
        return max(
            *(self.size, len(self.by_rank("wait_s")), len(self.step_times)), int(self.summary.get("world_size", 0))
        )

    @property
    def group_size(self) -> int:
        """Ranks that have a leader of their own, in a run with pulls.

        Raises:
            ValueError: there are several such groups, and nothing says how many ranks.
        """
        groups = 1 + max(pull[1] for pull in self.pulls)
        if groups and not self._told:
            raise ValueError(f"{self.place} tells of {groups} groups, and not how many ranks there are: give --ranks")
        return self.ranks // max(1, groups)

    def by_rank(self, column: str) -> list[float]:
        """The sums over all epochs, else what the summary says of the last time that the run was started."""
        found = [row[column] for row in self.epochs if row.get(column)]
        if found:
            return [sum(each) for each in itertools.zip_longest(*found, fillvalue=0.0)]  # resumed with more ranks
        return list(self.summary.get(f"{column}_by_rank") or [])

    def curve(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """Columns of metrics.csv against each other, where both are there; ``seconds`` from the run's begin."""
        rows = self.epochs
        if x == "seconds":
            told = list(itertools.takewhile(lambda row: row.get(x) is not None, rows))
            passed = itertools.accumulate(row[x] for row in told)
            rows = [row | {x: until} for row, until in zip(told, passed, strict=True)]
        there = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
        return [row[x] for row in there], [row[y] for row in there]


def labels(runs: Sequence[Run]) -> list[str]:
    """Return names that differ: algorithm or quorum, else the names of the folders, else the whole paths."""
    ways: tuple[Callable[[Run], str | None], ...] = (lambda run: run.arm, lambda run: run.place.resolve().stem)
    for way in ways:
        names = [way(run) for run in runs]
        if None not in names and len(set(names)) == len(runs):
            return [str(name) for name in names]
    return [str(run.place) for run in runs]


def read(paths: Sequence[Path], ranks: int | None = None) -> list[Run]:
    """The runs that folders and files tell of; CSV files of the same folder are of the same run.

    Args:
        paths: of them.
        ranks: of the jobs, if the files do not tell.

    Raises:
        ValueError: what cannot be read, or has nothing to draw, and what can.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} is not there: {HINT}")
        if path.is_dir():
            runs[path] = _folder(path)
        elif path.suffix == ".json":
            runs[path] = Run(path, summary=read_summary(path))
        elif not _take(runs.setdefault(path.parent, Run(path.parent)), path):
            raise ValueError(f"{path} tells nothing: {EMPTY}")
    for run in runs.values():
        if ranks is not None and ranks < run.ranks:
            raise ValueError(f"--ranks {ranks}: there were {run.ranks} in {run.place}; give {run.ranks} or more")
        run.size = ranks or 0
    return list(runs.values())


def _folder(path: Path) -> Run:
    run = Run(path)
    told = [_take(run, path / name) for name in NAMES if (path / name).exists()]
    if (path / "summary.json").exists():
        run.summary = read_summary(path / "summary.json")
    if not told and not run.summary:
        raise ValueError(f"{path} holds no {', '.join(NAMES)} or summary.json: {HINT}")
    if not any(told) and not run.summary:
        raise ValueError(f"{path} tells nothing: {EMPTY}")
    return run


def _take(run: Run, path: Path) -> bool:
    """Add what a CSV file says; whether that is anything."""
    try:
        with path.open(newline="") as file:
            head, *rows = list(csv.reader(file)) or [[]]
        if head[:1] == ["epoch"] and "train_loss" in head:
            run.epochs = [_epoch(dict(zip(head, row, strict=True))) for row in rows]
            return bool(rows)
        if head[:1] == ["percent"]:
            by_rank = zip(*([float(each or "nan") for each in row[1:]] for row in rows), strict=True)
            run.step_times = [list(times) for times in by_rank if len(times) == 101]
            return bool(run.step_times)
        if head == ["time_s", "group", "leader"]:
            pulls = [(float(at), int(group or ALL), int(leader or ALL)) for at, group, leader in rows]
            run.pulls = [] if any(leader == ALL for _, _, leader in pulls) else pulls
            return bool(run.pulls)
        raise ValueError(f"it begins with {','.join(head)[:60]!r}")
    except (OSError, ValueError, csv.Error) as error:  # a UnicodeDecodeError is a ValueError
        raise ValueError(f"{path} is no {', '.join(NAMES)} of a runner ({error}): {HINT}") from None


def _epoch(row: Mapping[str, str]) -> Row:
    found: Row = {}
    for name, text in row.items():
        if text == "":
            found[name] = None
        else:
            found[name] = tuple(map(float, text.split())) if name in BY_RANK else float(text)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. ValueError if there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): {HINT}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object: {HINT}")
    return content


def read_summary(path: Path) -> dict[str, Any]:
    """Return what a runner's ``--summary`` says. ValueError if it is none."""
    content = read_json(path)
    missing = [key for key in KEYS if key not in content]
    if missing:
        raise ValueError(f"{path} is no runner's summary (it has no {missing[0]}), nor a benchmark's rows: {HINT}")
    return content
