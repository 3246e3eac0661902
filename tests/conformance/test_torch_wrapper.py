"""torch: construction, refused arguments, buffers, consensus, and Horovod's names."""

from __future__ import annotations

from typing import Any

import horovod.torch
import numpy as np
import pytest
import torch

import hvd_async
import hvd_async.torch as hvd
from hvd_async.errors import NotInitializedError
from hvd_async.testing import Cluster
from tests.conformance.cases import Case
from tests.conformance.drive import scripted_engine
from tests.conformance.torch_ranks import TorchTrainer, conv_model

SGD = Case("sgd", "sgd", 0.1)


def make(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(conv_model().parameters(), lr=0.1, **options)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_the_result_is_an_instance_of_the_wrapped_class(kind):
    with scripted_engine(2):
        plain = kind(conv_model().parameters(), lr=0.1)
        wrapped = hvd_async.EagerOptimizer(plain)
    assert isinstance(wrapped, kind)
    assert type(wrapped).__name__ == kind.__name__
    assert wrapped.param_groups is plain.param_groups
    assert wrapped.defaults == plain.defaults
    assert type(plain) is kind
    assert wrapped.stats().steps == 0
    assert repr(wrapped).startswith(kind.__name__)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"quorum": "most"}, 'take "solo"'),
        ({"quorum": 0}, "cannot be"),
        ({"quorum": 9}, "of 4 ranks"),
        ({"max_staleness": -1}, r"take 0 \(synchronous\) or more"),
        ({"max_staleness": 1.5}, "not a number of rounds"),
        ({"grace": -0.1}, "seconds"),
        ({"buffers": "mean"}, "'average', 'local', 'root'"),
        ({"named_parameters": [("a", torch.zeros(1))]}, "leaves out 4 of the optimizer's 4"),
        ({"named_parameters": conv_model().parameters()}, "pass model.named_parameters"),
    ],
)
def test_wrong_arguments_are_refused_with_a_hint(options, hint):
    with scripted_engine(4), pytest.raises(ValueError, match=hint):
        hvd.EagerOptimizer(make(), **options)


def test_named_parameters_must_have_names_of_their_own():
    plain = make()
    named = [("same", p) for group in plain.param_groups for p in group["params"]]
    with scripted_engine(4), pytest.raises(ValueError, match="repeats a name"):
        hvd.EagerOptimizer(plain, named)


def test_optimizers_that_cannot_be_wrapped():
    with scripted_engine(2):
        with pytest.raises(ValueError, match="LBFGS"):
            hvd.EagerOptimizer(torch.optim.LBFGS(conv_model().parameters()))
        with pytest.raises(ValueError, match="already: wrap the plain one"):
            hvd.EagerOptimizer(hvd.EagerOptimizer(make()))
        whole = torch.nn.Parameter(torch.zeros(1, dtype=torch.complex64))
        with pytest.raises(ValueError, match=r"complex64 cannot be averaged"):
            hvd.EagerOptimizer(torch.optim.SGD([whole], lr=0.1))


def test_before_init_says_so():
    with pytest.raises(NotInitializedError, match=r"call hvd.init\(\) first"):
        hvd.EagerOptimizer(make())


def test_construction_does_not_communicate():
    """It may stand under ``if rank == 0``: the other ranks never hear of it."""

    def train(rank: int) -> int:
        kept = [TorchTrainer(SGD)] if rank == 0 else []
        trainer = TorchTrainer(SGD, quorum="all")
        trainer.train(rank, range(2))
        trainer.opt.drain()
        return len(kept) + trainer.opt.stats().rounds

    assert Cluster(2).run(train) == [3, 2]


# -- buffers --------------------------------------------------------------------------------------------------


def norm_model(rank: int) -> torch.nn.Module:
    model = torch.nn.BatchNorm1d(2)
    model.running_mean.fill_(1.0 + rank)
    model.running_var.fill_(10.0 * (1 + rank))
    model.num_batches_tracked.fill_(5 + rank)
    return model


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("average", [(2.0, 20.0, 5)] * 3), ("root", [(1.0, 10.0, 5)] * 3),
     ("local", [(1.0, 10.0, 5), (2.0, 20.0, 6), (3.0, 30.0, 7)])],
)  # fmt: skip
def test_batch_norm_buffers_after_drain(policy, expected):
    def train(rank: int) -> tuple[float, float, int]:
        model = norm_model(rank)
        opt = hvd.EagerOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_buffers=model.named_buffers(), buffers=policy
        )
        opt.drain()
        assert model.num_batches_tracked.dtype == torch.int64
        return model.running_mean[1].item(), model.running_var[0].item(), model.num_batches_tracked.item()

    assert Cluster(3).run(train) == expected


def test_buffers_are_left_alone_if_not_named():
    def train(rank: int) -> float:
        model = norm_model(rank)
        opt = hvd.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        opt.drain()
        return model.running_mean[0].item()

    assert Cluster(2).run(train) == [1.0, 2.0]


# -- consensus ------------------------------------------------------------------------------------------------


def test_consensus_distance_is_numpys():
    def train(rank: int) -> tuple[float, Any, float]:
        trainer = TorchTrainer(SGD)
        trainer.train(rank, range(2))
        trainer.opt.drain()
        together = trainer.opt.consensus_distance()
        random = np.random.default_rng(rank)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter += torch.as_tensor(random.normal(size=parameter.shape), dtype=torch.float32)
        return together, trainer.weights(), trainer.opt.consensus_distance()

    outcomes = Cluster(3).run(train)
    weights = np.stack([weights for _, weights, _ in outcomes])
    expected = np.sqrt(np.mean(np.sum((weights - weights.mean(axis=0)) ** 2, axis=1)))
    for together, _, apart in outcomes:
        assert together == 0.0
        assert apart == pytest.approx(expected, rel=1e-6)


def test_in_consensus_all_ranks_hold_the_same_weights():
    def train(rank: int) -> bytes:
        trainer = TorchTrainer(SGD)
        trainer.train(rank, range(3 - rank))
        with trainer.opt.consensus():
            return trainer.weights().tobytes()

    assert len(set(Cluster(3).run(train))) == 1


# -- names ----------------------------------------------------------------------------------------------------


def test_every_public_name_of_horovod_can_be_reached():
    public = {name for name in vars(horovod.torch) if not name.startswith("_")}
    missing = sorted(name for name in public if not hasattr(hvd, name))
    assert missing == []


def test_names_that_would_mislead_are_ours():
    for name in ("broadcast_optimizer_state", "join", "shutdown", "EagerOptimizer"):
        assert getattr(hvd, name).__module__.startswith("hvd_async.")
    assert hvd.DistributedOptimizer is horovod.torch.DistributedOptimizer
    assert hvd.broadcast_parameters is horovod.torch.broadcast_parameters
