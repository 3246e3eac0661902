"""torch: ranks' weights as flat vectors: the order of their elements, their memory, and what changes between steps."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hvd_async.torch as hvd
from hvd_async.algorithms.gossip.message_format import HEADER
from hvd_async.errors import ReplicaMismatchError
from hvd_async.testing import Cluster
from hvd_async.torch import streams, weight_replica
from hvd_async.torch.gradient_format import memory_order
from hvd_async.torch.weight_replica import FREE_BLOCKS, WeightVectors
from tests.conformance.gossip_ranks import PAIRS, STAR, alike
from tests.conformance.test_torch_waits import NothingComesFromTheHost
from tests.conformance.test_torch_waits import parameters as meta_parameters

LAST, PLAIN = torch.channels_last, torch.contiguous_format
INT8 = {**STAR, "compression": hvd.Compression.int8}
LSGD = {"algorithm": "lsgd", "group": 1, "global_period": 2}
SHAPES = [(4, 3, 2, 2), (5,), (2, 3), (4, 3, 1, 1), (), (0, 3)]


def made(memory_format: torch.memory_format = LAST, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Return parameters of all shapes, those of four dimensions in a memory format."""
    random = np.random.default_rng(1)
    tensors = [torch.as_tensor(random.normal(size=shape), dtype=dtype) for shape in SHAPES]
    formatted = [t.contiguous(memory_format=memory_format) if t.dim() == 4 else t for t in tensors]
    return [torch.nn.Parameter(tensor) for tensor in formatted]


def vectors_of(parameters: list[torch.nn.Parameter], dtype: torch.dtype = torch.float32) -> WeightVectors:
    return WeightVectors(parameters, dtype, [memory_order(p) for p in parameters])


class Rank:
    """One rank of any algorithm whose weights travel, with a gradient of its own in each step."""

    def __init__(self, rank: int, options: dict[str, Any], memory_format: torch.memory_format = PLAIN) -> None:
        self.rank, self.steps, self.leads = rank, 0, options is LSGD
        self.parameters = made(memory_format)
        sgd = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.opt = (hvd.LeaderOptimizer if self.leads else hvd.GossipOptimizer)(sgd, **options)

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
        """Return the bits of the weights, elements in contiguous order."""
        return [p.detach().contiguous().numpy().tobytes() for p in self.parameters]


def trained(options: dict[str, Any], between: Callable[[Rank], object], size: int) -> list[bytes]:
    """Train a few steps, with an action between them, and drain; return all ranks' bits."""

    def train(rank: int) -> list[bytes]:
        one = Rank(rank, options)
        for _ in range(4):
            one.step()
            between(one)
        one.opt.drain()
        return one.bits()

    return alike(train, size)


def convert(one: Rank) -> None:
    """Bring the weights into the other memory format, in new memory."""
    first = one.parameters[0]
    first.data = first.data.contiguous(memory_format=PLAIN if memory_order(first) else LAST)


# -- vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elements_have_the_parameters_memory_order_and_are_restored_bit_by_bit(dtype):
    parameters = made()
    vectors = vectors_of(parameters, dtype)
    vector = vectors.read(parameters)
    in_memory = [p.detach().permute(0, 2, 3, 1) if p.dim() == 4 else p.detach() for p in parameters]
    assert vector.tolist() == torch.cat([t.reshape(-1) for t in in_memory]).to(dtype).tolist()
    assert vectors.orders == ["channels_last", "", "", "", "", ""]
    expected = [p.detach().clone() for p in parameters]
    for parameter in parameters:
        parameter.detach().zero_()
    vectors.write(parameters, vector.clone())  # (in memory that it does not know)
    assert all(map(torch.equal, parameters, expected))
    vectors.write(parameters, vector.mul_(2.0))
    assert all(torch.equal(p, 2.0 * before) for p, before in zip(parameters, expected, strict=True))


