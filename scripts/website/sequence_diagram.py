"""Draws the pages' sequence diagrams: the part of Mermaid's language that they use, as SVG.

The site needs no JavaScript of another server for them, and they can be read without any.
"""

from __future__ import annotations

import html
import re

LANE, ROW, TOP, CHARACTER = 190, 40, 50, 7.2
"""In pixels: from rank to rank, from line to line, the heads, and the width of a character."""
LINES = {
    "participant": re.compile(r"participant (\w+) as (.+)"),
    "message": re.compile(r"(\w+)->>(\w+): (.+)"),
    "note": re.compile(r"Note over (\w+)(?:,(\w+))?: (.+)"),
}


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle">{html.escape(text)}</text>'


def _message(x: float, end: float, y: float, text: str) -> str:
    if x == end:
        way = f"M{x:g} {y - 6:g} h34 v14 h-26"
        words = f'<text x="{x + 42:g}" y="{y + 5:g}">{html.escape(text)}</text>'
        tip = f"M{x:g} {y + 8:g} l9 -4.5 v9 z"
    else:
        step = 1 if end > x else -1
        way = f"M{x:g} {y + 6:g} H{end - 8 * step:g}"
        words = _text((x + end) / 2, y, text)
        tip = f"M{end:g} {y + 6:g} l{-9 * step} -4.5 v9 z"
    return f'<path class="arrow" d="{way}"/><path class="tip" d="{tip}"/>{words}'


def _note(x: float, end: float, y: float, text: str) -> str:
    centre, width = (x + end) / 2, max(abs(end - x) + 60, len(text) * CHARACTER + 16)
    box = f'<rect class="note" x="{centre - width / 2:g}" y="{y - 12:g}" width="{width:g}" height="26" rx="3"/>'
    return box + _text(centre, y + 6, text)


def draw(source: str) -> str:
    """Return a diagram as an SVG element on one line.

    Args:
        source: what stands between the fences, ``sequenceDiagram`` included.

    Raises:
        ValueError: a line is not one of ``LINES``, or names an unknown participant.
    """
    first, *rest = (line.strip() for line in source.strip().splitlines())
    if first != "sequenceDiagram":
        raise ValueError(f"{first!r}: only sequenceDiagram can be drawn; draw others as a picture in docs/")
    lanes: dict[str, float] = {}
    heads, rows = [], []
    left, right = 0.0, 0.0
    for line in rest:
        kind, found = next(((k, m) for k, p in LINES.items() if (m := p.fullmatch(line))), (None, None))
        if found is None:
            raise ValueError(f"{line!r}: write a participant, a message with ->>, or a Note over one or two")
        y = TOP + 30 + ROW * len(rows)
        if kind == "participant":
            x = lanes[found[1]] = 90.0 + LANE * len(lanes)
            box = f'<rect class="who" x="{x - 75:g}" y="8" width="150" height="32" rx="4"/>'
            heads.append(box + _text(x, 29, found[2]))
            right = max(right, x + 80)
            continue
        start, end = found[1], found[2] or found[1]
        if not {start, end} <= lanes.keys():
            raise ValueError(f"{line!r}: {start} or {end} is no participant; they are {', '.join(lanes)}")
        x, to, half = lanes[start], lanes[end], len(found[3]) * CHARACTER / 2 + 12
        rows.append((_message if kind == "message" else _note)(x, to, y, found[3]))
        to_itself = kind == "message" and x == to
        left = min(left, (x + to) / 2 - half) if not to_itself else left
        right = max(right, x + 50 + 2 * half if to_itself else (x + to) / 2 + half)
    bottom = TOP + 20 + ROW * len(rows)
    lives = [f'<path class="life" d="M{x:g} 40 V{bottom}"/>' for x in lanes.values()]
    size = f'viewBox="{left:g} 0 {right - left:g} {bottom + 8}" width="{right - left:g}" font-size="14"'
    drawing = "".join(lives + heads + rows)
    return f'<svg class="sequence" role="img" {size} xmlns="http://www.w3.org/2000/svg">{drawing}</svg>'


def drawn(markdown: str) -> str:
    """Return a page with its Mermaid blocks drawn."""
    return re.sub(r"^```mermaid\n(.*?)^```$", lambda found: draw(found[1]), markdown, flags=re.MULTILINE | re.DOTALL)
