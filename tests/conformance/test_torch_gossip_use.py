"""torch: gossip beside what training scripts do: schedulers, closures, scalers, odd parameters, plain states."""

from __future__ import annotations

import copy
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.algorithms.gossip import message_format
from hvd_async.algorithms.gossip.message_format import HEADER
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.testing import Cluster
from hvd_async.torch.streams import ReusedMemory
from hvd_async.torch.weight_replica import make_message_format
from tests.conformance.drive import scripted_engine
from tests.conformance.gossip_ranks import MOMENTUM, PAIRS, SGD, STAR, alike, by_options, check_mean, drain, watch
from tests.conformance.gossip_reference import least_squares
from tests.conformance.torch_gossip_ranks import GossipTrainer
from tests.conformance.torch_ranks import batch, conv_model, flat, plain


def bits(trainer: GossipTrainer) -> bytes:
    trainer.opt.drain()
    return trainer.weights().tobytes()


# -- what is called around a step -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_the_result_is_an_instance_of_the_wrapped_class(kind):
    with scripted_engine(2):
        plain = kind(conv_model().parameters(), lr=0.1)
        wrapped = hvd.GossipOptimizer(plain)
    assert isinstance(wrapped, kind)
    assert wrapped.param_groups is plain.param_groups
    assert repr(wrapped).startswith(kind.__name__)
    assert wrapped.stats().steps == wrapped.rounds == 0
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ReplicaStateError, match=r"save its state_dict\(\)"):
            copying(wrapped)


@pytest.mark.parametrize("made", ["before", "after"])
def test_schedulers_change_each_ranks_own_rate(made):
    def train(rank: int, by_hand: bool = False) -> bytes:
        schedulers = []

        def make(parameters: Any) -> Any:
            plain = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
            if made == "before":
                schedulers.append(torch.optim.lr_scheduler.ExponentialLR(plain, 0.5))
            return plain

        trainer = GossipTrainer(least_squares(3, MOMENTUM), rank, make=make, **STAR)
        if made == "after":
            schedulers.append(torch.optim.lr_scheduler.ExponentialLR(trainer.opt, 0.5))
        for step in range(4):
            trainer.step()
            if by_hand:
                trainer.opt.param_groups[0]["lr"] = 0.1 * 0.5 ** (step + 1)
            else:
                schedulers[0].step()
        assert trainer.opt.param_groups[0]["lr"] == 0.1 / 16
        return bits(trainer)

    assert alike(train) == alike(lambda rank: train(rank, by_hand=True))


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


def test_step_hooks_run_once_a_step():
    def train(rank: int) -> list[str]:
        trainer, log = GossipTrainer(least_squares(2, SGD), rank), list[str]()
        trainer.opt.register_step_pre_hook(lambda *_: log.append("pre"))
        trainer.opt.register_step_post_hook(lambda *_: log.append("post"))
        trainer.train(2)
        trainer.opt.drain()
        return log

    assert alike(train, 2) == ["pre", "post"] * 2


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


def test_frozen_parameters_and_those_without_gradient_are_only_mixed():
    def train(rank: int) -> tuple[bytes, Any]:
        trainer = GossipTrainer(least_squares(3, MOMENTUM), rank, **STAR)
        trainer.parameters[0].requires_grad_(False)
        for _ in range(6):
            trainer.gradient()
            trainer.parameters[0].grad = None
            if rank == 1:
                trainer.parameters[1].grad = None
            trainer.opt.step()
        return bits(trainer), trainer.parameters[0].detach().numpy()

    start = least_squares(3, MOMENTUM).start[0]
    for _, frozen in Cluster(3).run(train):
        np.testing.assert_allclose(frozen, start[:2], rtol=1e-6)
    assert len({weights for weights, _ in Cluster(3).run(train)}) == 1


