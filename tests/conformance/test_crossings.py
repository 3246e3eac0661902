"""Crossings: one covering array of optimizers and of other features that touch a model, in all bindings.

Each cell is a training script, run by our optimizers on ranks that are threads, and by the plain optimizer in one
process. ``crossings/judge.py`` says what must hold. Where the algorithm allows: weights, averages and rates are the
plain run's. Everywhere: constraints hold and frozen parameters rest whenever a script looks, moving averages are
averages of weights, replicas are identical after a drain, statistics are the ranks' mean, other buffers are left
alone, no gradient is lost, rounds are counted.

A cell's name says what crosses. To run one, or what is left of it that still fails:

    python -m tests.conformance.crossings torch/osgp-own/weights=clamp-hook/rate=drop [--shrink]
"""

from __future__ import annotations

import pytest

from tests.conformance.crossings import bindings, judge
from tests.conformance.crossings.table import FEW, Cell
from tests.conftest import LONG_RUN

FEW_OF = {"torch": FEW, "keras": bindings.KERAS_FEW, "keras-graph": bindings.KERAS_FEW}
"""Arms of an ordinary run, by binding."""


def cells_of_a_long_run() -> list[Cell]:
    """All levels of any three factors (Keras: two) with the arms of an ordinary run, of any two (one) with all arms."""
    chosen = [
        cell
        for name, few in FEW_OF.items()
        for crossed in [3 if name == "torch" else 2]
        for cell in [*bindings.cells(name, crossed, few, ()), *bindings.cells(name, crossed - 1, seldom=())]
    ]
    return list({cell.id: cell for cell in chosen}.values())


CELLS = (
    cells_of_a_long_run()
    if LONG_RUN
    else [
        *bindings.cells("torch", 2, FEW),
        *bindings.cells("keras-mixed", 1, bindings.KERAS_FEW, (), bindings.BEGUN),
    ]
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_a_cell(cell):
    assert judge.problems(cell) == []


@pytest.mark.parametrize("optimizer", ["adam", "counting"])
def test_quasi_global_momentum_is_refused_without_momentum(optimizer):
    (problem,) = judge.problems(Cell("torch", "dpsgd-quasi", {"optimizer": optimizer}))
    assert "raised ValueError: quasi_global corrects the momentum" in problem


@pytest.mark.parametrize("name", ["eager-solo", "eager-pace"])
def test_a_clamp_between_steps_of_ranks_that_saw_other_rounds_is_refused_or_right(name):
    """A late rank applies several rounds in one step, and so clamps less often than others: a drain compares them."""
    problems = judge.problems(Cell("torch", name, {"weights": "clamp-between"}))
    assert all("replicas differ after drain()" in one or "weights are clamped" in one for one in problems)
