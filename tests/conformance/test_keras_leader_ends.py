"""Keras: how ranks that follow a leader end: drains, consensus, ranks without a batch, no NaN that spreads."""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster, InjectedError
from tests.conformance.cases import CASES
from tests.conformance.keras_gossip_ranks import least_squares
from tests.conformance.keras_leader_ranks import LeaderTrainer, run
from tests.conformance.keras_ranks import plain, ranks
from tests.conformance.leader_cases import ELASTIC, PAIRS, UNEVEN, leads
from tests.conformance.leader_drive import TIMEOUT, Seen, check
from tests.conformance.leader_reference import Following, replay, several

SGD, MOMENTUM, ADAM = CASES[0], CASES[1], CASES[6]
both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
both_algorithms = pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])


# -- drains ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", UNEVEN, ids=str)
@pytest.mark.parametrize("following", [PAIRS, leads(3), ELASTIC], ids=["any", "3", "easgd"])
def test_ranks_that_end_early_or_have_no_batch_hold_nobody_and_all_end_alike(following, steps):
    """At the weights of the rank with the lowest mean loss, bit by bit, or at the centre."""
    problem = least_squares(4, MOMENTUM)
    seen = run(problem, following, steps, Cluster(4, jitter=0.001), graph=max(steps) > 12)
    assert [own.stats.steps for own in seen] == list(steps)
    if not any(steps):
        assert seen[2].drained.tolist() == problem.start[2].tolist()
        return
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen)
    if following is not ELASTIC:
        best = min((means[-1], rank) for rank, means in enumerate(outcome.means) if means)[1]
        assert seen[0].drained.tobytes() == seen[best].path[-1].tobytes()


@both_algorithms
@both_modes
def test_training_goes_on_after_a_drain_from_what_all_hold(following, graph):
    """Nothing is left of targets or forces, counts begin anew, momentum and a step's number do not."""
    problem, together = least_squares(4, MOMENTUM), threading.Barrier(4)
    if following is PAIRS:
        following = dataclasses.replace(following, local_pull=lambda step: 0.3 / step)

    def train(rank: int) -> tuple[Seen, list[Any]]:
        trainer, seen, ends = LeaderTrainer(problem, rank, following, graph=graph), Seen(), []
        seen.log = trainer.worker().receiver.log = []
        together.wait(TIMEOUT)
        for steps in ((5, 3, 9, 4), (2, 0, 1, 1), (7, 7, 7, 7), (0, 0, 0, 0)):
            trainer.train(steps[rank])
            trainer.opt.drain()
            ends.append(trainer.weights())
        seen.path, seen.drained, seen.stats = trainer.path, trainer.weights(), trainer.opt.stats()
        return seen, ends

    seen, ends = zip(*Cluster(4, jitter=0.001).run(train), strict=True)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen)
    assert len(outcome.drained) == 3  # (nothing to do in the last)
    for own in ends:
        for held, other, expected in zip(own, ends[0], [*outcome.drained, outcome.drained[-1]], strict=True):
            assert held.tobytes() == other.tobytes()
            np.testing.assert_allclose(held, expected, rtol=0, atol=1e-5)


def test_ranks_go_on_without_one_whose_optimizer_is_gone():
    """Nobody waits for it, it leads nobody any more, and its engine still takes part in their pulls."""

    def train(rank: int) -> Any:
        trainer = LeaderTrainer(least_squares(3, SGD), rank, leads(2, Following("lsgd", several(3, 3), 1, 2)))
        trainer.train(2)
        trainer.opt.drain()
        if rank == 1:
            del trainer
            gc.collect()
            engine: Any = local_engine()
            engine.drain()
            return None
        trainer.train(5 if rank else 3)
        trainer.opt.drain()
        return trainer.weights().tolist()

    one, gone, other = Cluster(3).run(train)
    assert gone is None
    assert one == other


def test_ranks_of_a_process_set_follow_each_other_and_ranks_outside_step_by_themselves():
    members = (0, 2, 3, 4)
    problem, together = least_squares(4, MOMENTUM), threading.Barrier(4)

    def train(rank: int) -> Seen:
        place = members.index(rank) if rank in members else 0
        options = {"process_set": ranks(*members), "group": [[0, 4], [2, 3]]}
        trainer, seen = LeaderTrainer(problem, place, PAIRS, graph=True, **options), Seen()
        seen.log = trainer.worker().receiver.log = []
        if rank in members:
            together.wait(TIMEOUT)
        trainer.train(20)
        trainer.opt.drain()
        seen.path, seen.drained, seen.stats = trainer.path, trainer.weights(), trainer.opt.stats()
        return seen

    outcomes = Cluster(5).run(train)
    for own, groups in ((members, ((0, 3), (1, 2))), ((1,), ((0,),))):
        seen = [outcomes[rank] for rank in own]
        logs = [[by_place(entry, own) for entry in one.log] for one in seen]
        check(replay(least_squares(len(own), MOMENTUM), dataclasses.replace(PAIRS, groups=groups), logs), seen)


def by_place(entry: Any, members: tuple[int, ...]) -> Any:
    """An entry of a log, with leaders by their places."""
    if entry[0] != "taken":
        return entry
    return (*entry[:2], {group: (pull, members.index(leader)) for group, (pull, leader) in entry[2].items()})


