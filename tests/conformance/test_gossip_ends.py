"""Ends of gossip in every binding: uneven ones, cuts, consensus, broken steps and drains, several optimizers."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from hvd_async import topology
from hvd_async.errors import WaitTimeoutError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster, InjectedError
from tests.conformance import gossip_ranks as ranks
from tests.conformance import gossip_reference as reference
from tests.conformance.gossip_ranks import (
    EXACT,
    GRAPH,
    LATE,
    MOMENTUM,
    NESTEROV,
    PAIRS,
    RING,
    SGD,
    STAR,
    STILL,
    Rank,
    Seen,
    also_graph,
    both,
    by_options,
)
from tests.conformance.torch_ranks import ProcessSet


def bits(rank: Rank) -> bytes:
    """Weights after a drain."""
    rank.opt.drain()
    return rank.weights().tobytes()


# -- uneven steps, cuts -----------------------------------------------------------------------------------------


@by_options(
    LATE | {"compression": "int8"},
    RING | {"compression": "fp16"},
    EXACT | {"compression": "int8"},
    LATE | {"hierarchical": 2},
    LATE | {"hierarchical": 2, "compression": "int8", "average_every": 3},
    PAIRS,
    PAIRS | {"hierarchical": 2},
)
@both
def test_ranks_that_end_early_hold_nobody_up_and_lose_nothing(binding, options):
    """Also one that had no batch at all."""
    problem, steps = binding.problem(4, NESTEROV), [12, 3, 0, 7]
    seen = ranks.run(binding, problem, steps, Cluster(4, jitter=0.001), **options)
    assert [own.stats.steps for own in seen] == steps
    ranks.check_mean(problem.start, seen)


@by_options(
    STAR | {"compression": "int8"}, RING | {"compression": "int8"}, EXACT, LATE, LATE | {"hierarchical": 3}, PAIRS
)
@both
def test_a_cut_after_uneven_steps_loses_nothing(binding, options):
    """Which edges were left out is known at one end only; copies of 8-bit messages must be the same at both."""
    problem = binding.problem(3, NESTEROV)

    def work(rank: int) -> Seen:
        trainer = binding.make(problem, rank, **options)
        seen = ranks.watch(trainer)
        for steps in ((6, 1, 3), (4, 4, 4), (0, 5, 2)):
            ranks.train(trainer, seen, steps[rank])
            trainer.opt.cut()
        return ranks.drain(trainer, seen)

    ranks.check_mean(problem.start, Cluster(3, jitter=0.001).run(work))


@by_options(STAR, PAIRS)
@both
def test_weights_that_half_precision_cannot_hold_stay_with_their_rank(binding, options):
    problem = binding.problem(3, STILL)
    problem.start[:, 1] = 1e5

    def work(rank: int) -> Any:
        trainer = binding.make(problem, rank, compression="fp16", **options)
        trainer.train(5).opt.cut()
        return trainer.weights() * trainer.opt.stats().push_sum_weight

    x = np.array(Cluster(3).run(work))
    np.testing.assert_allclose(x.mean(axis=0), problem.start[0], rtol=1e-6)


@both
def test_large_finite_weights_are_no_reason_to_refuse(binding):
    problem = binding.problem(2, STILL)
    problem.start[:] = 2e38  # their sum is infinite in float32

    def work(rank: int) -> Any:
        trainer = binding.make(problem, rank)
        trainer.step_with(np.zeros(6))
        return trainer.weights()

    for weights in Cluster(2).run(work):
        np.testing.assert_allclose(weights, 2e38, rtol=1e-6)


# -- consensus --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "policy", "means"),
    [
        (STAR, "average", [2.0, 2.0, 2.0]),
        (STAR | {"compression": "int8"}, "root", [1.0, 1.0, 1.0]),
        (LATE | {"hierarchical": 3}, "local", [1.0, 2.0, 3.0]),
        (LATE, "average", [2.0, 2.0, 2.0]),
        (PAIRS, "average", [2.0, 2.0, 2.0]),
        (PAIRS | {"hierarchical": 3}, "average", [2.0, 2.0, 2.0]),
    ],
    ids=["sgp-average", "int8-root", "hosts-local", "osgp", "adpsgd", "host-pairs"],
)
@both
def test_consensus_shows_the_average_and_puts_everything_back(binding, options, policy, means):
    problem = binding.problem(3, NESTEROV)

    def work(rank: int) -> tuple[Any, ...]:
        trainer = binding.make(problem, rank, normed=True, buffers=policy, **options)
        trainer.mean = 1.0 + rank
        seen = ranks.watch(trainer)
        ranks.train(trainer, seen, 3 + rank)
        distance = trainer.opt.consensus_distance()  # (with a cut)
        own, weight = trainer.weights(), trainer.opt.stats().push_sum_weight
        for error in (None, KeyError):
            try:
                with trainer.opt.consensus():
                    shown = trainer.weights()
                    assert trainer.mean == means[rank]
                    if error is not None:
                        raise error
            except KeyError:
                assert error is KeyError
            assert trainer.weights().tobytes() == own.tobytes()
            assert trainer.mean == 1.0 + rank
        ranks.train(trainer, seen, 2)  # training goes on
        ranks.drain(trainer, seen)
        assert trainer.mean == means[rank]
        return own, weight, distance, shown, trainer.opt.consensus_distance(), seen

    z, w, distances, shown, ends, seen = zip(*Cluster(3, jitter=0.001).run(work), strict=True)
    apart = float(np.sqrt(np.mean(np.sum((np.array(z) - np.mean(z, axis=0)) ** 2, axis=1))))
    assert apart > 0.01 or "hierarchical" in options
    assert distances == pytest.approx([apart] * 3, rel=1e-6, abs=1e-9)
    assert ends == (0.0,) * 3
    np.testing.assert_allclose(shown[0], np.array(w) @ np.array(z) / 3, rtol=0, atol=1e-6)
    assert len({one.tobytes() for one in shown}) == 1
    ranks.check_mean(problem.start, seen)


@both
def test_statistics_that_were_computed_anew_agree_in_consensus(binding):
    def work(rank: int) -> float:
        trainer = binding.make(binding.problem(3), rank, normed=True).train(1)
        trainer.opt.drain()
        trainer.mean = float(rank)
        trainer.opt.drain()
        with trainer.opt.consensus():
            return trainer.mean

    assert ranks.alike(work) == 1.0


@both
def test_a_consensus_that_is_never_left_puts_nothing_back(binding):
    """An evaluation may be broken off, and other weights loaded after it."""

    def work(rank: int) -> bytes:
        trainer = binding.make(binding.problem(2), rank).train(2)
        context = trainer.opt.consensus()
        context.__enter__()
        trainer.assign([7.0] * 6)
        del context
        gc.collect()
        assert trainer.weights().tolist() == [7.0] * 6
        return bits(trainer.train(1))

    ranks.alike(work, 2)


@by_options(STAR, RING, EXACT, PAIRS)
@both
def test_weights_that_were_changed_between_steps_stay_changed(binding, options):
    """EarlyStopping(restore_best_weights=True) does so, and clipping weights: the ranks' mean moves as much."""
    problem = binding.problem(3, STILL)

    def work(rank: int) -> list[float]:
        trainer = binding.make(problem, rank, **options)
        for step in range(4):
            trainer.train(1)
            if rank == 2 and step > 1:
                trainer.assign(trainer.weights() + 3.0 / trainer.opt.stats().push_sum_weight)
        return np.frombuffer(bits(trainer)).tolist()

    np.testing.assert_allclose(ranks.alike(work), problem.start[0] + 3.0 * 2 / 3, rtol=0, atol=1e-5)


