"""Panels of runs: what the runners' files tell of one run or of several, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import leadership, plot
from .runs import Run

Runs = Mapping[str, Run]
"""By label."""
WIDTH, HEIGHT = 11.0, 3.4
"""Inches of a picture, and of a panel."""


class Panel(NamedTuple):
    """A part of the picture: title, axes' labels, whether a run has something for it, how that is drawn."""

    title: str
    x: str
    y: str
    there: Callable[[Run], bool]
    draw: Callable[[Any, Runs, list[str]], None]


def curve(title: str, x: str, y: str, x_label: str, y_label: str, *, log: bool = False, most: str = "") -> Panel:
    """A line a run over epochs or seconds; ``most``: of a second, thin line."""

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
    """Return whether its epochs, if it has told of any, make no line, and its summary says as much."""
    return len(run.epochs) < 2 and bool(run.summary)


def by_rank(title: str, y: str, values: Callable[[Run], list[float]]) -> Panel:
    """A bar a rank and run."""

    def draw(axes: Any, runs: Runs, names: list[str]) -> None:
        found = {name: values(runs[name]) for name in names if name in runs}
        ranks = [(rank, name) for rank in range(max(map(len, found.values()))) for name in found]
        rows = [
            {"arm": name, "setting": {"rank": rank}, y: found[name][rank] if rank < len(found[name]) else None}
            for rank, name in ranks
        ]
        plot.bars(axes, rows, "{rank}", key=y)

    return Panel(title, "rank", y, lambda run: bool(values(run)), draw)


def at_the_end(title: str, y: str, key: str, *mark: str, log: bool = False) -> Panel:
    """A bar a run, of those that told nothing but a summary, or of one epoch; ``mark``: another figure's key, marker
    and meaning."""

    def draw(axes: Any, runs: Runs, names: list[str]) -> None:
        keys = (key, *mark[:1])
        rows = [
            {"arm": name, "setting": {}} | {each: _of(run.summary, each) for each in keys} for name, run in runs.items()
        ]
        plot.bars(axes, rows, "all ranks", key=key)
        if mark:
            plot.marks(axes, rows, "all ranks", *mark)
        if log and any(row[key] for row in rows):
            plot.logarithmic(axes)
        else:
            axes.set_ylim(bottom=0)

    return Panel(title, "", y, lambda run: _is_short(run) and _of(run.summary, key) is not None, draw)


def _of(summary: Mapping[str, Any], key: str) -> Any:
    name, _, part = key.partition(".")
    value = summary.get(name)
    return value.get(part) if part and isinstance(value, dict) else value


def boxes(axes: Any, runs: Runs, names: list[str]) -> None:
    """How a rank's step times are spread, a box a rank and run."""
    from matplotlib.patheffects import withStroke

    width = plot.WIDTH / len(runs)
    for place, (name, run) in enumerate(runs.items()):
        look = plot.fill(name, names)
        stats, at = [], []
        for rank, times in enumerate(run.step_times):
            if not math.isnan(times[0]):
                keys = {"whislo": 5, "q1": 25, "med": 50, "q3": 75, "whishi": 95}
                stats.append({key: times[percent] for key, percent in keys.items()})
                at.append(rank + (place - (len(runs) - 1) / 2) * width)
        line = {"color": "#555555", "linewidth": 1.0}
        axes.bxp(
            stats,
            positions=at,
            widths=0.85 * width,
            patch_artist=True,
            showfliers=False,
            manage_ticks=False,
            boxprops={"facecolor": look["color"]} | {key: look[key] for key in look if key != "color"},
            medianprops={
                "color": "white",
                "linewidth": 2,
                "path_effects": [withStroke(linewidth=4, foreground="black")],
            },
            whiskerprops=line,
            capprops=line,
        )
        axes.bar([], [], label=name, **look)
    ranks = range(max(len(run.step_times) for run in runs.values()))
    axes.set_xticks(ranks, map(str, ranks))
    axes.set_ylim(bottom=0)


SECONDS = "seconds of training"
LATE = "late by: rounds (gossip: steps)"
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
    at_the_end(
        "step time, median", "seconds a step", "step_time_s.p50", "step_time_s.p95", "D", "95% of steps are below"
    ),
    by_rank("waiting for others", "seconds in all", lambda run: run.by_rank("wait_s")),
    by_rank("others waited for this rank", "seconds of all others", lambda run: run.by_rank("held_s")),
    curve(
        "distance from the average (consensus)", "epoch", "consensus_distance", "epochs", "root mean square", log=True
    ),
    at_the_end("distance from the average (consensus)", "root mean square", "consensus_distance", log=True),
    curve("staleness: mean, and (thin) the most", "epoch", "staleness_mean", "epochs", LATE, most="staleness_max"),
    at_the_end("staleness, mean", LATE, "staleness.mean", "staleness.max", "^", "the most"),
    by_rank(
        "distance from leaders, or the centre",
        "|x - leader|, mean over pulls",
        lambda run: list(run.summary.get("leader_distance_by_rank") or []),
    ),
)


def draw(figure: Any, runs: Runs) -> None:
    """Draw the panels that runs have something for, in pairs, and below them who led when, a line a run."""
    names = list(runs)
    panels = [(panel, {n: run for n, run in runs.items() if panel.there(run)}) for panel in PANELS]
    panels = [(panel, having) for panel, having in panels if having]
    led = {name: run for name, run in runs.items() if run.pulls}
    columns = min(2, len(panels)) or 1
    lines = math.ceil(len(panels) / columns)
    heights = [HEIGHT] * lines + [1.4 + 0.45 * run.ranks for run in led.values()]
    figure.set_size_inches(WIDTH, sum(heights) + 0.8)
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    drawn = []
    for number, (panel, having) in enumerate(panels):
        # the last one of an odd number is as wide as two
        last = number == len(panels) - 1
        place = slice(number % columns, columns) if last else number % columns
        axes = figure.add_subplot(grid[number // columns, place])
        panel.draw(axes, having, names)
        plot.label(axes, panel.title, panel.x, panel.y)
        drawn.append(axes)
    for number, (name, run) in enumerate(led.items(), lines):
        axes = figure.add_subplot(grid[number, :])
        leadership.draw(axes, run.pulls, run.ranks, run.group_size, run.pulls[-1][0] or 1.0)
        axes.set_title(f"who led when: {name}")
        axes.set_xlabel("seconds since the first pull")
        drawn.append(axes)
    plot.legend(figure, *drawn)
