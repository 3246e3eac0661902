"""Ends of gossip in every binding: drains, cuts, consensus, and what is broken off."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.gossip.outer_worker import OuterWorker
from hvd_async.algorithms.gossip.rank import PushSumWorker
from hvd_async.errors import ReplicaStateError, WaitTimeoutError
from hvd_async.runtime import coordinator
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster, InjectedError
from tests.conformance import gossip_ranks as ranks
from tests.conformance.gossip_ranks import DILOCO, EXACT, LATE, LOCAL, ON, PAIRED, PAIRS, RING, SLOWMO, STAR, by_turns
from tests.conformance.leader_cases import ELASTIC, leads
from tests.conformance.leader_reference import Following
from tests.conformance.weight_ranks import NESTEROV, SGD, STILL, KerasGraphRank, KerasRank, TorchRank, also_graph, both

# -- drains and cuts --------------------------------------------------------------------------------------------


@also_graph
def test_a_drain_averages_the_momenta_and_begins_the_correction_again(binding):
    problem = binding.least_squares(3)

    def work(rank: int) -> tuple[Any, ...]:
        one = binding(problem, rank, **RING, **ON).train(5)
        apart = one.moments().first
        one.opt.drain()
        return apart, one.moments().first, one.opt._async._correction.vector

    apart, together, corrections = zip(*Cluster(3).run(work), strict=True)
    assert np.abs(apart[0] - apart[1]).max() > 1e-2
    np.testing.assert_allclose(together[0], np.mean(apart, axis=0), rtol=0, atol=1e-6)
    assert len({own.tobytes() for own in together}) == 1
    assert corrections == (None, None, None)


@by_turns("options", STAR, PAIRS)
def test_weights_that_half_precision_cannot_hold_stay_with_their_rank(binding, options):
    problem = binding.least_squares(3, STILL)
    problem.start[:, 1] = 1e5

    def work(rank: int) -> Any:
        one = binding(problem, rank, compression="fp16", **options)
        one.train(5).opt.cut()
        return one.weights() * one.opt.stats().push_sum_weight

    np.testing.assert_allclose(np.mean(Cluster(3).run(work), axis=0), problem.start[0], rtol=1e-6)


@both
def test_large_finite_weights_are_no_reason_to_refuse(binding):
    problem = binding.least_squares(2, STILL)
    problem.start[:] = 2e38  # their sum is infinite in float32

    def work(rank: int) -> Any:
        one = binding(problem, rank)
        one.take(np.zeros(6))
        return one.weights()

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
        (PAIRS | {"hierarchical": 3}, "average", [2.0, 2.0, 2.0]),
    ],
    ids=["sgp-average", "int8-root", "hosts-local", "osgp", "host-pairs"],
)
@both
def test_consensus_shows_the_average_and_puts_everything_back(binding, options, policy, means):
    problem = binding.least_squares(3, NESTEROV)

    def work(rank: int) -> tuple[Any, ...]:
        one = binding(problem, rank, normed=True, buffers=policy, **options)
        one.mean = 1.0 + rank
        seen = ranks.Seen(one)
        one.train(3 + rank)
        distance = one.opt.consensus_distance()  # (with a cut)
        own, weight = one.weights(), one.opt.stats().push_sum_weight
        for error in (None, KeyError):
            with contextlib.suppress(KeyError), one.opt.consensus():
                shown = one.weights()
                assert one.mean == means[rank]
                if error is not None:
                    raise error
            assert one.weights().tobytes() == own.tobytes()
            assert one.mean == 1.0 + rank
        one.train(2)  # training continues
        seen.drain()
        assert one.mean == means[rank]
        return own, weight, distance, shown, one.opt.consensus_distance(), seen

    z, w, distances, shown, ends, seen = zip(*Cluster(3, jitter=0.001).run(work), strict=True)
    apart = float(np.sqrt(np.mean(np.sum((np.array(z) - np.mean(z, axis=0)) ** 2, axis=1))))
    assert apart > 0.01 or "hierarchical" in options
    assert distances == pytest.approx([apart] * 3, rel=1e-6, abs=1e-9)
    assert ends == (0.0,) * 3
    np.testing.assert_allclose(shown[0], np.array(w) @ np.array(z) / 3, rtol=0, atol=1e-6)
    assert len({one.tobytes() for one in shown}) == 1
    ranks.check_mean(problem.start, seen)


@by_turns("options", LOCAL, SLOWMO, DILOCO)
def test_consensus_is_what_a_drain_would_leave_and_changes_nothing(binding, options):
    """Evaluations in mid-training leave what is under way for the step that is to take it; also of a rank that has
    finished before others sent it."""
    problem, steps = binding.least_squares(3), (9, 9, 7)

    def run(looks: bool, most: int = 9) -> Any:
        def train(rank: int) -> tuple[Any, ...]:
            one, shown = binding(problem, rank, compression="int8", **options), []
            for _ in range(min(most, 6)):
                one.train(1)
                if looks:
                    with one.opt.consensus():
                        shown.append(one.weights().tobytes())
            one.train(max(0, min(most, steps[rank]) - 6))
            with one.opt.consensus() if looks else contextlib.nullcontext():
                shown.append(one.weights().tobytes())
            return one.drained(), shown

        return Cluster(3).run(train)

    (end, shown), *others = run(True)
    assert [own for _, own in others] == [shown] * 2
    assert [own for own, _ in run(False)] == [end] * 3
    for step in (1, 4, 6):
        assert run(False, step)[0][0] == shown[step - 1]
    assert shown[6] == end


@both
def test_a_consensus_that_is_never_left_puts_nothing_back(binding):
    """An evaluation may be broken off, and other weights loaded after it."""

    def work(rank: int) -> bytes:
        one = binding(binding.least_squares(2), rank).train(2)
        context = one.opt.consensus()
        context.__enter__()
        one.assign([7.0] * 6)
        del context
        gc.collect()
        assert one.weights().tolist() == [7.0] * 6
        return one.train(1).drained()

    ranks.alike(work, 2)


# -- what a script writes, loads and wraps ------------------------------------------------------------------------


@by_turns("options", PAIRED, DILOCO)
def test_weights_that_a_script_replaces_after_a_drain_are_the_slow_weights(binding, options):
    """Also in a job that was resumed from a cut: the momentum does not take the replacement for a step."""
    problem, saved = binding.least_squares(2, dataclasses.replace(STILL, momentum=0.0)), list[Any]([None] * 2)

    def begin(rank: int) -> None:
        one = binding(problem, rank, **options).train(2)
        one.opt.cut()
        saved[rank] = one.saved()

    def proceed(rank: int) -> Any:
        one = binding(problem, rank, **options).resume(saved[rank], 2).train(2)
        one.opt.drain()
        one.assign(np.arange(6.0))
        one.opt._async.on_weights_replaced()
        return one.train(9).weights()

    Cluster(2).run(begin)
    for weights in Cluster(2).run(proceed):
        np.testing.assert_allclose(weights, np.arange(6.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("following", "averages"),
    [(None, False), (Following(groups=((0, 1),)), False), (None, True)],
    ids=["sgp", "lsgd", "schedule-free"],
)
@also_graph
def test_weights_that_one_rank_replaces_after_a_drain_are_named_at_the_next(binding, following, averages, monkeypatch):
    """Unless a schedule-free optimizer may have replaced them: its ``eval()`` and ``train()`` round each rank's."""
    problem, said = binding.least_squares(2), list[str]()
    monkeypatch.setattr(coordinator, "warn", said.append)

    def work(rank: int) -> None:
        one = binding(problem, rank, following, make=binding.schedule_free if averages else None).train(2)
        for replaced in ([], [0, 1], [1], []):
            one.opt.drain()
            if rank in replaced:
                one.assign(np.ones(6))
            one.train(2)
        one.opt.drain()

    Cluster(2).run(work)
    notice = "rank 1 continued after the last drain() with other weights than rank 0"
    assert [notice in one for one in said] == ([] if averages else [True])


