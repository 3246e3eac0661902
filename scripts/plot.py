#!/usr/bin/env python
"""Pictures of runs and of benchmarks.

Runs: give the runners' --log-dir folders (or CSV files of them, or --summary files), one or several to be compared.
Drawn is what they tell: loss and accuracy over epochs and over time, how step times are spread, waits by rank, how far
ranks were apart, staleness, who led when. Runs are named by their quorum or algorithm, or by their folders where these
are the same or unknown.

A benchmark: give the JSON file that scripts/bench.py --json has written, and no other; it is drawn as --plot draws it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, current_name
from benchmarks.support import plot, runs

EXAMPLES = """\
examples:
  scripts/plot.py logs --plot run.png
  scripts/plot.py logs/solo logs/sgp logs/lsgd --plot compared.png
  scripts/plot.py logs/leaders.csv --ranks 8 --plot leaders.png
  scripts/plot.py straggler.json --plot straggler.png
"""


def draw_benchmark(path: Path, content: dict[str, Any], picture: Path) -> None:
    """Draw a benchmark's JSON.

    Raises:
        ValueError: there is no such case, or its rows are not what the case draws.
    """
    case = CASES.get(current_name(content["case"]))
    if case is None:
        raise ValueError(f"{path} is of a case {content['case']!r} that is not there: give one of {', '.join(CASES)}")
    try:
        plot.save(case, content, picture)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: its rows do not fit {content['case']} ({reason}): run the case again") from error


def draw_runs(paths: Sequence[Path], ranks: int | None, picture: Path) -> None:
    """Draw runs.

    Raises:
        ValueError: something cannot be read, or has nothing that could be drawn.
    """
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
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="of the job, where only leaders.csv is given (default: as far as leaders go)",
    )
    given = parser.parse_args(argv)
    try:
        contents = {path: runs.read_json(path) for path in given.files if path.suffix == ".json" and path.is_file()}
        benchmarks = [path for path, content in contents.items() if "case" in content and "rows" in content]
        if benchmarks and len(given.files) > 1:
            raise ValueError(f"{benchmarks[0]} is a benchmark's: pass no other file with it")
        if benchmarks:
            draw_benchmark(benchmarks[0], contents[benchmarks[0]], given.plot)
        else:
            draw_runs(given.files, given.ranks, given.plot)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {given.plot}")


if __name__ == "__main__":
    main()
