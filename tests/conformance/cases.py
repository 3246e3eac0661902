"""Optimizers and schedules on which both bindings and the reference must agree. Framework-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvd_async.algorithms.eager.quorum import Quorum


@dataclass(frozen=True)
class Case:
    """An optimizer, by the names that torch and Keras share.

    Attributes:
        kind: "sgd" or "adam".
        weight_decay: coupled (L2) in torch, decoupled in Keras.
    """

    name: str
    kind: str
    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


CASES = [
    Case("sgd", "sgd", 0.1),
    Case("momentum", "sgd", 0.05, momentum=0.9),
    Case("nesterov", "sgd", 0.05, momentum=0.9, nesterov=True),
    Case("decay", "sgd", 0.1, weight_decay=0.1),
    Case("momentum-decay", "sgd", 0.05, momentum=0.9, weight_decay=0.05),
    Case("nesterov-decay", "sgd", 0.05, momentum=0.8, nesterov=True, weight_decay=0.05),
    Case("adam", "adam", 0.01),
    Case("adam-decay", "adam", 0.01, weight_decay=0.05),
]


class Script(NamedTuple):
    """Rounds as a step finds them: for each step, for each round it applies, how many gradients the round carried."""

    name: str
    steps: tuple[tuple[int, ...], ...]


SCRIPTS = [
    Script("one-a-step", ((3,), (3,), (3,), (3,))),
    Script("none-one-three", ((), (1,), (2, 1, 3), (), (), (4,), (1, 1, 1))),
    Script("with-empty-rounds", ((2,), (0,), (0, 3, 0), (), (0, 0), (1,))),
]


class Schedule(NamedTuple):
    """The last rank of ``size`` takes its first step when the others have taken three."""

    quorum: Quorum
    size: int
    steps: int = 5


SCHEDULES = [Schedule("solo", 2), Schedule(2, 3)]
"""In both the late rank applies 3, 0 and 0 rounds in its first steps, the others 1 in each."""
