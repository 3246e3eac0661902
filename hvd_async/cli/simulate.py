"""Simulate a job under several modes: the library's own protocol, simulated ranks, a clock that does not wait.

Say how ranks compute: all alike for --compute seconds, and then who is slow, or late, or varies.
"""

from __future__ import annotations

import argparse

import msgspec
import numpy as np

from hvd_async.advisor.prediction import EVERY, named_modes, simulated
from hvd_async.advisor.report import modes_as_json, show_table, what
from hvd_async.simulation.network import Network
from hvd_async.simulation.schedule import Schedule, lengths, one_slow, stalls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="of the job")
    parser.add_argument("--per-host", type=int, default=1, metavar="N", help="ranks of a host, a group under a leader")
    parser.add_argument("--compute", type=float, default=0.3, metavar="S", help="seconds of computation in a step")
    parser.add_argument("--slow", type=float, default=1.0, metavar="TIMES", help="how much slower the last rank is")
    parser.add_argument("--late", type=float, default=0.0, metavar="S", help="one random rank a step is so late, in s")
    parser.add_argument(
        "--vary", type=float, default=0.0, metavar="SD", help="log-normal deviation of each computation"
    )
    parser.add_argument("--stall", type=float, default=0.0, metavar="S", help="a rank now and then stands still, for s")
    parser.add_argument("--stall-share", type=float, default=0.01, metavar="P", help="in a step, with this probability")
    parser.add_argument("--mode", default=EVERY, metavar="NAMES", help="modes, with commas between them")
    parser.add_argument("--megabytes", type=float, default=100.0, metavar="MB", help="of gradients, and of weights")
    parser.add_argument("--bandwidth", type=float, default=10_000.0, metavar="MBIT", help="of a rank's link, Mbit/s")
    parser.add_argument("--latency", type=float, default=0.3, metavar="MS", help="of a message, one way, in ms")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="of each rank")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="jobs that differ in what is random")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and print a table, the quickest mode first after Horovod."""
    _check(arguments)
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
    """Return how long each rank computes in each step, in s, [steps, ranks]."""
    steps, ranks = arguments.steps, arguments.ranks
    found: Schedule = one_slow(steps, ranks, arguments.compute, arguments.slow)
    found = found * lengths(steps, ranks, 1.0, arguments.vary, seed)
    found = found + stalls(steps, ranks, 0.0, arguments.stall, arguments.stall_share, seed)
    found[np.arange(steps), np.random.default_rng(seed).integers(ranks, size=steps)] += arguments.late
    return found


def _check(arguments: argparse.Namespace) -> None:
    least = {"ranks": 2, "steps": 1, "repetitions": 1, "per_host": 1}
    for name, number in least.items():
        if getattr(arguments, name) < number:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: it is at least {number}")
    for name in ("compute", "slow", "bandwidth"):
        if not getattr(arguments, name) > 0:
            raise ValueError(f"--{name} {getattr(arguments, name):g}: give a number above 0")
    for name in ("late", "vary", "stall", "megabytes", "latency"):
        if not getattr(arguments, name) >= 0:
            raise ValueError(f"--{name} {getattr(arguments, name):g}: give 0 or more")
    if not 0 <= arguments.stall_share <= 1:
        raise ValueError(f"--stall-share {arguments.stall_share:g} is no probability: say one from 0 to 1")
