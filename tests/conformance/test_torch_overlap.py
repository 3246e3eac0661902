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
from tests.conformance.eager_ranks import MOMENTUM, TORCH
from tests.conformance.torch_ranks import TINY, TorchTrainer, conv_model, flat, hand_overs, loss, plain


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


# -- each way of use is plain torch's ---------------------------------------------------------------------------

PASSES = 3


def never_cleared(model: torch.nn.Module, opt: Any, step: int) -> None:
    loss(model, 0, step).backward()
    opt.step()


def cleared_by_the_model(model: torch.nn.Module, opt: Any, step: int) -> None:
    """And clipped: nothing has left early."""
    model.zero_grad()
    loss(model, 0, step).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    opt.step()


def cleared_to_zero(model: torch.nn.Module, opt: Any, step: int) -> None:
    opt.zero_grad(set_to_none=False)
    loss(model, 0, step).backward()
    opt.step()


def by_closure(model: torch.nn.Module, opt: Any, step: int) -> None:
    values = []

    def closure() -> torch.Tensor:
        opt.zero_grad()
        values.append(loss(model, 0, step))
        values[-1].backward()
        return values[-1]

    assert opt.step(closure) is values[0]
    assert len(values) == 1, "evaluated twice"


def several_passes(model: torch.nn.Module, opt: Any, step: int) -> None:
    opt.zero_grad()
    for part in range(PASSES):
        loss(model, 0, step * PASSES + part).backward()
    opt.step()


def several_passes_said_later(model: torch.nn.Module, opt: Any, step: int) -> None:
    if hasattr(opt, "set_backward_passes_per_step"):
        opt.set_backward_passes_per_step(PASSES)
    several_passes(model, opt, step)


def compiled(model: torch.nn.Module, opt: Any, step: int) -> None:
    opt.zero_grad()
    loss(torch.compile(model, backend="aot_eager"), 0, step).backward()
    opt.step()


@pytest.mark.parametrize(
    ("use", "options", "early"),
    [
        (never_cleared, {}, 0),
        (cleared_by_the_model, {"bucket_cap_mb": TINY}, 0),
        (cleared_to_zero, {"bucket_cap_mb": TINY}, 4),
        (cleared_to_zero, {"bucket_cap_mb": 8e-5}, 3),
        (by_closure, {"bucket_cap_mb": TINY}, 4),
        (several_passes, {"bucket_cap_mb": TINY, "backward_passes_per_step": PASSES}, 4),
        (several_passes_said_later, {"bucket_cap_mb": TINY}, 4),
        (compiled, {"bucket_cap_mb": TINY}, 4),
    ],
)
def test_a_rank_alone_trains_as_plain_torch_does(use, options, early):
    """Bit by bit, and this many buckets leave early in a step."""

    def train(rank: int) -> tuple[bytes, list[int]]:
        trainer, seen = TorchTrainer(MOMENTUM, **options), []
        log = hand_overs(trainer.opt)
        for step in range(3):
            use(trainer.model, trainer.opt, step)
            seen.append(len(log))
        trainer.opt.drain()
        return flat(trainer.model.parameters()).tobytes(), seen

    model = conv_model()
    optimizer = plain(MOMENTUM, model.parameters())
    for step in range(3):
        use(model, optimizer, step)
    assert Cluster(1).run(train) == [(flat(model.parameters()).tobytes(), [early, 2 * early, 3 * early])]


# -- what a step must not be ------------------------------------------------------------------------------------


def test_zero_grad_between_backward_and_step_is_refused_and_the_step_is_not_lost():
    def train(rank: int) -> Any:
        trainer = TorchTrainer(MOMENTUM, quorum="all")
        trainer.opt._async.worker_now()
        for step in range(3):
            trainer.gradient(rank, step)
            if step == 1:
                with pytest.raises(ReplicaStateError, match=r"zero_grad\(\) between backward\(\) and step\(\)"):
                    trainer.opt.zero_grad()
            trainer.opt.step()
        trainer.opt.drain()
        return trainer.weights()

    expected = TORCH.averaged(MOMENTUM, [2] * 3)
    for weights in Cluster(2).run(train):
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6)


def test_after_step_nothing_leaves_until_zero_grad():
    """A GAN's other half runs backward through this model."""

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


def test_a_gradient_that_is_replaced_when_it_is_gone_is_an_error_that_says_what_to_do():
    """(Changes in place: ``test_torch_left_from_ddp``, ``test_torch_lost_changes``.)"""

    def train(rank: int) -> None:
        trainer = TorchTrainer(MOMENTUM)
        trainer.opt._async.worker_now()
        trainer.gradient(rank, 0)
        for parameter in trainer.model.parameters():
            parameter.grad = parameter.grad * 0.5
        with pytest.raises(ReplicaStateError, match=r"round_transform=.*skip_synchronize.*backward_passes_per_step="):
            trainer.opt.step()
        with pytest.raises(
            ReplicaStateError, match="no longer what the other ranks take them for"
        ):  # half of a step is on its way
            trainer.opt.step()

    Cluster(1).run(train)


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
