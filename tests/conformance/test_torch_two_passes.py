"""torch: loops with more than one backward pass a step, of which not each is to be applied: SAM, checkpointing of
modules that are used twice, adversarial examples. What is refused says which way works, and that way is right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.torch_ranks import TINY, batch, conv_model, flat, loss

STEPS, RADIUS = 4, 0.05


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization in two halves, as packages of it are written."""

    def __init__(self, parameters: Any, base: Callable[..., Any], **options: Any) -> None:
        super().__init__(parameters, options)
        self.base = base(self.param_groups, **options)
        self.before: list[torch.Tensor] = []

    def all(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.all()]).norm()
        self.before = [p.clone() for p in self.all()]
        for parameter in self.all():
            parameter.add_(parameter.grad, alpha=RADIUS / float(norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter, value in zip(self.all(), self.before, strict=True):
            parameter.copy_(value)
        self.base.step()
        self.zero_grad()


def train_sam(model: torch.nn.Module, opt: Any, rank: int) -> Any:
    for step in range(STEPS):
        loss(model, rank, step).backward()
        opt.first_step()
        ascended = loss(model, rank, step)
        ascended.backward()
        if hasattr(opt.base, "record_loss"):
            opt.base.record_loss(ascended)
        opt.second_step()
    return flat(model.parameters())


@pytest.mark.parametrize("wrapper", [hvd.EagerOptimizer, hvd.GossipOptimizer, partial(hvd.LeaderOptimizer, group=1)])
def test_sam_is_refused_as_what_to_wrap_and_its_base_optimizer_is_not(wrapper):
    def train(rank: int) -> Any:
        model = conv_model()
        with pytest.raises(ValueError, match=r"first_step.*wrap its base optimizer"):
            wrapper(SAM(model.parameters(), torch.optim.SGD, lr=0.1), named_parameters=model.named_parameters())

        def base(groups: Any, **options: Any) -> Any:
            return wrapper(torch.optim.SGD(groups, **options))

        opt = SAM(model.parameters(), base, lr=0.1)
        weights = train_sam(model, opt, rank)
        opt.base.drain()
        return weights

    (weights,) = Cluster(1).run(train)
    model = conv_model()
    expected = train_sam(model, SAM(model.parameters(), torch.optim.SGD, lr=0.1), 0)
    np.testing.assert_allclose(weights, expected, atol=1e-7)


@pytest.mark.parametrize("cap", [TINY, 25.0])
@pytest.mark.parametrize("passes", [1, 2])
def test_reentrant_checkpointing_of_a_module_used_twice_is_blamed_and_its_other_kind_is_right(cap, passes):
    """Its recomputation brings a module's gradient once a use, and not once a backward pass. (A further pass is another
    error.)"""

    def network() -> torch.nn.Module:
        layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        random = np.random.default_rng(0)
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter.copy_(torch.as_tensor(random.normal(size=parameter.shape)))
        return layers

    def backward(layers: torch.nn.Module, reentrant: bool | None, times: int) -> None:
        for _ in range(times):
            out = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
            for part in (layers[:2], layers[:2], layers[2:]):
                out = part(out) if reentrant is None else checkpoint(part, out, use_reentrant=reentrant)
            out.square().sum().backward()

    def train(reentrant: bool, times: int, refused: str = "") -> Any:
        layers = network()
        opt = hvd.EagerOptimizer(
            torch.optim.SGD(layers.parameters(), lr=0.1), bucket_cap_mb=cap, backward_passes_per_step=passes
        )
        opt._async.worker_now()
        opt.zero_grad()
        if refused:
            with pytest.raises(ReplicaStateError, match=refused):
                backward(layers, reentrant, times)
            return None
        backward(layers, reentrant, times)
        opt.step()
        return flat(layers.parameters())

    def ways(rank: int) -> Any:
        train(True, passes, "use_reentrant=False")
        train(False, passes + 1, "Pass backward_passes_per_step=")
        return train(False, passes)

    (weights,) = Cluster(1).run(ways)
    layers = network()
    plain = torch.optim.SGD(layers.parameters(), lr=0.1)
    backward(layers, None, passes)
    plain.step()
    np.testing.assert_allclose(weights, flat(layers.parameters()), atol=1e-6)


def attacked(model: torch.nn.Module, rank: int, step: int, clear: Callable[[], Any] | None) -> torch.Tensor:
    """The loss on images that were moved up its gradient, which is taken by ``backward()``, or by ``autograd.grad``."""
    images, labels = batch(rank, step)
    images.requires_grad_()
    clean = torch.nn.functional.cross_entropy(model(images), labels)
    if clear is None:
        (gradient,) = torch.autograd.grad(clean, [images])
    else:
        clean.backward()
        gradient = images.grad
        clear()
    return torch.nn.functional.cross_entropy(model(images.detach() + 0.1 * gradient.sign()), labels)


@pytest.mark.parametrize("way", ["model.zero_grad()", "torch.autograd.grad"])
def test_a_pass_that_is_thrown_away_is_refused_with_two_ways_that_are_right(way):
    def train(rank: int) -> Any:
        model = conv_model()
        opt = hvd.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        opt._async.worker_now()
        for step in range(STEPS):
            if way == "model.zero_grad()":
                model.zero_grad()
                attacked(model, rank, step, model.zero_grad).backward()
            else:
                opt.zero_grad()
                attacked(model, rank, step, None).backward()
            opt.step()
        weights = flat(model.parameters())
        opt.zero_grad()
        with pytest.raises(ReplicaStateError) as raised:
            attacked(model, rank, STEPS, opt.zero_grad)
        assert way in str(raised.value)
        opt.step()
        return weights

    (weights,) = Cluster(1).run(train)
    model = conv_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        plain.zero_grad()
        attacked(model, 0, step, plain.zero_grad).backward()
        plain.step()
    np.testing.assert_allclose(weights, flat(model.parameters()), atol=1e-7)


def test_weights_that_another_optimizer_has_moved_are_not_only_reported_to_be_broadcast():
    """The halves of SAM do so where they step a base optimizer that is not wrapped."""

    def train(rank: int) -> None:
        model = conv_model()
        opt = hvd.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        loss(model, rank, 0).backward()
        plain.step()
        with pytest.raises(ReplicaMismatchError, match="an optimizer that is not wrapped"):
            opt.drain()

    Cluster(2).run(train)
