"""torch: gradient scaling, overflows that stay on their rank, automatic mixed precision."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.eager_ranks import ADAM, MOMENTUM, SGD, TINY, UNIT
from tests.conformance.fake_gpu import FakeGpu
from tests.conformance.host_counts import Operators
from tests.conformance.torch_ranks import (
    TorchTrainer,
    TorchVectors,
    apply_plainly,
    conv_model,
    flat,
    loss,
    plain,
)


def make_scaler(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)


def make_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "fused":
        return torch.optim.Adam(parameters, lr=0.01, fused=True)
    return plain({"momentum": MOMENTUM, "adam": ADAM}[kind], parameters)


def by_hand(kind: str, gradients: list[Any]) -> Any:
    """The model's weights after steps with these gradients."""
    model = conv_model()
    optimizer = make_optimizer(kind, model.parameters())
    for gradient in gradients:
        apply_plainly(optimizer, list(model.parameters()), gradient)
    return flat(model.parameters())


@pytest.fixture(params=["cpu", "gpu"])
def device(request):
    """A CPU, or a GPU on which the host does not read whether a step has overflowed."""
    if request.param == "cpu":
        yield
        return
    with FakeGpu().installed():
        yield


STEPS = 8
FINE, OVER = (16.0, 512.0), (16.0, 2.0**127)
"""Scales that ranks begin with. Float32 cannot bear the last: rank 1's first steps overflow, until it has fallen."""


@pytest.mark.parametrize(
    ("kind", "quorum", "scales", "unscale"),
    [
        ("momentum", "all", FINE, True),
        ("adam", "all", FINE, False),
        ("fused", "all", FINE, True),
        ("momentum", "solo", OVER, False),
        ("fused", "all", OVER, False),
        ("momentum", "all", OVER, False),
    ],
)
@pytest.mark.usefixtures("device")
def test_each_rank_has_its_own_scale_and_an_overflow_is_a_step_without_gradient_there(kind, quorum, scales, unscale):
    """Powers of two are exact: the averages are those of gradients that were never scaled."""

    def train(rank: int) -> tuple[Any, list[Any], Any]:
        model, scaler = conv_model(), make_scaler(scales[rank])
        opt = hvd.EagerOptimizer(make_optimizer(kind, model.parameters()), quorum=quorum, scaler=scaler)
        true = []
        for step in range(STEPS):
            opt.zero_grad()
            value = loss(model, rank, step) * 8
            true.append(flat(torch.autograd.grad(value, list(model.parameters()), retain_graph=True)))
            scaler.scale(value).backward()
            finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
            if not finite:
                true[-1] *= 0
            if unscale:
                scaler.unscale_(opt)  # (clips this rank's gradients, with a warning)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                true[-1] *= min(1.0, 0.05 / np.linalg.norm(true[-1]))
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            assert (scaler.get_scale() < before) == (not finite)
        opt.drain()
        return flat(model.parameters()), true, opt.stats()

    with pytest.warns(UserWarning, match="round_transform=") if unscale else contextlib.nullcontext():
        outcomes = Cluster(2).run(train)
    lost = sum(not gradient.any() for gradient in outcomes[1][1])
    assert lost in (range(1, STEPS) if scales is OVER else [0]), "the example has lost its point"
    for rank, (weights, _, stats) in enumerate(outcomes):
        assert weights.tobytes() == outcomes[0][0].tobytes()
        assert np.isfinite(weights).all()
        assert stats.steps == STEPS
        assert stats.gradients_skipped == (lost if rank else 0)
        assert stats.gradients_produced == STEPS - stats.gradients_skipped
        assert stats.gradients_applied == stats.total_produced == 2 * STEPS - lost
    if quorum == "all":
        averages = [sum(parts) / 2 for parts in zip(*(true for _, true, _ in outcomes), strict=True)]
        np.testing.assert_allclose(outcomes[0][0], by_hand(kind, averages), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("device")
def test_an_overflow_in_one_bucket_leaves_the_whole_step_out():
    def train(rank: int) -> tuple[list[float], int]:
        scaler = make_scaler(4.0)
        one = TorchVectors([1, 1], UNIT, quorum="all", bucket_cap_mb=TINY, scaler=scaler)
        for step in range(3):
            scale = float(scaler.scale(torch.ones(())))
            one.backward([[math.inf if (rank, step) == (1, 1) else scale, scale]])
            scaler.step(one.opt)
            scaler.update()
        one.opt.drain()
        return one.weights().tolist(), one.opt.stats().gradients_skipped

    assert Cluster(2).run(train) == [([-2.5, -2.5], 0), ([-2.5, -2.5], 1)]


@pytest.mark.parametrize("overflows", [False, True])
def test_with_a_scaler_a_step_does_not_wait_for_a_gpu(overflows):
    """torch itself waits once a step, with an optimizer that does not know of scalers."""
    gpu = FakeGpu()

    def train(rank: int) -> int:
        scaler = make_scaler(4.0)
        one = TorchVectors([1, 1], UNIT, quorum="all", bucket_cap_mb=TINY, scaler=scaler)
        scale = float(scaler.scale(torch.ones(())))
        one.opt._async.worker_now()
        for step in range(3):
            one.backward([[math.inf if overflows and step == 1 else scale, scale]])
            before = Counter(gpu.waits)
            with (operators := Operators()):
                scaler.step(one.opt)
            assert operators.waits == 0, operators.calls
            own = {what: n for what, n in (gpu.waits - before).items() if "engine" not in what[0]}
            assert not own
            scaler.update(new_scale=scale)
        one.opt.drain()
        return one.opt.stats().gradients_skipped

    with gpu.installed():
        assert Cluster(1).run(train) == [int(overflows)]


def test_a_scaler_must_be_reported_of():
    def train(rank: int) -> None:
        trainer, scaler = TorchTrainer(SGD), make_scaler(4.0)
        trainer.opt.zero_grad()
        scaler.scale(loss(trainer.model, rank, 0)).backward()
        with pytest.raises(ReplicaStateError, match="pass scaler=scaler to EagerOptimizer"):
            scaler.step(trainer.opt)
        assert trainer.opt.stats().steps == 0

    Cluster(1).run(train)


def test_with_a_scaler_the_scaler_steps():
    def train(rank: int) -> None:
        trainer = TorchTrainer(SGD, scaler=make_scaler(4.0))
        trainer.gradient(rank, 0)
        with pytest.raises(ReplicaStateError, match=r"call scaler\.step\(optimizer\) and scaler\.update\(\)"):
            trainer.opt.step()
        with pytest.raises(ReplicaStateError, match=r"round_transform=, and call scaler\.step\(optimizer\)"):
            trainer.opt.synchronize()
        assert trainer.opt.stats().steps == 0

    Cluster(1).run(train)
