"""Findings of the checks, each with a verdict, a fact and advice, and their output."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

FORMAT = 1
"""Version of the JSON format; increased when a field changes its meaning."""
WIDTH = 100
"""Width of wrapped advice, characters."""


class Verdict(enum.Enum):
    """Result of a check."""

    OK = "ok"
    NOTE = "note"
    """Works, but more slowly than possible, or not for every use."""
    PROBLEM = "problem"
    """Jobs will fail."""


class Finding(msgspec.Struct, frozen=True):
    """Result of one check.

    Attributes:
        name: of the check.
        verdict: its result.
        fact: human-readable, with its unit.
        advice: recommended action; empty if none is needed.
        values: the same fact, machine-readable; names end in their unit (``_bytes``, ``_s``).
    """

    name: str
    verdict: Verdict
    fact: str
    advice: str = ""
    values: Mapping[str, Any] = {}


def ok(name: str, fact: str, /, **values: Any) -> Finding:
    """Return a finding that needs no action."""
    return Finding(name, Verdict.OK, fact, "", values)


def note(name: str, fact: str, advice: str, /, **values: Any) -> Finding:
    """Return a finding that the user should know about."""
    return Finding(name, Verdict.NOTE, fact, advice, values)


def problem(name: str, fact: str, advice: str, /, **values: Any) -> Finding:
    """Return a finding that makes jobs fail."""
    return Finding(name, Verdict.PROBLEM, fact, advice, values)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict of some findings; OK if there are none."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


def as_json(findings: Sequence[Finding], **more: Any) -> dict[str, Any]:
    """Return findings as ``--json`` writes them: ``format``, ``verdict``, ``findings``, and ``more``."""
    return {"format": FORMAT, "verdict": worst(findings).value, "findings": msgspec.to_builtins(findings), **more}


# -- on the screen -----------------------------------------------------------------------------------------------------

COLOURS = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}
CLOSING = {
    Verdict.OK: "Horovod and hvd_async will work here.",
    Verdict.NOTE: "jobs will work here; the notes say what could be better.",
    Verdict.PROBLEM: "fix the problems first.",
}


def show_findings(findings: Sequence[Finding]) -> None:
    """Print a line per finding, its advice indented below it, and a summary; in colours on a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    name_width = max((len(finding.name) for finding in findings), default=0)
    indent = " " * (9 + name_width + 2)
    for finding in findings:
        verdict = (f"{finding.verdict.value:7}", COLOURS[finding.verdict])
        console.print(Text.assemble(verdict, f"  {finding.name:{name_width}}  {finding.fact}"), soft_wrap=True)
        for words in textwrap.wrap(finding.advice, width, initial_indent=indent, subsequent_indent=indent):
            console.print(Text(words), soft_wrap=True)
    problems, notes, good = (
        sum(finding.verdict is verdict for finding in findings)
        for verdict in (Verdict.PROBLEM, Verdict.NOTE, Verdict.OK)
    )
    counts = f"{problems} problem{'s' * (problems != 1)}, {notes} note{'s' * (notes != 1)}, {good} ok"
    overall = worst(findings)
    console.print(Text(f"{counts}: {CLOSING[overall]}", style=COLOURS[overall]), soft_wrap=True)


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is aligned to the left, the others to the right."""
    first, *others = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(title)
    for name, *cells in [header, *rows]:
        aligned = [cell.rjust(width) for cell, width in zip(cells, others, strict=True)]
        print("  ".join([name.ljust(first), *aligned]).rstrip())