# -- consensus ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("following", [leads(0), leads(2), ELASTIC], ids=["0", "2", "easgd"])
def test_consensus_shows_what_a_drain_would_leave_and_puts_everything_back(following):
    """Also when what is done in it fails."""

    def train(rank: int) -> tuple[Any, ...]:
        trainer = LeaderTrainer(least_squares(4, MOMENTUM), rank, following)
        trainer.train(5 + rank)
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
        trainer.train(3)  # training goes on
        trainer.opt.drain()
        return own, shown, drained, centre

    own, shown, drained, centres = zip(*Cluster(4, jitter=0.001).run(train), strict=True)
    assert len({one.tobytes() for one in shown}) == len({one.tobytes() for one in drained}) == 1
    assert drained[0].tobytes() == shown[0].tobytes()
    assert np.abs(np.array(own) - own[0]).max() > 1e-3
    expected = centres[1] if following is ELASTIC else own[0 if following.told(own[0], 0, 1) < 0 else 2]
    assert shown[0].tobytes() == expected.tobytes()


@both_algorithms
def test_consensus_distance_is_numpys(following):
    def train(rank: int) -> tuple[Any, float, float]:
        trainer = LeaderTrainer(least_squares(4, SGD), rank, following, graph=True)
        assert trainer.opt.consensus_distance() == 0.0
        trainer.train(5)
        distance = trainer.opt.consensus_distance()
        own = trainer.weights()
        trainer.opt.drain()
        return own, distance, trainer.opt.consensus_distance()

    models, distances, ends = zip(*Cluster(4).run(train), strict=True)
    x = np.array(models)
    expected = np.sqrt(np.mean(np.sum((x - x.mean(axis=0)) ** 2, axis=1)))
    assert expected > 0.01
    np.testing.assert_allclose(distances, expected, rtol=1e-6)
    assert ends == (0.0,) * 4


# -- what must fit together, and what breaks ------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"algorithm": "easgd", "global_period": 4},
        {"global_period": 5},
        {"local_pull": 0.2},
        {"group": 1},
        {"lr_spread": "linear"},
        {"buffers": "local"},
        {"backward_passes_per_step": 2},
        {"model": keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization()])},
        {"make": lambda: plain(ADAM)},
    ],
    ids=lambda other: ",".join(other),
)
def test_ranks_that_differ_are_told_so_everywhere(other):
    following = dataclasses.replace(PAIRS, groups=several(2, 2))

    def train(rank: int) -> None:
        options = dict(other) if rank else {}
        own = dataclasses.replace(following, algorithm="easgd") if "algorithm" in options else following
        LeaderTrainer(least_squares(2, SGD), rank, own, **options).train(2)

    cluster = Cluster(2)
    for outcome in cluster.outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)
    assert cluster.board.count == 0  # no tensor has travelled


@both_modes
@pytest.mark.parametrize("value", [1.0, -0.5, "0.1"])
def test_a_strength_that_leaves_its_bounds_is_refused_before_any_weight_has_changed(value, graph):
    """At the very step that would use it, and training goes on once it is in them again."""

    def train(rank: int) -> bytes:
        bad = {3: value}
        following = dataclasses.replace(PAIRS, groups=several(2, 2), global_prox=lambda step: bad.get(step, 0.2))
        own = LeaderTrainer(least_squares(2, SGD), rank, following, graph=graph)
        own.train(2)
        before = own.weights().tobytes()
        refused = r"a strength of .* at step 3: take 0 \(no pull\) or more"
        with pytest.raises(tf.errors.OpError if graph else ValueError, match=refused):
            own.train(1)
        assert own.weights().tobytes() == before
        assert own.opt.stats().steps == 2
        bad.clear()
        own.train(1)
        own.opt.drain()
        return own.weights().tobytes()

    assert len(set(Cluster(2).run(train))) == 1


@both_modes
@both_algorithms
def test_a_step_that_makes_nan_is_refused_there_and_others_hear_of_it(following, graph):
    """Nobody is pulled towards it."""
    failed = threading.Event()

    def train(rank: int) -> None:
        trainer = LeaderTrainer(least_squares(4, SGD), rank, leads(1, following), graph=graph)
        trainer.train(2)
        if rank != 1:
            assert failed.wait(TIMEOUT)
            try:
                trainer.train(9)
                trainer.opt.drain()
            finally:
                assert np.isfinite(trainer.weights()).all()
            return
        loss, *gradients = trainer.given(trainer.weights())
        try:
            trainer._apply(loss, *[gradient * np.nan for gradient in gradients])
        finally:
            assert trainer.opt.stats().steps == 2
            for call in (lambda: trainer.train(1), trainer.opt.drain, trainer.opt.cut, trainer.opt.consensus_distance):
                with pytest.raises(Exception, match=r"broken off: FloatingPointError.*restart from a check") as caught:
                    call()
                assert isinstance(caught.value, ReplicaStateError | tf.errors.OpError)
            failed.set()

    for rank, outcome in enumerate(Cluster(4).outcomes(train)):
        if rank == 1:
            assert "NaN or infinite (x2 (2, 2) float32" in str(outcome)
        else:
            assert isinstance(outcome, InjectedError | tf.errors.OpError)
            assert "rank 1 on host host1 failed" in str(outcome)


@both_modes
def test_a_step_that_is_broken_off_ends_this_ranks_training(graph):
    class Breaking(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            tf.debugging.assert_less(gradient, 5.0)
            super().update_step(gradient, variable, learning_rate)

    def train(rank: int) -> None:
        trainer = LeaderTrainer(least_squares(1, SGD), 0, ELASTIC, graph=graph, make=lambda: Breaking(0.1))
        trainer.train(1)
        loss, *gradients = trainer.given(trainer.weights())
        with pytest.raises(tf.errors.InvalidArgumentError):
            trainer._apply(loss, *[gradient * 0.0 + 7.0 for gradient in gradients])
        for call in (trainer.opt.drain, lambda: trainer.train(1), trainer.opt.cut):
            with pytest.raises(Exception, match=r"(?s)broken off.*restart from a checkpoint"):
                call()

    assert Cluster(1).run(train) == [None]
