"""torch: two optimizers over one graph, parameters without gradient, frozen ones, sparse gradients,
channels last."""

from __future__ import annotations

import copy
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaMismatchError
from hvd_async.testing import Cluster
from tests.conformance.cases import Case
from tests.conformance.torch_ranks import TINY, TorchTrainer, flat, hand_overs

MOMENTUM = Case("momentum", "sgd", 0.05, momentum=0.9)


def numbers(*key: int, size: tuple[int, ...]) -> torch.Tensor:
    return torch.as_tensor(np.random.default_rng(key).normal(size=size), dtype=torch.float32)


def linear(inputs: int, outputs: int, seed: int) -> torch.nn.Linear:
    """One whose weights do not depend on torch's generator, which threads share."""
    layer = torch.nn.Linear(inputs, outputs)
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.copy_(numbers(seed, index, size=tuple(parameter.shape)) * 0.3)
    return layer


# -- a GAN ----------------------------------------------------------------------------------------------------


class Gan:
    """A generator and a discriminator, each with an optimizer that ``wrap`` may change."""

    def __init__(self, wrap: Any) -> None:
        self.g = torch.nn.Sequential(linear(3, 6, 1), torch.nn.Tanh(), linear(6, 4, 2))
        self.d = torch.nn.Sequential(linear(4, 5, 3), torch.nn.Tanh(), linear(5, 1, 4))
        self.opt_g = wrap(torch.optim.Adam(self.g.parameters(), lr=0.01))
        self.opt_d = wrap(torch.optim.Adam(self.d.parameters(), lr=0.01))

    def step(self, noise: torch.Tensor, real: torch.Tensor) -> None:
        """The generator's loss leaves gradients in the discriminator too, which are not its step's."""
        score = torch.nn.functional.binary_cross_entropy_with_logits
        fake = self.g(noise)
        self.opt_d.zero_grad()
        loss = score(self.d(real), torch.ones(len(real), 1)) + score(self.d(fake.detach()), torch.zeros(len(real), 1))
        loss.backward()
        self.opt_d.step()
        self.opt_g.zero_grad()
        score(self.d(fake), torch.ones(len(real), 1)).backward()
        self.opt_g.step()

    def weights(self) -> np.ndarray[Any, Any]:
        return flat([*self.g.parameters(), *self.d.parameters()])


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(rank, step, 0, size=(4, 3)), numbers(rank, step, 1, size=(4, 4))


@pytest.mark.parametrize("cap", [25.0, TINY])
def test_a_gan_trains_as_in_plain_torch_on_all_ranks_data(cap):
    def train(rank: int) -> tuple[Any, list[int]]:
        gan = Gan(lambda optimizer: hvd.EagerOptimizer(optimizer, quorum="all", bucket_cap_mb=cap))
        gan.step(*data(rank, 0))
        logs = [hand_overs(gan.opt_d), hand_overs(gan.opt_g)]
        for step in range(1, 5):
            gan.step(*data(rank, step))
        gan.opt_g.drain()
        return gan.weights(), [len(log) for log in logs]

    alone = Gan(lambda optimizer: optimizer)
    for step in range(5):
        together = zip(*(data(rank, step) for rank in range(2)), strict=True)
        alone.step(*(torch.cat(parts) for parts in together))
    outcomes = Cluster(2).run(train)
    for weights, early in outcomes:
        assert weights.tobytes() == outcomes[0][0].tobytes()
        np.testing.assert_allclose(weights, alone.weights(), rtol=0, atol=2e-5)
        assert early == ([16, 16] if cap == TINY else [4, 4])


def test_a_gan_on_uneven_data_with_late_ranks():
    def train(rank: int) -> tuple[bytes, list[int]]:
        gan = Gan(lambda optimizer: hvd.EagerOptimizer(optimizer, bucket_cap_mb=TINY, max_staleness=3))
        for step in range((5, 2, 7)[rank]):
            gan.step(*data(rank, step))
        gan.opt_g.drain()
        return gan.weights().tobytes(), [opt.stats().gradients_applied for opt in (gan.opt_g, gan.opt_d)]

    outcomes = Cluster(3, jitter=0.002).run(train)
    assert [applied for _, applied in outcomes] == [[14, 14]] * 3
    assert len({weights for weights, _ in outcomes}) == 1


# -- parameters without gradient ------------------------------------------------------------------------------


