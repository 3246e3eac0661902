"""Leader-pull of ranks as threads: ends of ranks with uneven steps, counts of pulls, losses that lead nobody."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from hvd_async.testing import Cluster, InjectedError
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import least_squares
from tests.conformance.leader_cases import ELASTIC, PAIRS, leads
from tests.conformance.leader_drive import TIMEOUT, Seen, check, run, wait_for_pulls
from tests.conformance.leader_reference import ALL, Following, Outcome, drawn, replay, several
from tests.threads.following_workload import Follower

MOMENTUM = CASES[1]
EXACT = 1e-12


def follow(following: Following, size: int, steps: Any, **how: Any) -> tuple[list[Seen], Outcome]:
    """Train, and check each step against the reference."""
    problem = least_squares(size, MOMENTUM)
    cluster = Cluster(size, jitter=0.0 if how else 0.001)
    seen = run(lambda rank: Follower(problem, following, rank), steps, cluster, **how)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen, EXACT)
    return seen, outcome


# -- ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("following", [PAIRS, leads(1), leads(3), ELASTIC], ids=["any", "1", "3", "easgd"])
@pytest.mark.parametrize("steps", [(30, 2, 0, 11), (0, 0, 5, 0), (1, 40, 2, 40)], ids=str)
def test_ranks_that_end_early_or_have_no_batch_hold_nobody_and_all_end_alike(following, steps):
    """At the weights of the rank with the lowest mean loss, or at the center; a rank that has finished leads no
    pull."""
    seen, outcome = follow(following, 4, steps)
    assert [own.stats.steps for own in seen] == list(steps)
    if following is not ELASTIC:
        best = min((means[-1], rank) for rank, means in enumerate(outcome.means) if means)[1]
        assert seen[0].drained.tobytes() == seen[best].path[-1].tobytes()


@pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])
def test_training_goes_on_after_a_drain_from_what_all_hold(following):
    """Nothing is left of targets or forces, counts begin anew, momentum and a step's number do not."""
    following = dataclasses.replace(following, local_pull=lambda step: 0.3 / step)
    problem, together = least_squares(4, MOMENTUM), threading.Barrier(4)

    def train(rank: int) -> Seen:
        own = Follower(problem, following, rank)
        seen = Seen(own)
        together.wait(TIMEOUT)
        for steps in ((5, 3, 9, 4), (2, 0, 1, 1), (7, 7, 7, 7)):
            own.train(steps[rank]).drain()
        return seen.drain(own)  # (nothing to do)

    seen = Cluster(4, jitter=0.001).run(train)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen, EXACT)
    assert len(outcome.drained) == 3


def test_after_a_cut_the_center_of_then_stands_for_all_also_when_others_have_gone_on():
    problem, together = least_squares(2, MOMENTUM), threading.Barrier(2)

    def train(rank: int) -> list[bytes]:
        own = Follower(problem, dataclasses.replace(ELASTIC, global_period=1), rank).train(3)
        own.drain(flush=False)
        worker, before = own.worker(), own.stats().pulls
        centers = [worker.consensus(own.x).tobytes()]
        together.wait(TIMEOUT)
        own.train(2 - 2 * rank)
        wait_for_pulls(worker, before + 1)
        together.wait(TIMEOUT)
        centers.append(worker.consensus(own.x).tobytes())
        own.drain()
        return centers

    assert len({center for centers in Cluster(2).run(train) for center in centers}) == 1


# -- counts ---------------------------------------------------------------------------------------------------


def test_what_is_counted_of_lsgd():
    """A follower receives the weights once a pull, who leads nothing."""
    began = time.time()
    seen, outcome = follow(PAIRS, 4, 41, together=True)
    for rank, own in enumerate(seen):
        pulled = [(group, leader) for group in (rank // 2, ALL) for _, leader in outcome.leaders(rank, group)]
        history = [entry[1:] for entry in own.stats.history]
        assert sorted(history[:30]) == sorted(pulled)  # (steps that are left may be enough for the last ranks)
        assert own.stats.pulls == len(history)
        assert own.stats.led == Counter(leader for group, leader in history if group == ALL)
        assert own.stats.led_group == Counter(leader for group, leader in history if group != ALL)
        assert own.stats.bytes_received == 6 * 8 * sum(leader != rank for _, leader in history)
        times = [when for when, _, _ in own.stats.history]
        assert began <= times[0] <= times[-1] <= time.time()
        assert times == sorted(times)
        assert own.stats.pull_s > 0.0
        assert own.stats.wait_s > 0.0  # (in its drain)
        assert own.stats.mean_loss == pytest.approx(outcome.means[rank][-1])


@pytest.mark.parametrize(("size", "each"), [(1, 0), (2, 48), (3, 64)])
def test_what_is_counted_of_easgd(size, each):
    """A ring's part of a sum: 2 (P - 1) / P times the weights."""
    for own in follow(dataclasses.replace(ELASTIC, global_period=2), size, 10, together=True)[0]:
        assert own.stats.pulls == 5
        assert own.stats.led == {-1: 5}
        assert own.stats.bytes_received == 5 * each
        assert {entry[1:] for entry in own.stats.history} == {(ALL, -1)}


# -- losses ---------------------------------------------------------------------------------------------------


def test_where_no_loss_is_finite_nobody_is_pulled_and_a_drain_leaves_the_first_ranks_weights():
    seen, _ = follow(dataclasses.replace(PAIRS, told=lambda z, rank, step: math.nan), 4, 9)
    assert {own.stats.pulls for own in seen} == {0}
    assert {own.drained.tobytes() for own in seen} == {seen[0].path[-1].tobytes()}
    assert len({own.path[-1].tobytes() for own in seen}) == 4


def test_easgd_asks_for_no_loss():
    seen, _ = follow(dataclasses.replace(ELASTIC, told=lambda *_: None), 2, 9)
    assert min(own.stats.pulls for own in seen) > 0


@pytest.mark.parametrize("silent", [(0, 1, 2), (0, 2)])
def test_ranks_that_record_no_loss_hear_so_at_the_first_pull_and_cannot_end(silent):
    """No rank leads for want of losses; once they are recorded, all goes on."""
    together, told = threading.Barrier(3), [rank not in silent for rank in range(3)]
    following = dataclasses.replace(
        PAIRS, groups=several(3, 3), told=lambda z, rank, step: drawn(z, rank, step) if told[rank] else None
    )

    def train(rank: int) -> bytes:
        own = Follower(least_squares(3, MOMENTUM), following, rank)
        own.worker()
        if rank in silent:
            for go_on in (lambda: own.train(10_000), own.drain, lambda: own.drain(flush=False)):
                with pytest.raises(ValueError, match=r"this rank has recorded none: call opt.record_loss"):
                    go_on()
            np.testing.assert_array_equal(own.x, own.path[-1])
        else:
            own.train(8)
        together.wait(TIMEOUT)
        told[rank] = True
        own.train(3).drain()
        return own.x.tobytes()

    assert len(set(Cluster(3).run(train, timeout=40))) == 1


def test_where_one_rank_records_no_loss_and_gives_up_the_others_hear_which():
    following = dataclasses.replace(PAIRS, groups=several(3, 1), told=lambda z, rank, step: None if rank == 1 else 1.0)
    one, silent, other = Cluster(3).outcomes(
        lambda rank: Follower(least_squares(3, MOMENTUM), following, rank).train(100_000)
    )
    assert isinstance(silent, ValueError)
    for outcome in (one, other):
        assert isinstance(outcome, InjectedError)
        assert "rank 1 on host host1 failed: ValueError: a leader is to be chosen" in str(outcome)
