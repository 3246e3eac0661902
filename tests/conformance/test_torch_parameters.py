"""torch: two optimizers over one graph, parameters unfrozen in a step, SparseAdam, channels last."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaMismatchError
from hvd_async.testing import Cluster
from tests.conformance.cases import Case
from tests.conformance.torch_ranks import TINY, TorchTrainer, flat, hand_overs, plain

UNIT = Case("unit", "sgd", 1.0)


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


def test_a_gan_trains_as_in_plain_torch_on_all_ranks_data():
    def train(rank: int) -> tuple[Any, list[int]]:
        gan = Gan(lambda optimizer: hvd.EagerOptimizer(optimizer, quorum="all", bucket_cap_mb=TINY))
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
        assert early == [16, 16]


# -- frozen parameters ----------------------------------------------------------------------------------------


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


def embedding() -> torch.nn.Embedding:
    return torch.nn.Embedding.from_pretrained(numbers(5, size=(9, 4)), freeze=False, sparse=True)


def test_sparse_adam_gets_rounds_back_sparse():
    def words(rank: int, step: int) -> torch.Tensor:
        return torch.as_tensor(np.random.default_rng([rank, step]).integers(0, 9, (3,)))

    def train(rank: int) -> Any:
        model = embedding()
        opt: Any = hvd.EagerOptimizer(torch.optim.SparseAdam(list(model.parameters()), lr=0.1), quorum="all")
        for step in range(4):
            opt.zero_grad()
            model(words(rank, step)).square().sum().backward()
            opt.step()
        opt.drain()
        return flat(model.parameters())

    model = embedding()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        (sum(model(words(rank, step)).square().sum() for rank in range(2)) / 2).backward()
        optimizer.step()
    for weights in Cluster(2).run(train):
        np.testing.assert_allclose(weights, flat(model.parameters()), rtol=0, atol=1e-5)


# -- channels last --------------------------------------------------------------------------------------------


class Convolution(TorchTrainer):
    """A rank with a convolution of several channels, whose weights lie so in memory."""

    def __init__(self, memory_format: torch.memory_format, case: Case, **options: Any) -> None:
        self.model = torch.nn.Conv2d(3, 4, 2).to(memory_format=memory_format)
        self.memory_format, self.parameters = memory_format, list(self.model.parameters())
        for index, parameter in enumerate(self.parameters):
            self.assign(index, numbers(index, size=tuple(parameter.shape)))
        self.opt = hvd.EagerOptimizer(plain(case, self.parameters), **options)

    def gradient(self, rank: int, step: int) -> Any:
        self.opt.zero_grad()
        images = numbers(rank, step, size=(2, 3, 4, 4)).to(memory_format=self.memory_format)
        self.model(images).square().mean().backward()
        return flat(p.grad for p in self.parameters)


def test_ranks_whose_parameters_lie_otherwise_in_memory_are_refused():
    def train(rank: int) -> None:
        one = Convolution(torch.channels_last if rank else torch.contiguous_format, UNIT)
        with pytest.raises(ReplicaMismatchError, match=r"\(4, 3, 2, 2\) float32 channels_last"):
            one.train(rank, range(1))

    Cluster(2).run(train)


def test_pending_gradients_are_taken_back_only_by_parameters_that_lie_alike():
    gone = threading.Event()

    def cut(rank: int) -> Any:
        one = Convolution(torch.channels_last, UNIT, quorum="solo")
        worker = one.opt._async.worker_now()
        if rank:
            assert gone.wait(60)
            worker.engine.wait(lambda: worker.has_available)
        gradient = one.gradient(rank, 0)
        one.step()
        gone.set()
        one.opt.cut()
        return one.saved(), one.weights(), gradient

    ends = Cluster(2).run(cut)
    pending = [versions for (_, state), _, _ in ends for versions in state["hvd_async"]["versions"]]
    assert [len(versions) for versions in pending] == [0, 1]

    def resume(rank: int) -> Any:
        one = Convolution(torch.channels_last, UNIT)
        one.load(ends[rank][0])
        one.opt.drain()
        return one.weights()

    for weights in Cluster(2).run(resume):
        np.testing.assert_allclose(weights, ends[1][1] - ends[1][2] / 2, rtol=0, atol=1e-6)

    def refuse(rank: int) -> None:
        one = Convolution(torch.contiguous_format, UNIT)
        if rank:
            with pytest.raises(ValueError, match="same memory format"):
                one.load(ends[rank][0])

    Cluster(2).run(refuse)
