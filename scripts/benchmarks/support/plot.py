"""Pictures as PNG: how arms look, and the panels of a case. matplotlib is imported only when a picture is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.support.names import GOSSIP, LEADERS, RIVALS, read_name

from .figures import grouped
from .report import Case, Panel, Row, finite

COLORS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""The palette of Okabe and Ito, which color-blind readers can tell apart. Hatches and markers need no color."""
HATCHES = ("", "/", ".", "\\\\", "x", "-", "|", "+")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HUES = {"horovod": 0, "ddp": 1, "post-local-sgd": 4, "decent-dp": 6, "torchft": 3, "torchft-diloco": 1, "plain": 4}
HUES |= {"all": 2, "majority": 3, "solo": 5, "auto": 7, "sgp": 6, "osgp": 7, "dpsgd": 2, "adpsgd": 3, "local-sgd": 4}
HUES |= {"local": 5, "slowmo": 1, "diloco": 7, "lsgd": 5, "easgd": 1}
"""Index of the color of an arm's base: an arm has the same color in every picture."""
WIDTH = 0.85
"""Width of a group of bars; groups are 1 apart."""
DPI = 130


def look_of(arm: str, arms: Sequence[str]) -> tuple[str, int]:
    """Return an arm's color, and its place among the arms of this color, which chooses hatch and marker."""

    def hue(name: str) -> int:
        base = read_name(name).base
        return HUES.get(base, sum(base.encode())) % len(COLORS)

    alike = [each for each in dict.fromkeys([*arms, arm]) if hue(each) == hue(arm)]
    return COLORS[hue(arm)], alike.index(arm) % len(HATCHES)


def fill(arm: str, arms: Sequence[str]) -> dict[str, Any]:
    """Return the look of an arm's bar: its color, hatch, and an edge that is seen on it."""
    color, place = look_of(arm, arms)
    edge = "white" if color == COLORS[0] else "black"
    return {"facecolor": color, "hatch": HATCHES[place], "edgecolor": edge, "linewidth": 0.6}


def line(arm: str, arms: Sequence[str]) -> dict[str, Any]:
    """Return the look of an arm's line: its color, a style for each family, and a marker."""
    (color, place), base = look_of(arm, arms), read_name(arm).base
    style = "-" if base in RIVALS else "-." if base in GOSSIP else ":" if base in LEADERS else "--"
    look = {"color": color, "linestyle": style, "marker": MARKERS[place], "linewidth": 1.4}
    return look | {"markersize": 5, "markeredgecolor": "black", "markeredgewidth": 0.5}


# -- the panels of a case ----------------------------------------------------------------------------------------------


