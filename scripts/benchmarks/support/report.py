"""A case of the benchmarks, and its report: rows, goals, their table and JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .figures import Interval

Row = dict[str, Any]
Say = Callable[[str], None]
"""Takes a line of progress."""


# -- what a case is ----------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """Column of the table: its heading, the key of the row (or of its ``setting``), and the format of its values."""

    heading: str
    key: str
    form: str = ""


ENDS = {"~": ("low", "high"), "95%": ("95% from", "to")}
"""Suffixes of columns with the limits of an estimate: the spread, or a 95% interval."""


def columns(text: str) -> tuple[Column, ...]:
    """Return columns by their text: ``heading = key form ends`` between ``|``; a name alone is heading and key."""
    found = []
    for part in text.split("|"):
        heading, _, rest = (word.strip() for word in part.partition("="))
        key, form, ends, *_ = [*(rest or heading).split(), "", "", ""]
        found.append(Column(heading, key, "" if form in ENDS else form))
        stem = "" if key == "value" else f"{key}_"
        for name, end in zip(ENDS.get(ends, ()), ("low", "high"), strict=False):
            found.append(Column(name, f"{stem}{end}", form))
    return tuple(found)


class Panel(NamedTuple):
    """Part of a case's picture.

    Attributes:
        key: of the rows' figure.
        kind: "bars"; "points" with their intervals; or "curves", whose figure is a list of [x, y], one line per arm.
        marks: keys of further figures, drawn over the bars.
        each: key of the setting; one panel for each of its values.
    """

    key: str = "value"
    kind: str = "bars"
    marks: tuple[str, ...] = ()
    each: str = ""


class Option(NamedTuple):
    """Option of the command line: its flag, default and help, and further arguments of ``add_argument``."""

    flag: str
    default: Any
    text: str
    more: Mapping[str, Any] = {}

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Add it to a parser. The default says of which type values are, and whether there may be several."""
        how: dict[str, Any] = {"default": self.default, "help": self.text}
        if isinstance(self.default, bool):
            how["action"] = argparse.BooleanOptionalAction if self.default else "store_true"
        else:
            values = self.default if isinstance(self.default, list) else [self.default]
            types = {type(value) for value in values} - {type(None)}
            how |= {"nargs": "+"} if isinstance(self.default, list) else {}
            how |= {"type": types.pop()} if types else {}
        parser.add_argument(self.flag, **{**how, **self.more})


