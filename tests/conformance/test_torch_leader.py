"""torch: ranks that follow a leader, or a centre, equal the float64 reference on the pulls that each has taken up."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from hvd_async.testing import Cluster
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import Problem, least_squares
from tests.conformance.leader_cases import ELASTIC, GROUPS, PERIODS, SCHEDULES, square
from tests.conformance.leader_drive import check, check_leaders
from tests.conformance.leader_reference import NEVER_OLD, Following, drawn, replay, several
from tests.conformance.torch_leader_ranks import run

STEPS = 100
SGD, MOMENTUM, NESTEROV, ADAM = CASES[0], CASES[1], CASES[5], CASES[6]
KINDS = list(zip(GROUPS, itertools.cycle([torch.float32, torch.float64]), itertools.cycle(PERIODS), strict=False))
WITHIN = {torch.float32: 1e-5, torch.float64: 1e-11}


def mean_square(size: int) -> Problem:
    return least_squares(size, MOMENTUM)


# -- every size and group -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "dtype", "periods"), KINDS, ids=str)
def test_lsgd_in_step_follows_whom_it_should_when_it_should(shape, dtype, periods):
    """Each pull when the period is over, towards the rank with the lowest mean loss then, and no other."""
    size, ranks = shape
    problem, following = mean_square(size), Following("lsgd", several(size, ranks), *periods, loss_window=3)
    seen = run(problem, following, STEPS, in_step=True, dtype=dtype)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen, WITHIN[dtype])
    assert check_leaders(outcome, following, STEPS) == set(range(size))
    assert {own.stats.steps for own in seen} == {STEPS}
    assert [own.stats.mean_loss for own in seen] == pytest.approx([means[-1] for means in outcome.means])


@pytest.mark.parametrize(("shape", "dtype", "periods"), KINDS, ids=str)
def test_lsgd_replays_whatever_comes_late(shape, dtype, periods):
    """Commands are held back at random, or every other rank is slow."""
    size, ranks = shape
    following = Following("lsgd", several(size, ranks), *periods, loss_window=NEVER_OLD)
    problem = mean_square(size)
    slow = dtype == torch.float64
    cluster = Cluster(size, jitter=0.0 if slow else 0.002, seed=size)
    seen = run(problem, following, STEPS, cluster, dtype=dtype, behind=[1 + 2 * (r % 2) for r in range(size)] * slow)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen, WITHIN[dtype])
    assert min(own.stats.pulls for own in seen) > 0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("how", ["in step", "late", "slow"])
def test_easgd(how, size):
    problem, dtype = mean_square(size), torch.float32 if size % 2 else torch.float64
    seen = run(
        problem, ELASTIC, STEPS, Cluster(size, jitter=0.002 * (how == "late"), seed=size), how == "in step",
        [1 + 3 * (rank % 2) for rank in range(size)] if how == "slow" else (), dtype=dtype,
    )  # fmt: skip
    outcome = replay(problem, ELASTIC, [own.log for own in seen])
    check(outcome, seen, WITHIN[dtype])
    if how == "in step":
        assert {own.stats.pulls for own in seen} <= {STEPS // 3, STEPS // 3 + 1}  # (what is left may do for the last)
    assert set(seen[0].stats.led) == {-1}


# -- strengths, rates, losses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("how", ["in step", "late"])
def test_strengths(name, how):
    """Each counts where it should: of a rank's own step, when a pull has come or between two."""
    problem = mean_square(4)
    following = Following("lsgd", ((0, 2), (1, 3)), 2, 7, loss_window=NEVER_OLD, **SCHEDULES[name])
    cluster = Cluster(4, jitter=0.002 * (how == "late"))
    seen = run(problem, following, STEPS, cluster, how == "in step", dtype=torch.float64)
    check(replay(problem, following, [own.log for own in seen]), seen, 1e-11)
    if how == "in step":
        changed = dataclasses.replace(following, local_pull=0.3, local_prox=0.3, global_pull=0.3)
        other = replay(problem, changed, [own.log for own in seen])
        assert np.abs(other.x - replay(problem, following, [own.log for own in seen]).x).max() > 1e-6


@pytest.mark.parametrize(("alpha", "beta"), [(None, 0.9), (0.0, 0.5), (0.7, 0.0), (0.3, 0.6)])
def test_easgds_strengths(alpha, beta):
    problem, following = mean_square(3), dataclasses.replace(ELASTIC, alpha=alpha, beta=beta)
    seen = run(problem, following, STEPS, Cluster(3, jitter=0.001), dtype=torch.float64)
    check(replay(problem, following, [own.log for own in seen]), seen, 1e-11)


@pytest.mark.parametrize("spread", ["linear", "power"])
@pytest.mark.parametrize("case", [SGD, NESTEROV, ADAM], ids=lambda case: case.name)
@pytest.mark.parametrize("algorithm", ["lsgd", "easgd"])
def test_learning_rates_that_differ_between_ranks(algorithm, case, spread):
    """Rank i's is i + 1, or 2^i, times the optimizer's."""
    problem = least_squares(4, dataclasses.replace(case, lr=case.lr / 10))
    following = Following(algorithm, several(4, 2), 3, 6, lr_spread=spread)
    seen = run(problem, following, STEPS, in_step=True, dtype=torch.float64)
    check(replay(problem, following, [own.log for own in seen]), seen, 1e-8 if case is ADAM else 1e-11)


@pytest.mark.parametrize("window", [1, 4, 50])
def test_by_real_losses(window):
    problem, following = mean_square(3), Following("lsgd", several(3, 3), 2, 4, told=square, loss_window=window)
    seen = run(problem, following, STEPS, in_step=True)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen)
    check_leaders(outcome, following, STEPS)


def test_who_diverges_does_not_lead_until_its_last_losses_are_finite_again():
    """Rank 1 would lead always, but for the steps around its NaN and its infinity."""

    def told(z, rank: int, step: int) -> float:
        if rank == 1:
            return {20: math.nan, 40: -math.inf, 60: math.inf, 80: -math.nan}.get(step, 0.5)
        return drawn(z, rank, step)

    problem, following = mean_square(3), Following("lsgd", several(3, 1), 2, 2, told=told, loss_window=5)
    seen = run(problem, following, STEPS, in_step=True)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen)
    led = check_leaders(outcome, following, STEPS)
    assert led == {0, 1, 2}
    others = [step - 1 for step, leader in outcome.leaders(0, -1) if leader != 1]
    assert others == [start + more for start in (20, 40, 60, 80) for more in (0, 2, 4)]
