"""torch: how ranks that follow a leader end: drains, consensus, counts, ranks without a batch, no NaN that spreads."""

from __future__ import annotations

import dataclasses
import gc
import math
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.stats import LeaderStats
from hvd_async.testing import Cluster, InjectedError
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import least_squares
from tests.conformance.leader_cases import ELASTIC, PAIRS, UNEVEN, leads
from tests.conformance.leader_drive import TIMEOUT, Seen, check, wait_for_pulls
from tests.conformance.leader_reference import Following, replay, several
from tests.conformance.torch_leader_ranks import LeaderTrainer, run
from tests.conformance.torch_ranks import ProcessSet

SGD, MOMENTUM = CASES[0], CASES[1]


# -- drains ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", UNEVEN, ids=str)
@pytest.mark.parametrize("following", [PAIRS, leads(1), leads(3), ELASTIC], ids=["any", "1", "3", "easgd"])
def test_ranks_that_end_early_or_have_no_batch_hold_nobody_and_all_end_alike(following, steps):
    """At the weights of the rank with the lowest mean loss, bit by bit, or at the centre."""
    problem = least_squares(4, MOMENTUM)
    seen = run(problem, following, steps, Cluster(4, jitter=0.001))
    assert [own.stats.steps for own in seen] == list(steps)
    if not any(steps):
        assert seen[2].drained.tolist() == problem.start[2].tolist()
        return
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen)
    if following is not ELASTIC:
        best = min((means[-1], rank) for rank, means in enumerate(outcome.means) if means)[1]
        assert seen[0].drained.tobytes() == seen[best].path[-1].tobytes()


@pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])
def test_training_goes_on_after_a_drain_from_what_all_hold(following):
    """Nothing is left of targets or forces, counts begin anew, momentum and a step's number do not."""
    problem, together = least_squares(4, MOMENTUM), threading.Barrier(4)
    by_step = dataclasses.replace(following, local_pull=lambda step: 0.3 / step)
    following = following if following is ELASTIC else by_step

    def train(rank: int) -> tuple[Seen, list[Any]]:
        trainer, seen, ends = LeaderTrainer(problem, rank, following), Seen(), []
        seen.log = trainer.worker().receiver.log = []
        together.wait(TIMEOUT)
        for steps in ((5, 3, 9, 4), (2, 0, 1, 1), (7, 7, 7, 7), (0, 0, 0, 0)):
            before = trainer.opt.stats().pulls
            for step in range(1, steps[rank] + 1):
                trainer.step()
                seen.path.append(trainer.weights())
                if len(set(steps)) == 1:
                    wait_for_pulls(trainer.worker(), before + following.pulls(rank, step))
            trainer.opt.drain()
            ends.append(trainer.weights())
        seen.drained, seen.stats = trainer.weights(), trainer.opt.stats()
        return seen, ends

    seen, ends = zip(*Cluster(4, jitter=0.001).run(train), strict=True)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen)
    assert len(outcome.drained) == 3  # (nothing to do in the last)
    for own in ends:
        for held, other, expected in zip(own, ends[0], [*outcome.drained, outcome.drained[-1]], strict=True):
            assert held.tobytes() == other.tobytes()
            np.testing.assert_allclose(held, expected, rtol=0, atol=1e-5)


def test_where_no_loss_is_finite_the_first_rank_is_what_a_drain_leaves():
    following = dataclasses.replace(PAIRS, told=lambda z, rank, step: math.nan)
    seen = run(least_squares(4, SGD), following, 9)
    assert {own.stats.pulls for own in seen} == {0}
    assert {own.drained.tobytes() for own in seen} == {seen[0].path[-1].tobytes()}
    assert len({own.path[-1].tobytes() for own in seen}) == 4


def test_ranks_go_on_without_one_whose_optimizer_is_gone():
    """Nobody waits for it, it leads nobody any more, and its engine still takes part in their pulls."""

    def train(rank: int) -> Any:
        trainer = LeaderTrainer(least_squares(3, SGD), rank, leads(2, Following("lsgd", several(3, 3), 1, 2)))
        trainer.train(2).opt.drain()
        if rank == 1:
            del trainer
            gc.collect()
            local_engine().drain()  # type: ignore[union-attr]
            return None
        trainer.train(5 if rank else 3).opt.drain()
        return trainer.weights().tolist()

    one, gone, other = Cluster(3).run(train)
    assert gone is None
    assert one == other


