"""Keras: ranks that follow a leader, or a centre, equal the float64 reference on the pulls that each has taken up."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow as hvd
from hvd_async.testing import Cluster
from tests.conformance.cases import CASES
from tests.conformance.keras_gossip_ranks import least_squares
from tests.conformance.keras_leader_ranks import LeaderTrainer, run
from tests.conformance.leader_cases import ELASTIC, PERIODS, SCHEDULES, square
from tests.conformance.leader_drive import check, check_leaders
from tests.conformance.leader_reference import NEVER_OLD, Following, drawn, replay, several

STEPS, FEWER = 100, 60
MOMENTUM, NESTEROV, ADAM, ADAMW = CASES[1], CASES[2], CASES[6], CASES[7]
KINDS = [
    ((1, 1), MOMENTUM, True),
    ((2, 1), MOMENTUM, False),
    ((2, 2), NESTEROV, True),
    ((3, 1), ADAM, True),
    ((3, 3), NESTEROV, False),
    ((4, 1), MOMENTUM, True),
    ((4, 2), MOMENTUM, True),
    ((6, 1), ADAM, True),
    ((6, 2), MOMENTUM, True),
    ((6, 3), NESTEROV, True),
]
"""Ranks and how many are a group, the optimizer, and whether a step is a graph."""
each_kind = pytest.mark.parametrize(("shape", "case", "graph"), KINDS, ids=lambda of: str(getattr(of, "name", of)))
both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


# -- every size and group -------------------------------------------------------------------------------------


@each_kind
def test_lsgd_in_step_follows_whom_it_should_when_it_should(shape, case, graph):
    """Each pull when the period is over, towards the rank with the lowest mean loss then, and no other."""
    size, ranks = shape
    problem, periods = least_squares(size, case), PERIODS[(size + ranks) % len(PERIODS)]
    following = Following("lsgd", several(size, ranks), *periods, loss_window=3)
    seen = run(problem, following, STEPS, in_step=True, graph=graph)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen)
    assert check_leaders(outcome, following, STEPS) == set(range(size))
    assert {own.stats.steps for own in seen} == {STEPS}
    assert [own.stats.mean_loss for own in seen] == pytest.approx([means[-1] for means in outcome.means])


@pytest.mark.parametrize(
    ("shape", "case", "graph"),
    [((2, 2), ADAM, False), ((3, 1), NESTEROV, True), ((6, 3), MOMENTUM, True)],
    ids=lambda of: str(getattr(of, "name", of)),
)
def test_lsgd_replays_whatever_comes_late(shape, case, graph):
    """Commands are held back at random, and every other rank is slow where there are three."""
    size, ranks = shape
    problem, following = least_squares(size, case), Following("lsgd", several(size, ranks), 2, 5, loss_window=NEVER_OLD)
    behind = [1 + 2 * (rank % 2) for rank in range(size)] if size == 3 else ()
    seen = run(problem, following, STEPS, Cluster(size, jitter=0.002, seed=size), behind=behind, graph=graph)
    check(replay(problem, following, [own.log for own in seen]), seen)
    assert min(own.stats.pulls for own in seen) > 0


@pytest.mark.parametrize(
    ("size", "case", "graph"),
    [(1, ADAM, True), (2, MOMENTUM, False), (3, ADAM, True), (4, NESTEROV, True), (6, MOMENTUM, True)],
    ids=lambda of: str(getattr(of, "name", of)),
)
def test_easgd(size, case, graph):
    problem = least_squares(size, case)
    seen = run(problem, ELASTIC, STEPS, in_step=True, graph=graph)
    check(replay(problem, ELASTIC, [own.log for own in seen]), seen)
    assert {own.stats.pulls for own in seen} <= {STEPS // 3, STEPS // 3 + 1}  # (what is left may do for the last)
    assert set(seen[0].stats.led) == {-1}


@pytest.mark.parametrize(("size", "case", "graph"), [(2, MOMENTUM, False), (3, ADAM, True)], ids=["2", "3"])
def test_easgd_replays_whatever_comes_late(size, case, graph):
    """Every other rank is slow too."""
    problem, behind = least_squares(size, case), [1 + 3 * (rank % 2) for rank in range(size)]
    seen = run(problem, ELASTIC, STEPS, Cluster(size, jitter=0.002, seed=size), behind=behind, graph=graph)
    check(replay(problem, ELASTIC, [own.log for own in seen]), seen)


# -- strengths, rates, losses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_strengths(name):
    """Each counts where it should: of a rank's own step, when a pull has come or between two."""
    problem = least_squares(4, MOMENTUM)
    following = Following("lsgd", ((0, 2), (1, 3)), 2, 7, loss_window=NEVER_OLD, **SCHEDULES[name])
    jitter = name == "by-step"
    seen = run(problem, following, FEWER, Cluster(4, jitter=0.002 * jitter), not jitter, graph="only" not in name)
    logs = [own.log for own in seen]
    outcome = replay(problem, following, logs)
    check(outcome, seen)
    changed = dataclasses.replace(following, local_pull=0.3, local_prox=0.3, global_pull=0.3)
    other = replay(problem, changed, logs)
    assert np.abs(other.x - outcome.x).max() > 1e-4


