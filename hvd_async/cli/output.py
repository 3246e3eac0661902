"""Output of the commands: tables, advice and findings; a picture of a trace."""

from __future__ import annotations

import importlib.util
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd_async.advisor.advice import Advice
from hvd_async.advisor.report import Table, brief, first_sentences, sentences, what, who
from hvd_async.doctor.findings import Finding, Verdict, worst
from hvd_async.traces.format import Times, Trace

WIDTH = 110
"""Width of wrapped text, characters."""
SHOWN = 30
"""Number of steps in a picture of several runs."""
CLOSING = {
    Verdict.OK: "hvd_async will work here.",
    Verdict.NOTE: "jobs will work here; the notes say what could be better.",
    Verdict.PROBLEM: "fix the problems first.",
}


def show_table(table: Table) -> None:
    """Print a table as plain columns."""
    title, columns, rows = table
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    print(f"{title}:")
    for row in (columns, *rows):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show_advice(advice: Advice, everything: bool = False) -> None:
    """Print advice: the obvious, the ranks, the modes, and what follows; with ``everything``, all ranks and modes."""
    print(_wrapped(" ".join(first_sentences(advice))) + "\n")
    show_table(who(advice, everything))
    print()
    show_table(what(advice.predictions, advice.base) if everything else brief(advice))
    for paragraph in sentences(advice, everything):
        print(f"\n{_wrapped(paragraph)}")


def show_demo(results: Sequence[Mapping[str, Any]], steps: int) -> None:
    """Print the results of the demo's modes, the synchronous one first."""
    rows = [
        [
            each["line"],
            f"{each['seconds']:.1f}",
            f"{each['wait_s']:.1f}",
            f"{each['loss']:.3f}",
            "yes" if each["distance"] == 0 else "no",
        ]
        for each in results
    ]
    columns = ["optimizer", "seconds", "rank 0 waited, s", "loss on unseen data", "replicas identical"]
    title = f"Two ranks, {steps} steps of 0.03 s; in half of them one of the two, drawn at random, is 0.05 s late"
    show_table((title, columns, rows))
    print(f"\nprint(opt.stats()) of the second one, on rank 0:\n{results[1]['stats']}")


def _wrapped(paragraph: str) -> str:
    """Wrap a paragraph to ``WIDTH``; items of a list keep their lines, and a diff is left alone."""
    lines = paragraph.split("\n")
    if any(line.startswith("+") for line in lines):
        return paragraph
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  " * line.startswith("- ")) for line in lines)


def show_findings(findings: Sequence[Finding]) -> None:
    """Print a line per finding, its advice indented below it, and a summary."""
    name_width = max((len(finding.name) for finding in findings), default=0)
    indent, width = " " * (9 + name_width + 2), min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns)
    for finding in findings:
        print(f"{finding.verdict.value:7}  {finding.name:{name_width}}  {finding.fact}")
        for words in textwrap.wrap(finding.advice, width, initial_indent=indent, subsequent_indent=indent):
            print(words)
    problems, notes, good = (
        sum(finding.verdict is verdict for finding in findings)
        for verdict in (Verdict.PROBLEM, Verdict.NOTE, Verdict.OK)
    )
    print(f"{problems} problem{'s' * (problems != 1)}, {notes} note{'s' * (notes != 1)}, {good} ok: ", end="")
    print(CLOSING[worst(findings)])


# -- a picture ---------------------------------------------------------------------------------------------------------

COMPUTES, WAITS, UPDATES = "#4477aa", "#ddcc77", "#aa3377"
"""Colours that colour-blind readers can distinguish."""


def need_matplotlib() -> None:
    """Check that pictures can be drawn.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install matplotlib")


def draw(trace: Trace, file: Path, first: int = 0, steps: int = 20) -> None:
    """Draw some steps of a trace, a row per rank, in the format of the file's suffix: .png, .svg, .pdf.

    Args:
        trace: of a run.
        file: to write.
        first: first step.
        steps: number of steps.

    Raises:
        ValueError: matplotlib is not installed, or the steps are not in the trace.
        OSError: the file cannot be written.
    """
    need_matplotlib()
    if not 0 <= first < trace.steps or steps < 1:
        raise ValueError(f"the trace has steps 0 to {trace.steps - 1}: say which of these to begin with, and 1 or more")
    from matplotlib.figure import Figure

    last = min(first + steps, trace.steps)
    figure = Figure(figsize=(12, 1.6 + 0.45 * trace.ranks), layout="constrained")
    axes = figure.subplots()
    _draw_steps(axes, trace, first, last)
    apart = "; the clocks of the hosts may differ" if trace.clocks_ahead is None else ""
    axes.set_xlabel(f"s (white lines: ends of steps{apart})")
    left_out = trace.left_out
    axes.set_title(f"{trace.headers[0].algorithm}, steps {left_out + first} to {left_out + last - 1}", loc="left")
    _save(figure, axes, file)


def draw_modes(traces: Mapping[str, Trace], file: Path) -> None:
    """Draw the first ``SHOWN`` steps of several runs below each other, as ``draw`` does, over the same seconds.

    Args:
        traces: runs by title.
        file: to write.

    Raises:
        ValueError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    need_matplotlib()
    from matplotlib.figure import Figure

    height = sum(0.8 + 0.45 * trace.ranks for trace in traces.values())
    figure = Figure(figsize=(12, 0.6 + height), layout="constrained")
    several = figure.subplots(len(traces), sharex=True)
    for axes, (title, trace) in zip(several, traces.items(), strict=True):
        _draw_steps(axes, trace, 0, min(SHOWN, trace.steps))
        axes.set_title(title, loc="left")
    several[-1].set_xlabel(f"s; the first {SHOWN} steps (white lines: ends of steps)")
    _save(figure, several[-1], file)


def _draw_steps(axes: Any, trace: Trace, first: int, last: int) -> None:
    """Draw the steps from ``first`` to ``last``, exclusively, a row per rank."""
    ahead = trace.clocks_ahead
    shift: Times = np.zeros(trace.ranks) if ahead is None else ahead
    origin = float((trace.begin[first] - shift).min())
    for rank in range(trace.ranks):
        begin, arrived, released, done = (
            times[first:last, rank] - shift[rank] - origin
            for times in (trace.begin, trace.arrived, trace.released, trace.done)
        )
        for start, end, colour in ((begin, arrived, COMPUTES), (arrived, released, WAITS), (released, done, UPDATES)):
            spans = list(zip(start.tolist(), np.maximum(end - start, 0.0).tolist(), strict=True))
            axes.broken_barh(spans, (rank - 0.36, 0.72), facecolors=colour)
        axes.vlines(done, rank - 0.36, rank + 0.36, colors="white", linewidth=0.8)
    axes.set_yticks(range(trace.ranks), [f"rank {rank}" for rank in range(trace.ranks)])
    axes.set_ylim(trace.ranks - 0.5, -0.5)
    axes.set_xlim(left=0.0)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, axes: Any, file: Path) -> None:
    """Add the legend of the colours, and write the file."""
    for name, colour in (("computes", COMPUTES), ("waits", WAITS), ("updates", UPDATES)):
        axes.bar([0], [0], color=colour, label=name)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
