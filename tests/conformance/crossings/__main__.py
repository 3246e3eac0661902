"""Run cells by name: python -m tests.conformance.crossings CELL ... [--shrink]."""

from __future__ import annotations

import sys

from tests.conformance.crossings import bindings
from tests.conformance.crossings.table import Cell, parse, shrink


def fails(cell: Cell) -> bool:
    """Return whether a cell has problems."""
    return bool(bindings.problems(cell))


def main(arguments: list[str]) -> int:
    """Print what does not hold of each cell; with ``--shrink`` of a part of it that fails too."""
    names = [name for name in arguments if not name.startswith("--")]
    for cell in map(parse, names):
        smaller = shrink(cell, fails) if "--shrink" in arguments and fails(cell) else cell
        print(smaller.id, *bindings.problems(smaller) or ["all holds"], sep="\n    ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
