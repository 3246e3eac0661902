"""Collectives at ends, as an engine submits them: their names."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from hvd_async.runtime.protocol import RunCollective
from hvd_async.runtime.worker import CollectiveCalls


def submitted(*commands: RunCollective) -> list[str]:
    """Return the names under which a rank that is in none of these collectives submits its zeros."""
    names: list[str] = []

    def record(vector: Any, name: str, *_: Any) -> None:
        names.append(name)

    collectives = SimpleNamespace(
        zeros=lambda length, dtype: np.zeros(length, dtype),
        allreduce_sum=record,
        broadcast=lambda vector, root, name, *_: record(vector, name),
    )
    engine: Any = SimpleNamespace(
        rank=1,
        collectives=collectives,
        turn=lambda: None,
        submit=lambda start, done, **_: start(),
        clock=lambda: 0.0,
        changed=threading.RLock(),
    )
    for command in commands:
        CollectiveCalls(engine, None).run(command)
    return names


def test_two_optimizers_collectives_have_names_of_their_own():
    """Else Horovod would add up the vectors of two optimizers that are drained at once, or refuse the second."""
    kinds = [("sum", "float32"), ("sum", "float64"), ("broadcast", "float32")]
    names = submitted(
        *(RunCollective(number, kind, "an average", 3, dtype, 0, [0]) for number in (7, 8) for kind, dtype in kinds)
    )
    assert len(names) == len(set(names)) == 2 * len(kinds)
