"""Results of a case: rows, goals, and their table and JSON. Pure but for the machine's description."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .intervals import Interval

Row = dict[str, Any]


class Column(NamedTuple):
    """A column of the table: its heading, the row's key (``a.b`` for a key of a key), and the format of its values."""

    heading: str
    key: str
    form: str = ""


SPREAD, INTERVAL = ("low", "high"), ("95% from", "to")
"""Headings of an estimate's ends."""


def ranged(heading: str, key: str, form: str, ends: tuple[str, str] = SPREAD) -> tuple[Column, Column, Column]:
    """Return the columns of an estimate and of its two ends, as ``row`` and ``ends`` name them."""
    stem = "" if key == "value" else f"{key}_"
    low, high = ends
    return Column(heading, key, form), Column(low, f"{stem}low", form), Column(high, f"{stem}high", form)


@dataclass(frozen=True)
class Goal:
    """Something that the figures must show.

    Attributes:
        what: in words.
        value: as measured.
        wanted: the limit, in words.
        met: whether it was.
        exact: whether every run must show it, however short.
        judged: whether not to meet it says anything; a quick run leaves open what is not exact.
    """

    what: str
    value: float | str
    wanted: str
    met: bool
    exact: bool = False
    judged: bool = True

    def __str__(self) -> str:
        shown = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        verdict = "met" if self.met else "MISSED" if self.judged else "open"
        return f"{verdict:6}  {self.what}: {shown} ({self.wanted})"


@dataclass
class Report:
    """Results of a case.

    Attributes:
        case, ranks, transport: of the jobs.
        rows: one for each arm and setting; ``arm``, ``setting``, ``value``, ``unit``, ``low``, ``high``, ``speedup``,
            ``bound`` and ``accuracy`` in all of them.
        columns: of the table.
        goals: as above.
        notes: remarks on the run, such as "the machine was too busy".
        draw: draws the rows on a matplotlib figure.
    """

    case: str
    ranks: int
    rows: list[Row]
    columns: Sequence[Column]
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    transport: str = "gloo"
    draw: Callable[[Any, list[Row]], None] | None = None

    def wants(self, what: str, value: float | str, wanted: str, met: bool, exact: bool = False) -> None:
        """Add a goal."""
        self.goals.append(Goal(what, value, wanted, met, exact))

    def at_most(self, what: str, value: float, limit: float, wanted: str | None = None) -> None:
        """Add the goal that a value is not above a limit; ``wanted``: that in words, if they are others."""
        self.wants(what, value, wanted or f"<= {limit:g}", value <= limit)

    def at_least(self, what: str, value: float, limit: float, wanted: str | None = None) -> None:
        """Add the goal that a value is not below a limit; ``wanted``: that in words, if they are others."""
        self.wants(what, value, wanted or f">= {limit:g}", value >= limit)

    def text(self) -> str:
        """Return the table, notes and goals, for people."""
        parts = [table(self.rows, self.columns), *(f"note: {note}" for note in self.notes)]
        return "\n".join([*parts, *(str(goal) for goal in self.goals)])

    def content(self) -> dict[str, Any]:
        """Return all there is, for programs."""
        return {
            "case": self.case,
            "ranks": self.ranks,
            "transport": self.transport,
            "machine": machine(),
            "goals": [vars(goal) for goal in self.goals],
            "notes": self.notes,
            "rows": self.rows,
        }

    def json(self) -> str:
        """Return ``content`` as JSON."""
        return json.dumps(finite(self.content()), indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Write the JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.json())


def row(arm: str, setting: dict[str, Any], found: Interval | float, unit: str, **more: Any) -> Row:
    """Return a row with all the keys that every row has.

    Args:
        arm: whose.
        setting: of the job.
        found: the value, with its ends if it has some.
        unit: of the value, in words.
        more: other figures.
    """
    value, low, high = found if isinstance(found, Interval) else (found, found, found)
    common: Row = {"arm": arm, "setting": setting, "value": value, "unit": unit, "low": low, "high": high}
    return common | {"speedup": None, "bound": None, "accuracy": None} | more


def ends(key: str, found: Interval | None) -> Row:
    """Return an estimate and its ends as a row's figures ``key``, ``key_low`` and ``key_high``; None: there is none."""
    return dict(zip((key, f"{key}_low", f"{key}_high"), found or (None,) * 3, strict=True))


def chosen(args: argparse.Namespace, *names: str, **more: Any) -> dict[str, Any]:
    """Return the command line's options of these names, and what stands beside them in a setting."""
    return {name: getattr(args, name) for name in names} | more


def find(row_: Row, key: str) -> Any:
    """The value of a dotted key; None if it is not there."""
    value: Any = row_
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The rows in columns: text to the left, numbers to the right, a dash where there is none."""
    cells = [[column.heading for column in columns]]
    cells += [[_shown(find(each, column.key), column.form) for column in columns] for each in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    left = [all(isinstance(find(each, column.key), str) for each in rows) for column in columns]
    lines = []
    for line in cells:
        padded = [c.ljust(w) if to_left else c.rjust(w) for c, w, to_left in zip(line, widths, left, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _shown(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else value
    return format(value, form)


def finite(value: Any) -> Any:
    """JSON knows no infinity: such numbers become null."""
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def machine() -> str:
    """The machine in words, with the load of the last minute: figures of a busy machine are worth less."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0))
    return f"{name}, {cores} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
