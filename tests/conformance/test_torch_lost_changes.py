"""torch: a gradient that changes after it was handed over is never lost in silence; one that does not is no error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from hvd_async.torch.gradient_replica import EVERY, FIRST_STEPS, LANES, ROW, fingerprint
from tests.conformance.cases import Case
from tests.conformance.torch_ranks import TINY, TorchTrainer, batch, conv_model, flat, hand_overs, plain

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


@pytest.mark.parametrize("change", BEHIND_THE_COUNTER.values(), ids=BEHIND_THE_COUNTER.keys())
def test_a_change_that_moves_no_version_counter_is_found(change):
    def train(rank: int) -> None:
        trainer = TorchTrainer(SGD)
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
    """So that whatever continues changing one bucket is found within a turn."""

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
    def train(rank: int) -> bytes:
        trainer = TorchTrainer(SGD, bucket_cap_mb=TINY)
        log = hand_overs(trainer.opt)
        for step in range(FIRST_STEPS + 2):
            trainer.gradient(rank, step)
            look(trainer.model, trainer.opt)
            trainer.opt.step()
        trainer.opt.drain()
        assert len(log) == 4 * (FIRST_STEPS + 2)
        return flat(trainer.model.parameters()).tobytes()

    model = conv_model()
    optimizer = plain(SGD, model.parameters())
    for step in range(FIRST_STEPS + 2):
        optimizer.zero_grad()
        images, labels = batch(0, step)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert Cluster(1).run(train) == [flat(model.parameters()).tobytes()]


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [1, 2, 7, ROW, 2 * ROW, LANES - 1, 2 * LANES, 2 * LANES * ROW + 5])
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
    if elements > 4 * ROW:
        assert of(vector.roll(2 * ROW)) != first
    if elements > 3 and thorough:
        other = vector.clone()
        other[1:4:2] *= -1
        assert of(other) != first
        assert of(vector.roll(2)) != first
