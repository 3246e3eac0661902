"""Leader-pull of ranks as threads: what is counted, and what threads share.

Each step equals the reference: ``tests/conformance/test_leader``. Any order of events: ``tests/machines``.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from hvd_async.testing import Cluster
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import least_squares
from tests.conformance.leader_cases import ELASTIC, PAIRS
from tests.conformance.leader_drive import TIMEOUT, Seen, check, run, wait_for_pulls
from tests.conformance.leader_reference import ALL, Following, Outcome, replay
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


def test_after_a_cut_the_consensus_is_its_center_although_others_continue():
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


def test_what_is_on_its_way_is_looked_at_and_changed_under_the_engines_lock_only():
    """The engine adds pulls while the training thread, at an end, looks which are on their way."""

    class Guarded(dict[str, int]):
        def __init__(self, lock: Any) -> None:
            super().__init__()
            self.lock, self.looks = lock, 0

        def values(self) -> Any:
            assert self.lock._is_owned()
            self.looks += 1
            return super().values()

        def __setitem__(self, name: str, number: int) -> None:
            assert self.lock._is_owned()
            super().__setitem__(name, number)

        def __delitem__(self, name: str) -> None:
            assert self.lock._is_owned()
            super().__delitem__(name)

    def train(rank: int) -> int:
        own = Follower(least_squares(2, MOMENTUM), dataclasses.replace(PAIRS, groups=((0, 1),)), rank)
        guarded = own._worker.executor.carrier._in_flight = Guarded(own._worker.engine.changed)
        own.train(12).drain(flush=False)
        own.train(1).drain()
        return guarded.looks

    assert min(Cluster(2).run(train)) > 0


def test_a_snapshot_is_never_changed_by_later_steps():
    """What is on its way belongs to the pull: mix() returns vectors that must not be changed, and changes none."""

    def train(rank: int) -> None:
        own, held = Follower(least_squares(2, MOMENTUM), dataclasses.replace(ELASTIC, global_period=1), rank), []
        for _ in range(30):
            own.step()
            executor = own.worker().executor
            held += [(vector, vector.copy()) for vector in (executor.snapshot, executor.consensus, own.x)]
        own.drain()
        for vector, was in held:
            np.testing.assert_array_equal(vector, was)

    Cluster(2).run(train)