@dataclass(frozen=True)
class Case:
    """A benchmark.

    Attributes:
        name: on the command line.
        help: a line.
        text: its page of ``--help``.
        run: measures and judges; raises ValueError for options that cannot be.
        columns, panels: of its table and picture.
        group: format of a row's setting; rows with the same text stand together in the picture.
        ranks, arms, repetitions: defaults.
        options: its own ones.
        quick: what ``--quick`` makes of options: of two numbers the lesser, of lists and arms this one.
        old_name: in 0.1.0. The command line knows it too, and files of results keep it.
        limit: minutes by default; None: reckoned.
    """

    name: str
    help: str
    text: str
    run: Callable[[argparse.Namespace, Say], Report]
    columns: tuple[Column, ...]
    panels: tuple[Panel, ...]
    ranks: int
    arms: str
    repetitions: int
    group: str = ""
    options: tuple[Option, ...] = ()
    quick: Mapping[str, Any] = field(default_factory=dict)
    old_name: str | None = None
    limit: float | None = None

    @property
    def file(self) -> str:
        """The name that files of results have."""
        return self.old_name or self.name

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its options and defaults to a parser."""
        for option in self.options:
            option.add(parser)
        parser.set_defaults(ranks=self.ranks, arms=self.arms, repetitions=self.repetitions, limit=self.limit)

    def make_quick(self, args: argparse.Namespace) -> None:
        """Make a run small. Lists and arms that were named on the command line stay."""
        defaults = {option.flag.removeprefix("--").replace("-", "_"): option.default for option in self.options}
        defaults["arms"] = self.arms
        for name, value in self.quick.items():
            given = getattr(args, name)
            if isinstance(value, int | float):
                setattr(args, name, min(given, value))
            elif given == defaults[name]:
                setattr(args, name, value)

    def heading(self, key: str) -> str:
        """Return the heading of a figure."""
        return next((column.heading for column in self.columns if column.key == key), key.replace("_", " "))

    def report(self, args: argparse.Namespace, rows: list[Row], **more: Any) -> Report:
        """Return a report with these rows."""
        return Report(self, args.ranks, rows, **more)


# -- what it found -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """Something that the figures must show.

    Attributes:
        what: in words.
        value: as measured.
        wanted: the limit, in words.
        met: whether it was.
        exact: whether every run must show it, however short.
        judged: whether missing it says anything; a quick run leaves open what is not exact.
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
        case: it.
        ranks, transport: of the jobs.
        rows: one for each arm and setting; ``row`` says what all of them have.
        goals: as above.
        notes: remarks on the run, such as "the machine was too busy".
    """

    case: Case
    ranks: int
    rows: list[Row]
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    transport: str = "gloo"

    def wants(self, what: str, value: float | str, wanted: str, met: bool, exact: bool = False) -> None:
        """Add a goal."""
        self.goals.append(Goal(what, value, wanted, met, exact))

    def at_most(self, what: str, value: float, limit: float, wanted: str = "") -> None:
        """Add the goal that a value is not above a limit; ``wanted``: the limit in other words."""
        self.wants(what, value, wanted or f"<= {limit:g}", value <= limit)

    def at_least(self, what: str, value: float, limit: float, wanted: str = "") -> None:
        """Add the goal that a value is not below a limit; ``wanted``: the limit in other words."""
        self.wants(what, value, wanted or f">= {limit:g}", value >= limit)

    def text(self) -> str:
        """Return the table, notes and goals, human-readable."""
        parts = [table(self.rows, self.case.columns), *(f"note: {note}" for note in self.notes)]
        return "\n".join([*parts, *(str(goal) for goal in self.goals)])

    def content(self) -> dict[str, Any]:
        """Return everything as JSON can have it."""
        found = {
            "case": self.case.file,
            "ranks": self.ranks,
            "transport": self.transport,
            "machine": machine(),
            "goals": [vars(goal) for goal in self.goals],
            "notes": self.notes,
            "rows": self.rows,
        }
        return dict(finite(found))

    def write(self, path: Path) -> None:
        """Write the JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.content(), indent=2) + "\n")


def row(arm: str, setting: Mapping[str, Any], found: Interval | float, unit: str, **more: Any) -> Row:
    """Return a row with the keys that all rows have.

    Args:
        arm: its name.
        setting: of the job.
        found: the value, with its ends if it has some.
        unit: of the value, in words.
        more: other figures.
    """
    value, low, high = found if isinstance(found, Interval) else (found, found, found)
    common: Row = {"arm": arm, "setting": dict(setting), "value": value, "unit": unit, "low": low, "high": high}
    return common | {"speedup": None, "bound": None, "accuracy": None} | more


def ends(key: str, found: Interval | None) -> Row:
    """Return an estimate and its ends as a row's figures ``key``, ``key_low`` and ``key_high``."""
    return dict(zip((key, f"{key}_low", f"{key}_high"), found or (None,) * 3, strict=True))


def interval_of(row_: Row, key: str) -> Interval:
    """Return the figures that ``ends`` has made."""
    return Interval(row_[key], row_[f"{key}_low"], row_[f"{key}_high"])


def chosen(args: argparse.Namespace, *names: str, **more: Any) -> dict[str, Any]:
    """Return the command line's options of these names, and more that a setting has."""
    return {name: getattr(args, name) for name in names} | more


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return rows in columns: text to the left, numbers to the right, a dash where there is none."""
    parts = []
    for heading, key, form in columns:
        _, _, inner = key.partition("setting.")
        values = [each["setting"].get(inner) if inner else each.get(key) for each in rows]
        cells = [heading, *(_shown(value, form) for value in values)]
        pad = str.ljust if all(isinstance(value, str) for value in values) else str.rjust
        parts.append([pad(cell, max(map(len, cells))) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*parts, strict=True))


def _shown(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else format(value, form)


def finite(value: Any) -> Any:
    """Return a value with null where a number is infinite, which JSON does not know."""
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def machine() -> str:
    """Return the machine in words, with the load of the last minute: figures of a busy machine are worth less."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name, cores = found[1] if found else platform.machine(), len(os.sched_getaffinity(0))
    return f"{name}, {cores} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