def test_a_group_may_be_added_before_the_first_step_only():
    def train(rank: int) -> float:
        trainer = GossipTrainer(least_squares(2, SGD), rank, named_parameters=None)
        extra = torch.nn.Parameter(torch.zeros(1))
        trainer.opt.add_param_group({"params": [extra], "lr": 0.5})
        trainer.gradient()
        extra.grad = torch.full((1,), 1.0 + rank)
        trainer.opt.step()
        with pytest.raises(ReplicaStateError, match="Add all groups before training"):
            trainer.opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        trainer.opt.drain()
        return extra.item()

    assert alike(train, 2) == -0.75


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_parameters_that_mixing_would_spoil(dtype):
    right = torch.nn.Parameter(torch.zeros(2))
    wrong = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    with scripted_engine(2):
        hint = rf"{dtype} cannot be mixed.*keep weights in float32 and compute in half precision by torch\.autocast"
        with pytest.raises(ValueError, match=hint):
            hvd.GossipOptimizer(torch.optim.SGD([right, wrong], lr=0.1))

    def train(rank: int) -> None:
        opt = hvd.GossipOptimizer(torch.optim.SGD([right], lr=0.1))
        opt.add_param_group({"params": [wrong]})
        with pytest.raises(ValueError, match=hint):
            opt.drain()

    Cluster(1).run(train)


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


def test_optimizer_state_is_broadcast_before_the_first_step(monkeypatch):
    """Rank 0 has loaded a checkpoint; nobody has stepped."""
    meeting, sent, states = threading.Barrier(2), dict[str, Any](), dict[int, Any]()

    def broadcast(value: Any, root: int, name: str) -> Any:
        if local_engine().rank == root:  # type: ignore[union-attr]
            sent[name] = value
        meeting.wait(30)
        return sent[name]

    fake = SimpleNamespace(rank=lambda: local_engine().rank, broadcast=broadcast, broadcast_object=broadcast)  # type: ignore[union-attr]
    monkeypatch.setattr("hvd_async.torch.functions.hvd", fake)

    def first(rank: int) -> None:
        trainer = GossipTrainer(least_squares(2, MOMENTUM), rank, **STAR).train(3)
        trainer.opt.drain()
        states[rank] = trainer.saved()["opt"], trainer.moments().tolist()

    def train(rank: int) -> tuple[Any, int]:
        trainer = GossipTrainer(least_squares(2, MOMENTUM), rank, **STAR)
        if rank == 0:
            trainer.opt.load_state_dict(states[0][0])
        hvd.broadcast_optimizer_state(trainer.opt, root_rank=0)
        assert trainer.opt.stats().steps == 0
        held, rounds = trainer.moments().tolist(), trainer.opt.rounds
        trainer.train(1).opt.drain()
        return held, rounds

    Cluster(2).run(first)
    state, moments = states[0]
    assert Cluster(2).run(train) == [(moments, state["hvd_async"]["rounds"])] * 2


def test_a_header_is_not_written_over_the_part_behind_a_message():
    """Two parts of 16 bytes lie in 32, which is as long as a row of one with its header."""
    vector = torch.arange(8.0)
    post = make_message_format(vector, "none", 1, RankGroup(None, (0,), 0, 0, 1), 2, ReusedMemory(1))
    first, second = post.split(vector)
    row = post.pack([(post.encode(first), HEADER.pack(1, 0.5))])
    assert row[0, :16].view(torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert second.tolist() == [4.0, 5.0, 6.0, 7.0]


def test_there_is_room_for_all_rows_that_an_exchange_brings():
    """In memory that serves again; on hosts, where nobody knows how many there will be, Horovod finds some."""
    vector, group = torch.arange(8.0), RankGroup(None, (0,), 0, 0, 1)
    post = make_message_format(vector, "fp16", 1, group, 1, ReusedMemory(2), received=3)
    (row,) = post.pack([(post.encode(vector), HEADER.pack(1, 0.5))])
    room = post.room()
    assert room.shape == (3, len(row))
    where = room.data_ptr()
    del room
    assert post.room().data_ptr() == where
    assert make_message_format(vector, "fp16", 1, group, 2, ReusedMemory(2)).room() is None
