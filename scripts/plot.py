#!/usr/bin/env python
"""Pictures of runs and of benchmarks.

Runs: pass the runners' --log-dir folders, or CSV files of them, one or several to be compared. Drawn are loss and
accuracy over epochs and over time, step times, waits by rank, how far ranks were apart, staleness, and who led when.
Runs are named by their quorum or algorithm, or by their paths where these are the same.

A benchmark: pass the JSON file that scripts/bench.py --json has written, and no other; it is drawn as --plot draws it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder that scripts/ is in
from scripts.benchmarks.cases import CASES, current_name
from scripts.benchmarks.support import plot, runs

EXAMPLES = """\
examples:
  scripts/plot.py logs --plot run.png
  scripts/plot.py logs/solo logs/sgp logs/lsgd --plot compared.png
  scripts/plot.py logs/leaders.csv --ranks 8 --plot leaders.png
  scripts/plot.py straggler.json --plot straggler.png
"""


def draw_benchmark(path: Path, picture: Path) -> None:
    """Draw a benchmark's JSON; ValueError if there is no such case, or its rows are not what the case draws."""
    content = runs.read_json(path)
    case = CASES.get(current_name(content.get("case", "")))
    if case is None:
        known = ", ".join(CASES)
        raise ValueError(f"{path} is of a case {content.get('case')!r} that is not there: pass one of {known}")
    try:
        plot.save(case, content, picture)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: its rows do not fit {content['case']} ({reason}): run the case again") from error


def draw_runs(paths: Sequence[Path], ranks: int | None, picture: Path) -> None:
    """Draw runs; ValueError if a file cannot be read, or has nothing to draw."""
    found = runs.read(paths, ranks)
    named = dict(zip(runs.labels(found), found, strict=True))
    sizes = sorted({run.ranks for run in found})
    title = f"{', '.join(named)}: {' and '.join(map(str, sizes))} ranks"
    plot.picture(picture, title, lambda figure: runs.draw(figure, named))


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line, draw, and say where the picture is."""
    parser = argparse.ArgumentParser(
        prog="scripts/plot.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a folder or a file, as above")
    parser.add_argument("--plot", type=Path, default=Path("plot.png"), metavar="FILE", help="a PNG (default: plot.png)")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks, if only leaders.csv is passed")
    args = parser.parse_args(argv)
    try:
        if args.files[0].suffix == ".json":
            if len(args.files) > 1:
                raise ValueError(f"{args.files[0]} is a benchmark's: pass no other file with it")
            draw_benchmark(args.files[0], args.plot)
        else:
            draw_runs(args.files, args.ranks, args.plot)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
