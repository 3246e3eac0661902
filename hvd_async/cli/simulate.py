"""Simulate a job under several modes: the library's own protocol, simulated ranks, simulated time.

Each rank computes for --compute seconds in a step, longer if it is slow, late, varies, or stalls.
"""

from __future__ import annotations

import argparse

import msgspec
import numpy as np

from hvd_async.advisor.prediction import EVERY, named_modes, simulated
from hvd_async.advisor.report import modes_as_json, show_table, what
from hvd_async.cli.numbers import COUNT, NOT_NEGATIVE, POSITIVE, RANKS, SHARE
from hvd_async.simulation.network import Network
from hvd_async.simulation.schedule import Schedule, lengths, one_slow, stalls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--ranks", type=RANKS, default=8, metavar="N", help="of the job")
    add("--per-host", type=COUNT, default=1, metavar="N", help="ranks of a host, a group under a leader")
    add("--compute", type=POSITIVE, default=0.3, metavar="S", help="seconds of computation in a step")
    add("--slow", type=POSITIVE, default=1.0, metavar="TIMES", help="how much slower the last rank is")
    add("--late", type=NOT_NEGATIVE, default=0.0, metavar="S", help="seconds by which one random rank per step is late")
    add("--vary", type=NOT_NEGATIVE, default=0.0, metavar="SD", help="log-normal deviation of each computation")
    add("--stall", type=NOT_NEGATIVE, default=0.0, metavar="S", help="seconds of a random stall of a rank")
    add("--stall-share", type=SHARE, default=0.01, metavar="P", help="probability of a stall in a step")
    add("--mode", default=EVERY, metavar="NAMES", help="modes, separated by commas")
    add("--megabytes", type=NOT_NEGATIVE, default=100.0, metavar="MB", help="of gradients, and of weights")
    add("--bandwidth", type=POSITIVE, default=10_000.0, metavar="MBIT", help="of a rank's link, Mbit/s")
    add("--latency", type=NOT_NEGATIVE, default=0.3, metavar="MS", help="of a message, one way, in ms")
    add("--steps", type=COUNT, default=200, metavar="N", help="of each rank")
    add("--repetitions", type=COUNT, default=3, metavar="N", help="jobs with different random draws")
    add("--seed", type=int, default=0, help="of the random draws")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and print a table: Horovod, then the modes from the fastest on."""
    modes = named_modes(arguments.ranks, arguments.mode)
    jobs = [computation(arguments, arguments.seed + number) for number in range(arguments.repetitions)]
    link = Network(latency=arguments.latency / 1e3, bandwidth=arguments.bandwidth * 1e6 / 8, cycle=0.001)
    base, *others = simulated(jobs, link, arguments.megabytes * 1e6, modes, 0, arguments.seed, arguments.per_host)
    found = [base, *sorted(others, key=lambda each: -each.gain.mean)]
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(modes_as_json(found)), indent=1).decode())
    else:
        show_table(what(found))
    return 0


def computation(arguments: argparse.Namespace, seed: int) -> Schedule:
    """Return the seconds that each rank computes in each step, [steps, ranks]."""
    steps, ranks = arguments.steps, arguments.ranks
    found: Schedule = one_slow(steps, ranks, arguments.compute, arguments.slow)
    found = found * lengths(steps, ranks, 1.0, arguments.vary, seed)
    found = found + stalls(steps, ranks, 0.0, arguments.stall, arguments.stall_share, seed)
    found[np.arange(steps), np.random.default_rng(seed).integers(ranks, size=steps)] += arguments.late
    return found
