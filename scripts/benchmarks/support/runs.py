"""Runs of the runners, read from their ``--log-dir``, and their picture."""

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
ALL = -1
"""Instead of a group's number: a pull of all ranks."""
NAMES = ("metrics.csv", "step_times.csv", "leaders.csv")
BY_RANK = ("wait_s", "held_s")
"""Columns of metrics.csv with a number per rank, separated by spaces."""
HINT = "pass a runner's --log-dir, CSV files of it, or one JSON file of scripts/bench.py --json"


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run, as far as it is known.

    Attributes:
        place: the folder.
        epochs: the lines of metrics.csv: numbers, lists of numbers by rank, None where there is nothing.
        step_times: of step_times.csv, by rank: percentiles of the seconds of a step, from 0 to 100.
        pulls: of leaders.csv, seconds, group and leader; none of EASGD, which has no leaders.
        summary: as the runner has written it.
        size: number of ranks, if it is given; else as far as the files say.
    """

    place: Path
    epochs: list[Row] = field(default_factory=list)
    step_times: list[list[float]] = field(default_factory=list)
    pulls: list[tuple[float, int, int]] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0

    @property
    def arm(self) -> str:
        """The run's arm by its name in the benchmarks; the folder's name without a summary."""
        if not self.summary:
            return self.place.resolve().name
        algorithm, quorum = self.summary["algorithm"], self.summary["quorum"]
        if algorithm == "eager":
            return f"k{quorum}" if isinstance(quorum, int) else str(quorum)
        return "horovod" if algorithm == "allreduce" else str(algorithm)

    @property
    def ranks(self) -> int:
        """Number of ranks, as far as is known; of a lone leaders.csv, as far as the leaders go."""
        known = (self.size, len(self.by_rank("wait_s")), len(self.step_times), self.summary.get("world_size", 0))
        return max(*known, *(leader + 1 for _, _, leader in self.pulls))

    def by_rank(self, column: str) -> list[float]:
        """Return the sums over all epochs; a run may be resumed with more ranks."""
        found = [row[column] for row in self.epochs if row.get(column)]
        return [sum(each) for each in itertools.zip_longest(*found, fillvalue=0.0)]

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
    """Return names that differ: algorithm or quorum, else the whole paths."""
    names = [run.arm for run in runs]
    return names if len(set(names)) == len(runs) else [str(run.place) for run in runs]


def read(paths: Sequence[Path], ranks: int | None = None) -> list[Run]:
    """Return the runs of folders and files; CSV files of the same folder are of the same run.

    Raises:
        ValueError: a file cannot be read, or a run has nothing to draw; the message says what can be drawn.
    """
    runs: dict[Path, Run] = {}
    for path in paths:
        folder = path if path.is_dir() else path.parent
        run = runs.setdefault(folder, Run(folder, size=ranks or 0))
        files = [path / name for name in NAMES if (path / name).exists()] if path.is_dir() else [path]
        for file in files:
            _take(run, file)
        if path.is_dir() and (path / "summary.json").exists():
            run.summary = read_json(path / "summary.json")
            if missing := [key for key in KEYS if key not in run.summary]:
                raise ValueError(f"{path / 'summary.json'} is no runner's summary (it has no {missing[0]}): {HINT}")
        if not (run.epochs or run.step_times or run.pulls):
            raise ValueError(f"{path} has no finished epoch, step or leader in {', '.join(NAMES)}: {HINT}")
    return list(runs.values())


def _take(run: Run, path: Path) -> None:
    """Add the content of a CSV file."""
    try:
        with path.open(newline="") as file:
            head, *rows = list(csv.reader(file)) or [[]]
        if head[:1] == ["epoch"] and "train_loss" in head:
            run.epochs = [{name: _value(name, text) for name, text in zip(head, row, strict=True)} for row in rows]
        elif head[:1] == ["percent"]:
            by_rank = zip(*([float(each or "nan") for each in row[1:]] for row in rows), strict=True)
            run.step_times = [list(times) for times in by_rank if len(times) == 101]
        elif head == ["time_s", "group", "leader"]:
            led = [row for row in rows if row[2]]
            run.pulls = [(float(at), int(group or ALL), int(leader)) for at, group, leader in led]
        else:
            raise ValueError(f"it begins with {','.join(head)[:60]!r}")
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"{path} is no {', '.join(NAMES)} of a runner ({error}): {HINT}") from None


def _value(name: str, text: str) -> float | list[float] | None:
    if text == "":
        return None
    return list(map(float, text.split())) if name in BY_RANK else float(text)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; ValueError if there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): {HINT}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object: {HINT}")
    return content


# -- panels ------------------------------------------------------------------------------------------------------------

Runs = Mapping[str, Run]
"""By label."""


class Panel(NamedTuple):
    """Part of the picture: title, axes' labels, whether a run has something for it, how that is drawn."""

    title: str
    x: str
    y: str
    has: Callable[[Run], bool]
    draw: Callable[[Any, Runs, list[str]], None]


def curve(title: str, x: str, y: str, x_label: str, y_label: str, log: bool = False) -> Panel:
    """Return a panel with a line per run over epochs or seconds."""

    def draw(axes: Any, runs: Runs, names: list[str]) -> None:
        for name, run in runs.items():
            axes.plot(*run.curve(x, y), label=name, **plot.line(name, names))
        if log and any(value > 0 for run in runs.values() for value in run.curve(x, y)[1]):
            axes.set_yscale("log")

    return Panel(title, x_label, y_label, lambda run: bool(run.curve(x, y)[0]), draw)


