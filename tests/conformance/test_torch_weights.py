"""torch's own features: closures, scalers, plain states, odd parameters, messages, memory formats."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.algorithms.gossip.message_format import HEADER, NumpyMessageFormat
from hvd_async.errors import ReplicaMismatchError
from hvd_async.testing import Cluster
from hvd_async.torch.functions import receive_state
from hvd_async.torch.gradient_format import Layout, memory_order
from hvd_async.torch.streams import ReusedMemory
from hvd_async.torch.weight_replica import TorchMessageFormat
from tests.conformance.fake_gpu import FakeGpu
from tests.conformance.gossip_ranks import PAIRS, STAR, alike, by_options, check_mean
from tests.conformance.leader_drive import Seen
from tests.conformance.weight_ranks import SGD, TorchRank

# -- what is called around a step -----------------------------------------------------------------------------


def test_a_closure_is_evaluated_once_a_step_at_the_models_own_weights():
    calls = []

    def train(rank: int, closure: bool = False) -> bytes:
        one = TorchRank(TorchRank.least_squares(3), rank, **STAR)

        def evaluate() -> float:
            assert torch.is_grad_enabled()
            values = torch.as_tensor(one.problem.gradient(one.weights(), rank, len(one.path) + 1)).split((2, 4))
            for parameter, part in zip(one.parameters, values, strict=True):
                parameter.grad = part.view_as(parameter).float()
            calls.append(rank)
            return 7.0

        for _ in range(4):
            if closure:
                assert one.opt.step(evaluate) == 7.0
                one.path.append(one.weights())
            else:
                one.train(1)
        return one.drained()

    assert alike(train) == alike(lambda rank: train(rank, closure=True))
    assert sorted(calls) == [0] * 4 + [1] * 4 + [2] * 4


@by_options(STAR, PAIRS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_on_one_rank(options, fused):
    """It is one step less of this rank, or, where the optimizer itself skips, one that moves nothing."""
    problem = TorchRank.least_squares(3, SGD)

    def train(rank: int) -> Any:
        one = TorchRank(problem, rank, make=lambda ps: torch.optim.SGD(ps, lr=0.1, fused=fused), **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        seen = Seen(one)
        for step in range(5):
            one.before = one.weights()
            parts = torch.as_tensor(problem.gradient(one.before, rank, step)).split((2, 4))
            for parameter, part in zip(one.parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter).float() * scaler.get_scale()
            if (rank, step) == (1, 2):
                one.parameters[0].grad[0] = torch.inf
            scaler.scale(torch.zeros(1))
            scaler.step(one.opt)
            scaler.update()
        assert scaler.get_scale() == (512.0 if rank == 1 else 1024.0)
        return seen.drain()

    seen = Cluster(3).run(train)
    assert [own.stats.steps for own in seen] == [5, 5 if fused else 4, 5]
    check_mean(problem.start, seen)


@pytest.mark.parametrize(
    ("wrapper", "options"), [("EagerOptimizer", {"quorum": "all"}), ("GossipOptimizer", STAR)], ids=["eager", "gossip"]
)
def test_a_plain_optimizer_takes_our_state_and_we_take_its(wrapper, options):
    def stepped(gradient: float, **others: float) -> torch.optim.Optimizer:
        made = [torch.nn.Parameter(torch.ones(shape)) for shape in ((2,), (2, 2))]
        for parameter in made:
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer = torch.optim.SGD(made, **others)
        optimizer.step()
        return optimizer

    def train(rank: int) -> Any:
        one = TorchRank(TorchRank.least_squares(2), rank, wrapper=wrapper, **options)
        one.load(stepped(3.0, lr=0.2, momentum=0.8).state_dict())
        assert one.moments().first.tolist() == [3.0] * 6
        one.train(2).opt.drain()
        assert one.opt.stats().steps == 2
        return one.state()

    for state in Cluster(2).run(train):
        fresh = stepped(1.0, lr=0.5, momentum=0.1)
        fresh.load_state_dict(state)
        assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["momentum"]) == (0.2, 0.8)
        held = fresh.state_dict()
        assert "hvd_async" not in held
        for place in range(2):
            assert torch.equal(*(one["state"][place]["momentum_buffer"] for one in (held, state)))
        fresh.step()


# -- messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("elements", [1, 9, 2051])
@pytest.mark.parametrize(("codec", "parts"), [("none", 2), ("fp16", 1), ("bf16", 2), ("int8", 1), ("int8", 3)])
def test_messages_have_the_bytes_that_numpys_have(codec, parts, elements, kind):
    """Ties, zeros, and what half precision cannot hold among them; and vectors are added and split up as there."""
    values = np.random.default_rng(elements).normal(size=elements).astype(kind)
    values[:9] = [127.0, 0.5, 1.5, -0.0, 1e-6, 1.00390625, 65520.0, -1e5, 3.4e38][:elements]
    if codec == "int8":
        values[6:9] = 2.5
    ours = TorchMessageFormat(torch.as_tensor(values), ReusedMemory(1), compression=codec, messages=3, parts=parts)
    theirs = NumpyMessageFormat(elements, kind, codec, 3, None, parts)
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


def test_a_header_is_not_written_over_the_part_behind_a_message():
    """Two parts of 16 bytes lie in 32, which is as long as a row of one with its header."""
    vector = torch.arange(8.0)
    post = TorchMessageFormat(vector, ReusedMemory(1), compression="none", messages=1, parts=2)
    first, second = post.split(vector)
    row = post.pack([(post.encode(first), HEADER.pack(1, 0.5))])
    assert row[0, :16].view(torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert second.tolist() == [4.0, 5.0, 6.0, 7.0]


# -- shapes and memory formats of parameters ----------------------------------------------------------------------

SHAPES = [(4, 3, 2, 2), (5,), (2, 3), (4, 3, 1, 1), (), (0, 3)]
LAST, PLAIN = torch.channels_last, torch.contiguous_format
INT8 = STAR | {"compression": "int8"}
LSGD = {"group": 1, "global_period": 2}
SOLO = {"quorum": "solo"}


class Shaped:
    """A rank with parameters of all shapes, those of four dimensions in a memory format, one of them in float64."""

    def __init__(
        self, rank: int, options: dict[str, Any], memory_format: torch.memory_format = LAST, fused: bool = False
    ) -> None:
        random = np.random.default_rng(1)
        tensors = [torch.as_tensor(random.normal(size=shape), dtype=torch.float32) for shape in SHAPES]
        tensors[1] = tensors[1].double()
        formatted = [t.contiguous(memory_format=memory_format) if t.dim() == 4 else t for t in tensors]
        self.rank, self.steps, self.parameters = rank, 0, [torch.nn.Parameter(tensor) for tensor in formatted]
        self.leads = "global_period" in options
        averages: Any = hvd.EagerOptimizer if "quorum" in options else hvd.GossipOptimizer
        self.opt = (hvd.LeaderOptimizer if self.leads else averages)(
            torch.optim.SGD(self.parameters, lr=0.1, momentum=0.5, fused=fused), **options
        )

    def step(self) -> None:
        """Take a step."""
        random = np.random.default_rng((self.rank, self.steps))
        for parameter in self.parameters:
            gradient = torch.as_tensor(random.normal(size=tuple(parameter.shape)), dtype=parameter.dtype)
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        if self.leads:
            self.opt.record_loss(1.0 + self.rank)
        self.opt.step()
        self.steps += 1

    def bits(self) -> list[bytes]:
        """Return the bits of the weights, elements in contiguous order, after a drain."""
        self.opt.drain()
        return [p.detach().contiguous().numpy().tobytes() for p in self.parameters]

    def saved(self) -> Any:
        """Return the optimizer's state after a cut, and the weights."""
        self.opt.cut()
        return copy.deepcopy((self.opt.state_dict(), [p.detach() for p in self.parameters]))

    def resume(self, saved: Any) -> None:
        """Take up what was saved after three steps."""
        self.opt.load_state_dict(copy.deepcopy(saved[0]))
        for parameter, tensor in zip(self.parameters, saved[1], strict=True):
            parameter.data.copy_(tensor)
        self.steps = 3


