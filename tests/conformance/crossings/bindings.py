"""The scripts by binding, and which cells there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.conformance.crossings import keras_script, torch_script
from tests.conformance.crossings.table import ARMS, Cell, cover

SCRIPTS: Mapping[str, Any] = {"torch": torch_script} | dict.fromkeys(
    ("keras", "keras-graph", "keras-mixed"), keras_script
)
"""Modules with ``Run``; ``LEVELS`` of each factor, in addition to "none"; ``allowed``, whether levels may meet; and
``equivalent``, which returns a cell in which ranks' weights are to be the same."""
KERAS_FEW = (
    *("eager-all", "eager-ahead", "eager-solo", "sgp-star-own", "osgp-own"),
    *("dpsgd-quasi-own", "local", "diloco-own", "lsgd-own"),
)
"""Arms of Keras in an ordinary run: each family, and each kind of step."""
BEGUN = [
    {"arm": arm, "weights": "max-norm" if place % 2 else "non-neg" if ARMS[arm].mixes else "unit-norm"}
    | ({"travel": "none"} if ARMS[arm].plain else {})
    | ({"training": "freeze", "rate": "warm-up"} if ARMS[arm].options.get("quasi_global") else {})
    for place, arm in enumerate(KERAS_FEW)
]
"""Each of these arms with a constraint, which holds wherever a script looks; equal to a plain run if it can be, and not
in a script that takes four times as long (``steps_of``), as torch's do."""
SELDOM = {
    *("drain", "drain-inference", "ends-inference", "consensus", "zeroed", "loop", "sgd"),
    "reassigned",
}
"""Levels that only a long run crosses with all others: another level does what they do, and more."""


def cells(
    binding: str,
    crossed: int,
    arms: Iterable[str] = ARMS,
    seldom: Iterable[str] = SELDOM,
    begun: Sequence[Mapping[str, str]] = (),
) -> list[Cell]:
    """Return few cells in which all levels of any ``crossed`` factors meet, the arm being one of them.

    Args:
        binding: of the cells.
        crossed: number of factors.
        arms: that are crossed.
        seldom: levels that are left out.
        begun: levels that must meet in addition, each in a cell of their own.
    """
    script = SCRIPTS[binding]
    factors = {"arm": list(arms)}
    for factor, levels in script.LEVELS.items():
        without = [] if factor == "optimizer" else ["none"]
        factors[factor] = [*without, *(level for level in levels if level not in set(seldom))]
    rows = cover(factors, crossed, script.allowed, begun=begun)
    return [Cell(binding, row.pop("arm"), row) for row in rows]