def test_copies_do_not_reorder_elements_and_views_are_made_once():
    parameters = made()
    vectors = vectors_of(parameters)
    vector = vectors.read(parameters)
    parts = vectors.parts(vector)
    assert [part.stride() for part in parts if part.numel()] == [p.stride() for p in parameters if p.numel()]
    del vector
    assert vectors.parts(vectors.read(parameters)) is parts


def test_no_step_waits_for_a_number():
    parameters = meta_parameters()
    vectors = vectors_of(parameters)
    with NothingComesFromTheHost():
        vectors.write(parameters, vectors.read(parameters))


def test_memory_is_reused_when_the_last_tensor_on_it_is_gone():
    vectors = vectors_of(made())
    first = vectors.empty()
    where, view = first.data_ptr(), first.view(torch.uint8)[8:16]
    del first
    assert vectors.empty().data_ptr() != where
    del view
    again = vectors.empty()
    assert where in {again.data_ptr(), vectors.empty().data_ptr(), vectors.empty().data_ptr()}


def test_free_memory_is_bounded():
    vectors = vectors_of(made())
    late = [vectors.empty() for _ in range(6)]
    assert len({one.data_ptr() for one in late}) == 6
    del late
    vectors.empty()
    assert len(vectors._blocks) == FREE_BLOCKS + 1


def test_there_is_room_for_a_header_behind_a_vector():
    vector = vectors_of(made()).empty()
    assert vector.storage_offset() == 0
    assert vector.untyped_storage().nbytes() >= vector.nbytes + HEADER.size


