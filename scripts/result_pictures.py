"""Bar charts for docs/results.md, drawn from the tables of that page as SVG.

``python scripts/result_pictures.py`` writes them again; a test compares them with the tables.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[1] / "docs"
COLORS = ("#0072b2", "#e69f00", "#555555", "#009e73")
"""Of the series, in their order; of Okabe and Ito's palette, which color-blind readers can tell apart."""
WIDTH, LABELS, BAR, GAP, TOP = 860, 250, 14, 12, 62


class Chart(NamedTuple):
    """How a table becomes a chart.

    Attributes:
        heading: the section of the page whose first table is drawn.
        title: what the length of a bar is.
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


def draw(chart: Chart, rows: Sequence[Sequence[str]]) -> str:
    """Return an SVG with a group of bars for each row."""
    values = [[float(row[column].replace(",", "")) for column in chart.series.values()] for row in rows]
    scale = (WIDTH - LABELS - 70) / max(map(max, values))
    height = len(chart.series) * BAR + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + height * len(rows)}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<title>{html.escape(chart.title)}</title>\n<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="10" y="22" font-size="16">{html.escape(chart.title)}</text>',
    ]
    for number, legend in enumerate(filter(None, chart.series)):
        x = LABELS + 150 * number
        parts.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{COLORS[number]}"/>')
        parts.append(f'<text x="{x + 18}" y="47">{html.escape(legend)}</text>')
    for group, (row, bars) in enumerate(zip(rows, values, strict=True)):
        y = TOP + group * height
        label = html.escape(row[0].replace("`", ""))
        parts.append(f'<text x="{LABELS - 8}" y="{y + (height - GAP) / 2 + 5:g}" text-anchor="end">{label}</text>')
        for number, (value, column) in enumerate(zip(bars, chart.series.values(), strict=True)):
            top = y + number * BAR
            parts.append(
                f'<rect x="{LABELS}" y="{top}" width="{value * scale:.1f}" height="{BAR - 2}" fill="{COLORS[number]}"/>'
            )
            end = LABELS + value * scale + 6
            parts.append(f'<text x="{end:.1f}" y="{top + 11}" font-size="11">{html.escape(row[column])}</text>')
    return "\n".join([*parts, "</svg>\n"])


def pictures(docs: Path = DOCS) -> dict[str, str]:
    """Return the SVG of each picture by the name of its file."""
    page = (docs / "results.md").read_text(encoding="utf-8")
    return {name: draw(chart, table(page, chart.heading)) for name, chart in CHARTS.items()}


if __name__ == "__main__":
    for name, picture in pictures().items():
        (DOCS / name).write_text(picture, encoding="utf-8")
