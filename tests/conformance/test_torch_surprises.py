"""torch: surprises for a user's own code around a wrapped optimizer: own options, what is broken off, plain states."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaStateError, WaitTimeoutError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conformance.eager_ranks import UNIT
from tests.conformance.torch_ranks import TorchVectors


def test_a_model_is_let_go_with_its_optimizer():
    def train(rank: int) -> bool:
        one = TorchVectors([2], UNIT, quorum="solo", compression=hvd.Compression.fp16)
        one.take(1.0)
        one.opt.drain()
        alive = weakref.ref(one.parameters[0])
        del one
        gc.collect()
        return alive() is None

    assert Cluster(2).run(train) == [True, True]


@pytest.mark.parametrize("broken_off", ["step", "drain"])
def test_what_is_broken_off_can_be_done_again(broken_off):
    """HVD_ASYNC_TIMEOUT ends a wait, as Ctrl-C would; continuing must not bring the others down."""

    def train(rank: int) -> list[float]:
        engine = local_engine()
        assert engine is not None
        one = TorchVectors([1], UNIT, quorum="all")
        one.take(1.0)
        if rank and broken_off == "drain":
            one.take(1.0)
        if rank:
            assert stalled.wait(30)
        else:
            if broken_off == "drain":
                one.take(1.0)
            engine.timeout = 0.05
            with pytest.raises(WaitTimeoutError):
                one.take(1.0) if broken_off == "step" else one.opt.drain()
            engine.timeout = float("inf")
            stalled.set()
            if broken_off == "drain":
                with pytest.raises(ReplicaStateError, match=r"broken off|was interrupted"):
                    one.take(1.0)
        if broken_off == "step":
            for _ in range(1 + rank):
                one.take(1.0)
        one.opt.drain()
        return one.weights().tolist()

    stalled = threading.Event()
    # A gradient of weights that lack the broken-off step's round is left out.
    assert Cluster(2).run(train) == [[0.5 - 3.0 if broken_off == "step" else -2.0]] * 2


def test_a_rank_that_leaves_without_a_step_that_others_wait_for_is_named():
    def train(rank: int) -> None:
        one = TorchVectors([1], UNIT, quorum="solo")
        if rank == 0:
            one.take(1.0)

    first, _ = Cluster(2).outcomes(train, timeout=20)
    assert "rank 1 on host host1 left without a step or drain() of optimizer 0" in str(first)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_an_odd_pass_is_named_at_a_drain_and_goes_with_the_next_step(nonfinite):
    def train(rank: int) -> tuple[float, list[str]]:
        parameter = torch.nn.Parameter(torch.zeros(1))
        opt = hvd.EagerOptimizer(
            torch.optim.SGD([parameter], lr=1.0), quorum="all", backward_passes_per_step=2, nonfinite=nonfinite
        )
        said: list[str] = []
        opt._async.worker_now()
        opt.zero_grad()
        for number in range(1, 5):
            (parameter * number).sum().backward()
            if number == 2:
                opt.step()
                opt.zero_grad()
            if number == 3:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    opt.drain()
                said += [str(one.message) for one in caught]
                assert [one.filename for one in caught] == [__file__]
        opt.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.drain()
        return parameter.item(), said

    (outcome,) = Cluster(1).run(train)
    assert outcome[0] == -10.0
    assert [("1 backward pass(es) short of a step of 2" in one, "p.grad" in one) for one in outcome[1]] == [
        (True, True)
    ]