def test_ranks_of_a_process_set_follow_each_other_alone():
    """With groups of their own; ranks outside step by themselves."""
    ranks = (1, 2, 4, 5)
    problem, together = least_squares(4, MOMENTUM), threading.Barrier(4)

    def train(rank: int) -> Seen:
        place = ranks.index(rank) if rank in ranks else 0
        options = {"process_set": ProcessSet(*ranks), "group": [[1, 5], [2, 4]]}
        trainer, seen = LeaderTrainer(problem, place, PAIRS, **options), Seen()
        seen.log = trainer.worker().receiver.log = []
        if rank in ranks:
            together.wait(TIMEOUT)
        for _ in range(20):
            trainer.step()
            seen.path.append(trainer.weights())
        trainer.opt.drain()
        seen.drained, seen.stats = trainer.weights(), trainer.opt.stats()
        return seen

    outcomes = Cluster(6).run(train)
    for members, groups in ((ranks, ((0, 3), (1, 2))), ((0,), ((0,),)), ((3,), ((0,),))):
        seen = [outcomes[rank] for rank in members]
        logs = [[by_place(entry, members) for entry in own.log] for own in seen]
        check(replay(least_squares(len(seen), MOMENTUM), dataclasses.replace(PAIRS, groups=groups), logs), seen)
        assert set().union(*({**own.stats.led, **own.stats.led_group} for own in seen)) <= set(members)


def by_place(entry: Any, ranks: tuple[int, ...]) -> Any:
    """An entry of a log, with leaders by their places."""
    if entry[0] != "taken":
        return entry
    return (*entry[:2], {group: (pull, ranks.index(leader)) for group, (pull, leader) in entry[2].items()})


# -- consensus ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("following", [leads(0), leads(2), ELASTIC], ids=["0", "2", "easgd"])
def test_consensus_shows_what_a_drain_would_leave_and_puts_everything_back(following):
    def train(rank: int) -> tuple[Any, ...]:
        trainer = LeaderTrainer(least_squares(4, MOMENTUM), rank, following).train(5 + rank)
        trainer.opt.cut()
        own, worker = trainer.weights(), trainer.worker()
        for error in (None, KeyError):
            try:
                with trainer.opt.consensus():
                    shown = trainer.weights()
                    if error is not None:
                        raise error
            except KeyError:
                pass
            assert trainer.weights().tobytes() == own.tobytes()
        centre = np.asarray(worker.receiver.consensus, np.float64)
        trainer.opt.drain()
        drained = trainer.weights()
        trainer.train(3).opt.drain()  # training goes on
        return own, shown, drained, centre

    own, shown, drained, centres = zip(*Cluster(4, jitter=0.001).run(train), strict=True)
    assert len({one.tobytes() for one in shown}) == len({one.tobytes() for one in drained}) == 1
    assert drained[0].tobytes() == shown[0].tobytes()
    assert np.abs(np.array(own) - own[0]).max() > 1e-3
    expected = centres[1] if following is ELASTIC else own[0 if following.told(own[0], 0, 1) < 0 else 2]
    assert shown[0].tobytes() == expected.tobytes()


@pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])
def test_consensus_distance_is_numpys(following):
    def train(rank: int) -> tuple[Any, float, float]:
        trainer = LeaderTrainer(least_squares(4, SGD), rank, following)
        assert trainer.opt.consensus_distance() == 0.0
        distance = trainer.train(5).opt.consensus_distance()
        own = trainer.weights()
        trainer.opt.drain()
        return own, distance, trainer.opt.consensus_distance()

    models, distances, ends = zip(*Cluster(4).run(train), strict=True)
    x = np.array(models)
    expected = np.sqrt(np.mean(np.sum((x - x.mean(axis=0)) ** 2, axis=1)))
    assert expected > 0.01
    np.testing.assert_allclose(distances, expected, rtol=1e-6)
    assert ends == (0.0,) * 4