@pytest.mark.parametrize(("alpha", "beta"), [(None, 0.9), (0.0, 0.5), (0.7, 0.0), (0.3, 0.6)])
def test_easgds_strengths(alpha, beta):
    problem, following = least_squares(2, MOMENTUM), dataclasses.replace(ELASTIC, alpha=alpha, beta=beta)
    seen = run(problem, following, FEWER, Cluster(2, jitter=0.001), graph=True)
    check(replay(problem, following, [own.log for own in seen]), seen)


@pytest.mark.parametrize(
    ("algorithm", "case", "spread", "graph"),
    [("lsgd", NESTEROV, "linear", False), ("lsgd", ADAMW, "power", True), ("easgd", ADAMW, "linear", True)],
    ids=lambda of: str(getattr(of, "name", of)),
)
def test_learning_rates_that_differ_between_ranks(algorithm, case, spread, graph):
    """Rank i's is i + 1, or 2^i, times the optimizer's, also in weight decay."""
    problem = least_squares(3, dataclasses.replace(case, lr=case.lr / 10))
    following = Following(algorithm, several(3, 3), 3, 6, lr_spread=spread)
    seen = run(problem, following, FEWER, in_step=True, graph=graph)
    check(replay(problem, following, [own.log for own in seen]), seen)


@both_modes
def test_learning_rates_of_a_rank_are_its_own_only_within_a_step(graph):
    """Schedules and callbacks see, and set, those that all ranks have; so does a checkpoint."""

    def train(rank: int) -> list[float]:
        weight = keras.Variable(0.0)
        opt = hvd.LeaderOptimizer(keras.optimizers.SGD(0.5), group=1, lr_spread="power")
        opt.build([weight])
        step = tf.function(opt.apply) if graph else opt.apply
        seen = []
        for _ in range(3):
            opt.record_loss(1.0)
            step([tf.constant(1.0)])
            seen.append(float(weight.numpy()))
            opt.learning_rate.assign(opt.learning_rate * 0.5)  # as callbacks do
        opt.learning_rate = float(opt.learning_rate) * 2  # as Keras' ReduceLROnPlateau does
        opt.drain()
        rates = [opt.get_state()["learning_rate"], opt.get_config()["learning_rate"], float(opt.learning_rate)]
        return [*seen, *map(float, rates)]

    own = [-0.5, -0.75, -0.875]
    assert Cluster(2).run(train) == [[at * 2**rank for at in own] + [0.125] * 3 for rank in range(2)]


def test_by_real_losses():
    problem, following = least_squares(3, MOMENTUM), Following("lsgd", several(3, 3), 2, 4, told=square, loss_window=4)
    seen = run(problem, following, STEPS, in_step=True, graph=True)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen)
    check_leaders(outcome, following, STEPS)


def test_who_diverges_does_not_lead_until_its_last_losses_are_finite_again():
    """Rank 1 would lead always, but for the steps around its NaN and its infinity."""

    def told(z: Any, rank: int, step: int) -> float:
        if rank == 1:
            return {20: math.nan, 40: -math.inf, 60: math.inf, 80: -math.nan}.get(step, 0.5)
        return drawn(z, rank, step)

    problem, following = least_squares(2, MOMENTUM), Following("lsgd", several(2, 1), 2, 2, told=told, loss_window=5)
    seen = run(problem, following, STEPS, in_step=True, graph=True)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen)
    assert check_leaders(outcome, following, STEPS) == {0, 1}
    others = [step - 1 for step, leader in outcome.leaders(0, -1) if leader != 1]
    assert others == [start + more for start in (20, 40, 60, 80) for more in (0, 2, 4)]


def test_several_steps_in_one_graph_are_pulled_in_order():
    """As with ``steps_per_execution``; the gradients depend on nothing that would order them."""
    following = Following(
        "lsgd", several(2, 2), 1, 3, loss_window=NEVER_OLD, told=lambda z, rank, step: float((step * 7 + rank * 3) % 5)
    )
    problem = dataclasses.replace(least_squares(2, MOMENTUM), gradient=lambda z, rank, step: np.full(6, 1.0 + rank))

    class Several(LeaderTrainer):
        def _take(self, *given: Any) -> None:
            losses, *gradients = given
            for loss in tf.unstack(losses):
                self.opt.record_loss(loss)
                self.opt.apply(gradients, self.variables)

    def train(rank: int) -> tuple[Any, list[Any], Any, Any]:
        trainer = Several(problem, rank, following, graph=True)
        log = trainer.worker().receiver.log = []
        for first in range(0, 20, 4):
            losses = [following.told(None, rank, first + step) for step in range(1, 5)]
            trainer._apply(tf.constant(losses), *trainer.given(trainer.weights())[1:])
        own, stats = trainer.weights(), trainer.opt.stats()
        trainer.opt.drain()
        return own, log, stats, trainer.weights()

    held, logs, stats, drained = zip(*Cluster(2, jitter=0.001).run(train), strict=True)
    outcome = replay(problem, following, logs)
    for rank in range(2):
        np.testing.assert_allclose(held[rank], outcome.path[rank][-1], rtol=0, atol=1e-5)
        np.testing.assert_allclose(drained[rank], outcome.drained[0], rtol=0, atol=1e-5)
        assert len(outcome.path[rank]) == stats[rank].steps == 20
        assert stats[rank].mean_loss == outcome.means[rank][-1]
