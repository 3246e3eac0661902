"""How ranks that follow a leader end: drains, consensus, ranks that finish early; what is counted.

Each step equals the reference: ``test_leader``. Any order of events, and that no step waits: ``tests/machines``.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from hvd_async.stats import LeaderStats
from hvd_async.testing import Cluster
from tests.conformance.gossip_ranks import alike
from tests.conformance.leader_cases import ELASTIC, PAIRS, leads
from tests.conformance.leader_drive import TIMEOUT, Seen, check, wait_for_pulls
from tests.conformance.leader_reference import ALL, Following, Outcome, replay, several
from tests.conformance.weight_ranks import TorchRank, also_graph, both

OFTEN = dataclasses.replace(ELASTIC, global_period=1)
DOUBLE = {"dtype": torch.float64}


# -- drains ---------------------------------------------------------------------------------------------------


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
        one.train(20)
        return seen.drain()

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
def test_consensus_shows_what_a_drain_would_leave(binding, following):
    def train(rank: int) -> tuple[Any, ...]:
        one = binding(binding.least_squares(4), rank, following).train(5 + rank)
        one.opt.cut()
        own = one.weights()
        with one.opt.consensus():
            shown = one.weights()
        center = np.asarray(one.worker().center, np.float64)  # (on a late plane it has not come before)
        one.opt.drain()
        drained = one.weights()
        one.train(3).opt.drain()  # training continues
        return own, shown, drained, center

    own, shown, drained, centers = zip(*Cluster(4, jitter=0.001).run(train), strict=True)
    expected = centers[1] if following is ELASTIC else own[2]
    assert {one.tobytes() for one in (*shown, *drained)} == {expected.tobytes()}
    assert np.abs(np.array(own) - own[0]).max() > 1e-3


def test_after_a_cut_the_consensus_is_its_center_although_others_continue():
    problem, together = TorchRank.least_squares(2), threading.Barrier(2)

    def train(rank: int) -> list[Any]:
        own = TorchRank(problem, rank, OFTEN, **DOUBLE).train(3)
        own.opt.cut()
        worker, before = own.worker(), own.opt.stats().pulls
        centers = [worker.consensus(torch.as_tensor(own.weights())).tolist()]
        together.wait(TIMEOUT)
        own.train(2 - 2 * rank)
        wait_for_pulls(worker, before + 1)
        together.wait(TIMEOUT)
        centers.append(worker.consensus(torch.as_tensor(own.weights())).tolist())
        own.opt.drain()
        return centers

    one, other = Cluster(2).run(train)
    assert one == other == [one[0]] * 2


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

    alike(train, 2)


# -- what is counted, and what threads share --------------------------------------------------------------------


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


def follow(following: Following, size: int, steps: int) -> tuple[list[Seen], Outcome]:
    """Train in step, and check each step against the reference."""
    problem, seen = TorchRank.run(following, steps, Cluster(size), together=True, **DOUBLE)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen, 1e-12)
    return seen, outcome


def test_what_is_counted_of_lsgd():
    """A follower receives the weights once a pull, who leads nothing."""
    began = time.time()
    seen, outcome = follow(PAIRS, 4, 41)
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
    for own in follow(dataclasses.replace(ELASTIC, global_period=2), size, 10)[0]:
        assert own.stats.pulls == 5
        assert own.stats.led == {-1: 5}
        assert own.stats.bytes_received == 5 * each
        assert {entry[1:] for entry in own.stats.history} == {(ALL, -1)}


def test_what_is_on_its_way_is_looked_at_and_changed_under_the_engines_lock_only():
    """The engine adds pulls while the training thread, at an end, looks which are on their way."""

    looks: Counter[str] = Counter()

    def guarded(lock: Any, name: str) -> Any:
        def method(self: dict[str, int], *arguments: Any) -> Any:
            assert lock._is_owned()
            looks[name] += 1
            return getattr(dict, name)(self, *arguments)

        return method

    def train(rank: int) -> None:
        own = TorchRank(TorchRank.least_squares(2), rank, dataclasses.replace(PAIRS, groups=((0, 1),)), **DOUBLE)
        worker, names = own.worker(), ("values", "__setitem__", "__delitem__")
        kind = type("Guarded", (dict,), {name: guarded(worker.engine.changed, name) for name in names})
        with worker.engine.changed:  # (the other rank may have trained already, so that pulls are on their way)
            worker._carrier._in_flight = kind(worker._carrier._in_flight)
        own.train(12).opt.cut()
        own.train(1).opt.drain()

    Cluster(2).run(train)
    assert len(looks) == 3


def test_a_snapshot_is_never_changed_by_later_steps():
    """A snapshot on its way belongs to the pull."""

    def train(rank: int) -> None:
        own, held = TorchRank(TorchRank.least_squares(2), rank, OFTEN, **DOUBLE), []
        for _ in range(30):
            worker = own.train(1).worker()
            held += [(vector, vector.clone()) for vector in (worker._snapshot, worker.center)]
        own.opt.drain()
        assert all(torch.equal(vector, was) for vector, was in held)

    Cluster(2).run(train)
