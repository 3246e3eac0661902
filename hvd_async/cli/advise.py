"""Learn from a recorded run which ranks are stragglers, and how many steps per second each mode would reach.

The recorded computation of each rank goes through a simulation of the library's own protocol under each mode. Nothing
is trained: what a mode costs in accuracy is not predicted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from hvd_async.advisor.advice import Given, advise, checked, read_given
from hvd_async.advisor.prediction import EVERY
from hvd_async.advisor.report import as_json, show
from hvd_async.cli.numbers import COUNT
from hvd_async.traces.format import read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("trace", type=Path, help="folder that `hvd_async record` or hvd_async.torch.record has written")
    parser.add_argument("--network", type=Path, metavar="FILE", help="JSON with latency_s and bandwidth_bytes_s")
    parser.add_argument("--bandwidth", type=float, metavar="MBIT", help="of a rank's link, in Mbit/s; over --network")
    parser.add_argument("--latency", type=float, metavar="MS", help="of a message, one way, in ms; over --network")
    parser.add_argument("--modes", default=EVERY, metavar="NAMES", help="to try, separated by commas")
    parser.add_argument("--skip", type=int, default=3, metavar="N", help="steps at the start to leave out")
    parser.add_argument("--steps", type=COUNT, default=200, metavar="N", help="of each simulated job")
    parser.add_argument("--resamples", type=COUNT, default=8, metavar="N", help="simulated jobs of each mode")
    parser.add_argument("--seed", type=int, default=0, help="of the resampling")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Read a trace, simulate, and print the advice."""
    given = read_given(arguments.network) if arguments.network is not None else Given()
    if arguments.bandwidth is not None:
        given = msgspec.structs.replace(given, bandwidth_bytes_s=arguments.bandwidth * 1e6 / 8)
    if arguments.latency is not None:
        given = msgspec.structs.replace(given, latency_s=arguments.latency / 1e3)
    trace = read_trace(arguments.trace, arguments.skip)
    found = advise(trace, checked(given), arguments.modes, arguments.steps, arguments.resamples, arguments.seed)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(as_json(found)), indent=1).decode())
    else:
        show(found)
    return 0
