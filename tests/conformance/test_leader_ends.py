"""How ranks that follow a leader end: drains, consensus, ranks that finish early, fail or have left."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.leader.selection import ALL_RANKS
from hvd_async.errors import ReplicaStateError
from hvd_async.stats import LeaderStats
from hvd_async.testing import Cluster, InjectedError
from tests.conformance.leader_cases import ELASTIC, PAIRS, leads
from tests.conformance.leader_drive import TIMEOUT, Seen, check, in_step
from tests.conformance.leader_reference import Following, replay, several
from tests.conformance.weight_ranks import (
    SGD,
    KerasGraphRank,
    KerasRank,
    TorchRank,
    also_graph,
    both,
)

ALGORITHMS = pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])


# -- drains ---------------------------------------------------------------------------------------------------


def distance_to_leader(optimizer: Any) -> float | None:
    """Return |x - leader|, of this rank's weights after its last step and the weights of the leader of all ranks.

    Args:
        optimizer: a ``LeaderOptimizer`` that has taken a step. With EASGD the distance is that to the center.

    Returns:
        None if this rank knows no leader of all ranks, or is the leader.
    """
    pulls = optimizer._async.worker
    leader = pulls.pending_results().targets.get(ALL_RANKS)
    return None if leader is None else float(((pulls._snapshot - leader) ** 2).sum() ** 0.5)


@both
def test_ranks_of_a_process_set_follow_each_other_and_ranks_outside_step_separately(binding):
    members = (0, 2, 3, 4)
    problem, together = binding.least_squares(4), threading.Barrier(4)

    def train(rank: int) -> Seen:
        place = members.index(rank) if rank in members else 0
        one = binding(problem, place, PAIRS, process_set=binding.process_set(*members), group=[[0, 4], [2, 3]])
        seen = Seen(one)
        if rank in members:
            together.wait(TIMEOUT)
        return seen.drain(one.train(20))

    outcomes = Cluster(5).run(train)
    for ranks, groups in ((members, ((0, 3), (1, 2))), ((1,), ((0,),))):
        seen = [outcomes[rank] for rank in ranks]
        logs = [[by_place(entry, ranks) for entry in one.log] for one in seen]
        check(replay(binding.least_squares(len(ranks)), dataclasses.replace(PAIRS, groups=groups), logs), seen)


def by_place(entry: Any, ranks: tuple[int, ...]) -> Any:
    """An entry of a log, with leaders by their places."""
    if entry[0] != "taken":
        return entry
    return (*entry[:2], {group: (pull, ranks.index(leader)) for group, (pull, leader) in entry[2].items()})


# -- consensus ------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("following", [leads(2), ELASTIC], ids=["2", "easgd"])
def test_consensus_shows_what_a_drain_would_leave_and_puts_everything_back(binding, following):
    """Also when what is done in it fails."""

    def train(rank: int) -> tuple[Any, ...]:
        one = binding(binding.least_squares(4), rank, following).train(5 + rank)
        one.opt.cut()
        own, worker = one.weights(), one.worker()
        for error in (None, KeyError):
            with contextlib.suppress(KeyError), one.opt.consensus():
                shown = one.weights()
                if error is not None:
                    raise error
            assert one.weights().tobytes() == own.tobytes()
        center = np.asarray(worker.center, np.float64)
        one.opt.drain()
        drained = one.weights()
        one.train(3).opt.drain()  # training continues
        return own, shown, drained, center

    own, shown, drained, centers = zip(*Cluster(4, jitter=0.001).run(train), strict=True)
    expected = centers[1] if following is ELASTIC else own[2]
    assert {one.tobytes() for one in (*shown, *drained)} == {expected.tobytes()}
    assert np.abs(np.array(own) - own[0]).max() > 1e-3


@ALGORITHMS
def test_the_distance_to_the_leader_or_the_center_is_reported(following):
    following = dataclasses.replace(leads(1, following), groups=several(2, 2), local_period=1, global_period=1)
    together = threading.Barrier(2)

    def train(rank: int) -> Any:
        one = TorchRank(TorchRank.least_squares(2), rank, following)
        in_step(one, 1)
        together.wait(TIMEOUT)
        own, reported = one.weights(), distance_to_leader(one.opt)
        with one.opt.consensus():
            return reported, float(np.linalg.norm(own - one.weights()))

    (reported, apart), (leaders, other) = Cluster(2).run(train)
    assert reported == pytest.approx(apart, rel=1e-5)
    assert reported > 0
    assert leaders is None if following.algorithm == "lsgd" else leaders == pytest.approx(other, rel=1e-5)


def test_counts_continue_over_drains_cuts_and_loaded_states():
    together = threading.Barrier(2)

    def train(rank: int) -> None:
        one = TorchRank(TorchRank.least_squares(2), rank, Following("lsgd", several(2, 1), 1, 2))
        assert one.opt.stats() == LeaderStats()
        for end in (one.opt.drain, one.opt.cut, one.opt.drain, one.opt.cut):
            for _ in range(4):
                one.step()
                together.wait(TIMEOUT)
            end()
            before, rounds = one.opt.stats(), one.opt.rounds
            assert before.steps == len(one.path)
            assert before.pulls == rounds == len(before.history) >= len(one.path) // 2 - 2
            one.load(one.state())
            assert (one.opt.stats(), one.opt.rounds) == (before, rounds)
            together.wait(TIMEOUT)
        one.train(1).opt.drain()
        assert one.opt.stats().steps == 17

    Cluster(2).run(train)


# -- what must fit together, and what breaks ------------------------------------------------------------------


@also_graph
def test_a_strength_that_leaves_its_bounds_is_refused_before_any_weight_has_changed(binding):
    """At the very step that would use it, and training continues once it is in them again."""

    def train(rank: int) -> bytes:
        bad = {3: 1.0}
        following = dataclasses.replace(PAIRS, groups=several(2, 2), global_prox=lambda step: bad.get(step, 0.2))
        one = binding(binding.least_squares(2), rank, following).train(2)
        before = one.bits()
        with pytest.raises(binding.raised(ValueError), match=r"a strength must be at least 0 .* at step 3"):
            one.step()
        assert one.bits() == before
        assert one.opt.stats().steps == 2
        bad.clear()
        one.train(1).opt.drain()
        return one.bits()

    assert len(set(Cluster(2).run(train))) == 1


@pytest.mark.parametrize(
    ("binding", "following", "value"),
    [
        (TorchRank, PAIRS, np.nan),
        (TorchRank, ELASTIC, -np.inf),
        (KerasRank, PAIRS, np.nan),
        (KerasGraphRank, ELASTIC, np.nan),
    ],
    ids=["torch-lsgd", "torch-easgd", "keras-lsgd", "keras-graph-easgd"],
)
def test_a_step_that_makes_nan_is_refused_there_and_others_hear_of_it(binding, following, value):
    """No rank is pulled towards it."""
    failed = threading.Event()

    def train(rank: int) -> None:
        one = binding(binding.least_squares(4, SGD), rank, leads(1, following)).train(2)
        if rank != 1:
            assert failed.wait(TIMEOUT)
            try:
                one.train(9).opt.drain()
            finally:
                assert np.isfinite(one.weights()).all()
            return
        try:
            one.take(np.array([1.0, 1.0, 1.0, value, 1.0, 1.0]), 0.5)
        finally:
            assert one.opt.stats().steps == 2
            for call in (one.step, one.opt.drain, one.opt.cut, one.opt.consensus_distance):
                kinds = (ReplicaStateError, binding.raised(ReplicaStateError))
                with pytest.raises(kinds, match=r"broken off: FloatingPointError.*restart from a check"):
                    call()
            failed.set()

    for rank, outcome in enumerate(Cluster(4).outcomes(train)):
        if rank == 1:
            assert isinstance(outcome, binding.raised(FloatingPointError))
            assert "NaN or infinite (" in str(outcome)
        else:
            assert isinstance(outcome, InjectedError | binding.raised(InjectedError))
            assert "rank 1 on host host1 failed" in str(outcome)