# -- steps and drains that are broken off -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@also_graph
def test_a_step_that_makes_nan_is_refused_there_and_others_hear_of_it(binding, value):
    failed = threading.Event()

    def work(rank: int) -> None:
        trainer = binding.make(binding.problem(3), rank, **STAR).train(2)
        if rank != 1:
            assert failed.wait(30)
            try:
                trainer.train(9).opt.drain()
            finally:
                assert np.isfinite(trainer.weights()).all()
            return
        try:
            trainer.step_with([0.0] * 5 + [value])
        finally:
            assert trainer.opt.stats().steps == 2  # (the worker has not seen it)
            again = (lambda: trainer.step_with([0.0] * 6), trainer.opt.drain, trainer.opt.cut)
            for call in (*again, trainer.opt.consensus_distance):
                with pytest.raises(Exception, match=r"(?s)broken off: FloatingPointError.*restart from a checkpoint"):
                    call()
            failed.set()

    one, bad, other = Cluster(3).outcomes(work)
    spoilt = "parameter 1" if binding.framework == "torch" else "x1 (2,) float32"
    assert f"NaN or infinite ({spoilt}" in str(bad)
    for outcome in (one, other):
        assert isinstance(outcome, InjectedError) or binding is GRAPH
        assert "rank 1 on host host1 failed: " in str(outcome)


