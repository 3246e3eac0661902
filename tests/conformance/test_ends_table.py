"""The table of ends in both frameworks: three dimensions crossed in torch and two in Keras, the whole table in a long
run."""

from __future__ import annotations

import pytest

from tests.conformance.ends_table import DIMENSIONS, FRAMEWORKS, SOME, WRAPPERS, Cell, cells, check, run
from tests.conftest import LONG_RUN

EVERY = len(DIMENSIONS)


pytestmark = pytest.mark.usefixtures("quick_garbage_collection")


@pytest.mark.parametrize("cell", cells(DIMENSIONS, EVERY if LONG_RUN else 3))
def test_partial_allreduce_in_torch(cell: Cell):
    check(cell, run(cell, "solo", FRAMEWORKS["torch"]))


@pytest.mark.parametrize("cell", cells(DIMENSIONS, EVERY if LONG_RUN else 2))
def test_partial_allreduce_in_keras(cell: Cell):
    check(cell, run(cell, "solo", FRAMEWORKS["keras"]))


@pytest.mark.parametrize("cell", cells(SOME, EVERY if LONG_RUN else 2))
@pytest.mark.parametrize(
    ("framework", "wrapper"),
    [*(("torch", name) for name in WRAPPERS if name != "solo"), ("keras", "sgp"), ("keras", "lsgd")],
)
def test_other_algorithms(framework: str, wrapper: str, cell: Cell):
    check(cell, run(cell, wrapper, FRAMEWORKS[framework]))
