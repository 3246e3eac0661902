"""Quasi-global momentum, base graphs, local steps, exact diffusion, NoLoCo, outer optimizers: beside all else.

The table of what holds is in tests/README.md.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch

from hvd_async.algorithms.gossip.outer_worker import OuterWorker
from hvd_async.errors import WaitTimeoutError
from hvd_async.testing import Cluster, InjectedError
from tests.conformance import gossip_ranks as ranks
from tests.conformance import gossip_reference as reference
from tests.conformance.gossip_ranks import (
    DILOCO,
    EXACT,
    LOCAL,
    MOMENTUM,
    NESTEROV,
    PAIRED,
    PAIRS,
    RING,
    SGD,
    SLOWMO,
    STAR,
    TORCH,
    both,
    by_options,
)
from tests.conformance.gossip_reference import Outcome, Problem, least_squares
from tests.conformance.quasi_global_reference import Corrected
from tests.conformance.torch_gossip_ranks import GossipTrainer
from tests.conformance.torch_ranks import ProcessSet

ON = {"quasi_global": True}
BASE = {"algorithm": "dpsgd", "topology": "base"}
FEATURES = (STAR | ON, BASE | ON, PAIRS | ON, BASE | {"gossip_every": 2}, EXACT, PAIRED, LOCAL, SLOWMO, DILOCO)


def expected(problem: Problem, seen: list[ranks.Seen], options: dict[str, Any]) -> Outcome:
    """Return what the reference makes of it."""
    corrected: Any = Corrected(problem) if "quasi_global" in options else problem
    return ranks.expected(corrected, seen, options)


def of(problem: Problem, members: list[int]) -> Problem:
    """Return the problem of some of the ranks."""
    return dataclasses.replace(
        problem,
        start=problem.start[members],
        gradient=lambda z, place, step: problem.gradient(z, members[place], step),
    )


@pytest.mark.parametrize("size", [1, 3, 5])
@by_options(STAR | ON, BASE | ON, PAIRS | ON, BASE | {"gossip_every": 2}, EXACT | {"gossip_every": 3})
@both
def test_odd_sizes_equal_the_reference(binding, options, size):
    problem = binding.problem(size, NESTEROV)
    seen = ranks.run(binding, problem, 11, **options)
    ranks.check(expected(problem, seen, options), seen)


@by_options(BASE | {"hierarchical": 2}, BASE | {"hierarchical": 2, "gossip_every": 2, "average_every": 5})
@both
def test_hosts_on_a_base_graph(binding, options):
    """Three of them."""
    problem = binding.problem(6)
    seen = ranks.run(binding, problem, 9, **options)
    ranks.check(expected(problem, seen, options), seen)


@pytest.mark.parametrize("binding", [ranks.KERAS, ranks.GRAPH], ids=ranks.name)
def test_several_backward_passes_make_a_step_that_corrects_the_momentum_once(binding):
    problem = binding.problem(3)
    seen = ranks.run(binding, problem, 12, backward_passes_per_step=2, **RING, **ON)
    whole = dataclasses.replace(
        problem,
        gradient=lambda z, rank, step: problem.gradient(z, rank, 2 * step - 1) + problem.gradient(z, rank, 2 * step),
    )
    for own, other in zip(seen, ranks.run(binding, whole, 6, **RING, **ON), strict=True):
        np.testing.assert_allclose(own.path[1::2], other.path, rtol=1e-5, atol=1e-5)


@by_options(*FEATURES)
@both
def test_ranks_of_a_process_set_and_one_outside(binding, options):
    """The one outside steps by itself, under the same algorithm."""
    problem = binding.problem(4)
    seen = ranks.run(binding, problem, 9, process_set=ProcessSet(0, 2, 3), **options)
    for members in ([0, 2, 3], [1]):
        own = [seen[rank] for rank in members]
        ranks.check(expected(of(problem, members), own, options), own)


@by_options(*FEATURES)
def test_models_in_float64_are_trained_in_it(options):
    problem = TORCH.problem(3)
    seen = ranks.run(TORCH, problem, 10, dtype=torch.float64, **options)
    outcome = expected(problem, seen, options)
    for own, path in zip(seen, outcome.path, strict=True):
        np.testing.assert_allclose(own.path, path, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(own.drained, outcome.drained(), rtol=1e-11, atol=1e-11)


@by_options(
    STAR | ON | {"gossip_every": 50},
    BASE | ON | {"average_every": 50},
    EXACT | {"gossip_every": 50},
    PAIRED | {"gossip_every": 50},
    LOCAL | {"average_every": 50},
    SLOWMO | {"average_every": 50},
    DILOCO | {"average_every": 50, "compression": "int8"},
)
@both
def test_a_period_may_be_longer_than_the_training(binding, options):
    """A drain leaves all at the mean all the same."""
    problem = binding.problem(3, MOMENTUM)
    seen = ranks.run(binding, problem, [6, 2, 4] if "quasi_global" not in options else 5, **options)
    ranks.check_mean(problem.start, seen)


@pytest.mark.parametrize("size", [1, 5])
@by_options(STAR | ON, BASE | ON, EXACT, PAIRED, LOCAL)
@both
def test_rank_0s_drained_state_resumes_at_any_size(binding, options, size):
    """(Of slowmo and diloco: ``test_outer``.)"""
    problem, together = binding.problem(size), threading.Barrier(size)

    def save(rank: int) -> Any:
        trainer = binding.make(binding.problem(3), rank, **options).train(5)
        trainer.opt.drain()
        return trainer.saved()

    state = Cluster(3).run(save)[0]

    def work(rank: int) -> tuple[Any, ...]:
        trainer = binding.make(problem, rank, **options).resumed(state, 5)
        began = trainer.weights(), trainer.moments()
        seen = ranks.watch(trainer)
        together.wait(30)
        ranks.train(trainer, seen, 7)
        together.wait(60)
        return *began, ranks.drain(trainer, seen)

    began, moments, seen = zip(*Cluster(size).run(work), strict=True)
    resumed = dataclasses.replace(
        problem,
        start=np.array(began),
        gradient=lambda z, rank, step: problem.gradient(z, rank, 5 + step),
        states=tuple(reference.start(z)._replace(t=5, first=own) for z, own in zip(began, moments, strict=True)),
    )
    ranks.check(expected(resumed, list(seen), options), seen)


@by_options(RING | ON, EXACT, PAIRED, LOCAL, SLOWMO, DILOCO)
@both
def test_an_earlier_state_may_be_loaded_in_the_same_job(binding, options):
    """Weights and the optimizer's state, after a drain: training goes on from there, bit by bit as it did."""

    def work(rank: int) -> tuple[list[bytes], list[bytes]]:
        trainer = binding.make(binding.problem(3), rank, **options).train(5)
        trainer.opt.drain()
        state, paths = trainer.saved(), []
        for _ in range(2):
            trainer.resumed(state, 5)
            paths.append([trainer.train(1).weights().tobytes() for _ in range(7)])
            trainer.opt.drain()
        return paths[0], paths[1]

    for first, again in Cluster(3).run(work):
        assert first == again


