"""Run cells by name: python -m tests.conformance.crossings CELL ... [--shrink]."""

from __future__ import annotations

import re
import sys

from tests.conformance.crossings import judge
from tests.conformance.crossings.table import Cell, parse, shrink


def kinds(problems: list[str]) -> set[str]:
    """Return problems without their numbers."""
    return {re.sub(r"[-+.\d]+(e-?\d+)?", "#", problem) for problem in problems}


def main(arguments: list[str]) -> int:
    """Print what does not hold of each cell; with ``--shrink`` the part of it that is enough for each problem."""
    for cell in map(parse, (name for name in arguments if not name.startswith("--"))):
        problems = judge.problems(cell)
        smaller = dict.fromkeys([cell] if not problems else [])
        for kind in sorted(kinds(problems)) if "--shrink" in arguments else []:

            def fails(part: Cell, kind: str = kind) -> bool:
                return kind in kinds(judge.problems(part))

            smaller[shrink(cell, fails)] = None
        for part in smaller or [cell]:
            print(part.id, *judge.problems(part) or ["all holds"], sep="\n    ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
