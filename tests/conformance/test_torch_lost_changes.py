"""torch: a gradient that changes after it was handed over is never lost in silence; one that does not is no error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from hvd_async.torch.gradient_replica import FIRST_STEPS, LANES, ROW, fingerprint
from tests.conformance.cases import Case
from tests.conformance.torch_ranks import TINY, TorchTrainer, batch, conv_model, flat, hand_overs, plain

SGD = Case("sgd", "sgd", 0.05)
WRITTEN = r"a gradient was written to after backward\(\).*round_transform=.*get_total_norm\(\).*HVD_ASYNC_CHECK=1"
SAID = (
    r"a gradient was changed after backward\(\) and before step\(\).*round_transform=lambda parameters: "
    r"torch\.nn\.utils\.clip_grad_norm_.*leave out an all_reduce\(\) of gradients"
)

BEHIND_THE_COUNTER: dict[str, Callable[[torch.Tensor], object]] = {
    "clamp": lambda gradient: gradient.data.clamp_(-1e-3, 1e-3),
    "scale": lambda gradient: gradient.data.mul_(0.5),
    "negate": lambda gradient: gradient.data.neg_(),
    "zero": lambda gradient: gradient.data.zero_(),
    "last bit": lambda gradient: gradient.data.view(torch.int32).view(-1)[-1:].bitwise_xor_(1),
    "numpy": lambda gradient: gradient.numpy().reshape(-1).__setitem__(0, 7.0),
    "swap": lambda gradient: gradient.data.copy_(gradient.flip(0)),
}
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "to the same": lambda gradient: gradient.mul_(1.0),
    "to another": lambda gradient: gradient.mul_(0.5),
}


@pytest.mark.parametrize(
    ("change", "step", "check", "error"),
    [
        *((change, 0, "", "said") for change in BEHIND_THE_COUNTER),
        *(("last bit", FIRST_STEPS - 1, check, "said") for check in ("", "0", "1")),
        *(("last bit", FIRST_STEPS, check, error) for check, error in (("", "none"), ("0", "none"), ("1", "said"))),
        *((change, FIRST_STEPS, "", "written") for change in WRITES),
        ("to the same", FIRST_STEPS, "1", "none"),
        ("to another", FIRST_STEPS, "1", "said"),
    ],
)
def test_a_gradient_that_may_have_changed_is_an_error(change, step, check, error, monkeypatch):
    """In the first steps any change is found, later one that moves a version counter. That a write is none shows only
    with HVD_ASYNC_CHECK=1, which finds all changes."""
    monkeypatch.setenv("HVD_ASYNC_CHECK", check)
    text = {"said": SAID, "written": WRITTEN}.get(error)

    def train(rank: int) -> None:
        trainer = TorchTrainer(SGD)
        trainer.opt._async.worker_now()
        trainer.train(rank, range(step))
        trainer.gradient(rank, step)
        gradient = trainer.model[3].weight.grad
        version = gradient._version
        (BEHIND_THE_COUNTER | WRITES)[change](gradient)
        assert (gradient._version == version) == (change in BEHIND_THE_COUNTER)
        with pytest.raises(ReplicaStateError, match=text) if text else contextlib.nullcontext():
            trainer.opt.step()
        if text is None:
            trainer.opt.drain()

    Cluster(1).run(train)


def test_a_script_that_writes_without_a_change_in_the_first_steps_is_compared_later_too():
    def train(rank: int) -> None:
        trainer = TorchTrainer(SGD)
        trainer.opt._async.worker_now()
        for step in range(FIRST_STEPS + 6):
            trainer.gradient(rank, step)
            if step % 3 == 0:
                log_norm(trainer.model, trainer.opt)
            trainer.opt.step()
        trainer.gradient(rank, FIRST_STEPS + 6)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1e-3)
        with pytest.raises(ReplicaStateError, match=SAID):
            trainer.opt.step()

    Cluster(1).run(train)


def test_after_a_membership_change_it_is_remembered_that_a_script_writes_without_a_change():
    def train(rank: int) -> None:
        before, after = TorchTrainer(SGD), TorchTrainer(SGD)
        for trainer in (before, after):
            trainer.opt._async.worker_now()
        before.gradient(rank, 0)
        log_norm(before.model, before.opt)
        before.opt.step()
        after.opt._async.replica.continue_from(before.opt._async.replica)
        after.train(rank, range(FIRST_STEPS))
        after.gradient(rank, FIRST_STEPS)
        log_norm(after.model, after.opt)
        after.opt.step()
        for trainer in (before, after):
            trainer.opt.drain()

    Cluster(1).run(train)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [1, 2, 7, ROW, 2 * ROW, LANES - 1, 2 * LANES, 2 * LANES * ROW + 5])
def test_a_fingerprint_changes_with_every_bit_and_place(elements, dtype):
    def of(one: torch.Tensor) -> int:
        return int(fingerprint(one))

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
    if elements > 3:
        other = vector.clone()
        other[1:4:2] *= -1
        assert of(other) != first
        assert of(vector.roll(2)) != first
