"""Picture of a trace: a row per rank with its computation and its waits. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from hvd_async.traces.format import Times, Trace

COMPUTES, WAITS, UPDATES = "#4477aa", "#ddcc77", "#aa3377"
"""Colours that colour-blind readers can distinguish."""


def draw(trace: Trace, file: Path, first: int = 0, steps: int = 20) -> None:
    """Draw some steps of a trace, in the format of the file's suffix: .png, .svg, .pdf.

    Args:
        trace: of a run.
        file: to write.
        first: first step.
        steps: number of steps.

    Raises:
        ValueError: matplotlib is not installed, or the steps are not in the trace.
        OSError: the file cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install matplotlib")
    if not 0 <= first < trace.steps or steps < 1:
        raise ValueError(f"the trace has steps 0 to {trace.steps - 1}: say which of these to begin with, and 1 or more")
    from matplotlib.figure import Figure

    last = min(first + steps, trace.steps)
    ahead = trace.clocks_ahead
    shift: Times = np.zeros(trace.ranks) if ahead is None else ahead
    origin = float((trace.begin[first] - shift).min())
    figure = Figure(figsize=(12, 1.6 + 0.45 * trace.ranks), layout="constrained")
    axes = figure.subplots()
    for rank in range(trace.ranks):
        begin, arrived, released, done = (
            times[first:last, rank] - shift[rank] - origin
            for times in (trace.begin, trace.arrived, trace.released, trace.done)
        )
        for start, end, colour in ((begin, arrived, COMPUTES), (arrived, released, WAITS), (released, done, UPDATES)):
            spans = list(zip(start.tolist(), np.maximum(end - start, 0.0).tolist(), strict=True))
            axes.broken_barh(spans, (rank - 0.36, 0.72), facecolors=colour)
        axes.vlines(done, rank - 0.36, rank + 0.36, colors="white", linewidth=0.8)
    for name, colour in (("computes", COMPUTES), ("waits", WAITS), ("updates", UPDATES)):
        axes.bar([0], [0], color=colour, label=name)
    axes.set_yticks(range(trace.ranks), [f"rank {rank}" for rank in range(trace.ranks)])
    axes.set_ylim(trace.ranks - 0.5, -0.5)
    axes.set_xlim(left=0.0)
    apart = "; the clocks of the hosts may differ" if ahead is None else ""
    axes.set_xlabel(f"s (white lines: ends of steps{apart})")
    left_out = trace.left_out
    axes.set_title(f"{trace.headers[0].algorithm}, steps {left_out + first} to {left_out + last - 1}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
