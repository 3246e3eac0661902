"""Shows findings and network tables: by rich on a terminal, plain where the output is piped."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from hvd_async.doctor.findings import Finding, Verdict, worst

COLOURS = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}
WIDTH = 100
"""Characters to which plain advice is wrapped."""


def summary(findings: Sequence[Finding]) -> str:
    """Return how many findings there are of each verdict, in words."""
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    few = [f"{counts[one]} {one.value}{'' if counts[one] == 1 else 's'}" for one in (Verdict.PROBLEM, Verdict.NOTE)]
    words = f"{', '.join(few)}, {counts[Verdict.OK]} ok"
    return (
        f"{words}: "
        + {
            Verdict.OK: "Horovod and hvd_async will work here.",
            Verdict.NOTE: "jobs will work here; the notes say what could be better.",
            Verdict.PROBLEM: "mend the problems first.",
        }[worst(findings)]
    )


def plain_findings(findings: Sequence[Finding]) -> str:
    """Return findings as lines of text; advice is indented below the fact."""
    wide = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict.value:7}  {finding.name:{wide}}  {finding.fact}")
        indent = " " * (9 + wide + 2)
        lines += textwrap.wrap(finding.advice, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text: the first column to the left, the others to the right."""
    wide = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [cell.ljust(wide[0]) if place == 0 else cell.rjust(wide[place]) for place, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def show_findings(findings: Sequence[Finding], stream: TextIO | None = None) -> None:
    """Print findings and their summary; ``stream``: None for standard output."""
    out = stream or sys.stdout
    if not out.isatty():
        print(plain_findings(findings), file=out)
        print(summary(findings), file=out)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "check")
    for name in ("fact", "what to do"):
        table.add_column(name, overflow="fold")  # (names of variables are copied from here: none is cut off)
    for finding in findings:
        colour = COLOURS[finding.verdict]
        verdict = Text(finding.verdict.value, style=colour)
        table.add_row(verdict, Text(finding.name), Text(finding.fact), Text(finding.advice))
    console = Console(file=out)
    console.print(table)
    console.print(Text(summary(findings), style=COLOURS[worst(findings)]))


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO | None = None) -> None:
    """Print a table; ``stream``: None for standard output."""
    out = stream or sys.stdout
    if not out.isatty():
        print(title, plain_table(header, rows), sep="\n", file=out)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for place, name in enumerate(header):
        table.add_column(name, justify="left" if place == 0 else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(file=out).print(table)
