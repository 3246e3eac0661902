"""Buffers of torch models: statistics of batch norm are averaged, each by itself; others are rank 0's, bit by bit."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.testing import Cluster
from hvd_async.torch.buffers import NamedBuffers
from tests.conformance.leader_drive import wait_for_pulls

WRAPPERS: dict[str, Callable[..., Any]] = {
    "eager": lambda optimizer, **named: hvd.EagerOptimizer(optimizer, quorum="all", **named),
    "gossip": lambda optimizer, **named: hvd.GossipOptimizer(optimizer, algorithm="sgp", **named),
    "lsgd": lambda optimizer, **named: hvd.LeaderOptimizer(
        optimizer, algorithm="lsgd", global_period=1, group=1, **named
    ),
    "easgd": lambda optimizer, **named: hvd.LeaderOptimizer(optimizer, algorithm="easgd", global_period=1, **named),
}
all_wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)


class Net(torch.nn.Module):
    """A linear layer and batch norm, the same on all ranks, with other buffers."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(6.0).view(3, 2) / 5 - 0.5)
            self.layer.bias.zero_()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=name != "transient")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.layer(inputs))
        return out


def wrap(wrapper: str, model: torch.nn.Module, named_buffers: Any = None) -> Any:
    """The model's optimizer."""
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    return WRAPPERS[wrapper](plain, named_buffers=model.named_buffers() if named_buffers is None else named_buffers)


def step(model: torch.nn.Module, optimizer: Any, rank: int, number: int = 0) -> None:
    """One step on this rank's own data."""
    draw = torch.Generator().manual_seed(10 * rank + number)
    optimizer.zero_grad()
    loss = (model(torch.randn(8, 2, generator=draw) * (1 + rank)) - 1).square().mean()
    loss.backward()
    if hasattr(optimizer, "record_loss"):
        optimizer.record_loss(loss)
    optimizer.step()


