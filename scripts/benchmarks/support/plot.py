"""Plots to PNG, and parts of the cases' drawings. matplotlib is imported only when a plot is asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_async.simulation.names import COMPRESSED, OUTER, read_name

from .report import Report, Row

COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""Okabe and Ito's: they can be told apart whatever colours one sees. Hatches tell arms apart without colour."""
HATCHES = ("", "/", ".", "\\\\", "x", "-", "|", "+")
WIDTH = 0.85
"""Width of a group of bars; groups are 1 apart."""
ORDER = (
    *("horovod", "ddp", "all", "majority", "solo", "auto"),
    *("post-local-sgd", "decent-dp", "torchft", "torchft-diloco"),
)
LOCAL = {"sgp": 6, "osgp": 7, "dpsgd": 2, "adpsgd": 3, "lsgd": 5, "easgd": 1, "local-sgd": 4}
LOCAL |= {"local": 5, "slowmo": 1, "diloco": 7}
"""Places of their colours; where arms share one, as those with compressed messages do, hatches differ."""
FAMILIES = (
    ("horovod", "ddp", "post-local-sgd", "decent-dp", "torchft", "torchft-diloco"),
    (),
    ("sgp", "osgp", "dpsgd", "adpsgd", "local-sgd", *OUTER),
    ("lsgd", "easgd"),
)
STYLES = ("-", "--", "-.", ":")
"""Styles of their lines; partial allreduce, with its quorums, is the second."""
DPI = 130
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def colour(arm: str, arms: Sequence[str]) -> tuple[str, str]:
    """Colour and hatch of an arm: named arms have their own, unless another of these has it; counts take what is
    left. Arms that differ in their messages' compression alone share one."""
    place, hatch = _own_look(arm, arms)
    taken: dict[str, int] = {}
    wanted = {read_name(each).base: _own_look(each, arms)[0] for each in arms}
    for algorithm, own in wanted.items():
        free = [each for each in range(len(COLOURS)) if each not in {*taken.values(), *wanted.values()}]
        taken[algorithm] = free[0] if own in taken.values() and free else own
    return COLOURS[taken.get(read_name(arm).base, place)], hatch


