"""Runs of the runners, read from their ``--log-dir`` or ``--summary``, and their picture."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvd_async.runner.report import KEYS

from . import plot

Row = dict[str, Any]
Pull = tuple[float, int, int]
"""Seconds, group (-1: all ranks), leader."""
ALL = -1
NAMES = ("metrics.csv", "step_times.csv", "leaders.csv")
BY_RANK = ("wait_s", "held_s")
"""Columns of metrics.csv with a number per rank, separated by spaces."""
EMPTY = "no epoch had ended, no step was taken, or no rank led (easgd has a centre)"
HINT = "give a runner's --log-dir, CSV files of it, its --summary, or one JSON file of scripts/bench.py --json"


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run, as far as it is known.

    Attributes:
        place: the folder or the file.
        epochs: the lines of metrics.csv: numbers, tuples of numbers by rank, None where there is nothing.
        step_times: of step_times.csv, by rank: percentiles of the seconds of a step, from 0 to 100.
        pulls: of leaders.csv; none of EASGD, which has no leaders.
        summary: as the runner has written it.
        size: number of ranks, if the files do not say.
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
    def known_ranks(self) -> int:
        """Number of ranks by anything but who led; 0 if nothing says."""
        reported = int(self.summary.get("world_size", 0))
        return max(self.size, len(self.by_rank("wait_s")), len(self.step_times), reported)

    @property
    def ranks(self) -> int:
        """Number of ranks, as far as is known; of a lone leaders.csv, as far as the leaders go."""
        return max(self.known_ranks, 1 + max((leader for _, _, leader in self.pulls), default=0))

    @property
    def group_size(self) -> int:
        """Number of ranks that have a leader of their own, in a run with pulls.

        Raises:
            ValueError: there are several such groups, and nothing says how many ranks.
        """
        groups = 1 + max(group for _, group, _ in self.pulls)
        if groups and not self.known_ranks:
            raise ValueError(f"{self.place} tells of {groups} groups, and not how many ranks there are: give --ranks")
        return self.ranks // max(1, groups)

    def by_rank(self, column: str) -> list[float]:
        """Return the sums over all epochs, else what the summary says of the last start of the run."""
        found = [row[column] for row in self.epochs if row.get(column)]
        if found:
            return [sum(each) for each in itertools.zip_longest(*found, fillvalue=0.0)]  # resumed with more ranks
        return list(self.summary.get(f"{column}_by_rank") or [])

    def curve(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """Return columns of metrics.csv, where both are there; ``seconds`` count from the run's start."""
        rows = self.epochs
        if x == "seconds":
            timed = list(itertools.takewhile(lambda row: row.get(x) is not None, rows))
            passed = itertools.accumulate(row[x] for row in timed)
            rows = [row | {x: until} for row, until in zip(timed, passed, strict=True)]
        both = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
        return [row[x] for row in both], [row[y] for row in both]


def labels(runs: Sequence[Run]) -> list[str]:
    """Return names that differ: algorithm or quorum, else the names of the folders, else the whole paths."""
    ways: tuple[Callable[[Run], str | None], ...] = (lambda run: run.arm, lambda run: run.place.resolve().stem)
    for way in ways:
        names = [way(run) for run in runs]
        if None not in names and len(set(names)) == len(runs):
            return [str(name) for name in names]
    return [str(run.place) for run in runs]


def read(paths: Sequence[Path], ranks: int | None = None) -> list[Run]:
    """Return the runs of folders and files; CSV files of the same folder are of the same run.

    Args:
        paths: of them.
        ranks: of the jobs, if the files do not say.

    Raises:
        ValueError: something cannot be read, or has nothing to draw; the message says what can.
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
    found = [_take(run, path / name) for name in NAMES if (path / name).exists()]
    if (path / "summary.json").exists():
        run.summary = read_summary(path / "summary.json")
    if not found and not run.summary:
        raise ValueError(f"{path} holds no {', '.join(NAMES)} or summary.json: {HINT}")
    if not any(found) and not run.summary:
        raise ValueError(f"{path} tells nothing: {EMPTY}")
    return run


def _take(run: Run, path: Path) -> bool:
    """Add what a CSV file says, and return whether that is anything."""
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
    """Return a JSON object; ValueError if there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): {HINT}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object: {HINT}")
    return content


def read_summary(path: Path) -> dict[str, Any]:
    """Return what a runner's ``--summary`` says; ValueError if it is none."""
    content = read_json(path)
    missing = [key for key in KEYS if key not in content]
    if missing:
        raise ValueError(f"{path} is no runner's summary (it has no {missing[0]}), nor a benchmark's rows: {HINT}")
    return content


# -- panels ------------------------------------------------------------------------------------------------------------

Runs = Mapping[str, Run]
"""By label."""
WIDTH, HEIGHT = 11.0, 3.4
"""Inches of a picture, and of a panel."""