def bits(tensor: torch.Tensor) -> bytes:
    """A dense tensor's bytes."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def constants() -> dict[str, torch.Tensor]:
    """Buffers as models have them, of many kinds."""
    return {
        "mask": torch.triu(torch.full((4, 4), float("-inf")), 1),
        "observed": torch.tensor([float("inf"), float("-inf")]),
        "causal": torch.tril(torch.ones(4, 4, dtype=torch.bool)),
        "rotary": torch.polar(torch.ones(5), torch.arange(5.0)),
        "rotary_double": torch.polar(torch.ones(5).double(), torch.arange(5.0).double()).conj(),
        "words": torch.arange(5).to(torch.uint16),
        "scales": torch.linspace(0, 1, 5).to(torch.float8_e4m3fn),
        "brain": torch.linspace(0, 1, 3).bfloat16(),
        "tokens": torch.arange(4),
        "expanded": torch.tensor([[0.1]]).expand(3, 2),
        "transient": torch.linspace(0, 1, 7),
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(0.1),
        "adjacency": torch.eye(3).to_sparse(),
    }


@pytest.mark.parametrize("wrapper", ["eager", "gossip", "easgd"])
@pytest.mark.parametrize("name", [name for name in constants() if name not in ("empty", "adjacency")])
def test_other_buffers_become_rank_0s_bit_by_bit(wrapper, name):
    def train(rank: int) -> bytes:
        buffer = constants()[name]
        if rank:
            buffer = torch.zeros_like(buffer[:1, :1]).expand(3, 2) if name == "expanded" else torch.zeros_like(buffer)
        model = Net(**{name: buffer})
        optimizer = wrap(wrapper, model)
        step(model, optimizer, rank)
        optimizer.drain()
        assert getattr(model, name) is buffer
        return bits(buffer.resolve_conj())

    assert Cluster(2).run(train) == [bits(constants()[name].resolve_conj())] * 2


@all_wrappers
@pytest.mark.parametrize("count", [3, 7])
def test_statistics_that_are_the_same_on_all_ranks_keep_their_bits(wrapper, count):
    """Frozen batch norm: x + x + x in float32, divided by 3, is not always x."""

    def train(rank: int) -> list[bytes]:
        draw = torch.Generator().manual_seed(1)
        frozen = [torch.rand(500, generator=draw).to(kind) for kind in (torch.float32, torch.float16, torch.float64)]
        before = [bits(one) for one in frozen]
        model = Net()
        named = [(f"{number}.running_var", one) for number, one in enumerate(frozen)]
        optimizer = wrap(wrapper, model, [*model.named_buffers(), *named])
        for number in range(3):
            step(model, optimizer, rank, number)
        optimizer.drain()
        assert [bits(one) for one in frozen][: 2 if "sgd" in wrapper else 3] == before[: 2 if "sgd" in wrapper else 3]
        return before

    Cluster(count).run(train)


@pytest.mark.parametrize("wrapper", ["eager", "gossip", "lsgd", "easgd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_only_the_statistic_that_is_not_finite_is_left_out_and_named(wrapper, bad):
    def train(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        model = Net()
        optimizer = wrap(wrapper, model)
        step(model, optimizer, rank)
        model.norm.running_mean.fill_(1.0 + rank)
        model.norm.running_var.fill_(2.0 + rank)
        if rank == 1:
            model.norm.running_mean[0] = bad
        optimizer.drain()
        return model.norm.running_mean, model.norm.running_var

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ends = Cluster(3).run(train)
    for mean, variance in ends:
        assert mean.tolist() == [2.0] * 3  # of ranks 0 and 2
        assert variance.tolist() == [3.0] * 3
    told = [str(one.message) for one in caught if "not finite" in str(one.message)]
    assert told == ["buffers norm.running_mean are not finite on this rank, which has no part in their average"]


@pytest.mark.parametrize("algorithm", ["lsgd", "easgd"])
def test_pulls_average_statistics_beside_constants_and_without_the_one_that_is_not_finite(algorithm):
    """Alike steps: a pull after each, so that the next step takes its average up."""
    steps = 6

    def train(rank: int) -> np.ndarray[Any, Any]:
        model = Net(**constants())
        model.idle = norm = torch.nn.BatchNorm1d(3)  # (whose statistics no step changes)
        optimizer = wrap(algorithm, model)
        worker = optimizer._async.worker_now()
        norm.running_mean.fill_(float(rank))
        norm.running_var.fill_(float("nan") if rank else 4.0)
        for number in range(steps):
            step(model, optimizer, rank, number)
            wait_for_pulls(worker, number + 1)
        return np.array([norm.running_mean[0].item(), norm.running_var[0].item()])

    for seen in Cluster(2).run(train):
        assert seen.tolist() == [0.5, 4.0]


# -- which tensor -----------------------------------------------------------------------------------------------


GIVEN = {
    "pairs": lambda model: model.named_buffers(),
    "function": lambda model: model.named_buffers,
    "module": lambda model: model,
}


@all_wrappers
@pytest.mark.parametrize("given", GIVEN)
def test_a_buffer_that_its_module_has_replaced_is_averaged_where_it_is_now(wrapper, given):
    def train(rank: int) -> tuple[list[float], list[float]]:
        model = Net(mask=torch.zeros(2))
        stale = model.norm.running_mean
        optimizer = wrap(wrapper, model, GIVEN[given](model))
        step(model, optimizer, rank)
        model.norm.running_mean = torch.full((3,), 1.0 + rank)
        model.mask = torch.full((4,), 1.0 + rank)  # as a cache that has grown
        model.norm.double().float()  # new tensors, too
        with optimizer.consensus():
            assert model.norm.running_mean.tolist() == [1.5] * 3
        optimizer.drain()
        assert stale is not model.norm.running_mean
        return model.norm.running_mean.tolist(), model.mask.tolist()

    assert Cluster(2).run(train) == [([1.5] * 3, [1.0] * 4)] * 2


@all_wrappers
def test_a_buffer_with_another_shape_on_a_rank_is_left_alone_and_named(wrapper):
    """A rotary table that has grown with the longest sentence of a rank."""

    def train(rank: int) -> tuple[list[float], list[float]]:
        model = Net(table=torch.zeros(2))
        optimizer = wrap(wrapper, model)
        step(model, optimizer, rank)
        model.table = torch.full((2 + rank,), 1.0 + rank)
        model.norm.running_mean.fill_(1.0 + rank)
        optimizer.drain()
        return model.norm.running_mean.tolist(), model.table.tolist()

    with pytest.warns(UserWarning, match="buffers table have different shapes"):
        assert Cluster(2).run(train) == [([1.5] * 3, [1.0] * 2), ([1.5] * 3, [2.0] * 3)]


@pytest.mark.parametrize(("given", "told"), [(["mean"], "'mean'"), (5, "5")])
def test_named_buffers_that_are_no_pairs_are_refused(given, told):
    with pytest.raises(ValueError, match=rf"named_buffers must be pairs .* got \[{told}\]. Pass model.named_buffers"):
        hvd.EagerOptimizer(torch.optim.SGD(Net().parameters(), lr=0.1), named_buffers=given)


def test_buffers_are_looked_up_while_other_threads_make_tuples():
    """CPython raises a SystemError in a thread that fills a new tuple to which another thread has a reference."""
    model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(4) for _ in range(8)))
    done, errors, before = threading.Event(), [], sys.getswitchinterval()

    def make() -> None:
        try:
            while not done.is_set():
                tuple(number for number in range(50))
        except SystemError as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(3)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(40):
            NamedBuffers(model.named_buffers())
    finally:
        done.set()
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join(60)
    assert not errors