def draw(figure: Any, case: Case, rows: Sequence[Row]) -> None:
    """Draw a case's panels, as far as the rows have their figures."""
    shown = []
    for panel in case.panels:
        mine = [row for row in rows if row.get(panel.key) is not None]
        parts = grouped(mine, lambda row, panel=panel: row["setting"].get(panel.each) if panel.each else "")
        shown += [(panel, value, part) for value, part in parts.items()]
    across = min(3, len(shown))
    down = -(-len(shown) // max(1, across))
    figure.set_size_inches(max(8.0, 4.4 * across), 0.8 + 4.0 * down)
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for one, (panel, value, mine) in zip(axes, shown, strict=False):
        if panel.kind == "curves":
            _curves(one, case, panel, mine)
        else:
            groups = [case.group.format(**row["setting"]) for row in mine]
            bars(one, mine, groups, panel.key, points=panel.kind == "points")
            _marks(one, case, panel, mine, groups)
        label(one, str(value), "", case.heading(panel.key))
    for one in axes[len(shown) :]:
        one.remove()
    legend(figure, *axes[: len(shown)])


def bars(axes: Any, rows: Sequence[Row], groups: Sequence[str], key: str, points: bool = False) -> None:
    """Draw rows side by side, each in the group of its name: bars or points, with the ends of their intervals."""
    arms, stem = list(dict.fromkeys(row["arm"] for row in rows)), "" if key == "value" else f"{key}_"
    for place, row in zip(places_of(rows, groups), rows, strict=True):
        ends = [(-1, row.get(f"{stem}low")), (1, row.get(f"{stem}high"))]
        sides = [[0.0 if end is None else max(0.0, sign * (end - row[key]))] for sign, end in ends]
        known = any(end is not None for _, end in ends)
        how: dict[str, Any] = {"yerr": sides if known else None, "label": row["arm"]}
        if points:
            look = line(row["arm"], arms) | {"linestyle": "none", "ecolor": "#555555", "capsize": 4}
            axes.errorbar(place, row[key], **how, **look)
        else:
            look = fill(row["arm"], arms) | {"error_kw": {"elinewidth": 1.2, "capsize": 2, "ecolor": "#555555"}}
            axes.bar(place, row[key], WIDTH / len(arms), **how, **look)
    names = list(dict.fromkeys(groups))
    axes.set_xticks(range(len(names)), names)


def _marks(axes: Any, case: Case, panel: Panel, rows: Sequence[Row], groups: Sequence[str]) -> None:
    """Draw further figures of the rows over their bars."""
    for key, marker in zip(panel.marks, MARKERS[3:], strict=False):
        figures = zip(places_of(rows, groups), (row.get(key) for row in rows), strict=True)
        known = [(place, value) for place, value in figures if value is not None]
        look = {"color": "white", "markeredgecolor": "black", "markersize": 7, "linestyle": "none"}
        axes.plot(*zip(*known, strict=True) if known else ([], []), marker=marker, label=case.heading(key), **look)


def _curves(axes: Any, case: Case, panel: Panel, rows: Sequence[Row]) -> None:
    """Draw a line for each row: its figure is a list of points, or of such lists, whose mean is drawn."""
    names = [row["arm"] for row in rows]
    for row in rows:
        points = np.array(row[panel.key], float)
        x, y = (points if points.ndim == 2 else points.mean(axis=0)).T
        text = row["arm"] if panel.each else f"{row['arm']} {case.group.format(**row['setting'])}"
        axes.plot(x, y, label=text, **line(row["arm"], names) | {"markersize": 3})
    for key in panel.marks:
        for value in np.atleast_1d(rows[0][key]):
            axes.axhline(value, color="#555555", linewidth=0.8, linestyle="--")
        axes.plot([], [], color="#555555", linestyle="--", label=case.heading(key))


def places_of(rows: Sequence[Row], groups: Sequence[str]) -> list[float]:
    """Return where each row's bar is: groups and arms in the order in which they come."""
    names, arms = list(dict.fromkeys(groups)), list(dict.fromkeys(row["arm"] for row in rows))
    return [
        names.index(group) + (arms.index(row["arm"]) - (len(arms) - 1) / 2) * WIDTH / len(arms)
        for group, row in zip(groups, rows, strict=True)
    ]


# -- any picture -------------------------------------------------------------------------------------------------------


def label(axes: Any, title: str, x: str, y: str) -> None:
    """Set title and axes' labels, and a light grid to read values by."""
    axes.set(title=title, xlabel=x, ylabel=y, axisbelow=True)
    axes.grid(axis="y", alpha=0.3)


def legend(figure: Any, *axes: Any) -> None:
    """Put one legend below the figure, of all that these axes name."""
    named: dict[str, Any] = {}
    for one in axes:
        for handle, text in zip(*one.get_legend_handles_labels(), strict=True):
            named.setdefault(text, handle)
    columns = min(6, len(named))
    figure.legend(named.values(), named, loc="outside lower center", ncols=columns, frameon=False)


def save(case: Case, content: Mapping[str, Any], path: Path) -> None:
    """Draw a report's JSON and write it as PNG."""
    ranks = "1 rank" if content["ranks"] == 1 else f"{content['ranks']} ranks"
    title = f"{content['case']}: {ranks}, {content['transport']}, one machine"
    picture(path, title, lambda figure: draw(figure, case, finite(content["rows"])))


def picture(path: Path, title: str, draws: Callable[[Any], None]) -> None:
    """Have a figure drawn and write it as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    draws(figure)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