def convert(one: Shaped) -> None:
    """Bring the weights into the other memory format, in new memory."""
    first = one.parameters[0]
    first.data = first.data.contiguous(memory_format=PLAIN if memory_order(first) else LAST)


def strided(one: Shaped) -> None:
    """Bring them into a format that is neither."""
    first = one.parameters[0]
    first.data = first.data.repeat(1, 1, 1, 2)[..., ::2].copy_(first.data)


def replace(one: Shaped) -> None:
    """Replace all, as ``load_state_dict(assign=True)`` does."""
    kept = [p.data for p in one.parameters]
    for parameter in one.parameters:
        parameter.data = parameter.data.clone()
    for tensor in kept:
        tensor.fill_(7.0)


@pytest.mark.parametrize("options", [STAR, PAIRS | {"compression": "bf16"}, LSGD], ids=["sgp", "adpsgd-bf16", "lsgd"])
def test_weights_that_move_to_other_memory_between_steps(options):
    size = 2 if options is STAR else 1  # (with more, what has arrived at a step depends on the machine)

    def trained(between: Callable[[Shaped], object], memory_format: torch.memory_format = LAST) -> list[bytes]:
        def train(rank: int) -> list[bytes]:
            one = Shaped(rank, options, memory_format)
            for _ in range(4):
                one.step()
                between(one)
            return one.bits()

        bits: list[bytes] = alike(train, size)
        return bits

    usual = trained(lambda one: None)
    assert trained(lambda one: None, PLAIN) == usual
    for between in (convert, strided, replace):
        assert trained(between) == usual