class Panel(NamedTuple):
    """Part of the picture: title, axes' labels, whether a run has something for it, how that is drawn."""

    title: str
    x: str
    y: str
    has: Callable[[Run], bool]
    draw: Callable[[Any, Runs, list[str]], None]


def curve(title: str, x: str, y: str, x_label: str, y_label: str, *, log: bool = False, most: str = "") -> Panel:
    """Return a panel with a line per run over epochs or seconds; ``most``: key of a second, thin line."""

    def draw(axes: Any, runs: Runs, names: list[str]) -> None:
        for name, run in runs.items():
            look = plot.line(name, names)
            axes.plot(*run.curve(x, y), label=name, **look)
            if most:
                axes.plot(*run.curve(x, most), color=look["color"], linestyle=look["linestyle"], linewidth=0.7)
        if x == "epoch":
            axes.xaxis.get_major_locator().set_params(integer=True)
        else:
            axes.set_xlim(left=0)
        if log and any(value > 0 for run in runs.values() for value in run.curve(x, y)[1]):
            plot.logarithmic(axes)

    return Panel(title, x_label, y_label, lambda run: not _is_short(run) and bool(run.curve(x, y)[0]), draw)


def _is_short(run: Run) -> bool:
    """Return whether a run's epochs are too few for a line, and its summary says as much."""
    return len(run.epochs) < 2 and bool(run.summary)


def by_rank(title: str, y: str, values: Callable[[Run], list[float]]) -> Panel:
    """Return a panel with a bar per rank and run."""

    def draw(axes: Any, runs: Runs, names: list[str]) -> None:
        rows = [
            {"arm": name, "rank": rank, "value": value}
            for name in names
            if name in runs
            for rank, value in enumerate(values(runs[name]))
        ]
        rows.sort(key=lambda row: (row["rank"], names.index(row["arm"])))
        plot.bars(axes, rows, [str(row["rank"]) for row in rows], "value")

    return Panel(title, "rank", y, lambda run: bool(values(run)), draw)


def at_the_end(title: str, y: str, key: str, *mark: str, log: bool = False) -> Panel:
    """Return a panel with a bar for each run that has little but a summary; ``mark``: key and meaning of a mark."""

    def draw(axes: Any, runs: Runs, names: list[str]) -> None:
        rows = [{"arm": name, "value": _of(run.summary, key)} for name, run in runs.items()]
        groups = ["all ranks"] * len(rows)
        plot.bars(axes, rows, groups, "value")
        for place, run in zip(plot.places_of(rows, groups), runs.values(), strict=True):
            if mark and _of(run.summary, mark[0]) is not None:
                axes.plot(place, _of(run.summary, mark[0]), "D", color="white", markeredgecolor="black")
        if mark:
            axes.plot([], [], "D", color="white", markeredgecolor="black", label=mark[1])
        if log and any(row["value"] for row in rows):
            plot.logarithmic(axes)
        else:
            axes.set_ylim(bottom=0)

    return Panel(title, "", y, lambda run: _is_short(run) and _of(run.summary, key) is not None, draw)


def _of(summary: Mapping[str, Any], key: str) -> Any:
    name, _, part = key.partition(".")
    value = summary.get(name)
    return value.get(part) if part and isinstance(value, dict) else value


def boxes(axes: Any, runs: Runs, names: list[str]) -> None:
    """Draw the spread of each rank's step times, a box per rank and run."""
    width = plot.WIDTH / len(runs)
    for place, (name, run) in enumerate(runs.items()):
        look, line = plot.fill(name, names), {"color": "#555555", "linewidth": 1.0}
        known = {rank: times for rank, times in enumerate(run.step_times) if not math.isnan(times[0])}
        keys = {"whislo": 5, "q1": 25, "med": 50, "q3": 75, "whishi": 95}
        axes.bxp(
            [{key: times[percent] for key, percent in keys.items()} for times in known.values()],
            positions=[rank + (place - (len(runs) - 1) / 2) * width for rank in known],
            widths=0.85 * width,
            patch_artist=True,
            showfliers=False,
            manage_ticks=False,
            boxprops={"facecolor": look["color"]} | {key: look[key] for key in look if key != "color"},
            medianprops={"color": "white", "linewidth": 2},
            whiskerprops=line,
            capprops=line,
        )
        axes.bar([], [], label=name, **look)
    ranks = range(max(len(run.step_times) for run in runs.values()))
    axes.set_xticks(ranks, map(str, ranks))
    axes.set_ylim(bottom=0)


