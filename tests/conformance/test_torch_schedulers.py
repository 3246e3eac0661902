"""torch: groups' hyperparameters, schedulers that run apart, and hooks of steps, of which each round is one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.testing import Cluster
from tests.conformance.cases import SCRIPTS, Script
from tests.conformance.eager_ranks import UNIT
from tests.conformance.torch_ranks import TorchTrainer, TorchVectors, quadratic, wrap_scripted


def test_groups_keep_their_own_hyperparameters():
    def train(rank: int) -> list[float]:
        mine = [quadratic(1.0), quadratic(1.0)]
        groups = [{"params": mine[:1], "lr": 0.1}, {"params": mine[1:], "lr": 0.5, "weight_decay": 0.2}]
        opt = hvd.EagerOptimizer(torch.optim.SGD(groups), quorum="all")
        opt.step()
        opt.drain()
        return [p.item() for p in mine]

    for weights in Cluster(2).run(train):
        assert weights == pytest.approx([1 - 0.1, 1 - 0.5 * 1.2])


def test_tuples_and_tensors_stay_what_they_are():
    parameter = quadratic(1.0)
    plain = torch.optim.Adam([parameter], lr=torch.tensor(0.01), betas=(0.8, 0.9))
    opt = wrap_scripted(plain, SCRIPTS[0])
    opt._async.worker.lr = 0.02
    opt.step()
    assert isinstance(opt.param_groups[0]["lr"], torch.Tensor)
    assert opt.param_groups[0]["lr"].item() == pytest.approx(0.01)
    assert opt.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("before", [True, False])
def test_scheduler_made_before_or_after_wrapping(before):
    parameter = quadratic(0.0)
    plain = torch.optim.SGD([parameter], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if before:
            scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
            opt = wrap_scripted(plain, SCRIPTS[0])
        else:
            opt = wrap_scripted(plain, SCRIPTS[0])
            scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
        rates = []
        for _ in range(3):
            parameter.grad = torch.ones(1)
            opt.step()
            rates.append(opt._async.worker.hypers[-1][0]["lr"])
            scheduler.step()
    assert rates == [1.0, 0.5, 0.25]


# -- schedulers -----------------------------------------------------------------------------------------------

Step = Callable[[int], None]


def step_lr(opt: Any, rank: int) -> Step:
    """Halves the rate every 1 + rank steps."""
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1 + rank, gamma=0.5)
    return lambda step: scheduler.step()


def plateau(opt: Any, rank: int) -> Step:
    """Halves it when this rank's own loss, made up here, has not fallen."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=rank)
    return lambda step: scheduler.step(1.0 if rank < 2 else 1.0 / (1 + step))


def one_cycle(opt: Any, rank: int) -> Step:
    """Changes momentum too; rank r steps it only every r + 1 steps."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=50)
    return lambda step: scheduler.step() if step % (rank + 1) == 0 else None


def by_hand(opt: Any, rank: int) -> Step:
    """Sets rates, momentum and decay of the groups as it likes."""

    def change(step: int) -> None:
        for index, group in enumerate(opt.param_groups):
            group.update(lr=0.01 * (1 + rank + step % 3 + index), momentum=0.1 * rank, weight_decay=0.01 * index)

    return change


@pytest.mark.parametrize("quorum", ["solo", "all"])
@pytest.mark.parametrize("schedule", [step_lr, plateau, one_cycle, by_hand], ids=lambda f: f.__name__)
def test_schedulers_that_run_apart_do_not_split_the_replicas(schedule, quorum):
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        first, second, *others = parameters
        groups = [{"params": [first, second]}, {"params": others, "lr": 0.02}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)

    def train(rank: int) -> tuple[list[list[float]], list[float], list[float]]:
        trainer = TorchTrainer(grouped, quorum=quorum, max_staleness=4, bucket_cap_mb=2e-4)
        alone = grouped(torch.nn.Parameter(torch.zeros(1)) for _ in range(4))
        change, expected = schedule(trainer.opt, rank), schedule(alone, rank)
        for step in range(8 + rank):
            trainer.gradient(rank, step)
            trainer.step()
            change(step)
            alone.step()
            expected(step)
        trainer.opt.drain()
        rates, own = ([g["lr"] for g in opt.param_groups] for opt in (trainer.opt, alone))
        return trainer.state(), rates, own

    outcomes = Cluster(3, jitter=0.002).run(train)
    assert all(state == outcomes[0][0] for state, _, _ in outcomes)
    assert len({tuple(rates) for _, rates, _ in outcomes}) > 1, "the schedulers did not run apart"
    for _, rates, own in outcomes:
        assert rates == own  # as if no other rank were there


# -- step hooks -----------------------------------------------------------------------------------------------


def test_step_hooks_run_once_a_round_that_carried_something():
    parameter = quadratic(1.0)
    opt = wrap_scripted(torch.optim.SGD([parameter], lr=0.1), Script("", ((), (1, 0, 1, 1))))
    ran = []
    opt.register_step_post_hook(lambda *_: ran.append(1))
    opt.step()
    assert ran == []
    opt.step()
    assert ran == [1, 1, 1]


def test_a_scheduler_in_a_step_hook_keeps_its_change():
    def train(rank: int) -> float:
        one = TorchVectors([2], UNIT, quorum="all")
        opt = one.opt
        opt.register_step_post_hook(lambda *_: opt.param_groups[0].update(lr=opt.param_groups[0]["lr"] / 2))
        opt.param_groups[0]["lr"] = 1.0 + rank
        for _ in range(3):
            one.take(1.0)
        opt.drain()
        return one.rate()

    assert set(Cluster(2).run(train)) <= {0.125, 0.25}


def test_a_scheduler_made_before_the_wrapper_outlives_a_loaded_state():
    def train(rank: int) -> float:
        made = []

        def make(parameters: Any) -> torch.optim.Optimizer:
            plain = torch.optim.SGD(parameters, lr=1.0)
            made.append(torch.optim.lr_scheduler.ExponentialLR(plain, 0.5))
            return plain

        one = TorchVectors([2], make, quorum="all")
        one.opt.load_state_dict(one.opt.state_dict())
        for _ in range(3):
            one.take(1.0)
            made[0].step()
        one.opt.drain()
        return one.rate()

    assert Cluster(2).run(train) == [0.125, 0.125]