@by_options(RING | ON, EXACT, PAIRED, LOCAL, SLOWMO | {"compression": "int8"})
@both
def test_a_step_that_makes_nan_is_refused_there_and_others_hear_of_it(binding, options):
    failed = threading.Event()

    def work(rank: int) -> None:
        trainer = binding.make(binding.problem(3), rank, **options).train(2)
        if rank != 1:
            assert failed.wait(30)
            try:
                trainer.train(9).opt.drain()
            finally:
                assert np.isfinite(trainer.weights()).all()
            return
        try:
            trainer.step_with([0.0] * 5 + [np.nan])
        finally:
            failed.set()

    one, bad, other = Cluster(3).outcomes(work)
    assert "NaN or infinite" in str(bad)
    for outcome in (one, other):
        assert isinstance(outcome, InjectedError)
        assert "rank 1 on host host1 failed: " in str(outcome)


@by_options(RING | ON, EXACT | {"compression": "int8"}, PAIRED, LOCAL, SLOWMO | {"compression": "int8"})
@both
def test_statistics_agree_in_consensus_and_after_a_drain(binding, options):
    def work(rank: int) -> tuple[Any, ...]:
        trainer = binding.make(binding.problem(3), rank, normed=True, **options)
        trainer.mean = 1.0 + rank
        trainer.train(4)
        with trainer.opt.consensus():
            shown = trainer.mean, trainer.weights().tobytes()
        assert trainer.mean == 1.0 + rank
        trainer.opt.drain()
        assert trainer.weights().tobytes() == shown[1]
        return *shown, trainer.mean

    mean, _, drained = ranks.alike(work)
    assert (mean, drained) == (2.0, 2.0)


@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("where", ["_enter", "_await", "_take"])
def test_others_go_on_without_a_rank_whose_average_was_broken_off(monkeypatch, where, late, compression):
    """Before it has entered, while it waits, or when the result is there."""
    real = getattr(OuterWorker, where)

    def broken(worker: Any, *args: Any) -> Any:
        if worker.engine.rank == 0 and worker._step == 4 + (late if where != "_enter" else 0):
            raise WaitTimeoutError("a time limit")
        return real(worker, *args)

    monkeypatch.setattr(OuterWorker, where, broken)
    options = {"algorithm": "slowmo", "average_every": 4, "max_staleness": late, "compression": compression}

    def train(rank: int) -> Any:
        trainer = GossipTrainer(least_squares(3, SGD), rank, **options)
        if rank == 0:
            with pytest.raises(WaitTimeoutError):
                trainer.train(11)
            trainer.opt.discard()
            return None
        trainer.train(11).opt.drain()
        return trainer.weights()

    _, one, other = Cluster(3).run(train)
    np.testing.assert_array_equal(one, other)
