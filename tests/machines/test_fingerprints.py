"""Fingerprints of states: those from which something else can happen differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.machines.driver import PAUSE
from tests.machines.explore import digest_of


class Thing:
    """Something with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state


def waiting(steps: int) -> Any:
    """Return a program that waits."""

    def program() -> Any:
        for step in range(steps):
            yield PAUSE, step

    found = program()
    next(found)
    return found


PAIRS = {
    "objects after one another": ([Thing(1), Thing(2)], [Thing(1), Thing(3)]),
    "objects within objects": ([Thing(Thing(1)), Thing(Thing(2))], [Thing(Thing(1)), Thing(Thing(3))]),
    "programs": ([waiting(1), waiting(2)], [waiting(1), waiting(3)]),
    "an object that is shared": ([thing := Thing(1), thing], [Thing(1), Thing(1)]),
    "numbers that read alike together": ([1, 12], [11, 2]),
    "texts that read alike together": (["a", "bc"], ["ab", "c"]),
    "defaults": (lambda one=1: one, lambda one=2: one),
    "vectors": (np.zeros(2), np.zeros((2, 1))),
    "sets": ({1, 2}, {1, 3}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_states_that_differ_have_fingerprints_that_differ(name: str) -> None:
    one, other = PAIRS[name]
    assert digest_of(one) == digest_of(one)
    assert digest_of(one) != digest_of(other)


def test_equal_states_have_one_fingerprint() -> None:
    assert digest_of([Thing({"a": [1.5, None]}), np.ones(3)]) == digest_of([Thing({"a": [1.5, None]}), np.ones(3)])