def test_memory_is_freed_in_one_thread_and_reused_in_another():
    vectors, seen = vectors_of(made()), []

    def work() -> None:
        for number in range(200):
            mine = vectors.empty().fill_(number)
            seen.append(bool((mine == number).all()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [True] * 800


def test_memory_is_not_reused_where_torch_cannot_count_uses(monkeypatch):
    monkeypatch.setattr(weight_replica, "_use_count", None)
    parameters = made()
    vectors = vectors_of(parameters)
    one, other = vectors.read(parameters), vectors.empty().zero_()
    vectors.write(parameters, other)
    assert one.abs().sum() > 0
    assert not any(p.any() for p in parameters)


# -- memory formats of ranks --------------------------------------------------------------------------------------


def test_a_rank_with_another_memory_format_is_refused_when_the_ranks_meet():
    def train(rank: int) -> None:
        with pytest.raises(ReplicaMismatchError, match=r"\(4, 3, 2, 2\) float32 channels_last"):
            Rank(rank, STAR, LAST if rank else PLAIN).step()

    Cluster(2).run(train)


@pytest.mark.parametrize("options", [STAR, PAIRS, LSGD], ids=["sgp", "adpsgd", "lsgd"])
def test_weights_that_move_to_other_memory_between_steps(options):
    """To the other format, to one that is neither, or by ``p.data``, as load_state_dict(assign=True) does."""
    size = 2 if options is STAR else 1  # (with more, what has arrived at a step depends on the machine)
    plain = trained(options, lambda one: None, size)
    assert trained(options, convert, size) == plain

    def strided(one: Rank) -> None:
        one.parameters[0].data = one.parameters[0].data.repeat(1, 1, 1, 2)[..., ::2].copy_(one.parameters[0].data)

    assert trained(options, strided, size) == plain

    def replace(one: Rank) -> None:
        kept = [p.data for p in one.parameters]
        for parameter in one.parameters:
            parameter.data = parameter.data.clone()
        for tensor in kept:
            tensor.fill_(7.0)

    assert trained(options, replace, size) == plain


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loads", [LAST, PLAIN], ids=["the same format", "another"])
def test_vectors_in_a_checkpoint_load_only_with_the_same_memory_order(loads):
    saved: list[Any] = [None, None]

    def run(rank: int) -> list[bytes]:
        one = Rank(rank, INT8, LAST)
        for step in range(6):
            if step == 3:
                one.opt.cut()
                saved[rank] = copy.deepcopy((one.opt.state_dict(), [p.detach() for p in one.parameters]))
            one.step()
        one.opt.drain()
        return one.bits()

    whole = Cluster(2).run(run)

    def resume(rank: int) -> list[bytes] | None:
        one = Rank(rank, INT8, loads)
        state, weights = saved[rank]
        for parameter, tensor in zip(one.parameters, weights, strict=True):
            parameter.data.copy_(tensor)
        if loads is PLAIN:
            with pytest.raises(ValueError, match="only then bring the model into the format that you like"):
                one.opt.load_state_dict(copy.deepcopy(state))
            return None
        one.opt.load_state_dict(copy.deepcopy(state))
        one.steps = 3
        for _ in range(3):
            one.step()
        one.opt.drain()
        return one.bits()

    assert Cluster(2).run(resume) == (whole if loads is LAST else [None, None])


@pytest.mark.parametrize("saves", [PLAIN, LAST], ids=str)
def test_orders_are_those_of_all_groups_also_of_one_added_before_a_state_is_loaded(saves):
    """Loading a state raises only if the parameter of the added group has another memory format."""

    def grouped(memory_format: torch.memory_format) -> Any:
        first, *others = made(memory_format)
        opt: Any = hvd.GossipOptimizer(torch.optim.SGD(others, lr=0.1), **INT8)
        opt.add_param_group({"params": [first]})
        for parameter in (first, *others):
            parameter.grad = torch.ones_like(parameter)
        return opt

    def resume(rank: int) -> None:
        opt = grouped(saves)
        opt.step()
        opt.cut()
        state = copy.deepcopy(opt.state_dict())
        grouped(saves).load_state_dict(copy.deepcopy(state))
        with pytest.raises(ValueError, match="lie in memory otherwise than this model's"):
            grouped(LAST if saves is PLAIN else PLAIN).load_state_dict(state)

    Cluster(2).run(resume)


def test_a_checkpoint_in_contiguous_order_loads_into_a_model_that_is_converted_later():
    """Older versions saved that order, whatever the model's format."""
    saved: list[Any] = [None, None]

    def run(rank: int, resumes: bool) -> list[bytes]:
        one = Rank(rank, INT8)
        if resumes:
            one.opt.load_state_dict(copy.deepcopy(saved[rank][0]))
            convert(one)
            for parameter, tensor in zip(one.parameters, saved[rank][1], strict=True):
                parameter.data.copy_(tensor)
            one.steps = 3
        while one.steps < 6:
            if one.steps == 3 and not resumes:
                one.opt.cut()
                saved[rank] = copy.deepcopy((one.opt.state_dict(), [p.detach() for p in one.parameters]))
                assert "orders" not in saved[rank][0]["hvd_async"]
            one.step()
        one.opt.drain()
        return one.bits()

    whole = Cluster(2).run(lambda rank: run(rank, False))
    assert Cluster(2).run(lambda rank: run(rank, True)) == whole


# -- parameter groups -----------------------------------------------------------------------------------------------


def test_freezing_between_steps_is_seen_by_the_next_one():
    """Elements of a frozen parameter are reported as frozen, those of an unfrozen one are not."""

    def train(rank: int) -> list[list[slice]]:
        one, seen = Rank(rank, {"algorithm": "exact-diffusion", "topology": "ring"}), []
        for frozen in ([], [1], [0, 1, 5], [2], []):
            for index, parameter in enumerate(one.parameters):
                parameter.requires_grad_(index not in frozen)
            one.step()
            seen.append(one.opt._async.replica.frozen())
        return seen

    assert (
        Cluster(2).run(train)
        == [
            [[], [slice(48, 53)], [slice(0, 48), slice(48, 53)], [slice(53, 59)], []],
        ]
        * 2
    )


def test_weights_converted_to_a_wider_dtype_after_the_ranks_met_are_refused():
    def train(rank: int) -> None:
        one = Rank(rank, STAR)
        one.step()
        for parameter in one.parameters:
            parameter.data = parameter.data.double()
        with pytest.raises(ValueError, match=r"travel as torch\.float32.*have become torch\.float64"):
            one.step()

    Cluster(1).run(train)


def test_the_content_of_groups_may_be_replaced_by_a_loaded_state():
    """A step uses the learning rates that the groups have when it begins."""

    def train(rank: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        groups = [{"params": made()}, {"params": made()[:2], "lr": 0.5}]
        opt = hvd.GossipOptimizer(
            torch.optim.SGD(groups, lr=0.1, momentum=0.9), algorithm="exact-diffusion", topology="ring"
        )

        def step() -> list[tuple[int, float]]:
            for group in groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            opt.step()
            return list(opt._async.worker.learning_rates())

        before = step()
        opt.drain()
        state = opt.state_dict()
        state["param_groups"][0]["lr"], state["param_groups"][1]["lr"] = torch.tensor(0.25), 0.125
        opt.load_state_dict(state)
        return before, step()

    for before, after in Cluster(2).run(train):
        assert before == [(72, 0.1), (53, 0.5)]
        assert after == [(72, 0.25), (53, 0.125)]


@pytest.mark.parametrize(
    "options", [{"algorithm": "exact-diffusion", "topology": "ring"}, {**STAR, "quasi_global": True}], ids=str
)
def test_a_learning_rate_on_a_gpu_is_read_after_the_step_is_computed(monkeypatch, options):
    rate, events = torch.tensor(0.1), []

    class Later:
        def __init__(self, number: torch.Tensor) -> None:
            assert number is rate
            events.append("sent")

        def __float__(self) -> float:
            events.append("read")
            return 0.1

    monkeypatch.setattr(streams.gpu, "holds", lambda tensor: tensor is rate)
    monkeypatch.setattr(streams, "Later", Later)

    def train(rank: int) -> list[str]:
        one = Rank(rank, options)
        replica = one.opt._async.replica
        is_finite = replica.is_finite
        replica.is_finite = lambda weights: events.append("waited") or is_finite(weights)
        one.step()
        one.opt.param_groups[0]["lr"] = rate
        events.clear()
        one.step()
        return list(events)

    (seen,) = Cluster(1).run(train)
    assert seen[:2] == ["sent", "waited"]
    assert set(seen[2:]) == {"read"}


# -- batch-norm statistics ------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counter of calls that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(argument.alias_info for argument in function._schema.arguments[:1])
        return function(*args, **(kwargs or {}))


def test_statistics_are_read_in_one_call_from_the_modules_present_buffers():
    model = torch.nn.Sequential(*[torch.nn.BatchNorm1d(3) for _ in range(20)], torch.nn.Linear(3, 1))

    def train(rank: int) -> None:
        opt = hvd.LeaderOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), group=1, named_buffers=model.named_buffers()
        )
        replica = opt._async.replica
        with Calls() as calls:
            read = replica.statistics()
        assert calls.count == 1
        model[1].running_mean = torch.tensor([1.0, 2.0, 3.0])  # (another tensor)
        model[2].running_var.fill_(torch.nan)
        expected = torch.zeros(2, 40, 3)
        expected[1] = 1.0
        expected[0, 1::2] = 1.0
        assert read().view(2, 40, 3).equal(expected.double())  # as it was read
        expected[0, 2] = torch.tensor([1.0, 2.0, 3.0])
        expected[:, 5] = 0.0
        assert replica.statistics()().view(2, 40, 3).equal(expected.double())
        model[3].running_mean = torch.zeros(4)  # (of another shape)
        model[3].running_var = None
        model[4].running_mean = torch.ones(3, dtype=torch.int64)  # (counts are no statistics)
        expected[:, 6:9] = 0.0
        assert replica.statistics()().view(2, 40, 3).equal(expected.double())

    Cluster(1).run(train)
