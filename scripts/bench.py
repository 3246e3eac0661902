"""Benchmarks: arms interleaved in one job, medians with their spread, goals, as a table, JSON and a plot.

A speed-up is that over Horovod's own arm in the same job, on the same transport. Figures mean most on a machine that
does nothing else. Progress goes to stderr, the table to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that scripts/ is in
from scripts.benchmarks.cases import CASES, current_name
from scripts.benchmarks.support import plot
from scripts.benchmarks.support.launch import JobError, NotHereError
from scripts.benchmarks.support.report import Report


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(
        prog="scripts/bench.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="scripts/bench.py CASE --help lists a case's own options; all runs every case.",
    )
    cases = top.add_subparsers(dest="case", required=True, metavar="CASE")
    for name, case in CASES.items():
        one = cases.add_parser(
            name,
            aliases=[case.old_name] if case.old_name else [],
            help=case.help.replace("%", "%%"),
            description=case.text,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        common = one.add_argument_group("of every case")
        common.add_argument("--ranks", type=int, metavar="N", help="processes")
        common.add_argument(
            "--arms",
            metavar="A,B,...",
            help="of horovod, ddp, post-local-sgd, torchft, torchft-diloco, decent-dp; all, majority, solo, auto, "
            "k3 (3 ranks), 0.75; sgp, osgp, dpsgd, adpsgd, local-sgd, local, slowmo, diloco; lsgd, easgd; some "
            "compressed: horovod-fp16, ddp-powersgd, solo-bf16, sgp-int8; some averaged each few steps: "
            "dpsgd-avg4, sgp-bf16-avg8, local-avg8. "
            "No case has all",
        )
        common.add_argument("--repetitions", type=int, metavar="N", help="of each arm, in alternation")
        common.add_argument(
            "--quick", action="store_true", help="a small run of fewer arms, to see that it works; judge nothing by it"
        )
        common.add_argument("--limit", type=float, metavar="MIN", help="end the job after this many minutes")
        common.add_argument(
            "--resume",
            type=Path,
            metavar="FILE",
            help="keep each result there as it comes, and take results that are there: to run a case in pieces",
        )
        common.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
        common.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (PNG)")
        case.add_arguments(one)
    every = cases.add_parser(
        "all",
        help="every case, one after the other: a folder of JSON files and plots",
        description="Every case with its defaults, one after the other. A case that fails does not end the run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    every.add_argument("--quick", action="store_true", help="small runs, to see that they work; judge nothing by them")
    every.add_argument("--out", type=Path, default=Path("bench"), metavar="DIR", help="for CASE.json and CASE.png")
    only = {"nargs": "+", "type": current_name, "choices": CASES, "metavar": "CASE"}
    every.add_argument("--only", **only, help="these cases; not given: all")
    return top


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def run_case(args: argparse.Namespace) -> Report:
    """Run a case as the command line says, print its table, write what is to be written.

    Raises:
        ValueError: its options cannot be.
        JobError: a job failed.
    """
    case = CASES[current_name(args.case)]
    if args.quick:
        case.make_quick(args)
    report = case.run(args, say)
    if args.quick:
        report.notes.append("a quick run: the goals are listed, but nothing can be judged by it")
        report.goals = [dataclasses.replace(goal, judged=goal.exact) for goal in report.goals]
    print(report.text(), flush=True)
    if args.json is not None:
        report.write(args.json)
    if args.plot is not None:
        plot.save(case, report.content(), args.plot)
    return report


def run_all(command: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Run every case; say at the end which goals were met, which cases failed, or cannot be here. 1 if one failed."""
    names = args.only or list(CASES)
    goals, ends = [], []
    failed = False
    started = time.monotonic()
    for number, name in enumerate(names, start=1):
        say(f"== case {number} of {len(names)}: {name}; {(time.monotonic() - started) / 60:.1f} min so far")
        print(f"\n== {name}", flush=True)
        file = args.out / CASES[name].file
        files = [f"--json={file}.json", f"--plot={file}.png"]
        try:
            report = run_case(command.parse_args([name, *files, *(["--quick"] if args.quick else [])]))
        except NotHereError as error:
            print(f"skipped: {error}")
            ends.append(f"SKIPPED {name}: {error}")
        except Exception as error:  # noqa: BLE001  whatever it is, the other cases are to be run
            say(f"{type(error).__name__}: {error}")
            print(f"failed: {str(error).splitlines()[-1] if str(error) else type(error).__name__}")
            ends.append(f"FAILED  {name}")
            failed = True
        else:
            goals += [f"{name}: {goal}" for goal in report.goals]
    minutes = (time.monotonic() - started) / 60
    print("\n".join(["", f"== all, in {minutes:.1f} min", *goals, *ends]))
    return 1 if failed else 0


def main() -> int:
    """Run what the command line says; return the exit code: 1 if a job failed, 130 after Ctrl-C."""
    command = parser()
    args = command.parse_args()
    try:
        if args.case == "all":
            return run_all(command, args)
        run_case(args)
    except ValueError as error:
        command.error(str(error))
    except JobError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the job has been ended")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
