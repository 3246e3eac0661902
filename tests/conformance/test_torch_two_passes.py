"""torch: loops with more than one backward pass a step, of which not each is to be applied: SAM, checkpointing of
modules that are used twice, adversarial examples, GANs. What is refused says which way works, and that way is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.torch_ranks import TINY, batch, conv_model, flat, hand_overs, loss, seeded

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
        return seeded(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)))

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


def train_gan(
    ranks: Sequence[int], wrap: Callable[[Any], Any] = lambda opt: opt, watch: Callable[[Any], Any] = lambda opt: ()
) -> tuple[Any, list[int]]:
    """Train on the data of these ranks; return all weights, and how much ``watch`` has seen of each optimizer.

    The generator's loss leaves gradients in the discriminator too, which are not its step's."""
    generator, discriminator = seeded(torch.nn.Linear(3, 25)), conv_model(1)
    opts = [wrap(torch.optim.Adam(model.parameters(), lr=0.01)) for model in (generator, discriminator)]
    logs, score = [watch(opt) for opt in opts], torch.nn.functional.cross_entropy
    for step in range(5):
        real = torch.cat([batch(rank, step)[0] for rank in ranks])
        made, kind = generator(real.flatten(1)[:, :3]).view_as(real), torch.zeros(len(real), dtype=torch.int64)
        opts[1].zero_grad()
        (score(discriminator(real), kind) + score(discriminator(made.detach()), kind + 1)).backward()
        opts[1].step()
        opts[0].zero_grad()
        score(discriminator(made), kind).backward()
        opts[0].step()
    getattr(opts[0], "drain", lambda: None)()
    return flat([*generator.parameters(), *discriminator.parameters()]), [len(log) for log in logs]


def test_a_gan_trains_as_in_plain_torch_on_all_ranks_data():
    """And all of its gradients leave early."""
    wrap = partial(hvd.EagerOptimizer, quorum="all", bucket_cap_mb=TINY)
    outcomes = Cluster(2).run(lambda rank: train_gan([rank], wrap, hand_overs))
    expected, _ = train_gan(range(2))
    for weights, early in outcomes:
        assert weights.tobytes() == outcomes[0][0].tobytes()
        np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-5)
        assert early == [5 * 2, 5 * 4]
