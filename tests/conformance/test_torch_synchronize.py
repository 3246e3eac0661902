"""torch: Horovod's idiom synchronize(), then step() in skip_synchronize(): one round a step, shown in p.grad."""

from __future__ import annotations

import re
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from hvd_async.torch import gradient_replica
from tests.conformance.cases import SCRIPTS
from tests.conformance.drive import wait_for_rounds
from tests.conformance.eager_ranks import SGD
from tests.conformance.torch_ranks import TINY, TorchTrainer, backwards, flat, quadratic, wrap_scripted


@pytest.mark.parametrize("options", [{}, {"round_transform": lambda parameters: None}], ids=["", "round_transform"])
def test_synchronize_shows_one_round_a_step_and_says_what_a_drain_brings(options, tapes):
    """Rank 1 comes when rank 0 has taken its three steps: its gradients are in a fourth round."""
    three_taken = threading.Event()

    def train(rank: int) -> Any:
        trainer = TorchTrainer(SGD, **options)
        opt, shown = trainer.opt, []
        worker = opt._async.worker_now()
        if rank == 1:
            assert three_taken.wait(30)
            wait_for_rounds(worker, 3)
        for step in range(1, 4):
            trainer.gradient(rank, step)
            opt.synchronize()
            shown.append(flat(p.grad for p in backwards(trainer.model)))
            with opt.skip_synchronize():
                opt.step()
            assert worker.version == step
        three_taken.set()
        opt.drain()
        return trainer.weights(), shown

    with warnings.catch_warnings(record=True) as warned:  # (around all ranks: it is not made for threads)
        warnings.simplefilter("always")
        outcomes = Cluster(2).run(train)
    for rank, (weights, shown) in enumerate(outcomes):
        assert weights.tobytes() == outcomes[0][0].tobytes()
        for index, gradient in enumerate(shown):
            np.testing.assert_allclose(gradient, tapes[rank].applied[index].sums[:-1] / 2, atol=1e-6)
    assert len(warned) == (0 if options else 2)
    assert all(re.search(r"drain\(\) applied 1 round\(s\).*round_transform=", str(one.message)) for one in warned)


def test_step_after_synchronize_says_what_to_write():
    parameter = quadratic(1.0)
    opt = wrap_scripted(torch.optim.SGD([parameter], lr=1.0), SCRIPTS[0])
    opt.synchronize()
    shown = parameter.grad.clone()
    with pytest.raises(ReplicaStateError, match=r"with optimizer\.skip_synchronize"):
        opt.step()
    assert parameter.item() == 1.0
    with opt.skip_synchronize():
        opt.step()
    assert torch.equal(parameter.detach(), 1.0 - shown)
    with pytest.raises(ReplicaStateError, match="without synchronize"), opt.skip_synchronize():
        opt.step()


def test_a_round_that_is_shown_and_not_stepped_is_left_out_on_all_ranks():
    def train(rank: int) -> float:
        parameter = quadratic(0.0)
        opt = hvd.EagerOptimizer(torch.optim.SGD([parameter], lr=1.0), quorum="all")
        for step in range(3):
            parameter.grad = torch.full((1,), 10.0**step)
            opt.synchronize()
            if step == 1:
                with opt.skip_synchronize():
                    opt.step()
        opt.drain()
        return parameter.item()

    assert Cluster(2).run(train) == [-10.0, -10.0]


@pytest.mark.parametrize(
    ("steps", "end"), [((8, 2), "cut"), ((2, 8, 5), "drain"), ((3, 0), "drain"), ((3, 0), "cut")], ids=str
)
def test_synchronize_with_uneven_data_leaves_the_replicas_identical(steps, end):
    """Clipping is done on every round; a rank that has drained cannot, and takes over what the ones that did have."""

    def train(rank: int) -> tuple[bytes, bytes]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.ones(4))
        frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        opt = hvd.EagerOptimizer(
            torch.optim.SGD([weight, frozen], lr=0.1, momentum=0.9), quorum="solo", bucket_cap_mb=TINY
        )
        for step in range(steps[rank]):
            opt.zero_grad()
            ((weight * (5.0 + rank + step)).sum() + frozen.sum()).backward()
            opt.synchronize()
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            with opt.skip_synchronize():
                opt.step()
        getattr(opt, end)()
        opt.drain()
        assert opt.consensus_distance() < 1e-12  # weights in float64: the mean of three equal ones may round
        momentum = opt.state[weight]["momentum_buffer"]
        return weight.detach().numpy().tobytes(), momentum.numpy().tobytes()

    with pytest.warns(UserWarning, match=r"weights of rank \d, which had most.*round_transform="):
        outcomes = Cluster(len(steps)).run(train)
    assert len(set(outcomes)) == 1


def test_synchronize_with_even_data_moves_no_weights_between_ranks(monkeypatch):
    monkeypatch.setattr(gradient_replica, "take_over", lambda *_: pytest.fail("took over"))

    def train(rank: int) -> None:
        weight = torch.nn.Parameter(torch.ones(4))
        opt = hvd.EagerOptimizer(torch.optim.SGD([weight], lr=0.1), quorum="solo")
        for _ in range(3):
            opt.zero_grad()
            weight.sum().backward()
            opt.synchronize()
            with opt.skip_synchronize():
                opt.step()
        opt.drain()

    with pytest.warns(UserWarning, match="never showed"):  # (the round that only flushes)
        Cluster(2).run(train)
