"""The table of ends, for both frameworks: every way a rank's training ends, times what crosses it.

Three ranks train one or two optimizers, with batch norm or without; each calls drain() or cut() so often, keeps its
optimizers or lets them go, trains another model afterwards, and ends. Each cell ends, and says how it must: normally,
with the same weights everywhere; or with an error that names the rank that failed or died.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster, InjectedError

RANKS = 3
LIMIT = 60.0
"""Seconds in which a cell has to end, on a machine that does much else."""
Pair = tuple[Any, Any]
"""A model and its optimizer."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination.

    Attributes:
        end: "normal", or what rank 1 does after its drains: "exception", "death" (its connection ends).
        kept: ranks that still hold their optimizers afterwards.
        drains: how often each rank calls ``how``.
        how: "drain" or "cut".
        buffers: whether the models have batch norm.
        optimizers: of each rank.
    """

    end: str
    kept: tuple[int, ...]
    drains: tuple[int, ...]
    how: str
    buffers: bool
    optimizers: int


def cells(*dimensions: Any) -> list[Any]:
    """All combinations, each with a name."""
    made = [Cell(*each) for each in itertools.product(*dimensions)]
    return [pytest.param(cell, id="-".join(str(value) for value in dataclasses.astuple(cell))) for cell in made]


EVERY = cells(
    ("normal", "exception", "death"),
    ((0, 1, 2), (0,), ()),
    ((1, 1, 1), (2, 1, 1), (0, 1, 0), (0, 0, 0)),
    ("drain", "cut"),
    (True, False),
    (1, 2),
)
SOME = cells(("normal", "exception"), ((1,), ()), ((2, 1, 1),), ("drain", "cut"), (True,), (2,))


class _Holder:
    """In a reference cycle with its optimizers, as a trainer is."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers
        for optimizer in optimizers:
            vars(optimizer)["holder"] = self


def steps_of(cell: Cell, rank: int) -> int:
    """Uneven where that is allowed: ranks that are out of batches serve the others."""
    return 3 + (rank if any(cell.drains) else 0)


def run(
    cell: Cell,
    make: Callable[[int], Pair],
    step: Callable[[Any, Any, int, int], None],
    state: Callable[[Any], np.ndarray[Any, Any]],
) -> list[Any]:
    """Train, drain and end on every rank.

    Args:
        cell: how.
        make: a model and its optimizer by seed, the same on all ranks.
        step: one step of them, of a rank, with a number.
        state: a model's weights and buffers.

    Returns:
        What comes of each rank: its models' states after the drains and that of the model trained last, or its error.
    """

    def train(rank: int) -> Any:
        pairs = [make(seed) for seed in range(cell.optimizers)]
        for number in range(steps_of(cell, rank)):
            for model, optimizer in pairs:
                step(model, optimizer, rank, number)
        for _ in range(cell.drains[rank]):
            getattr(pairs[0][1], cell.how)()
        if cell.end == "exception" and rank == 1:
            raise InjectedError("boom")
        engine = local_engine()
        assert engine is not None
        if cell.end == "death" and rank == 1:
            engine._channel.close()  # type: ignore[union-attr]
            return None
        states = [state(model) for model, _ in pairs]
        holder = _Holder([optimizer for _, optimizer in pairs])
        del pairs, optimizer, model
        if rank not in cell.kept:
            del holder
            gc.collect()
        trained = np.zeros(0)
        if len(set(cell.drains)) == 1:  # (else a rank may still be in a drain of the first)
            later, other = make(7)
            for number in range(3):
                step(later, other, rank, number)
            other.drain()
            trained = state(later)
        engine.drain(leaving=True)
        return states, trained

    return list(Cluster(RANKS).outcomes(train, LIMIT))


def check(cell: Cell, outcomes: list[Any]) -> None:
    """Normal ends bring the same weights everywhere; otherwise all are told of rank 1."""
    assert not any(isinstance(outcome, TimeoutError) for outcome in outcomes), outcomes
    if cell.end != "normal":
        for rank in (0, 2):
            over = cell.drains[rank] < cell.drains[1] or (len(set(cell.drains)) > 1 and rank not in cell.kept)
            if over and not isinstance(outcomes[rank], InjectedError):
                continue  # it had nothing left to drain when rank 1 failed
            assert isinstance(outcomes[rank], InjectedError), outcomes
            assert "rank 1 on host host1" in str(outcomes[rank])
        return
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    for _, trained in outcomes[1:]:
        assert np.array_equal(trained, outcomes[0][1])
    if cell.how == "drain" and len(set(cell.drains)) == 1 and cell.drains[0]:
        for states, _ in outcomes[1:]:
            assert all(map(np.array_equal, states, outcomes[0][0]))