class Branches(torch.nn.Module):
    """Two heads of which a step uses one, both or none; the trunk is always used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = linear(3, 4, 1), torch.nn.ModuleList([linear(4, 1, 2), linear(4, 1, 3)])

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        y = self.trunk(x)
        return y.sum() * 0.1 + sum((self.heads[i](y).square().sum() for i in used), torch.zeros(()))


USES = list(itertools.product([(), (0,), (1,), (0, 1)], repeat=2))
"""What rank 0 and rank 1 use in each step: everything that can be."""


@pytest.mark.parametrize("cap", [25.0, TINY])
def test_parameters_without_gradient_count_as_zero_wherever_they_are(cap):
    def train(rank: int) -> Any:
        model = Branches()
        opt = hvd.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), quorum="all", bucket_cap_mb=cap)
        for step, used in enumerate(USES):
            opt.zero_grad()
            model(numbers(rank, step, size=(2, 3)), used[rank]).backward()
            opt.step()
        opt.drain()
        return flat(model.parameters())

    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, used in enumerate(USES):
        optimizer.zero_grad()
        (sum(model(numbers(r, step, size=(2, 3)), used[r]) for r in range(2)) / 2).backward()
        optimizer.step()
    for weights in Cluster(2).run(train):
        np.testing.assert_allclose(weights, flat(model.parameters()), rtol=0, atol=1e-5)


# -- frozen parameters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quorum", ["solo", 2, "all"])
def test_ranks_may_freeze_and_unfreeze_at_different_steps(quorum):
    """Rank r freezes the first layer from its step 2 + r to 5 + 2 r: a round does what the rank says that leads it."""

    def train(rank: int) -> tuple[bytes, bytes]:
        trainer = TorchTrainer(MOMENTUM, quorum=quorum, bucket_cap_mb=TINY, max_staleness=3)
        for step in range(12):
            trainer.model[0].weight.requires_grad_(not 2 + rank <= step < 5 + 2 * rank)
            trainer.opt.zero_grad()
            images = numbers(rank, step, size=(4, 1, 5, 5))
            trainer.model(images).square().sum().backward()
            trainer.step()
        trainer.opt.drain()
        state = trainer.opt.state_dict()["state"]
        return trainer.weights().tobytes(), flat(held["momentum_buffer"] for held in state.values()).tobytes()

    assert len(set(Cluster(3, jitter=0.002).run(train))) == 1


def test_a_round_moves_a_parameter_only_if_its_leader_has_not_frozen_it():
    def train(rank: int) -> list[list[float]]:
        weight = torch.nn.Parameter(torch.zeros(1))
        free = torch.nn.Parameter(torch.zeros(1))
        opt = hvd.EagerOptimizer(torch.optim.SGD([weight, free], lr=1.0, momentum=0.5), quorum="all")
        seen = []
        for frozen in (False, True, True, False):
            weight.requires_grad_(not frozen)
            weight.grad = None if frozen else torch.ones(1)
            free.grad = torch.ones(1)
            opt.step()
            seen.append([weight.item(), free.item()])
        opt.drain()
        return seen

    moved = [[-1.0, -1.0], [-1.0, -2.5], [-1.0, -4.25], [-2.5, -6.125]]
    assert Cluster(2).run(train) == [moved, moved]


@pytest.mark.parametrize("joins", [0, 1])
def test_a_parameter_that_is_unfrozen_between_zero_grad_and_backward_is_in_its_bucket(joins):
    """The hooks count what was free at zero_grad(); the bucket must not leave without the one that joins."""

    def train(rank: int) -> list[float]:
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        opt = hvd.EagerOptimizer(torch.optim.SGD(parameters, lr=1.0), quorum="all")
        opt._async.worker_now()
        for free in (False, True, False):
            parameters[joins].requires_grad_(free)
            opt.zero_grad()
            parameters[joins].requires_grad_(not free)
            sum(p for p in parameters if p.requires_grad).sum().backward()
            opt.step()
        opt.drain()
        return [p.item() for p in parameters]

    weights = [-3.0, -3.0]
    weights[joins] = -2.0
    assert Cluster(1).run(train) == [weights]


# -- sparse gradients -----------------------------------------------------------------------------------------


def words(rank: int, step: int) -> torch.Tensor:
    return torch.as_tensor(np.random.default_rng([rank, step]).integers(0, 9, (3,)))


def embedding() -> torch.nn.Embedding:
    made = torch.nn.Embedding(9, 4, sparse=True)
    with torch.no_grad():
        made.weight.copy_(numbers(5, size=(9, 4)))
    return made


KINDS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sparse-adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
}


@pytest.mark.parametrize("flag", [{}, {"sparse_as_dense": True}], ids=["", "flag"])
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients_train_as_in_plain_torch(kind, flag):
    def train(rank: int) -> Any:
        model = embedding()
        opt = hvd.EagerOptimizer(KINDS[kind](model.parameters()), quorum="all", **flag)
        for step in range(4):
            opt.zero_grad()
            model(words(rank, step)).square().sum().backward()
            opt.step()
        opt.drain()
        return flat(model.parameters())

    model = embedding()
    optimizer = KINDS[kind](model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        (sum(model(words(rank, step)).square().sum() for rank in range(2)) / 2).backward()
        optimizer.step()
    for weights in Cluster(2).run(train):
        np.testing.assert_allclose(weights, flat(model.parameters()), rtol=0, atol=1e-5)


# -- channels last --------------------------------------------------------------------------------------------


def channels_last(case: Case, memory_format: torch.memory_format, steps: int) -> list[tuple[np.ndarray[Any, Any], Any]]:
    """Two ranks' weights, of a convolution of several channels, and the strides of what its optimizer was given."""

    def train(rank: int) -> tuple[np.ndarray[Any, Any], Any]:
        model = torch.nn.Conv2d(3, 4, 2)
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.copy_(numbers(index, size=tuple(parameter.shape)))
        model = model.to(memory_format=memory_format)
        seen = []
        opt = hvd.EagerOptimizer(
            torch.optim.SGD(model.parameters(), lr=case.lr, momentum=case.momentum),
            quorum="all",
            round_transform=lambda parameters: seen.append([(p.stride(), p.grad.stride()) for p in parameters]),
        )
        for step in range(steps):
            opt.zero_grad()
            images = numbers(rank, step, size=(2, 3, 4, 4)).to(memory_format=memory_format)
            model(images).square().mean().backward()
            opt.step()
        opt.drain()
        return flat(p.contiguous() for p in model.parameters()), seen

    return Cluster(2).run(train)