def by_rank(title: str, y: str, values: Callable[[Run], list[float]]) -> Panel:
    """Return a panel with a bar per rank and run."""

    def draw(axes: Any, runs: Runs, names: list[str]) -> None:
        found = [(rank, name, value) for name, run in runs.items() for rank, value in enumerate(values(run))]
        found.sort(key=lambda each: (each[0], names.index(each[1])))
        rows = [{"arm": name, "value": value} for _, name, value in found]
        plot.bars(axes, rows, [str(rank) for rank, *_ in found], "value")

    return Panel(title, "rank", y, lambda run: bool(values(run)), draw)


def boxes(axes: Any, runs: Runs, names: list[str]) -> None:
    """Draw the spread of each rank's step times, a box per rank and run."""
    width = plot.WIDTH / len(runs)
    for place, (name, run) in enumerate(runs.items()):
        known = {rank: times for rank, times in enumerate(run.step_times) if not math.isnan(times[0])}
        keys = {"whislo": 5, "q1": 25, "med": 50, "q3": 75, "whishi": 95}
        axes.bxp(
            [{key: times[percent] for key, percent in keys.items()} for times in known.values()],
            positions=[rank + (place - (len(runs) - 1) / 2) * width for rank in known],
            widths=0.85 * width,
            patch_artist=True,
            showfliers=False,
            manage_ticks=False,
            boxprops=plot.fill(name, names),
            medianprops={"color": "white", "linewidth": 2},
        )
        axes.bar([], [], label=name, **plot.fill(name, names))
    ranks = range(max(len(run.step_times) for run in runs.values()))
    axes.set_xticks(ranks, map(str, ranks))
    axes.set_ylim(bottom=0)


LOSS, ACCURACY = "loss, mean of the epoch", "share of test images"
PANELS = (
    curve("training loss over epochs", "epoch", "train_loss", "epochs", LOSS, log=True),
    curve("training loss over time", "seconds", "train_loss", "seconds of training", LOSS, log=True),
    curve("test accuracy over epochs", "epoch", "test_accuracy", "epochs", ACCURACY),
    curve("test accuracy over time", "seconds", "test_accuracy", "seconds of training", ACCURACY),
    Panel(
        "step times: 5, 25, 50, 75 and 95% of steps are below",
        *("rank", "seconds a step"),
        lambda run: any(not math.isnan(times[0]) for times in run.step_times),
        boxes,
    ),
    by_rank("waiting for others", "seconds in all", lambda run: run.by_rank("wait_s")),
    by_rank("others waited for this rank", "seconds of all others", lambda run: run.by_rank("held_s")),
    curve("distance from the consensus", "epoch", "consensus_distance", "epochs", "root mean square", log=True),
    curve("staleness, mean", "epoch", "staleness_mean", "epochs", "late by: rounds (gossip: steps)"),
    by_rank(
        *("distance from leaders, or the center", "|x - leader|, mean over pulls"),
        lambda run: list(run.summary.get("leader_distance_by_rank") or []),
    ),
)


def draw(figure: Any, runs: Runs) -> None:
    """Draw the panels that runs have something for, in pairs, and below them who led when, a line per run."""
    names = list(runs)
    shown = [(panel, {n: run for n, run in runs.items() if panel.has(run)}) for panel in PANELS]
    shown = [(panel, having) for panel, having in shown if having]
    led = {name: run for name, run in runs.items() if run.pulls}
    heights = [3.4] * math.ceil(len(shown) / 2) + [1.4 + 0.45 * run.ranks for run in led.values()]
    figure.set_size_inches(11.0, sum(heights) + 0.8)
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    for number, (panel, having) in enumerate(shown):
        axes = figure.add_subplot(grid[number // 2, number % 2])
        panel.draw(axes, having, names)
        plot.label(axes, panel.title, panel.x, panel.y)
    for number, (name, run) in enumerate(led.items(), len(heights) - len(led)):
        axes = figure.add_subplot(grid[number, :])
        draw_leaders(axes, run)
        plot.label(axes, f"who led when: {name}", "seconds since the first pull", "")
    plot.legend(figure, *figure.axes)


def draw_leaders(axes: Any, run: Run) -> None:
    """Draw a line per rank: below when it led its group, above when it led all; at the right its share of those."""
    end = run.pulls[-1][0] or 1.0
    for group in sorted({group for _, group, _ in run.pulls}):
        text = "led all ranks (at the right: of how many pulls)" if group == ALL else "led its group"
        look = {"facecolor": plot.COLORS[6 if group == ALL else 2 + group % 2], "edgecolor": "black", "label": text}
        mine = [(at, leader) for at, of, leader in run.pulls if of == group]
        for (start, leader), (until, _) in itertools.pairwise([*mine, (end, 0)]):
            place = (leader - 0.42, 0.40) if group == ALL else (leader + 0.04, 0.36)  # rank 0 is at the top
            axes.broken_barh([(start, until - start)], place, linewidth=0.3, **look)
    counts = Counter(leader for _, group, leader in run.pulls if group == ALL)
    for rank in range(run.ranks):
        share = counts[rank] / max(1, counts.total())
        axes.text(1.01, rank, f"{share:.0%}", transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    axes.set_yticks(range(run.ranks), [f"rank {rank}" for rank in range(run.ranks)])
    axes.set(xlim=(0, end), ylim=(run.ranks - 0.5, -0.5))
