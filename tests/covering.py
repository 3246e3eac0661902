"""Few combinations of several dimensions that cross as many values as a test needs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def covering(dimensions: Sequence[Sequence[Any]], crossed: int) -> list[tuple[Any, ...]]:
    """Choose combinations in which all values of any ``crossed`` dimensions meet, each time the one in which most meet
    that have not yet; with as many as there are dimensions it is all of them."""

    def meetings(row: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(row), crossed))

    rows = {row: meetings(row) for row in itertools.product(*dimensions)}
    left, chosen = set().union(*rows.values()), list[tuple[Any, ...]]()
    while left:
        best = max(rows, key=lambda row: len(rows[row] & left))
        chosen.append(best)
        left -= rows[best]
    return chosen
