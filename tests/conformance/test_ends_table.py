"""The table of ends: every way a rank's training ends, times what crosses it.

Three ranks train one or two optimizers, with batch norm or without; each calls drain() or cut() so often, keeps its
optimizers or lets them go, trains another model afterwards, and ends. Each cell ends, and says how it must: normally,
with the same weights everywhere; or with an error that names the rank that failed or died. Three dimensions are crossed
in torch and two in Keras, the whole table in a long run.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster, InjectedError
from tests.conformance.weight_ranks import KerasRank, Rank, TorchRank, both
from tests.conftest import LONG_RUN
from tests.covering import covering

RANKS = 3
LIMIT = 60.0
"""Seconds in which a cell has to end, on a machine that does much else."""
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "solo": ("EagerOptimizer", {"quorum": "solo"}),
    "all": ("EagerOptimizer", {"quorum": "all"}),
    "host": ("EagerOptimizer", {"hierarchical": RANKS}),
    "sgp": ("GossipOptimizer", {"algorithm": "sgp"}),
    "dpsgd": ("GossipOptimizer", {"algorithm": "dpsgd"}),
    "adpsgd": ("GossipOptimizer", {"algorithm": "adpsgd", "topology": "ring"}),
    "host pairs": ("GossipOptimizer", {"algorithm": "adpsgd", "topology": "ring", "hierarchical": RANKS}),
    "quasi-global": ("GossipOptimizer", {"algorithm": "dpsgd", "quasi_global": True}),
    "exact-diffusion": ("GossipOptimizer", {"algorithm": "exact-diffusion"}),
    "noloco": ("GossipOptimizer", {"algorithm": "noloco", "gossip_every": 2}),
    "diloco": ("GossipOptimizer", {"algorithm": "diloco", "average_every": 2, "compression": "int8"}),
    "lsgd": ("LeaderOptimizer", {"algorithm": "lsgd", "group": RANKS, "global_period": 4}),
    "easgd": ("LeaderOptimizer", {"algorithm": "easgd", "global_period": 4}),
}


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


DIMENSIONS: list[Sequence[Any]] = [
    ("normal", "exception", "death"),
    ((0, 1, 2), (0,), ()),
    ((1, 1, 1), (2, 1, 1), (0, 1, 0), (0, 0, 0)),
    ("drain", "cut"),
    (True, False),
    (1, 2),
]
SOME: list[Sequence[Any]] = [("normal", "exception"), ((1,), ()), ((2, 1, 1),), ("drain", "cut"), (True,), (2,)]


def cells(dimensions: Sequence[Sequence[Any]], crossed: int) -> list[Any]:
    """Cells that cover a table, each with a name."""
    made = [Cell(*row) for row in covering(dimensions, crossed)]
    return [pytest.param(cell, id="-".join(str(value) for value in dataclasses.astuple(cell))) for cell in made]


# -- a cell ---------------------------------------------------------------------------------------------------


def run(cell: Cell, wrapper: str, binding: type[Rank]) -> list[Any]:
    """Train, drain and end on every rank.

    Returns:
        What comes of each rank: its weights and statistics after the drains and those trained last, or its error.
    """
    name, options = WRAPPERS[wrapper]
    problem = binding.least_squares(RANKS)

    def make(rank: int, start: float) -> Rank:
        one = binding(problem, rank, wrapper=name, normed=cell.buffers, **options)
        one.assign(np.full(6, start))
        return one

    def step(one: Rank) -> None:
        one.step(1.0 + one.rank + len(one.path) if cell.buffers else None)

    def train(rank: int) -> Any:
        ones = [make(rank, 1.0 + number) for number in range(cell.optimizers)]
        for _ in range(3 + (rank if any(cell.drains) else 0)):  # (ranks that are out of batches serve the others)
            for one in ones:
                step(one)
        for _ in range(cell.drains[rank]):
            getattr(ones[0].opt, cell.how)()
        if cell.end == "exception" and rank == 1:
            raise ValueError("boom")  # (InjectedError would stand for Horovod's, and call a roll)
        engine = local_engine()
        assert engine is not None
        if cell.end == "death" and rank == 1:
            engine._channel.close()  # type: ignore[union-attr]
            return None
        states = [one.bits() for one in ones]
        for one in ones:
            vars(one.opt)["holder"] = one  # (in a reference cycle with its optimizer, as a trainer is)
        if rank not in cell.kept:
            del ones, one
            gc.collect()
        trained = b""
        if len(set(cell.drains)) == 1:  # (else a rank may still be in a drain of the first)
            later = make(rank, 7.0)
            for _ in range(3):
                step(later)
            later.opt.drain()
            trained = later.bits()
        engine.drain(leaving=True)
        return states, trained

    return list(Cluster(RANKS).outcomes(train, LIMIT))


def check(cell: Cell, outcomes: list[Any]) -> None:
    """Normal ends bring the same weights everywhere; otherwise all are informed of rank 1."""
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
    assert len({trained for _, trained in outcomes}) == 1
    if cell.how == "drain" and len(set(cell.drains)) == 1 and cell.drains[0]:
        assert all(states == outcomes[0][0] for states, _ in outcomes)


EVERY = len(DIMENSIONS)


@pytest.mark.parametrize("cell", cells(DIMENSIONS, EVERY if LONG_RUN else 3))
def test_partial_allreduce_in_torch(cell: Cell):
    check(cell, run(cell, "solo", TorchRank))


@pytest.mark.parametrize("cell", cells(DIMENSIONS, EVERY) if LONG_RUN else cells(SOME, 2))
def test_partial_allreduce_in_keras(cell: Cell):
    check(cell, run(cell, "solo", KerasRank))


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
    check(cell, run(cell, wrapper, TorchRank if framework == "torch" else KerasRank))


@both
@pytest.mark.parametrize(("name", "other"), [("all", "sgp"), ("sgp", "all"), ("diloco", "all")])
def test_a_rank_without_batches_opens_the_optimizer_that_others_train(binding, name, other):
    """While it waits for the end of another one; and not the one of the same ranks that was wrapped before."""
    problem = binding.least_squares(2)

    def train(rank: int) -> Any:
        wrapped = (WRAPPERS[one] for one in ("solo", other, name))
        first, second, asked = (binding(problem, rank, wrapper=wrapper, **options) for wrapper, options in wrapped)
        if rank == 0:
            first.train(1)
            asked.train(1)
        first.opt.drain()
        driver = asked.opt._async
        driver.worker_now()
        return asked.weights().tobytes(), driver.worker.agreed, second.opt._async.worker

    one, other = Cluster(2).run(train)
    assert one == other
    assert one[1:] == (True, None)


@pytest.mark.parametrize("name", ["sgp", "dpsgd"])
def test_a_loaded_state_is_taken_over_once_where_another_optimizers_drain_registers_it(name):
    problem = TorchRank.least_squares(2)

    def ranks(rank: int) -> list[TorchRank]:
        return [TorchRank(problem, rank, wrapper=WRAPPERS[one][0], **WRAPPERS[one][1]) for one in ("all", name)]

    def save(rank: int) -> Any:
        _, one = ranks(rank)
        one.train(2).opt.cut()
        return one.opt.state_dict()

    states = Cluster(2).run(save)

    def train(rank: int) -> Any:
        first, second = ranks(rank)
        second.opt.load_state_dict(states[rank])
        before = second.opt._async.resumed.cut
        for one in () if rank else (first, second):
            one.train(1)
        first.opt.drain()
        second.opt.drain()
        return before, second.opt._async.resumed.cut

    assert Cluster(2).run(train) == [(True, False)] * 2