def _own_look(arm: str, arms: Sequence[str]) -> tuple[int, str]:
    """Place of an arm's own colour, and its hatch."""
    base, compression, every = read_name(arm)[:3]
    if base in LOCAL:
        place, variants = LOCAL[base], ("none", *COMPRESSED)
        averaged = every > 0 and base != "local-sgd"
        return place, HATCHES[(place + 2 + variants.index(compression) + 4 * averaged) % len(HATCHES)]
    others = [each for each in arms if each not in ORDER and read_name(each).base not in LOCAL]
    place = ORDER.index(arm) if arm in ORDER else len(ORDER) + others.index(arm)
    return place % len(COLOURS), HATCHES[(place + place // len(COLOURS)) % len(HATCHES)]


def fill(arm: str, arms: Sequence[str]) -> dict[str, Any]:
    """Look of an arm's bar: its colour, hatch, and an edge that is seen on it."""
    own, hatch = colour(arm, arms)
    return {"color": own, "hatch": hatch, "edgecolor": "white" if own == COLOURS[0] else "black", "linewidth": 0.6}


def line(arm: str, arms: Sequence[str]) -> dict[str, Any]:
    """Look of an arm's line: its colour, a style for each family, and a marker, so that no two of a case are alike."""
    own, hatch = colour(arm, arms)
    family = next((number for number, named in enumerate(FAMILIES) if read_name(arm).base in named), 1)
    marker = MARKERS[HATCHES.index(hatch)]
    look = {"color": own, "linestyle": STYLES[family], "linewidth": 1.4, "marker": marker}
    return look | {"markersize": 5, "markeredgecolor": "black", "markeredgewidth": 0.5}


def bars(axes: Any, rows: Sequence[Row], group: str, key: str = "value") -> None:
    """Bars side by side, one group a setting, one bar an arm, with the ends of a figure that has some.

    Args:
        axes: matplotlib's.
        rows: of any arms and settings.
        group: the name of a row's group, as a format of its setting.
        key: of the figure.
    """
    places = _places(rows, group)
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    stem = "" if key == "value" else f"{key}_"
    for arm in arms:
        there = [(place, row) for place, row in zip(places, rows, strict=True) if row["arm"] == arm and has(row, key)]
        if not there:
            continue
        mine = [row for _, row in there]
        errors = None
        if f"{stem}low" in mine[0]:
            errors = [[row[key] - row[f"{stem}low"] for row in mine], [row[f"{stem}high"] - row[key] for row in mine]]
        axes.bar(
            [place for place, _ in there],
            [row[key] for row in mine],
            WIDTH / len(arms),
            yerr=errors,
            label=arm,
            error_kw={"elinewidth": 1.2, "capsize": 2, "ecolor": "#555555"},
            **fill(arm, arms),
        )
    groups = list(dict.fromkeys(group.format(**row["setting"]) for row in rows))
    axes.set_xticks(range(len(groups)), groups)


def arms_below(axes: Any, names: Sequence[str]) -> None:
    """An arm's name below each place, from 0 on, of bars that are drawn one by one."""
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)


def points(axes: Any, rows: Sequence[Row], key: str, **ticks: Any) -> None:
    """A point an arm, with the ends of its interval."""
    names = [each["arm"] for each in rows]
    for place, each in enumerate(rows):
        own, _ = colour(each["arm"], names)
        ends = sides(each[key], each[f"{key}_low"], each[f"{key}_high"])
        style = {"color": own, "markeredgecolor": "black", "ecolor": "black", "capsize": 5, "markersize": 9}
        axes.errorbar(place, each[key], yerr=ends, fmt="o", **style)
    axes.set_xticks(range(len(names)), names, **ticks)


def marks(axes: Any, rows: Sequence[Row], group: str, key: str, marker: str, text: str) -> None:
    """White marks on the bars that ``bars`` has drawn of the same rows: a second figure of each."""
    look = {"color": "white", "markeredgecolor": "black", "markersize": 7}
    for place, row in zip(_places(rows, group), rows, strict=True):
        if has(row, key):
            axes.plot(place, row[key], marker, **look)
    axes.plot([], [], marker, label=text, **look)


def has(row: Row, key: str) -> bool:
    """Return whether a row has a figure."""
    return row.get(key) is not None


def _places(rows: Sequence[Row], group: str) -> list[float]:
    """Where each row's bar is: groups and arms in the order in which they come."""
    names = [group.format(**row["setting"]) for row in rows]
    groups, arms = list(dict.fromkeys(names)), list(dict.fromkeys(row["arm"] for row in rows))
    return [
        groups.index(name) + (arms.index(row["arm"]) - (len(arms) - 1) / 2) * WIDTH / len(arms)
        for name, row in zip(names, rows, strict=True)
    ]


def label(axes: Any, title: str, x: str, y: str) -> None:
    """Title and axes' labels, and a light grid to read values by."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def near_one(axes: Any) -> None:
    """Shares, on a scale on which those near 1 are told apart: evenly spaced in the logarithm of what is left to 1."""
    import numpy as np

    whole = 1.005  # so that 1 itself has a place
    axes.set_yscale(
        "function", functions=(lambda y: -np.log10(np.maximum(whole - y, 1e-9)), lambda z: whole - 10.0**-z)
    )
    low, high = axes.get_ylim()
    ticks = [tick for tick in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 1.0) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def logarithmic(axes: Any) -> None:
    """Values on a logarithmic scale, with readable numbers at 1, 2 and 5 of each power of ten where there are few."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def legend(figure: Any, *axes: Any) -> None:
    """One legend for the figure, below it, of all that these axes name; what has lines and bars is shown as both."""
    from matplotlib.legend_handler import HandlerTuple

    named: dict[str, dict[type, Any]] = {}
    for one in axes:
        for handle, text in zip(*one.get_legend_handles_labels(), strict=True):
            named.setdefault(text, {})[type(handle)] = handle
    looks = [tuple(kinds.values()) if len(kinds) > 1 else next(iter(kinds.values())) for kinds in named.values()]
    side_by_side = {"handler_map": {tuple: HandlerTuple(ndivide=None, pad=0.4)}}
    figure.legend(looks, named, loc="outside lower center", ncols=min(6, len(named)), frameon=False, **side_by_side)


def sides(value: float, low: float | None, high: float | None) -> list[list[float]]:
    """Return the sides of an error bar; one that is endless, in JSON null, is not drawn."""
    return [[math.nan if end is None else max(0.0, sign * (value - end))] for sign, end in ((1, low), (-1, high))]


def save(report: Report, path: Path) -> None:
    """Draw a report and write it as PNG."""
    assert report.draw is not None
    redraw(json.loads(report.json()), report.draw, path)


def redraw(content: Mapping[str, Any], draw: Callable[[Any, list[Row]], None], path: Path) -> None:
    """Draw a report's JSON and write it as PNG."""
    ranks = "1 rank" if content["ranks"] == 1 else f"{content['ranks']} ranks"
    title = f"{content['case']}: {ranks}, {content['transport']}, one machine"
    picture(path, title, draw, content["rows"])


def picture(path: Path, title: str, draw: Callable[[Any, Any], None], rows: Any, height: float = 5.0) -> None:
    """Draw rows and write them as PNG, ``height`` inches high unless ``draw`` wants another size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    draw(figure, rows)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
