"""torch: optimizers that count in ``param_groups``. Each round counts once, whichever rank led it and however late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.testing import Cluster

STEPS = 5


class Averaging(torch.optim.Optimizer):
    """Counts as schedule-free SGD does: k, weight_sum and lr_max in the groups. ``log`` has what steps were given."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, dict(lr=lr, k=0, weight_sum=0.0, lr_max=-1.0, betas=(0.9, 0.99), **more))
        self.log: list[tuple[float, list[Any]]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr = float(group["lr"])
            self.log.append((lr, [p.grad.clone() for p in group["params"]]))
            group["lr_max"] = max(lr, group["lr_max"])
            weight = (group["k"] + 1) * group["lr_max"] ** 2
            group["weight_sum"] += weight
            for p in group["params"]:
                p.sub_(p.grad, alpha=lr * weight / group["weight_sum"])
            group["k"] += 1


class Distance(Averaging):
    """Counts as Prodigy does: ``d`` stays as it is for some steps, then grows. Its parent counts too."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, d=1e-2, tensor_k=torch.zeros(()))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["tensor_k"] += 1
            if group["k"] >= 2:
                group["d"] *= 2.0
            for p in group["params"]:
                p.grad.mul_(1.0 + group["d"])
        super().step()


COUNTERS = ("k", "weight_sum", "lr_max", "d", "tensor_k")


def counted(opt: Any) -> list[tuple[str, float]]:
    return [(name, float(group[name])) for group in opt.param_groups for name in COUNTERS if name in group]


def replayed(kind: type[Averaging], log: list[tuple[float, list[Any]]]) -> tuple[Any, torch.Tensor]:
    """A plain optimizer of one process that has taken the same steps."""
    parameter = torch.nn.Parameter(torch.ones(3))
    plain = kind([parameter])
    for lr, (gradient,) in log:
        plain.param_groups[0]["lr"] = lr
        # (a child's step has scaled the gradient before its parent logged it)
        parameter.grad = gradient / (1.0 + _factor(plain)) if kind is Distance else gradient.clone()
        plain.step()
    return plain, parameter.detach()


def _factor(plain: Any) -> float:
    group = plain.param_groups[0]
    return float(group["d"] * (2.0 if group["k"] >= 2 else 1.0))


def by_step(opt: Any, step: int) -> None:
    opt.param_groups[0]["lr"] = 0.1 * 0.5**step


def never(opt: Any, step: int) -> None:
    pass


@pytest.mark.parametrize("schedule", [never, by_step])
@pytest.mark.parametrize("kind", [Averaging, Distance])
def test_counters_follow_the_rounds_and_learning_rates_travel(
    kind: type[Averaging], schedule: Callable[[Any, int], None]
):
    """Rank 1 is late: its gradient, and the hyperparameters it knew, come after all of rank 0's rounds; and a drain
    ends with a round of what is left."""
    first_done = [threading.Event() for _ in range(2)]

    def work(rank: int) -> tuple[Any, ...]:
        parameter = torch.nn.Parameter(torch.ones(3))
        opt: Any = hvd.EagerOptimizer(kind([parameter]), quorum="solo", weight_prediction=0, grace=0)
        opt.drain()  # the ranks meet

        def step(number: int) -> None:
            opt.zero_grad()
            ((rank + 1.0) * parameter.pow(2) / 8).sum().backward()
            schedule(opt, number)
            opt.step()

        for epoch in range(2):
            if rank == 0:
                for number in range(STEPS):
                    step(epoch * STEPS + number)
                first_done[epoch].set()
            else:
                assert first_done[epoch].wait(30)
                step(epoch * STEPS)
            opt.drain()
        return opt.log, counted(opt), parameter.detach().clone(), opt.stats().rounds_applied

    results = Cluster(2).run(work)
    for log, counts, weights, applied in results:
        plain, expected = replayed(kind, log)
        assert len(log) == applied == dict(counts)["k"]
        np.testing.assert_allclose([v for _, v in counts], [v for _, v in counted(plain)], rtol=1e-6)
        np.testing.assert_allclose(weights, expected, rtol=1e-5)
    assert results[0][1] == results[1][1]
    assert results[0][2].tolist() == results[1][2].tolist()
    assert [lr for lr, _ in results[0][0]] == [lr for lr, _ in results[1][0]]
    if schedule is by_step:
        assert len({lr for lr, _ in results[0][0]}) > STEPS  # what a user sets still travels with its round


def test_a_schedule_in_a_step_hook_sets_a_hyperparameter():
    """It runs once a round on every rank, and what one rank sets otherwise still travels."""

    def work(rank: int) -> tuple[list[float], float]:
        parameter = torch.nn.Parameter(torch.ones(3))
        opt: Any = hvd.EagerOptimizer(Averaging([parameter], lr=0.1), quorum="all", weight_prediction=0)
        opt.register_step_post_hook(lambda o, *_: o.param_groups[0].update(lr=o.param_groups[0]["lr"] * 0.9))
        for number in range(4):
            parameter.grad = torch.ones(3)
            if number == 2:
                opt.param_groups[0]["lr"] = 0.05
            opt.step()
        opt.drain()
        return [lr for lr, _ in opt.log], opt.param_groups[0]["lr"]

    for rates, last in Cluster(2).run(work):
        np.testing.assert_allclose(rates, [0.1, 0.09, 0.05, 0.045])
        assert last == pytest.approx(0.0405)
