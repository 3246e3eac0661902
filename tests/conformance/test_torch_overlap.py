"""torch: buckets leave while backward still computes, and what is handed over is what plain torch would step with."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.cases import Case
from tests.conformance.torch_ranks import TINY, TorchTrainer, batch, conv_model, flat, hand_overs, plain

MOMENTUM = Case("momentum", "sgd", 0.05, momentum=0.9)


def loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    images, labels = batch(rank, step)
    return torch.nn.functional.cross_entropy(model(images), labels)


def test_buckets_leave_during_backward_the_last_layers_first():
    def train(rank: int) -> None:
        trainer = TorchTrainer(MOMENTUM, bucket_cap_mb=TINY)
        worker, log = trainer.opt._async.worker_now(), []
        hand_over = worker.hand_over
        first, last = trainer.model[0].weight, trainer.model[3].weight

        def spy(bucket: int, vector: Any) -> None:
            log.append((bucket, first.grad is not None, last.grad is not None))
            hand_over(bucket, vector)

        worker.hand_over = spy
        trainer.opt.zero_grad()
        value = loss(trainer.model, rank, 0)
        assert log == []
        value.backward()
        assert sorted(bucket for bucket, _, _ in log) == [0, 1, 2, 3]
        assert [bucket > 1 for bucket, _, _ in log] == [False, False, True, True]
        assert (1, False, True) in log, "the last layer's weight waited for the first layer's gradient"
        trainer.opt.step()
        trainer.opt.drain()
        assert trainer.opt.stats().gradients_produced == 1

    Cluster(2).run(train)


def trained(options: dict[str, Any], steps: int = 4, clear: str = "none", size: int = 2) -> list[tuple[bytes, int]]:
    """Weights of every rank, and how many buckets left early."""

    def train(rank: int) -> tuple[bytes, int]:
        trainer = TorchTrainer(MOMENTUM, quorum="all", **options)
        log = hand_overs(trainer.opt)
        for step in range(steps):
            if clear == "model":
                trainer.model.zero_grad()
            else:
                trainer.opt.zero_grad(set_to_none=clear == "none")
            loss(trainer.model, rank, step).backward()
            trainer.opt.step()
        trainer.opt.drain()
        return trainer.weights().tobytes(), len(log)

    return Cluster(size).run(train)


def test_however_many_buckets_the_bits_are_the_same():
    one = trained({})
    assert [early for _, early in one] == [4, 4]
    for cap, buckets in ((TINY, 4), (8e-5, 3), (2.3e-4, 2)):
        assert trained({"bucket_cap_mb": cap}) == [(weights, 4 * buckets) for weights, _ in one]


def test_however_gradients_are_cleared_the_bits_are_the_same():
    one = trained({"bucket_cap_mb": TINY})
    assert trained({"bucket_cap_mb": TINY}, clear="zeros") == one
    assert trained({"bucket_cap_mb": TINY}, clear="model") == [(weights, 0) for weights, _ in one]


def test_gradients_that_were_never_cleared_add_up_as_in_torch():
    def train(rank: int) -> tuple[bytes, list[int]]:
        trainer = TorchTrainer(MOMENTUM)
        log = hand_overs(trainer.opt)
        for step in range(3):
            loss(trainer.model, rank, step).backward()
            trainer.opt.step()
        trainer.opt.drain()
        return flat(trainer.model.parameters()).tobytes(), log

    model = conv_model()
    optimizer = plain(MOMENTUM, model.parameters())
    for step in range(3):
        loss(model, 0, step).backward()
        optimizer.step()
    assert Cluster(1).run(train) == [(flat(model.parameters()).tobytes(), [])]


def test_zero_grad_between_backward_and_step_is_refused_and_the_step_is_not_lost():
    def train(rank: int) -> bytes:
        trainer = TorchTrainer(MOMENTUM, quorum="all")
        trainer.opt._async.worker_now()
        for step in range(3):
            trainer.gradient(rank, step)
            if step == 1:
                with pytest.raises(ReplicaStateError, match=r"zero_grad\(\) between backward\(\) and step\(\)"):
                    trainer.opt.zero_grad()
            trainer.opt.step()
        trainer.opt.drain()
        return trainer.weights().tobytes()

    assert set(Cluster(2).run(train)) == {weights for weights, _ in trained({}, steps=3)}


def test_after_step_nothing_leaves_until_zero_grad():
    """As in a GAN whose other half runs backward through this model."""

    def train(rank: int) -> None:
        trainer = TorchTrainer(MOMENTUM)
        log = hand_overs(trainer.opt)
        trainer.opt.zero_grad()
        trainer.opt.step()  # without backward: no gradient, and yet a step
        loss(trainer.model, rank, 0).backward()
        assert log == []
        trainer.gradient(rank, 1)
        assert log == [0]
        trainer.opt.step()
        trainer.opt.drain()

    Cluster(1).run(train)


def test_a_drain_between_backward_and_step_is_refused():
    def train(rank: int) -> None:
        trainer = TorchTrainer(MOMENTUM)
        trainer.opt._async.worker_now()
        trainer.gradient(rank, 0)
        for finish in (trainer.opt.drain, trainer.opt.cut):
            with pytest.raises(ReplicaStateError, match=r"call optimizer\.step\(\) before this"):
                finish()
        trainer.opt.step()
        trainer.opt.drain()

    Cluster(2).run(train)


@pytest.mark.parametrize("cap", [25.0, TINY])
def test_a_second_backward_is_refused_with_what_allows_it(cap):
    def train(rank: int) -> None:
        trainer = TorchTrainer(MOMENTUM, bucket_cap_mb=cap)
        trainer.opt._async.worker_now()
        trainer.gradient(rank, 0)
        with pytest.raises(ReplicaStateError, match="Pass backward_passes_per_step="):
            loss(trainer.model, rank, 1).backward()

    Cluster(1).run(train)


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("later", [False, True], ids=["argument", "method"])
def test_several_backward_passes_a_step_equal_accumulation(passes, later):
    def train(rank: int) -> tuple[bytes, int]:
        trainer = TorchTrainer(MOMENTUM, bucket_cap_mb=TINY, **({} if later else {"backward_passes_per_step": passes}))
        if later:
            trainer.opt.set_backward_passes_per_step(passes)
        log = hand_overs(trainer.opt)
        for step in range(4):
            trainer.opt.zero_grad()
            for part in range(passes):
                assert len(log) == 4 * step
                loss(trainer.model, rank, step * passes + part).backward()
            trainer.opt.step()
        trainer.opt.drain()
        return flat(trainer.model.parameters()).tobytes(), len(log)

    model = conv_model()
    optimizer = plain(MOMENTUM, model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for part in range(passes):
            loss(model, 0, step * passes + part).backward()
        optimizer.step()
    assert Cluster(1).run(train) == [(flat(model.parameters()).tobytes(), 16)]


def halve(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = parameter.grad * 0.5


def halve_in_place(parameters: list[torch.Tensor]) -> None:
    parameters[0].grad.mul_(0.5)


def clip(parameters: list[torch.Tensor]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 1e-3)


@pytest.mark.parametrize("change", [halve, halve_in_place, clip])
def test_a_gradient_that_is_changed_when_it_is_gone_is_an_error_that_says_what_to_do(change):
    def train(rank: int) -> None:
        trainer = TorchTrainer(MOMENTUM)
        trainer.opt._async.worker_now()
        trainer.gradient(rank, 0)
        change(list(trainer.model.parameters()))
        with pytest.raises(ReplicaStateError, match=r"round_transform=.*skip_synchronize.*backward_passes_per_step="):
            trainer.opt.step()
        with pytest.raises(
            ReplicaStateError, match="no longer what the other ranks take them for"
        ):  # half of a step is on its way
            trainer.opt.step()

    Cluster(1).run(train)


def test_a_gradient_may_be_changed_where_the_hooks_had_not_taken_it():
    """Without the optimizer's zero_grad() nothing leaves early, so clipping is plain torch's."""

    def train(rank: int) -> bytes:
        trainer = TorchTrainer(MOMENTUM)
        for step in range(3):
            trainer.model.zero_grad()
            loss(trainer.model, rank, step).backward()
            clip(list(trainer.model.parameters()))
            trainer.opt.step()
        trainer.opt.drain()
        return flat(trainer.model.parameters()).tobytes()

    model = conv_model()
    optimizer = plain(MOMENTUM, model.parameters())
    for step in range(3):
        model.zero_grad()
        loss(model, 0, step).backward()
        clip(list(model.parameters()))
        optimizer.step()
    assert Cluster(1).run(train) == [flat(model.parameters()).tobytes()]


def test_a_closure_hands_over_early_and_steps_as_torch():
    def train(rank: int) -> tuple[bytes, list[float], int]:
        trainer = TorchTrainer(MOMENTUM, bucket_cap_mb=TINY)
        log, losses = hand_overs(trainer.opt), []
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                trainer.opt.zero_grad()
                value = loss(trainer.model, rank, step)
                value.backward()
                return value

            losses.append(trainer.opt.step(closure).item())
        trainer.opt.drain()
        return flat(trainer.model.parameters()).tobytes(), losses, len(log)

    model = conv_model()
    optimizer, expected = plain(MOMENTUM, model.parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        value = loss(model, 0, step)
        value.backward()
        optimizer.step()
        expected.append(value.item())
    assert Cluster(1).run(train) == [(flat(model.parameters()).tobytes(), expected, 12)]


@pytest.mark.parametrize("cap", [25.0, TINY])
def test_a_compiled_model(cap):
    def train(rank: int) -> tuple[Any, int]:
        trainer = TorchTrainer(MOMENTUM, quorum="all", bucket_cap_mb=cap)
        compiled = torch.compile(trainer.model, backend="aot_eager")
        log = hand_overs(trainer.opt)
        for step in range(3):
            trainer.opt.zero_grad()
            loss(compiled, rank, step).backward()
            trainer.opt.step()
        trainer.opt.drain()
        return trainer.weights(), len(log)

    ((weights, early),) = Cluster(1).run(train)
    ((expected, _),) = trained({}, steps=3, size=1)
    np.testing.assert_allclose(weights, np.frombuffer(expected), rtol=0, atol=1e-6)
    assert early == 3 * (4 if cap == TINY else 1)


def test_an_optimizer_that_is_gone_leaves_no_hook_that_hands_over():
    model = conv_model()

    def train(rank: int) -> None:
        opt: Any = hvd.EagerOptimizer(plain(MOMENTUM, model.parameters()))
        opt.zero_grad()
        loss(model, rank, 0).backward()
        opt.step()
        opt.zero_grad()
        opt.drain()

    Cluster(1).run(train)
    gc.collect()
    for step in range(3):  # (armed, the hooks would refuse a second backward)
        loss(model, 0, step).backward()
