"""What a user's own code may do around a wrapped torch optimizer, and must find as it left it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError, WaitTimeoutError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster


def one_weight(**options: Any) -> tuple[torch.nn.Parameter, Any]:
    """A parameter and plain SGD around it."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    return parameter, hvd.EagerOptimizer(torch.optim.SGD([parameter], lr=1.0), **options)


def take_step(parameter: torch.nn.Parameter, opt: Any) -> None:
    """A step by backward, so that hooks hand over."""
    opt.zero_grad()
    parameter.sum().backward()
    opt.step()


class Counting(torch.optim.Optimizer):
    """Keeps a count in its groups, as schedule-free optimizers do; and has private methods of common names."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group["lr"])
            group["k"] += 1

    def _update(self, parameter: torch.Tensor, lr: float) -> None:
        parameter.data -= lr * parameter.grad

    _apply = _worker = _hand_over = _show = _finish = _share = _update


def test_what_an_optimizer_keeps_in_its_groups_stays_and_its_private_methods_are_its_own():
    def train(rank: int) -> tuple[float, int]:
        parameter = torch.nn.Parameter(torch.zeros(2))
        opt = hvd.EagerOptimizer(Counting([parameter], lr=1.0), quorum="all")
        for step in range(5):
            opt.param_groups[0]["lr"] = 1.0 + rank + step / 8  # ranks differ, so a round's numbers are written in
            take_step(parameter, opt)
        opt.drain()
        return parameter[0].item(), opt.param_groups[0]["k"]

    (first, k), (other, other_k) = Cluster(2).run(train)
    assert first == other
    assert k == other_k == 5


def test_a_scheduler_in_a_step_hook_keeps_its_change():
    def train(rank: int) -> float:
        parameter, opt = one_weight(quorum="all")
        opt.register_step_post_hook(lambda *_: opt.param_groups[0].update(lr=opt.param_groups[0]["lr"] / 2))
        opt.param_groups[0]["lr"] = 1.0 + rank
        for _ in range(3):
            take_step(parameter, opt)
        opt.drain()
        return float(opt.param_groups[0]["lr"])

    assert set(Cluster(2).run(train)) <= {0.125, 0.25}


def test_a_scheduler_made_before_the_wrapper_outlives_a_loaded_state():
    def train(rank: int) -> float:
        parameter = torch.nn.Parameter(torch.zeros(2))
        plain = torch.optim.SGD([parameter], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
        opt = hvd.EagerOptimizer(plain, quorum="all")
        opt.load_state_dict(opt.state_dict())
        for _ in range(3):
            take_step(parameter, opt)
            scheduler.step()
        opt.drain()
        return float(opt.param_groups[0]["lr"])

    assert Cluster(2).run(train) == [0.125, 0.125]


def test_a_model_is_let_go_with_its_optimizer():
    def train(rank: int) -> bool:
        parameter, opt = one_weight(quorum="solo", compression=hvd.Compression.fp16)
        take_step(parameter, opt)
        opt.drain()
        alive = weakref.ref(parameter)
        del parameter, opt
        gc.collect()
        return alive() is None

    assert Cluster(2).run(train) == [True, True]


def test_groups_in_another_order_are_refused():
    def train(rank: int) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(4)]
        a, b, c, d = parameters if rank == 0 else [parameters[i] for i in (0, 2, 1, 3)]
        opt = hvd.EagerOptimizer(torch.optim.SGD(parameters, lr=1.0), groups=[[a, b], [c, d]])
        opt.drain()

    for outcome in Cluster(2).outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)
        assert "buckets" in str(outcome)


def test_restored_gradients_survive_a_mismatch_that_is_mended():
    def train(rank: int) -> float:
        parameter, opt = one_weight(quorum="solo")
        state = opt.state_dict()
        state["hvd_async"] |= {"vectors": [torch.tensor([4.0, 4.0, 1.0])], "versions": [[0]]}
        opt.load_state_dict(state)
        with torch.no_grad():
            parameter += rank
        with pytest.raises(ReplicaMismatchError):
            opt.drain()
        with torch.no_grad():
            parameter.zero_()
        opt.drain()
        return parameter[0].item()

    assert Cluster(2).run(train) == [-4.0, -4.0]


@pytest.mark.parametrize("broken_off", ["step", "drain"])
def test_what_is_broken_off_can_be_done_again(broken_off):
    """As Ctrl-C would, HVD_ASYNC_TIMEOUT ends a wait; going on must not bring the others down."""

    def train(rank: int) -> float:
        engine = local_engine()
        assert engine is not None
        parameter, opt = one_weight(quorum="all")
        take_step(parameter, opt)
        if rank == 0:
            engine.timeout = 0.05
            opt.zero_grad()
            parameter.sum().backward()
            if broken_off == "step":
                with pytest.raises(WaitTimeoutError):
                    opt.step()
            else:
                engine.timeout = float("inf")
                opt.step()
                engine.timeout = 0.05
                with pytest.raises(WaitTimeoutError):
                    opt.drain()
            engine.timeout = float("inf")
            stalled.release()
        else:
            if broken_off == "drain":
                take_step(parameter, opt)
            assert stalled.acquire(timeout=30)
            if broken_off == "step":
                take_step(parameter, opt)
        if broken_off == "step":
            take_step(parameter, opt)
        elif rank == 0:
            with pytest.raises(ReplicaStateError, match="broken off"):
                take_step(parameter, opt)
        opt.drain()
        return parameter[0].item()

    stalled = threading.Semaphore(0)
    steps = 3 if broken_off == "step" else 2
    left_out = 0.5 if broken_off == "step" else 0.0  # (a gradient of weights that lack the broken-off step's round)
    assert Cluster(2).run(train) == [left_out - steps] * 2


def test_batch_norm_statistics_of_a_rank_that_saw_nan_have_no_say():
    def train(rank: int) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(2))
        mean = torch.tensor([float("nan"), 1.0] if rank == 1 else [2.0 * rank, 4.0])
        opt = hvd.EagerOptimizer(torch.optim.SGD([parameter], lr=1.0), named_buffers=[("mean", mean)])
        opt.drain()
        return mean.tolist()

    assert Cluster(3).run(train) == [[2.0, 4.0]] * 3


def test_a_rank_that_leaves_without_a_step_that_others_wait_for_is_named():
    def train(rank: int) -> None:
        parameter, opt = one_weight(quorum="solo")
        if rank == 0:
            take_step(parameter, opt)

    first, _ = Cluster(2).outcomes(train, timeout=20)
    assert "rank 1 on host host1 left without a step or drain() of optimizer 0" in str(first)


def test_no_process_set_is_refused_with_a_hint():
    def train(rank: int) -> None:
        with pytest.raises(ValueError, match=r"pass an hvd\.ProcessSet"):
            one_weight(process_set=object())

    Cluster(1).run(train)
