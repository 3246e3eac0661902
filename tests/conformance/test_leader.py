"""Ranks that follow a leader, or a center, equal the float64 reference on the pulls that each has taken up."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from hvd_async.testing import Cluster
from tests.conformance.cases import CASES
from tests.conformance.leader_cases import ELASTIC, SCHEDULES
from tests.conformance.leader_drive import check, check_leaders
from tests.conformance.leader_reference import NEVER_OLD, Following, drawn, replay, several
from tests.conformance.weight_ranks import MOMENTUM, SGD, KerasGraphRank, KerasRank, TorchRank

NESTEROV, DECAY, ADAM, ADAMW = CASES[2], CASES[5], CASES[6], CASES[7]
DOUBLE = {"dtype": torch.float64}


def grouped(size: int, ranks: int, *periods: int) -> Following:
    return Following("lsgd", several(size, ranks), *periods, loss_window=3)


@pytest.mark.parametrize(
    ("binding", "size", "following", "case", "options"),
    [
        (TorchRank, 1, grouped(1, 1, 1, 1), SGD, {}),
        (TorchRank, 3, grouped(3, 3, 3, 7), DECAY, DOUBLE),
        (TorchRank, 6, grouped(6, 3, 2, 8), ADAM, {}),
        (KerasRank, 3, grouped(3, 1, 5, 5), NESTEROV, {}),
        (KerasGraphRank, 4, grouped(4, 2, 2, 8), ADAM, {}),
        (TorchRank, 3, ELASTIC, MOMENTUM, {}),
        (TorchRank, 4, ELASTIC, NESTEROV, DOUBLE),
        (KerasRank, 1, ELASTIC, ADAM, {}),
        (KerasGraphRank, 3, ELASTIC, MOMENTUM, {}),
        # learning rates that differ between ranks, also in weight decay
        (TorchRank, 4, dataclasses.replace(grouped(4, 2, 3, 6), lr_spread="linear"), DECAY, DOUBLE),
        (TorchRank, 3, dataclasses.replace(ELASTIC, lr_spread="power"), ADAM, DOUBLE),
        (KerasRank, 2, dataclasses.replace(ELASTIC, lr_spread="linear"), NESTEROV, {}),
        (KerasGraphRank, 3, dataclasses.replace(grouped(3, 3, 3, 6), lr_spread="power"), ADAMW, {}),
    ],
    ids=lambda of: f"{of.algorithm}-{of.lr_spread}" if isinstance(of, Following) else getattr(of, "__name__", None),
)
def test_in_step_ranks_follow_whom_they_should_when_they_should(binding, size, following, case, options):
    """Each pull when the period is over, towards the rank with the lowest mean loss then, and no other."""
    case = dataclasses.replace(case, lr=case.lr / (1 if following.lr_spread == "none" else 10))
    problem, seen = binding.run(following, 40, Cluster(size), case, together=True, **options)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen, 1e-5 if not options else 1e-8 if case.kind == "adam" else 1e-11)
    assert {own.stats.steps for own in seen} == {40}
    if following.algorithm == "lsgd":
        assert check_leaders(outcome, following, 40) == set(range(size))
        assert [own.stats.mean_loss for own in seen] == pytest.approx([means[-1] for means in outcome.means])
    else:
        assert {own.stats.pulls for own in seen} <= {40 // 3, 40 // 3 + 1}  # (what is left may do for the last)
        assert set(seen[0].stats.led) == {-1}


@pytest.mark.parametrize(
    ("binding", "size", "following"),
    [
        pytest.param(TorchRank, 4, Following("lsgd", several(4, 2), 2, 5, loss_window=NEVER_OLD), id="torch-lsgd"),
        pytest.param(TorchRank, 3, ELASTIC, id="torch-easgd"),
        pytest.param(KerasRank, 3, Following("lsgd", several(3, 1), 2, 5, loss_window=NEVER_OLD), id="keras-lsgd"),
        pytest.param(KerasGraphRank, 3, ELASTIC, id="keras-graph-easgd"),
    ],
)
def test_pulls_that_land_at_any_moment_of_a_step_are_replayed(binding, size, following):
    """Commands are held back at random, and every other rank is slow."""
    behind = [1 + 2 * (rank % 2) for rank in range(size)]
    problem, seen = binding.run(following, 60, Cluster(size, jitter=0.002, seed=size), behind=behind)
    check(replay(problem, following, [own.log for own in seen]), seen)
    assert min(own.stats.pulls for own in seen) > 0


@pytest.mark.parametrize(("name", "binding"), [*((name, TorchRank) for name in SCHEDULES), ("by-step", KerasGraphRank)])
def test_strengths(name, binding):
    """Each counts where it should: of a rank's own step, when a pull has come or between two."""
    following, options = SCHEDULES[name], DOUBLE if binding is TorchRank else {}
    problem, seen = binding.run(following, 30, Cluster(4), together=True, **options)
    logs = [own.log for own in seen]
    outcome = replay(problem, following, logs)
    check(outcome, seen, 1e-11 if options else 1e-5)
    if following.algorithm == "lsgd":
        check_leaders(outcome, following, 30)  # a pull whose strengths are 0 never goes
    changed = dataclasses.replace(following, local_pull=0.3, local_prox=0.3, global_pull=0.3, alpha=0.3)
    other = replay(problem, changed, logs)
    assert np.abs(np.array(other.path) - outcome.path).max() > 1e-4


@pytest.mark.parametrize("binding", [TorchRank, KerasGraphRank])
def test_who_diverges_does_not_lead_until_its_last_losses_are_finite_again(binding):
    """Rank 1 would lead always, except for the steps around its NaN and its infinity."""

    def loss_of(z: Any, rank: int, step: int) -> float:
        return {10: math.nan, 22: -math.inf}.get(step, 0.5) if rank == 1 else drawn(z, rank, step)

    following = Following("lsgd", several(2, 1), 2, 2, loss_of=loss_of, loss_window=5)
    problem, seen = binding.run(following, 31, Cluster(2), together=True)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen)
    assert check_leaders(outcome, following, 31) == {0, 1}
    others = [step - 1 for step, leader in outcome.leaders(0, -1) if leader != 1]
    assert others == [start + more for start in (10, 22) for more in (2, 4)]  # (a choice sees a loss one step later)