def test_construction_does_not_communicate():
    def work(rank: int) -> bytes:
        kept = [KerasGraphRank(KerasGraphRank.least_squares(2), rank)] if rank == 0 else []
        weights = KerasGraphRank(KerasGraphRank.least_squares(2), rank).train(2).drained()
        assert len(kept) == 1 - rank
        return weights

    ranks.alike(work, 2)


# -- steps and drains that are broken off -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("binding", "options"),
    [
        (TorchRank, STAR),
        (TorchRank, EXACT),
        (TorchRank, LOCAL),
        (TorchRank, DILOCO),
        (TorchRank, {"following": leads(1)}),
        (TorchRank, {"following": leads(1, ELASTIC)}),
        (KerasRank, RING | ON),
        (KerasRank, PAIRED),
        (KerasRank, SLOWMO),
        (KerasRank, {"following": leads(1)}),
        (KerasGraphRank, STAR),
        (KerasGraphRank, {"following": leads(1, ELASTIC)}),
    ],
    ids=ranks.name,
)
def test_a_step_that_makes_nan_is_refused_there_and_others_hear_of_it(binding, options):
    """Ranks that follow a leader have the leader's consensus."""
    failed = threading.Event()
    value = np.nan if options is STAR else -np.inf
    loss = 0.5 if "following" in options else None

    def work(rank: int) -> None:
        one = binding(binding.least_squares(4), rank, **options).train(2)
        if rank != 1:
            assert failed.wait(30)
            try:
                one.train(9).opt.drain()
            finally:
                assert np.isfinite(one.weights()).all()
            return
        try:
            one.take([0.0] * 5 + [value], loss)
        finally:
            assert one.opt.stats().steps == 2  # (the worker has not seen it)
            again = (lambda: one.take([0.0] * 6, loss), one.opt.drain, one.opt.cut)
            for call in (*again, one.opt.consensus_distance):
                with pytest.raises(Exception, match=r"(?s)broken off: FloatingPointError.*restart from a checkpoint"):
                    call()
            failed.set()

    one, bad, *others = Cluster(4).outcomes(work)
    spoilt = "parameter 1" if binding is TorchRank else "x1 (2,) float32"
    assert f"NaN or infinite ({spoilt}" in str(bad)
    for outcome in (one, *others):
        assert isinstance(outcome, InjectedError) or binding.graph
        assert "rank 1 on host host1 failed: " in str(outcome)


