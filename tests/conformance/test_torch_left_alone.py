"""torch: what the wrappers leave as it is (whole numbers, frozen halves), and sparse gradients, which they take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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


@pytest.mark.parametrize("joins", [0, 1])
def test_a_parameter_that_is_unfrozen_between_zero_grad_and_backward_is_in_its_bucket(joins):
    """The hooks count what was free at zero_grad(); the bucket must not leave without the one that joins."""

    def train(rank: int) -> list[float]:
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        opt: Any = hvd.EagerOptimizer(torch.optim.SGD(parameters, lr=1.0), quorum="all")
        opt._async.worker_now()
        for free in (False, True, False):
            parameters[joins].requires_grad_(free)
            opt.zero_grad()
            parameters[joins].requires_grad_(not free)
            finish(opt, sum(p.sum() for p in parameters if p.requires_grad))
        opt.drain()
        return [p.item() for p in parameters]

    weights = [-3.0, -3.0]
    weights[joins] = -2.0
    assert Cluster(1).run(train) == [weights]


# -- sparse gradients -----------------------------------------------------------------------------------------


def embedding() -> torch.nn.Embedding:
    made = torch.nn.Embedding(9, 4, sparse=True)
    with torch.no_grad():
        made.weight.fill_(100.0)
    return made


def words(rank: int, number: int) -> torch.Tensor:
    """The same one may come twice."""
    return torch.as_tensor(np.random.default_rng([rank, number]).integers(0, 9, (3,)))


SPARSE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sparse-adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
}


def train_sparsely(kind: str, ranks: Sequence[int], wrap: Callable[[Any], Any] = lambda optimizer: optimizer) -> Any:
    """Train with the mean of the losses of these ranks; return the weights."""
    model = embedding()
    opt = wrap(SPARSE[kind](model.parameters()))
    for number in range(4):
        opt.zero_grad()
        finish(opt, sum(model(words(rank, number)).square().sum() for rank in ranks) / len(ranks))
    getattr(opt, "drain", lambda: None)()
    return flat(model.parameters())


@pytest.mark.parametrize(("family", "kind"), [("gossip", "sparse-adam"), ("leader", "sgd")])
def test_sparse_gradients_stay_on_a_rank_with_weights_of_its_own(family, kind):
    alone = {"gossip": hvd.GossipOptimizer, "leader": lambda o: hvd.LeaderOptimizer(o, group=1)}[family]
    (own,) = Cluster(1).run(lambda rank: train_sparsely(kind, [rank], alone))
    np.testing.assert_array_equal(own, train_sparsely(kind, [0]))
    ends = Cluster(2).run(lambda rank: train_sparsely(kind, [rank], FAMILIES[family]))
    assert ends[0].tobytes() == ends[1].tobytes()


def test_sparse_adam_gets_rounds_back_sparse():
    wrap = functools.partial(hvd.EagerOptimizer, quorum="all")
    for weights in Cluster(2).run(lambda rank: train_sparsely("sparse-adam", [rank], wrap)):
        np.testing.assert_allclose(weights, train_sparsely("sparse-adam", range(2)), rtol=0, atol=1e-5)
