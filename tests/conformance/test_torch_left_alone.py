"""torch: what the wrappers leave as it is (whole numbers, frozen halves), and sparse gradients, which they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.testing import Cluster
from tests.conformance.torch_ranks import flat

FAMILIES: dict[str, Callable[..., Any]] = {
    "eager": hvd.EagerOptimizer,
    "groups": lambda optimizer, **o: hvd.EagerOptimizer(optimizer, groups=[optimizer.param_groups[0]["params"]], **o),
    "gossip": hvd.GossipOptimizer,
    "leader": lambda optimizer, **o: hvd.LeaderOptimizer(optimizer, group=2, **o),
}
OWN_WEIGHTS = ("gossip", "leader")


def step(opt: Any, *parameters: torch.Tensor) -> None:
    """With the gradient 1."""
    opt.zero_grad()
    finish(opt, sum(p.sum() for p in parameters))


def finish(opt: Any, loss: Any) -> None:
    """LSGD has to know by what to choose a leader."""
    loss.backward()
    if hasattr(opt, "record_loss"):
        opt.record_loss(loss.detach())
    opt.step()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("named", [False, True])
def test_whole_numbers_are_left_alone_even_where_ranks_have_others_and_need_no_name(family, named):
    def train(rank: int) -> Any:
        learned, kinds = torch.nn.Parameter(torch.zeros(3)), (torch.int64, torch.int8, torch.bool)
        numbers = [torch.arange(rank, rank + 3).to(kind) for kind in kinds]
        tables = [torch.nn.Parameter(each.clone(), requires_grad=False) for each in numbers]
        names = {"named_parameters": [("learned", learned)]} if named else {}
        opt = FAMILIES[family](torch.optim.SGD([learned, *tables], lr=1.0), **names)
        for _ in range(2):
            step(opt, learned)
        opt.drain()
        opt.load_state_dict(opt.state_dict())
        assert all(map(torch.equal, tables, numbers))
        assert all(table.grad is None for table in tables)
        return learned.tolist()

    assert Cluster(2).run(train) == [[-2.0] * 3] * 2


@pytest.mark.parametrize("family", OWN_WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_frozen_halves_are_left_alone_and_must_stay_frozen(family, dtype):
    def train(rank: int) -> Any:
        learned = torch.nn.Parameter(torch.zeros(3))
        backbone = torch.nn.Parameter(torch.full((2,), 0.1, dtype=dtype), requires_grad=False)
        opt = FAMILIES[family](torch.optim.SGD([backbone, learned], lr=1.0))
        step(opt, learned)
        backbone.requires_grad_(True)
        with pytest.raises(ValueError, match=rf"{dtype} cannot be mixed"):
            step(opt, learned, backbone)
        backbone.requires_grad_(False)
        backbone.grad = None
        step(opt, learned)  # nothing was left behind by the refusal
        opt.drain()
        assert torch.equal(backbone, torch.full((2,), 0.1, dtype=dtype))
        return learned.tolist()

    assert Cluster(2).run(train) == [[-2.0] * 3] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_weights_stay_equal_and_what_they_were(family):
    start = torch.as_tensor(np.random.default_rng(3).normal(size=50), dtype=torch.float32)

    def train(rank: int) -> Any:
        learned, frozen = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(start.clone(), requires_grad=False)
        opt = FAMILIES[family](torch.optim.SGD([frozen, learned], lr=1.0, momentum=0.9, weight_decay=0.1))
        for _ in range(5):
            step(opt, learned)
        opt.drain()
        return frozen.detach().numpy().copy()

    ends = Cluster(2).run(train)
    assert ends[0].tobytes() == ends[1].tobytes()
    np.testing.assert_allclose(ends[0], start.numpy(), rtol=1e-6, atol=0)


def test_frozen_weights_may_have_other_memory_while_gradients_of_others_travel():
    """As where they are moved to another device, or merged into others and let go."""

    def train(rank: int) -> Any:
        learned, frozen = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(4))
        opt: Any = hvd.EagerOptimizer(torch.optim.SGD([learned, frozen], lr=1.0))
        step(opt, learned, frozen)
        frozen.requires_grad_(False)
        frozen.data = torch.empty(0)
        step(opt, learned)
        opt.drain()
        return learned.tolist()

    assert Cluster(2).run(train) == [[-2.0] * 3] * 2


# -- sparse gradients -----------------------------------------------------------------------------------------


def embedding() -> torch.nn.Embedding:
    made = torch.nn.Embedding(9, 4, sparse=True)
    with torch.no_grad():
        made.weight.fill_(100.0)
    return made


def words(rank: int, number: int) -> torch.Tensor:
    """The same one may come twice."""
    return torch.as_tensor(np.random.default_rng([rank, number]).integers(0, 9, (3,)))


@pytest.mark.parametrize(("family", "kind"), [("gossip", "sparse-adam"), ("leader", "sgd")])
def test_sparse_gradients_stay_on_a_rank_with_weights_of_its_own(family, kind):
    make = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "sparse-adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
    }[kind]

    def train(rank: int, wrap: Callable[[Any], Any]) -> Any:
        model = embedding()
        opt = wrap(make(model.parameters()))
        for number in range(4):
            opt.zero_grad()
            finish(opt, model(words(rank, number)).square().sum())
        getattr(opt, "drain", lambda: None)()
        return flat(model.parameters())

    alone = {"gossip": hvd.GossipOptimizer, "leader": lambda o: hvd.LeaderOptimizer(o, group=1)}[family]
    (own,) = Cluster(1).run(lambda rank: train(rank, alone))
    np.testing.assert_array_equal(own, train(0, lambda optimizer: optimizer))
    ends = Cluster(2).run(lambda rank: train(rank, FAMILIES[family]))
    assert ends[0].tobytes() == ends[1].tobytes()