@also_graph
def test_no_step_between_a_broken_drain_and_its_repetition(binding):
    """HVD_ASYNC_TIMEOUT ends a wait, as Ctrl-C would. A step before that is refused, and moves nothing."""
    stalled = threading.Event()

    def work(rank: int) -> bytes:
        engine: Any = local_engine()
        one = binding(binding.least_squares(2, SGD), rank, algorithm="osgp").train(2)
        if rank == 0:
            engine.timeout = 0.05
            with pytest.raises(WaitTimeoutError):
                one.opt.drain()
            engine.timeout = float("inf")
            held = one.weights().tobytes()
            with pytest.raises(Exception, match="interrupted: call it again before the next step"):
                one.train(1)
            assert one.weights().tobytes() == held
            stalled.set()
        assert stalled.wait(30)
        one.opt.drain()
        return one.train(2).drained()

    ranks.alike(work, 2)


@pytest.mark.parametrize(("wrapper", "algorithm"), [("GossipOptimizer", "sgp"), ("LeaderOptimizer", "easgd")])
def test_a_rank_whose_end_was_broken_off_is_refused_and_the_others_hear_of_it(wrapper, algorithm):
    def work(rank: int) -> None:
        one = TorchRank(TorchRank.least_squares(2, SGD), rank, wrapper=wrapper, algorithm=algorithm).train(2)
        if rank == 0:
            one.opt._async.replica.write = lambda weights: 1 / 0
            with pytest.raises(ZeroDivisionError):
                one.opt.drain()
            del one.opt._async.replica.write
        else:
            one.opt.drain()
        one.train(2)
        one.opt.drain()

    own, other = Cluster(2).outcomes(work, 30)
    assert isinstance(own, ReplicaStateError)
    assert "a drain or cut was broken off: ZeroDivisionError" in str(own)
    assert "rank 0 on host host0 failed: ReplicaStateError: a drain or cut was broken off" in str(other)


BROKEN = [
    *((PushSumWorker, where, 3, {"algorithm": name, "topology": "ring", "gossip_every": 1})
      for name in ("sgp", "osgp", "dpsgd", "exact-diffusion", "noloco") for where in ("_offer", "_await_messages")),
    (PushSumWorker, "_offer", 1, {"algorithm": "dpsgd", "topology": "ring"}),
    *((OuterWorker, where, 4 + (late if where != "_enter" else 0), SLOWMO | {"average_every": 4, "max_staleness": late})
      for where, late in (("_enter", 2), ("wait", 0), ("wait", 2), ("_take", 0))),
    (OuterWorker, "wait", 4, SLOWMO | {"average_every": 4, "max_staleness": 0, "compression": "int8"}),
]  # fmt: skip
"""Methods of a worker, or its engine's ``wait``, and the step in which one of them is broken off on rank 0."""


@pytest.mark.parametrize(("worker", "where", "broken_step", "options"), BROKEN, ids=ranks.name)
def test_others_continue_without_a_rank_whose_step_was_broken_off(monkeypatch, worker, where, broken_step, options):
    """By an interrupt or a time limit; also when it had announced messages that it did not queue, or has entered an
    average."""
    kind = Engine if where == "wait" else worker
    real = getattr(kind, where)
    first: list[Any] = []

    def broken(self: Any, *args: Any) -> Any:
        if kind is Engine:
            breaks = bool(first) and self is first[0].engine and first[0]._step == broken_step
        else:
            breaks = self.engine.rank == 0 and self._step == broken_step
        if breaks and not (first and first[0].deleted):
            raise WaitTimeoutError("a time limit")
        return real(self, *args)

    monkeypatch.setattr(kind, where, broken)

    def train(rank: int) -> Any:
        one = TorchRank(TorchRank.least_squares(3, SGD), rank, **options)
        if rank == 0:
            if kind is Engine:
                first.append(one.train(1).worker())
            with pytest.raises(WaitTimeoutError):
                one.train(9)
            with pytest.raises(ReplicaStateError, match="broken off"):
                one.train(1)
            one.opt.discard()
            return None
        one.train(9).opt.drain()
        assert one.opt.stats().steps == 9
        return one.weights().tolist()

    _, one, other = Cluster(3).run(train)
    assert one == other


def test_a_rank_that_ends_between_two_steps_sends_nothing_more():
    """D-PSGD's messages of its next step would be queued in the step that it does not take."""
    queued: list[Any] = []

    def train(rank: int) -> None:
        one = TorchRank(TorchRank.least_squares(3, SGD), rank, **RING)
        one.train(2).opt.drain()
        if rank == 0:
            one.worker()._exchanges.offer = lambda *message: queued.append(message)
            one.opt.discard()
        else:
            one.train(2).opt.drain()

    Cluster(3).run(train)
    assert not queued
