"""torch: a gradient that changes after it was handed over is never lost in silence; one that does not is no error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from hvd_async.torch import gradient_replica
from hvd_async.torch.gradient_watch import EVERY, FIRST_STEPS, LANES, fingerprint
from tests.conformance.cases import Case
from tests.conformance.torch_ranks import TINY, TorchTrainer

SGD = Case("sgd", "sgd", 0.05)
SAID = r"a gradient was changed after backward\(\) and before step\(\).*round_transform="

BEHIND_THE_COUNTER: dict[str, Callable[[torch.Tensor], object]] = {
    "clamp": lambda gradient: gradient.data.clamp_(-1e-3, 1e-3),
    "scale": lambda gradient: gradient.data.mul_(0.5),
    "negate": lambda gradient: gradient.data.neg_(),
    "zero": lambda gradient: gradient.data.zero_(),
    "last bit": lambda gradient: gradient.data.view(torch.int32).view(-1)[-1:].bitwise_xor_(1),
    "numpy": lambda gradient: gradient.numpy().reshape(-1).__setitem__(0, 7.0),
    "swap": lambda gradient: gradient.data.copy_(gradient.flip(0)),
}


@pytest.mark.parametrize("cap", [25.0, TINY])
@pytest.mark.parametrize("change", BEHIND_THE_COUNTER.values(), ids=BEHIND_THE_COUNTER.keys())
def test_a_change_that_moves_no_version_counter_is_found(change, cap):
    def train(rank: int) -> None:
        trainer = TorchTrainer(SGD, bucket_cap_mb=cap)
        trainer.opt._async.worker_now()
        trainer.gradient(rank, 0)
        weight = trainer.model[3].weight
        version = weight.grad._version
        change(weight.grad)
        assert weight.grad._version == version
        with pytest.raises(ReplicaStateError, match=SAID):
            trainer.opt.step()

    Cluster(1).run(train)


def test_later_steps_are_compared_a_bucket_at_a_time():
    """So that whatever goes on changing one bucket is found within a turn."""

    def train(rank: int) -> int:
        trainer = TorchTrainer(SGD, bucket_cap_mb=TINY)
        trainer.opt._async.worker_now()
        trainer.train(rank, range(FIRST_STEPS))
        buckets = len(trainer.opt._async.replica.layout)
        for step in range(EVERY * buckets):
            trainer.gradient(rank, step)
            trainer.model[0].bias.grad.data.mul_(0.5)
            try:
                trainer.opt.step()
            except ReplicaStateError:
                return step
        raise AssertionError("not found")

    assert Cluster(1).run(train)[0] < EVERY * 4


def log_norm(model: torch.nn.Module, opt: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def clone(model: torch.nn.Module, opt: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clone()


def to_and_fro(model: torch.nn.Module, opt: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(2.0).mul_(0.5)


@pytest.mark.parametrize("look", [log_norm, clone, to_and_fro])
def test_what_leaves_the_values_as_they_are_is_no_error(look):
    steps = FIRST_STEPS + 2

    def train(rank: int) -> bytes:
        trainer = TorchTrainer(SGD, quorum="all", bucket_cap_mb=TINY)
        trainer.opt._async.worker_now()
        for step in range(steps):
            trainer.gradient(rank, step)
            look(trainer.model, trainer.opt)
            trainer.opt.step()
        trainer.opt.drain()
        return trainer.weights().tobytes()

    def plainly(rank: int) -> bytes:
        trainer = TorchTrainer(SGD, quorum="all", bucket_cap_mb=TINY)
        trainer.train(rank, range(steps))
        trainer.opt.drain()
        return trainer.weights().tobytes()

    assert Cluster(2).run(train) == Cluster(2).run(plainly)


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [1, 2, 7, LANES - 1, 2 * LANES, 3 * LANES + 5])
def test_a_fingerprint_changes_with_every_bit_and_place(elements, dtype, thorough):
    def of(one: torch.Tensor) -> int:
        return int(fingerprint(one, thorough))

    vector = torch.randn(elements, generator=torch.Generator().manual_seed(elements), dtype=dtype)
    first = of(vector)
    assert of(vector.clone()) == first
    assert of(-vector) != first
    for place in {0, elements // 2, elements - 1}:
        other = vector.clone()
        other.view(torch.uint8)[place * vector.element_size()] ^= 1
        assert of(other) != first
    if elements > 1:
        assert of(vector.flip(0)) != first
    if elements > 3 and thorough:
        other = vector.clone()
        other[1:4:2] *= -1
        assert of(other) != first


# -- passes that no step took ---------------------------------------------------------------------------------


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


# -- synchronize() with uneven data ---------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["drain", "cut"])
@pytest.mark.parametrize("steps", [(8, 2), (2, 8, 5), (3, 0)], ids=str)
def test_synchronize_with_uneven_data_leaves_the_replicas_identical(steps, end):
    """Clipping is done on every round; a rank that has drained cannot, and takes over what those that did have."""

    def train(rank: int) -> tuple[bytes, bytes]:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.ones(4))
        frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        opt = hvd.EagerOptimizer(torch.optim.SGD([weight, frozen], lr=0.1, momentum=0.9), bucket_cap_mb=TINY)
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
        opt = hvd.EagerOptimizer(torch.optim.SGD([weight], lr=0.1))
        for _ in range(3):
            opt.zero_grad()
            weight.sum().backward()
            opt.synchronize()
            with opt.skip_synchronize():
                opt.step()
        opt.drain()

    with pytest.warns(UserWarning, match="never showed"):  # (the round that only flushes)
        Cluster(2).run(train)