def test_gradients_lie_in_memory_as_their_parameters_do():
    last = channels_last(MOMENTUM, torch.channels_last, 5)
    first = channels_last(MOMENTUM, torch.contiguous_format, 5)
    for (weights, seen), (others, _) in zip(last, first, strict=True):
        np.testing.assert_allclose(weights, others, rtol=0, atol=1e-6)
        assert len(seen) == 5
        assert seen[0][0] == ((12, 1, 6, 3), (12, 1, 6, 3))
        assert all(own == gradient for each in seen for own, gradient in each)


def test_ranks_whose_parameters_lie_otherwise_in_memory_are_refused():
    def train(rank: int) -> str:
        model = torch.nn.Conv2d(3, 4, 2)
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                parameter.copy_(numbers(index, size=tuple(parameter.shape)))
        model = model.to(memory_format=torch.channels_last if rank else torch.contiguous_format)
        opt = hvd.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ReplicaMismatchError) as caught:
            opt.step()
        return str(caught.value)

    assert all("(4, 3, 2, 2) float32 channels_last" in text for text in Cluster(2).run(train))


@pytest.mark.parametrize("same", [True, False])
def test_pending_gradients_are_taken_back_only_by_parameters_that_lie_alike(same):
    def model(memory_format: torch.memory_format) -> torch.nn.Module:
        made = torch.nn.Conv2d(3, 4, 2).to(memory_format=memory_format)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()
        return made

    def wrapped(own: torch.nn.Module) -> Any:
        return hvd.EagerOptimizer(torch.optim.SGD(own.parameters(), lr=1.0))

    def counted(parameter: torch.Tensor) -> torch.Tensor:
        return torch.arange(1.0, parameter.numel() + 1).view(parameter.shape)

    gone = threading.Event()

    def cut(rank: int) -> Any:
        own = model(torch.channels_last)
        opt = wrapped(own)
        opt._async.worker_now()
        if rank:
            assert gone.wait(60)
        for parameter in own.parameters():
            parameter.grad = counted(parameter)  # (as its shape has it, whatever the parameter's own order)
        opt.step()
        gone.set()
        opt.cut()
        return copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in own.parameters()]

    states = Cluster(2).run(cut)
    assert sum(len(versions) for state, _ in states for versions in state["hvd_async"]["versions"]) == 1

    def resume(rank: int) -> None:
        own = model(torch.channels_last if same else torch.contiguous_format)
        opt = wrapped(own)
        state, weights = states[rank]
        with torch.no_grad():
            for parameter, values in zip(own.parameters(), weights, strict=True):
                parameter.copy_(values)
        if not same and rank:
            with pytest.raises(ValueError, match="same memory format"):
                opt.load_state_dict(state)
            return
        opt.load_state_dict(state)
        if same:
            opt.drain()
            assert all(torch.equal(p, -counted(p)) for p in own.parameters())

    Cluster(2).run(resume)
