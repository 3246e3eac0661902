"""torch: what the wrappers leave as it is (whole numbers, frozen halves), and sparse gradients, which they take."""

from __future__ import annotations

import threading
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
    "groups": lambda optimizer: hvd.EagerOptimizer(optimizer, groups=[optimizer.param_groups[0]["params"]]),
    "gossip": hvd.GossipOptimizer,
    "leader": lambda optimizer: hvd.LeaderOptimizer(optimizer, group=2),
}
OWN_WEIGHTS = ("gossip", "leader")


def step(opt: Any, *parameters: torch.Tensor) -> None:
    """With the gradient 1."""
    opt.zero_grad()
    loss = sum(p.sum() for p in parameters)
    loss.backward()
    told(opt, loss)
    opt.step()


def told(opt: Any, loss: Any) -> None:
    """LSGD has to know by what to choose a leader."""
    if hasattr(opt, "record_loss"):
        opt.record_loss(loss.detach())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool], ids=str)
def test_whole_numbers_are_left_alone_even_where_ranks_have_others(family, dtype):
    def train(rank: int) -> Any:
        learned = torch.nn.Parameter(torch.zeros(3))
        table = torch.nn.Parameter(torch.arange(rank, rank + 3).to(dtype), requires_grad=False)
        opt = FAMILIES[family](torch.optim.SGD([learned, table], lr=1.0))
        for _ in range(2):
            step(opt, learned)
        opt.drain()
        state = opt.state_dict()
        opt.load_state_dict(state)
        assert torch.equal(table, torch.arange(rank, rank + 3).to(dtype))
        assert table.grad is None
        return learned.tolist()

    assert Cluster(2).run(train) == [[-2.0] * 3] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_numbers_need_no_name(family):
    def train(rank: int) -> Any:
        learned = torch.nn.Parameter(torch.zeros(3))
        table = torch.nn.Parameter(torch.arange(3), requires_grad=False)
        wrapper = {"gossip": hvd.GossipOptimizer, "leader": hvd.LeaderOptimizer}.get(family, hvd.EagerOptimizer)
        options = {"group": 2} if family == "leader" else {}
        opt = wrapper(torch.optim.SGD([table, learned], lr=1.0), [("learned", learned)], **options)
        step(opt, learned)
        opt.drain()
        return learned.tolist()

    assert Cluster(2).run(train) == [[-1.0] * 3] * 2


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


# -- sparse gradients -----------------------------------------------------------------------------------------


def embedding() -> torch.nn.Embedding:
    made = torch.nn.Embedding(9, 4, sparse=True)
    with torch.no_grad():
        made.weight.fill_(100.0)
    return made


def words(rank: int, number: int) -> torch.Tensor:
    """The same one may come twice."""
    return torch.as_tensor(np.random.default_rng([rank, number]).integers(0, 9, (3,)))


@pytest.mark.parametrize("quorum", ["solo", "majority", "auto", 2, 0.75, "all"], ids=str)
@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_gradients_are_conserved_under_every_quorum(quorum, passes):
    """Whole numbers, so that sums are exact; under solo the last rank is late."""
    size, steps = 4, 5
    begun = threading.Event()

    def train(rank: int) -> Any:
        model = embedding()
        opt = hvd.EagerOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), quorum=quorum, backward_passes_per_step=passes
        )
        opt._async.worker_now()
        if rank == size - 1 and quorum == "solo":
            assert begun.wait(60)
        for number in range(steps):
            opt.zero_grad()
            for part in range(passes):
                model(words(rank, number * passes + part)).sum().backward()
            opt.step()
            if rank == 0 and number == 2:
                begun.set()
        opt.drain()
        return flat(model.parameters())

    expected = np.full((9, 4), 100.0)
    for rank in range(size):
        for number in range(steps * passes):
            for word in words(rank, number):
                expected[int(word)] -= 1.0 / size
    for weights in Cluster(size, jitter=0.001).run(train):
        np.testing.assert_array_equal(weights, expected.reshape(-1))


@pytest.mark.parametrize("family", OWN_WEIGHTS)
@pytest.mark.parametrize("kind", ["sgd", "sparse-adam"])
def test_sparse_gradients_stay_on_a_rank_with_weights_of_its_own(family, kind):
    make = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "sparse-adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
    }[kind]

    def train(wrap: Callable[[Any], Any], rank: int) -> tuple[Any, Any]:
        model = embedding()
        opt = wrap(make(model.parameters()))
        for number in range(4):
            opt.zero_grad()
            loss = model(words(rank, number)).square().sum()
            loss.backward()
            told(opt, loss)
            opt.step()
        return model, opt

    def alone(rank: int) -> Any:
        wrapped = {"gossip": hvd.GossipOptimizer, "leader": lambda o: hvd.LeaderOptimizer(o, group=1)}[family]
        model, opt = train(wrapped, rank)
        opt.drain()
        return flat(model.parameters())

    def together(rank: int) -> Any:
        model, opt = train(FAMILIES[family], rank)
        opt.drain()
        return flat(model.parameters())

    model, _ = train(lambda optimizer: optimizer, 0)
    np.testing.assert_array_equal(Cluster(1).run(alone)[0], flat(model.parameters()))
    ends = Cluster(2).run(together)
    assert ends[0].tobytes() == ends[1].tobytes()


def test_a_sparse_gradient_that_is_not_finite_is_named():
    def train(rank: int) -> None:
        model = embedding()
        opt = hvd.EagerOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), nonfinite="raise"
        )
        (model(words(0, 0)).sum() * float("nan")).backward()
        with pytest.raises(FloatingPointError, match="weight"):
            opt.step()

    Cluster(1).run(train)
