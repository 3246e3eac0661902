"""The table of ends in both frameworks: three dimensions crossed in torch and two in Keras, the whole table in a long
run."""

from __future__ import annotations

import pytest

from tests.conformance.ends_table import DIMENSIONS, FRAMEWORKS, SOME, WRAPPERS, Cell, cells, check, run
from tests.conftest import LONG_RUN

EVERY = len(DIMENSIONS)


@pytest.mark.parametrize("cell", cells(DIMENSIONS, EVERY if LONG_RUN else 3))
def test_partial_allreduce_in_torch(cell: Cell):
    check(cell, run(cell, "solo", FRAMEWORKS["torch"]))


@pytest.mark.parametrize("cell", cells(DIMENSIONS, EVERY) if LONG_RUN else cells(SOME, 2))
def test_partial_allreduce_in_keras(cell: Cell):
    check(cell, run(cell, "solo", FRAMEWORKS["keras"]))


OTHERS = [*(("torch", name) for name in WRAPPERS if name != "solo"), ("keras", "sgp"), ("keras", "lsgd")]
CELLS = cells(SOME, EVERY if LONG_RUN else 2)
TRIED = [
    pytest.param(*other, *cell.values, id="-".join([*other, cell.id]))
    for place, other in enumerate(OTHERS)
    for cell in (CELLS if LONG_RUN else CELLS[place % 2 :: 2])
]
"""In an ordinary run every second cell of an algorithm, by turns."""


@pytest.mark.parametrize(("framework", "wrapper", "cell"), TRIED)
def test_other_algorithms(framework: str, wrapper: str, cell: Cell):
    check(cell, run(cell, wrapper, FRAMEWORKS[framework]))