# -- counts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_counted_of_lsgd(dtype):
    """A follower receives the weights once a pull, who leads nothing."""
    problem, began, nbytes = least_squares(4, SGD), time.time(), 6 * dtype.itemsize
    seen = run(problem, PAIRS, 41, in_step=True, dtype=dtype)
    outcome = replay(problem, PAIRS, [own.log for own in seen])
    for rank, own in enumerate(seen):
        pulled = [(group, leader) for group in (rank // 2, -1) for _, leader in outcome.leaders(rank, group)]
        history = [entry[1:] for entry in own.stats.history]
        assert sorted(history[:30]) == sorted(pulled)  # (steps that are left may be enough for the last ranks)
        assert own.stats.pulls == len(history)
        assert own.stats.led == Counter(leader for group, leader in history if group == -1)
        assert own.stats.led_group == Counter(leader for group, leader in history if group != -1)
        assert own.stats.bytes_received == nbytes * sum(leader != rank for _, leader in history)
        times = [when for when, _, _ in own.stats.history]
        assert began <= times[0] <= times[-1] <= time.time()
        assert times == sorted(times)
        assert own.stats.pull_s > 0.0
        assert own.stats.wait_s > 0.0  # (in its drain)
        assert own.stats.mean_loss == pytest.approx(outcome.means[rank][-1])


@pytest.mark.parametrize(("size", "each"), [(1, 0), (2, 24), (3, 32), (4, 36)])
def test_what_is_counted_of_easgd(size, each):
    """A ring's part of a sum: 2 (P - 1) / P times the weights."""
    following = dataclasses.replace(ELASTIC, global_period=2)
    for own in run(least_squares(size, SGD), following, 10, in_step=True):
        assert own.stats.pulls == 5
        assert own.stats.led == {-1: 5}
        assert own.stats.bytes_received == 5 * each
        assert {entry[1:] for entry in own.stats.history} == {(-1, -1)}


def test_counts_go_on_over_drains_cuts_and_loaded_states():
    together = threading.Barrier(2)

    def train(rank: int) -> None:
        trainer = LeaderTrainer(least_squares(2, SGD), rank, Following("lsgd", several(2, 1), 1, 2))
        assert trainer.opt.stats() == LeaderStats()
        for end in (trainer.opt.drain, trainer.opt.cut, trainer.opt.drain, trainer.opt.cut):
            for _ in range(4):
                trainer.train(1)
                together.wait(TIMEOUT)
            end()
            before, rounds = trainer.opt.stats(), trainer.opt.rounds
            assert before.steps == trainer.steps
            assert before.pulls == rounds == len(before.history) >= trainer.steps // 2 - 2
            trainer.opt.load_state_dict(trainer.opt.state_dict())
            assert trainer.opt.stats() == before
            assert trainer.opt.rounds == rounds
            together.wait(TIMEOUT)
        trainer.train(1).opt.drain()
        assert trainer.opt.stats().steps == 17

    Cluster(2).run(train)


def test_learning_rates_of_a_rank_are_its_own_only_within_a_step():
    """Schedulers and state_dict see those that all ranks have, also when the step itself fails."""

    def train(rank: int) -> None:
        trainer = LeaderTrainer(least_squares(2, SGD), rank, Following("lsgd", several(2, 1), lr_spread="power"))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.opt, 0.5)
        inside = []
        trainer.opt.register_step_pre_hook(lambda opt, *_: inside.append(opt.param_groups[0]["lr"]))
        for step in range(3):
            trainer.train(1)
            assert trainer.opt.param_groups[0]["lr"] == 0.1 * 0.5**step
            scheduler.step()
        assert inside == [0.1 * 2**rank * 0.5**step for step in range(3)]
        trainer.opt.drain()
        assert trainer.opt.state_dict()["param_groups"][0]["lr"] == 0.1 / 8

    Cluster(2).run(train)


# -- NaN ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])
def test_a_step_that_makes_nan_is_refused_there_and_others_hear_of_it(following, value):
    """Nobody is pulled towards it."""
    failed = threading.Event()

    def train(rank: int) -> None:
        trainer = LeaderTrainer(least_squares(4, SGD), rank, leads(1, following)).train(2)
        if rank != 1:
            assert failed.wait(TIMEOUT)
            try:
                trainer.train(9).opt.drain()
            finally:
                assert np.isfinite(trainer.weights()).all()
            return
        trainer.gradient()
        trainer.parameters[1].grad[1, 0] = value
        try:
            trainer.opt.step()
        finally:
            assert trainer.opt.stats().steps == 2
            for call in (trainer.opt.step, trainer.opt.drain, trainer.opt.cut, trainer.opt.consensus_distance):
                with pytest.raises(ReplicaStateError, match=r"broken off: FloatingPointError.*restart from a check"):
                    call()
            failed.set()

    for rank, outcome in enumerate(Cluster(4).outcomes(train)):
        if rank == 1:
            assert isinstance(outcome, FloatingPointError)
        else:
            assert isinstance(outcome, InjectedError)
            assert "rank 1 on host host1 failed: FloatingPointError" in str(outcome)
