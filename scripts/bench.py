"""Benchmarks: arms interleaved in one job, medians with their spread, goals, as a table, JSON and a plot.

A speed-up is that over Horovod's own arm in the same job, on the same transport. Figures mean most on a machine that
does nothing else. Progress goes to stderr, the table to stdout.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import (
    accuracy,
    activation,
    balanced,
    convergence,
    exchange,
    hard,
    hetero,
    independence,
    lengths,
    memory,
    network,
    plot,
    pull,
    race,
    scaling,
    skew,
    soak,
    straggler,
)
from benchmarks.launch import JobError

MODULES = (
    *(straggler, skew, balanced, activation, memory, accuracy, hard, convergence, lengths),
    *(hetero, independence, exchange, network, scaling, pull, race, soak),
)
CASES = {module.__name__.rpartition(".")[2]: module for module in MODULES}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="scripts/bench.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="scripts/bench.py CASE --help lists a case's own options.",
    )
    cases = top.add_subparsers(dest="case", required=True, metavar="CASE")
    for name, case in CASES.items():
        one = cases.add_parser(
            name,
            help=case.HELP,
            description=f"{case.__doc__}",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        common = one.add_argument_group("of every case")
        common.add_argument("--ranks", type=int, metavar="N", help="processes")
        common.add_argument(
            "--arms",
            metavar="A,B,...",
            help="of horovod, ddp; all, majority, solo, auto, k3 (3 ranks), 0.75; sgp, osgp, dpsgd, adpsgd, sgp-int8; "
            "lsgd, easgd",
        )
        common.add_argument("--repetitions", type=int, metavar="N", help="of each arm, in alternation")
        common.add_argument(
            "--quick", action="store_true", help="a small run, to see that it works; judge nothing by it"
        )
        common.add_argument("--limit", type=float, metavar="MIN", help="end the job after so many minutes")
        common.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
        common.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (PNG)")
        case.add_arguments(one)
    return top


def main() -> int:
    """Run a case as the command line says; the exit code is 1 if a job failed, 130 after Ctrl-C."""
    command = parser()
    args = command.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        report = CASES[args.case].run(args, say)
    except ValueError as error:
        command.error(str(error))
    except JobError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the job has been ended")
        return 130
    if args.quick:
        report.notes.append("a quick run: the goals are listed, but nothing can be judged by it")
    print(report.text())
    if args.json is not None:
        report.write(args.json)
    if args.plot is not None:
        plot.save(report, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
