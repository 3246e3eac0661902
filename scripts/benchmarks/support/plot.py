"""Pictures as PNG: how arms look, and the panels of a case. matplotlib is imported only when a picture is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_async.simulation.names import GOSSIP, LEADERS, RIVALS, read_name

from .figures import grouped
from .report import Case, Panel, Row, finite

COLORS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""Okabe and Ito's: people who see fewer colors can tell them apart. Hatches and markers need no color."""
HATCHES = ("", "/", ".", "\\\\", "x", "-", "|", "+")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HUES = {"horovod": 0, "ddp": 1, "post-local-sgd": 4, "decent-dp": 6, "torchft": 3, "torchft-diloco": 1, "plain": 4}
HUES |= {"all": 2, "majority": 3, "solo": 5, "auto": 7, "sgp": 6, "osgp": 7, "dpsgd": 2, "adpsgd": 3, "local-sgd": 4}
HUES |= {"local": 5, "slowmo": 1, "diloco": 7, "lsgd": 5, "easgd": 1}
"""Places of the arms' colors, by their base, so that an arm has the same color in every picture."""
WIDTH = 0.85
"""Width of a group of bars; groups are 1 apart."""
DPI = 130


def _hue(arm: str) -> int:
    base = read_name(arm).base
    return HUES.get(base, sum(base.encode())) % len(COLORS)


def _place(arm: str, arms: Sequence[str]) -> int:
    """Return an arm's place among those of its color."""
    alike = [each for each in dict.fromkeys([*arms, arm]) if _hue(each) == _hue(arm)]
    return alike.index(arm) % len(HATCHES)


def color(arm: str, arms: Sequence[str]) -> tuple[str, str]:
    """Return an arm's color and its hatch, which differ from those of the other arms of a picture."""
    return COLORS[_hue(arm)], HATCHES[_place(arm, arms)]


def fill(arm: str, arms: Sequence[str]) -> dict[str, Any]:
    """Return the look of an arm's bar: its color, hatch, and an edge that is seen on it."""
    own, hatch = color(arm, arms)
    return {"color": own, "hatch": hatch, "edgecolor": "white" if own == COLORS[0] else "black", "linewidth": 0.6}


def line(arm: str, arms: Sequence[str]) -> dict[str, Any]:
    """Return the look of an arm's line: its color, a style for each family, and a marker."""
    base = read_name(arm).base
    style = "-" if base in RIVALS else "-." if base in GOSSIP else ":" if base in LEADERS else "--"
    look = {"color": COLORS[_hue(arm)], "linestyle": style, "marker": MARKERS[_place(arm, arms)], "linewidth": 1.4}
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
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, (panel, value, mine) in zip(panels, shown, strict=False):
        groups = [case.group.format(**row["setting"]) for row in mine]
        {"bars": _bars, "points": _points, "curves": _curves}[panel.kind](axes, case, panel, mine, groups)
        label(axes, str(value), "", case.heading(panel.key))
    for axes in panels[len(shown) :]:
        axes.remove()
    legend(figure, *panels[: len(shown)])


def _bars(axes: Any, case: Case, panel: Panel, rows: Sequence[Row], groups: Sequence[str]) -> None:
    """Draw bars side by side, a group for each setting, and marks over them."""
    bars(axes, rows, groups, panel.key)
    for key, marker in zip(panel.marks, MARKERS[3:], strict=False):
        look = {"color": "white", "markeredgecolor": "black", "markersize": 7}
        for place, row in zip(places_of(rows, groups), rows, strict=True):
            if row.get(key) is not None:
                axes.plot(place, row[key], marker, **look)
        axes.plot([], [], marker, label=case.heading(key), **look)


def _points(axes: Any, case: Case, panel: Panel, rows: Sequence[Row], groups: Sequence[str]) -> None:
    """Draw a point for each row, with the ends of its interval."""
    names, stem = [row["arm"] for row in rows], "" if panel.key == "value" else f"{panel.key}_"
    for place, row in zip(places_of(rows, groups), rows, strict=True):
        value, low, high = row[panel.key], row[f"{stem}low"], row[f"{stem}high"]
        sides = [[0.0 if end is None else max(0.0, sign * (value - end))] for sign, end in ((1, low), (-1, high))]
        look = line(row["arm"], names) | {"linestyle": "none", "ecolor": "#555555", "capsize": 4}
        axes.errorbar(place, value, yerr=sides, label=row["arm"], **look)
    _ticks(axes, groups)


def _curves(axes: Any, case: Case, panel: Panel, rows: Sequence[Row], groups: Sequence[str]) -> None:
    """Draw a line for each row: its figure is a list of points, or of such lists, whose mean is drawn."""
    names = [row["arm"] for row in rows]
    for row, group in zip(rows, groups, strict=True):
        points = np.array(row[panel.key], float)
        x, y = (points if points.ndim == 2 else points.mean(axis=0)).T
        text = row["arm"] if panel.each else f"{row['arm']} {group}"
        axes.plot(x, y, label=text, **line(row["arm"], names) | {"markersize": 3})
    for key in panel.marks:
        for value in np.atleast_1d(rows[0][key]):
            axes.axhline(value, color="#555555", linewidth=0.8, linestyle="--")
        axes.plot([], [], color="#555555", linestyle="--", label=case.heading(key))


def bars(axes: Any, rows: Sequence[Row], groups: Sequence[str], key: str) -> None:
    """Draw bars side by side: one per row, in the group of this name."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    stem = "" if key == "value" else f"{key}_"
    for place, row in zip(places_of(rows, groups), rows, strict=True):
        value, sides = row[key], None
        if row.get(f"{stem}low") is not None and row.get(f"{stem}high") is not None:
            sides = [[value - row[f"{stem}low"]], [row[f"{stem}high"] - value]]
        axes.bar(
            place,
            value,
            WIDTH / len(arms),
            yerr=sides,
            label=row["arm"],
            error_kw={"elinewidth": 1.2, "capsize": 2, "ecolor": "#555555"},
            **fill(row["arm"], arms),
        )
    _ticks(axes, groups)


def _ticks(axes: Any, groups: Sequence[str]) -> None:
    names = list(dict.fromkeys(groups))
    axes.set_xticks(range(len(names)), names)


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
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def logarithmic(axes: Any) -> None:
    """Scale values by their logarithm, with readable numbers at 1, 2 and 5 of each power of ten where there are few."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def legend(figure: Any, *axes: Any) -> None:
    """Put one legend below the figure, of all that these axes name; what has lines and bars is shown as both."""
    from matplotlib.legend_handler import HandlerTuple

    named: dict[str, dict[type, Any]] = {}
    for one in axes:
        for handle, text in zip(*one.get_legend_handles_labels(), strict=True):
            named.setdefault(text, {})[type(handle)] = handle
    looks = [tuple(kinds.values()) if len(kinds) > 1 else next(iter(kinds.values())) for kinds in named.values()]
    side_by_side = {"handler_map": {tuple: HandlerTuple(ndivide=None, pad=0.4)}}
    figure.legend(looks, named, loc="outside lower center", ncols=min(6, len(named)), frameon=False, **side_by_side)


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
