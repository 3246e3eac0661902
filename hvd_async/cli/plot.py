"""Draw a recorded run, a row for each rank: when it computed, waited for others, updated its weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvd_async.traces.format import read_trace
from hvd_async.traces.timeline import draw


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("trace", type=Path, help="folder that `hvd_async record` or hvd_async.torch.record has written")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG", help="picture to write; .svg or .pdf will do")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="step to begin with, of those not left out")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="how many to draw")
    parser.add_argument("--skip", type=int, default=3, metavar="N", help="steps at the start to leave out")


def run(arguments: argparse.Namespace) -> int:
    """Read, draw, and say where the picture is."""
    draw(read_trace(arguments.trace, arguments.skip, least=1), arguments.out, arguments.first, arguments.steps)
    print(f"wrote {arguments.out}")
    return 0