@pytest.mark.parametrize("options", [SOLO, STAR, LSGD], ids=["eager", "gossip", "lsgd"])
def test_fused_kernels_get_gradients_and_loaded_state_that_lie_as_the_parameters_do(options):
    """The kernels of a CPU do not compare strides."""

    def train(rank: int, moves: bool) -> list[bytes]:
        one = Shaped(rank, options, fused=True)
        if moves:
            one.parameters[2].data = one.parameters[2].data.t().contiguous().t()
        one.step()
        one.opt.drain()
        state = copy.deepcopy(one.opt.state_dict())
        if moves:
            convert(one)
            for own in state["state"].values():  # as ``broadcast_optimizer_state`` sends it
                own["momentum_buffer"] = own["momentum_buffer"].contiguous()
        one.opt.load_state_dict(state)
        for _ in range(2):
            one.step()
        return one.bits()

    assert alike(lambda rank: train(rank, moves=True), 1) == alike(lambda rank: train(rank, moves=False), 1)


def test_gradients_are_not_copied_where_strides_differ_in_dimensions_of_size_1_only():
    """Such are weights of 1x1 convolutions in ``torch.channels_last``."""
    one = torch.empty(4, 3, 1, 1, memory_format=LAST)
    vector = torch.zeros(13)
    (gradient,) = Layout([one]).buckets[0].gradients(vector)
    assert (gradient.stride(), gradient.data_ptr()) == (one.stride(), vector.data_ptr())