@also_graph
def test_no_step_between_a_broken_drain_and_its_repetition(binding):
    """HVD_ASYNC_TIMEOUT ends a wait, as Ctrl-C would. A step before that is refused, and moves nothing."""
    stalled = threading.Event()

    def work(rank: int) -> bytes:
        engine: Any = local_engine()
        trainer = binding.make(binding.problem(2, SGD), rank, algorithm="osgp").train(2)
        if rank == 0:
            engine.timeout = 0.05
            with pytest.raises(WaitTimeoutError):
                trainer.opt.drain()
            engine.timeout = float("inf")
            held = trainer.weights().tobytes()
            with pytest.raises(Exception, match="broken off: call it again before the next step"):
                trainer.train(1)
            assert trainer.weights().tobytes() == held
            stalled.set()
        assert stalled.wait(30)
        trainer.opt.drain()
        return bits(trainer.train(2))

    ranks.alike(work, 2)


# -- several optimizers, sets of ranks ----------------------------------------------------------------------------


@both
def test_two_optimizers_of_a_process_do_not_touch_each_other(binding):
    """Each one ends where it ends alone, also where a step of one of them is a graph."""
    options = (STAR | {"compression": "int8"}, RING)

    def make(which: int, rank: int) -> Rank:
        kind = GRAPH if which == 0 and binding.framework == "keras" else binding
        return kind.make(binding.problem(3, (MOMENTUM, SGD)[which]), rank, **options[which])

    def together(rank: int) -> list[bytes]:
        trainers = [make(0, rank), make(1, rank)]
        for step in range(6):
            trainers[0].train(1)
            if step % 2:
                trainers[1].train(1)
        trainers[0].opt.drain()  # both
        assert [trainer.opt.stats().steps for trainer in trainers] == [6, 3]
        return [trainer.weights().tobytes() for trainer in trainers]

    alone = [
        ranks.alike(lambda rank: bits(make(0, rank).train(6))),
        ranks.alike(lambda rank: bits(make(1, rank).train(3))),
    ]
    assert ranks.alike(together) == alone


@by_options({"peers": 2}, {"algorithm": "dpsgd", "topology": topology.complete(3)})
@both
def test_ranks_of_a_process_set_gossip_among_themselves(binding, options):
    trio, problem = ProcessSet(0, 2, 3), binding.problem(4, SGD)

    def work(rank: int) -> tuple[Any, ...]:
        trainer = binding.make(problem, rank, process_set=trio, **options).train(5 + 2 * (rank == 1))
        every = binding.make(problem, rank).train(2)  # and all of them in another one
        trainer.opt.drain()
        every.opt.drain()
        return trainer.weights(), trainer.opt.stats(), every.weights().tobytes()

    results = Cluster(4).run(work)
    members = [0, 2, 3]
    inside = reference.Problem(problem.start[:3], lambda z, r, k: problem.gradient(z, members[r], k), SGD)
    algorithm = options.get("algorithm", "sgp")
    expected = reference.gossip(inside, [np.full((3, 3), 1 / 3)], 5, algorithm=algorithm).drained()
    for rank in members:
        np.testing.assert_allclose(results[rank][0], expected, rtol=0, atol=1e-5)
        assert len(results[rank][1].waited_for) == 3
    outside = reference.Problem(problem.start[:1], lambda z, _, k: problem.gradient(z, 1, k), SGD)
    alone = reference.sgp(outside, ranks.graph("ring", 1), 7).drained()
    np.testing.assert_allclose(results[1][0], alone, rtol=0, atol=1e-5)
    assert (results[1][1].steps, results[1][1].messages_sent) == (7, 0)
    assert len({every for _, _, every in results}) == 1


def test_construction_does_not_communicate():
    binding = GRAPH

    def work(rank: int) -> bytes:
        kept = [binding.make(binding.problem(2), rank)] if rank == 0 else []
        weights = bits(binding.make(binding.problem(2), rank).train(2))
        assert len(kept) == 1 - rank
        return weights

    ranks.alike(work, 2)
