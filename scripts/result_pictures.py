"""Bar charts for docs/results.md, drawn from the tables of that page as SVG.

``python scripts/result_pictures.py`` writes them again; a test compares their figures with the tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[1] / "docs"
COLORS = ("#0072b2", "#e69f00", "#555555", "#009e73")
"""Colors of the series, from Okabe and Ito's palette, which color-blind readers can tell apart."""


class Chart(NamedTuple):
    """A chart of a table.

    Attributes:
        heading: the section of the page whose first table is drawn.
        title: meaning of a bar's length.
        series: legend and column of each bar in a group; without a legend a chart has one bar per group.
    """

    heading: str
    title: str
    series: Mapping[str, int]


CHARTS = {
    "results_seconds.svg": Chart(
        "Seconds to an accuracy",
        "Seconds to an accuracy, 4 ranks (shorter is better)",
        {"this library": 2, "best other library": 4, "Horovod": 6},
    ),
    "results_straggler.svg": Chart(
        "One random rank is late",
        "Steps per second relative to Horovod, 8 ranks (longer is better)",
        {"0.2 s late": 1, "0.3 s late": 2, "0.4 s late": 3},
    ),
    "results_network.svg": Chart(
        "A slow network", "Milliseconds per step at 50 Mbit/s, 8 hosts (shorter is better)", {"": 1}
    ),
}


def table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table in a section, without its head."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"(?:^\|.+\|\n){3,}", section, re.MULTILINE)
    if found is None:
        raise ValueError(f"the section {heading!r} must have a table with rows, got none")
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in found[0].splitlines()[2:]]


def draw(chart: Chart, rows: Sequence[Sequence[str]], path: Path) -> None:
    """Write an SVG with a group of bars for each row; its text stays text."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    height = 0.8 / len(chart.series)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.heading, "font.size": 9}):
        figure = Figure(figsize=(9, 1.0 + 0.2 * len(rows) * (len(chart.series) + 0.8)))
        figure.set_layout_engine("constrained", w_pad=0.3)  # (inches, for viewers whose font is wider)
        axes = figure.subplots()
        for number, (legend, column) in enumerate(chart.series.items()):
            places = [group + number * height for group in range(len(rows))]
            values = [float(row[column].replace(",", "")) for row in rows]
            bars = axes.barh(places, values, height, label=legend, color=COLORS[number])
            axes.bar_label(bars, [row[column] for row in rows], padding=3)
        labels = [row[0].replace("`", "") for row in rows]
        axes.set_yticks([group + 0.4 - height / 2 for group in range(len(rows))], labels)
        axes.set(title=chart.title, xticks=[])
        axes.invert_yaxis()
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        if len(chart.series) > 1:
            figure.legend(frameon=False, loc="outside lower center", ncols=len(chart.series))
        figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    for name, chart in CHARTS.items():
        draw(chart, table(text, chart.heading), DOCS / name)