@pytest.mark.parametrize("options", [SOLO, STAR, LSGD], ids=["eager", "gossip", "lsgd"])
@pytest.mark.parametrize("given", ["device", "dtype"])
def test_torchs_default_device_and_dtype_change_nothing(options, given):
    """A tensor that is made without a device does not go together with others then. The dtype matters on a GPU."""

    def train(rank: int, device: str) -> tuple[list[bytes], set[torch.device]]:
        one = Shaped(rank, options)
        for step in range(3):
            with torch.device(device):
                one.opt.zero_grad()
                torch.autograd.backward([((step + 1) * p**2 + p).sum() for p in one.parameters])
                if one.leads:
                    one.opt.record_loss(1.0)
                one.opt.step()
        with torch.device(device):
            one.opt.drain()
            state = receive_state(one.opt, 1, 0, "", lambda _, value, name: value, lambda _, tensors, name: tensors)
            return one.bits(), {own["momentum_buffer"].device for own in state["state"].values()}

    def trained(device: str = "cpu") -> Any:
        with FakeGpu().installed() if given == "dtype" else contextlib.nullcontext():
            return alike(lambda rank: train(rank, device), 1)

    usual = trained()
    if given == "device":
        assert trained("meta") == usual
        return
    torch.set_default_dtype(torch.float64)
    try:
        assert trained() == usual
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("options", [STAR, SOLO], ids=["gossip", "eager"])
def test_a_rank_with_another_memory_format_is_refused_when_the_ranks_meet(options):
    def train(rank: int) -> None:
        with pytest.raises(ReplicaMismatchError, match=r"\(4, 3, 2, 2\) float32 channels_last"):
            Shaped(rank, options, LAST if rank else PLAIN).step()

    Cluster(2).run(train)


def test_pending_gradients_are_taken_back_only_by_parameters_that_lie_alike():
    gone, saved = threading.Event(), [None, None]

    def cut(rank: int) -> list[bytes]:
        one = Shaped(rank, SOLO)
        worker = one.opt._async.worker_now()
        if rank:
            assert gone.wait(60)
            worker.engine.wait(lambda: worker.has_available)
        one.step()
        gone.set()
        saved[rank] = one.saved()
        return one.bits()

    def resume(rank: int) -> list[bytes]:
        if rank:
            with pytest.raises(ValueError, match="same memory format"):
                Shaped(rank, SOLO, PLAIN).resume(saved[rank])
        one = Shaped(rank, SOLO)
        one.resume(saved[rank])
        return one.bits()

    whole = Cluster(2).run(cut)
    assert [any(state["hvd_async"]["versions"]) for state, _ in saved] == [False, True]
    assert Cluster(2).run(resume) == whole


def test_weights_converted_to_a_wider_dtype_after_the_ranks_met_are_refused():
    def train(rank: int) -> None:
        one = TorchRank(TorchRank.least_squares(1), rank, **STAR).train(1)
        for parameter in one.parameters:
            parameter.data = parameter.data.double()
        with pytest.raises(ValueError, match=r"sent as torch\.float32.*have become torch\.float64"):
            one.train(1)

    Cluster(1).run(train)


@pytest.mark.parametrize(
    ("saves", "loads", "later"),
    [(LAST, LAST, None), (LAST, PLAIN, None), (PLAIN, PLAIN, convert)],
    ids=["the same format", "another", "converted later"],
)
def test_vectors_in_a_checkpoint_load_only_with_the_same_memory_order(saves, loads, later):
    """Older versions saved vectors in contiguous order, whatever the model's format; so do contiguous models."""
    saved: list[Any] = [None, None]

    def run(rank: int) -> list[bytes]:
        one = Shaped(rank, INT8, saves)
        for step in range(6):
            if step == 3:
                saved[rank] = one.saved()
                assert ("orders" in saved[rank][0]["hvd_async"]) == (saves is LAST)
            one.step()
        return one.bits()

    def resume(rank: int) -> list[bytes] | None:
        one = Shaped(rank, INT8, loads)
        if loads is not saves:
            with pytest.raises(ValueError, match="only then convert the model to another format"):
                one.resume(saved[rank])
            return None
        one.resume(saved[rank])
        if later is not None:
            later(one)
        for _ in range(3):
            one.step()
        return one.bits()

    whole = Cluster(2).run(run)
    assert Cluster(2).run(resume) == (whole if loads is saves else [None, None])
