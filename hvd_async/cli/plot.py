"""Draw a recorded run, a row per rank: when it computed, waited for others, updated its weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvd_async.traces.format import read_trace
from hvd_async.traces.timeline import draw


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("trace", type=Path, help="folder that `hvd_async record` or hvd_async.torch.record has written")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG", help="picture to write: .png, .svg or .pdf")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first step to draw, after those left out")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="number of steps to draw")
    parser.add_argument("--skip", type=int, default=3, metavar="N", help="steps at the start to leave out")


def run(arguments: argparse.Namespace) -> int:
    """Read a trace, draw it, and print the picture's path."""
    draw(read_trace(arguments.trace, arguments.skip, least=1), arguments.out, arguments.first, arguments.steps)
    print(f"wrote {arguments.out}")
    return 0
