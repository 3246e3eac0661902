"""torch: gossip beside what training scripts do: schedulers, closures, scalers, odd parameters, plain states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.algorithms.gossip import message_format
from hvd_async.algorithms.gossip.message_format import HEADER
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.testing import Cluster
from hvd_async.torch.memory import ReusedMemory
from hvd_async.torch.message_format import make_message_format
from tests.conformance.gossip_ranks import MOMENTUM, PAIRS, SGD, STAR, alike, by_options, check_mean, drain, watch
from tests.conformance.gossip_reference import least_squares
from tests.conformance.torch_gossip_ranks import GossipTrainer
from tests.conformance.torch_ranks import batch, conv_model, flat, plain


def bits(trainer: GossipTrainer) -> bytes:
    trainer.opt.drain()
    return trainer.weights().tobytes()


# -- what is called around a step -----------------------------------------------------------------------------


def test_a_closure_is_evaluated_once_a_step_at_the_models_own_weights():
    calls = []

    def train(rank: int, closure: bool = False) -> bytes:
        trainer = GossipTrainer(least_squares(3, MOMENTUM), rank, **STAR)

        def evaluate() -> float:
            assert torch.is_grad_enabled()
            trainer.gradient()
            calls.append(rank)
            return 7.0

        for _ in range(4):
            if closure:
                assert trainer.opt.step(evaluate) == 7.0
            else:
                trainer.step()
        return bits(trainer)

    assert alike(train) == alike(lambda rank: train(rank, closure=True))
    assert sorted(calls) == [0] * 4 + [1] * 4 + [2] * 4


@by_options(STAR, PAIRS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_on_one_rank(options, fused):
    """It is one step less of this rank, or, where the optimizer itself skips, one that moves nothing."""
    problem = least_squares(3, SGD)

    def train(rank: int) -> Any:
        trainer = GossipTrainer(problem, rank, lambda ps: torch.optim.SGD(ps, lr=0.1, fused=fused), **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        seen = watch(trainer)
        for step in range(5):
            trainer.gradient()
            for parameter in trainer.parameters:
                parameter.grad *= scaler.get_scale()
            if (rank, step) == (1, 2):
                trainer.parameters[0].grad[0] = torch.inf
            scaler.scale(torch.zeros(1))
            scaler.step(trainer.opt)
            scaler.update()
        assert scaler.get_scale() == (512.0 if rank == 1 else 1024.0)
        return drain(trainer, seen)

    seen = Cluster(3).run(train)
    assert [own.stats.steps for own in seen] == [5, 5 if fused else 4, 5]
    check_mean(problem.start, seen)


def test_backward_under_autocast_and_several_backward_passes():
    def train(rank: int) -> bytes:
        model = conv_model()
        opt = hvd.GossipOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2, **STAR
        )
        for step in range(4):
            opt.zero_grad()
            for part in range(2):
                images, labels = batch(rank, 2 * step + part)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss.backward()
            opt.step()
        opt.drain()
        assert opt.stats().steps == 4
        assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in model.parameters())
        assert np.abs(flat(model.parameters()) - flat(conv_model().parameters())).max() > 1e-3
        return flat(model.parameters()).tobytes()

    alike(train)


# -- parameters -----------------------------------------------------------------------------------------------


@by_options(STAR, PAIRS | {"compression": "bf16"})
def test_parameters_of_all_shapes_and_layouts(options):
    """A scalar, an empty one, float64, channels last: all as one vector."""
    values = [torch.tensor(1.5), torch.zeros(0, 3), torch.ones(3, dtype=torch.float64), torch.ones(2, 3, 2, 2)]

    def drawn(shape: tuple[int, ...], *seed: int) -> Any:
        return np.random.default_rng(seed).normal(size=shape)

    def train(rank: int, last: bool = False) -> list[bytes]:
        parameters = [torch.nn.Parameter(value.clone()) for value in values]
        if last:
            parameters[3].data = parameters[3].data.contiguous(memory_format=torch.channels_last)
        opt = hvd.GossipOptimizer(torch.optim.SGD(parameters, lr=0.1), **options)
        for step in range(3):
            for index, parameter in enumerate(parameters):
                gradient = drawn(tuple(parameter.shape), rank, step, index)
                parameter.grad = torch.as_tensor(gradient, dtype=parameter.dtype)
            opt.step()
            assert parameters[3].is_contiguous(memory_format=torch.channels_last) == last
        opt.drain()
        assert [p.dtype for p in parameters] == [value.dtype for value in values]
        moved = sum(drawn((3,), own, step, 2) for own in range(2) for step in range(3))
        np.testing.assert_allclose(parameters[2].detach(), 1.0 - 0.1 * moved / 2, rtol=0, atol=1e-14)
        return [p.detach().contiguous().numpy().tobytes() for p in parameters]

    contiguous, channels_last = alike(train, 2), alike(lambda rank: train(rank, last=True), 2)
    assert contiguous == channels_last or options["algorithm"] == "adpsgd"


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("elements", [1, 9, 2051])
@pytest.mark.parametrize(("codec", "parts"), [("none", 2), ("fp16", 1), ("bf16", 2), ("int8", 1), ("int8", 3)])
def test_messages_have_the_bytes_that_numpys_have(codec, parts, elements, kind):
    """Ties, zeros, and what half precision cannot hold among them; and vectors are added and split up as there."""
    values = np.random.default_rng(elements).normal(size=elements).astype(kind)
    values[:9] = [127.0, 0.5, 1.5, -0.0, 1e-6, 1.00390625, 65520.0, -1e5, 3.4e38][:elements]
    if codec == "int8":
        values[6:9] = 2.5
    ours = make_message_format(
        torch.as_tensor(values), codec, 3, RankGroup(None, (0,), 0, 0, 1), parts, ReusedMemory(1)
    )
    theirs = message_format.make_message_format(elements, kind, codec, 3, None, parts)
    for field in ("nbytes", "rows", "lossless", "differences"):
        assert getattr(ours, field) == getattr(theirs, field)
    pieces = ours.split(torch.as_tensor(values))
    for piece, other in zip(pieces, theirs.split(values), strict=True):
        data, expected = ours.encode(piece), theirs.encode(other)
        (row, *_), header = ours.pack([(data, HEADER.pack(7, 0.5))]), HEADER.pack(7, 0.5)
        for received, end in (theirs.unpack(row.numpy()), ours.unpack(row)):
            assert (np.asarray(received).tobytes(), end) == (expected.tobytes(), header)
        np.testing.assert_array_equal(ours.decode(data).numpy(), theirs.decode(expected), strict=True)
        whole, longer = ours.as_bytes(piece), ours.concatenate([ours.as_bytes(piece), data])
        assert whole.numpy().tobytes() == theirs.as_bytes(other).tobytes()
        assert ours.from_bytes(longer).numpy().tobytes() == other.tobytes()
    np.testing.assert_array_equal(ours.join(pieces).numpy(), values, strict=True)
    total = ours.add(torch.as_tensor(values.copy()), torch.as_tensor(values), -0.5)
    np.testing.assert_allclose(total.numpy(), theirs.add(values.copy(), values, -0.5), rtol=1e-7)
    assert (ours.zeros().numpy() == 0).all()
    assert ours.scalar(0.1).tolist() == [0.1]


# -- states of plain optimizers -----------------------------------------------------------------------------------


def test_a_plain_optimizers_state_is_taken_and_ours_by_a_plain_optimizer():
    alone = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 2))]
    other = plain(MOMENTUM, alone)
    for parameter in alone:
        parameter.grad = torch.full_like(parameter, 3.0)
    other.step()

    def train(rank: int) -> Any:
        trainer = GossipTrainer(least_squares(2, MOMENTUM), rank, **STAR)
        trainer.opt.load_state_dict(other.state_dict())
        assert trainer.moments().tolist() == [3.0] * 6
        trainer.train(2).opt.drain()
        return trainer.opt.state_dict()

    for state in Cluster(2).run(train):
        fresh = plain(MOMENTUM, [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 2))])
        fresh.load_state_dict(state)
        held = fresh.state_dict()["state"][1]["momentum_buffer"]
        assert torch.equal(held, state["state"][1]["momentum_buffer"])


def test_a_header_is_not_written_over_the_part_behind_a_message():
    """Two parts of 16 bytes lie in 32, which is as long as a row of one with its header."""
    vector = torch.arange(8.0)
    post = make_message_format(vector, "none", 1, RankGroup(None, (0,), 0, 0, 1), 2, ReusedMemory(1))
    first, second = post.split(vector)
    row = post.pack([(post.encode(first), HEADER.pack(1, 0.5))])
    assert row[0, :16].view(torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert second.tolist() == [4.0, 5.0, 6.0, 7.0]