SECONDS = "seconds of training"
LATE = "late by: rounds (gossip: steps)"
ROOT_MEAN_SQUARE = "root mean square"
PANELS = (
    curve("training loss over epochs", "epoch", "train_loss", "epochs", "loss, mean of the epoch", log=True),
    curve("training loss over time", "seconds", "train_loss", SECONDS, "loss, mean of the epoch", log=True),
    curve("test accuracy over epochs", "epoch", "test_accuracy", "epochs", "share of test images"),
    curve("test accuracy over time", "seconds", "test_accuracy", SECONDS, "share of test images"),
    at_the_end("training loss", "mean of the last epoch", "train_loss"),
    at_the_end("test accuracy", "share of test images", "test_accuracy"),
    Panel(
        "step times: 5, 25, 50, 75 and 95% of steps are below",
        *("rank", "seconds a step"),
        lambda run: any(not math.isnan(times[0]) for times in run.step_times),
        boxes,
    ),
    at_the_end("step time, median", "seconds a step", "step_time_s.p50", "step_time_s.p95", "95% of steps are below"),
    by_rank("waiting for others", "seconds in all", lambda run: run.by_rank("wait_s")),
    by_rank("others waited for this rank", "seconds of all others", lambda run: run.by_rank("held_s")),
    curve(
        *("distance from the average (consensus)", "epoch", "consensus_distance", "epochs", ROOT_MEAN_SQUARE), log=True
    ),
    at_the_end("distance from the average (consensus)", ROOT_MEAN_SQUARE, "consensus_distance", log=True),
    curve("staleness: mean, and (thin) the most", "epoch", "staleness_mean", "epochs", LATE, most="staleness_max"),
    at_the_end("staleness, mean", LATE, "staleness.mean", "staleness.max", "the most"),
    by_rank(
        *("distance from leaders, or the centre", "|x - leader|, mean over pulls"),
        lambda run: list(run.summary.get("leader_distance_by_rank") or []),
    ),
)


def draw(figure: Any, runs: Runs) -> None:
    """Draw the panels that runs have something for, in pairs, and below them who led when, a line per run."""
    names = list(runs)
    panels = [(panel, {n: run for n, run in runs.items() if panel.has(run)}) for panel in PANELS]
    panels = [(panel, having) for panel, having in panels if having]
    led = {name: run for name, run in runs.items() if run.pulls}
    columns = min(2, len(panels)) or 1
    lines = math.ceil(len(panels) / columns)
    heights = [HEIGHT] * lines + [1.4 + 0.45 * run.ranks for run in led.values()]
    figure.set_size_inches(WIDTH, sum(heights) + 0.8)
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    drawn = []
    for number, (panel, having) in enumerate(panels):
        is_last = number == len(panels) - 1  # the last one of an odd number is as wide as two
        place = slice(number % columns, columns) if is_last else number % columns
        axes = figure.add_subplot(grid[number // columns, place])
        panel.draw(axes, having, names)
        plot.label(axes, panel.title, panel.x, panel.y)
        drawn.append(axes)
    for number, (name, run) in enumerate(led.items(), lines):
        axes = figure.add_subplot(grid[number, :])
        draw_leaders(axes, run)
        plot.label(axes, f"who led when: {name}", "seconds since the first pull", "")
        drawn.append(axes)
    plot.legend(figure, *drawn)


def draw_leaders(axes: Any, run: Run) -> None:
    """Draw a line per rank: below when it led its group, above when it led all; at the right its share of those."""
    end, size, ranks = run.pulls[-1][0] or 1.0, run.group_size, run.ranks
    looks = {ALL: {"facecolor": plot.COLORS[6]}, 0: {"facecolor": plot.COLORS[2]}}
    looks[1] = {"facecolor": plot.COLORS[3], "hatch": "////"}
    edge = {"edgecolor": "black", "linewidth": 0.3}
    for group in sorted({group for _, group, _ in run.pulls}):
        mine = [(at, leader) for at, of, leader in run.pulls if of == group]
        for (start, leader), (until, _) in itertools.pairwise([*mine, (end, 0)]):
            # rank 0 is at the top, where y is least
            place = (leader - 0.42, 0.40) if group == ALL else (leader + 0.04, 0.36)
            if group == ALL or size < ranks:
                axes.broken_barh([(start, until - start)], place, **edge, **looks[ALL if group == ALL else group % 2])
    counts = Counter(leader for _, group, leader in run.pulls if group == ALL)
    for rank in range(ranks):
        axes.axhline(rank - 0.5, color="#999999", linewidth=1.2 if rank % size == 0 and rank else 0.3)
        share = counts[rank] / max(1, counts.total())
        axes.text(1.01, rank, f"{share:.0%}", transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(0, end)
    axes.fill([], [], label="led all ranks (at the right: of how many pulls)", **edge, **looks[ALL])
    if size < ranks:
        axes.fill([], [], label="led its group", **edge, **looks[0])
        axes.fill([], [], label="led its group (every second group)", **edge, **looks[1])
