"""torch's own features where ranks follow a leader: closures, schedulers, dtypes of parameters and of statistics."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.leader_drive import in_step
from tests.conformance.leader_ranks import SGD, TorchRank
from tests.conformance.leader_reference import Following, several
from tests.conformance.torch_ranks import conv_model

ALONE = Following("lsgd", ((0,),), 2, 4, loss_window=4, told=lambda *_: None)


def test_a_closures_loss_counts_where_none_was_recorded():
    def train(rank: int) -> None:
        one = TorchRank(TorchRank.least_squares(1, SGD), rank, ALONE).train(1)
        assert one.opt.stats().mean_loss is None
        assert one.opt.step(lambda: torch.tensor(6.0)) == 6.0
        assert one.opt.stats().mean_loss == 6.0
        one.opt.record_loss(1.0)
        one.opt.step(lambda: torch.tensor(100.0))
        assert one.opt.stats().mean_loss == 3.5
        before = one.bits()
        with pytest.raises(ValueError, match="takes one number"):
            one.opt.step(lambda: torch.ones(3))
        assert one.bits() == before
        one.opt.step()
        one.opt.drain()

    Cluster(1).run(train)


def test_learning_rates_of_a_rank_are_its_own_only_within_a_step():
    """Schedulers, step hooks and state_dict see those that all ranks have."""

    def train(rank: int) -> None:
        inside, hooks = [], []

        class Recording(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                inside.append(self.param_groups[0]["lr"])
                return torch.optim.SGD.step(self, closure)

        one = TorchRank(TorchRank.least_squares(2, SGD), rank, Following("lsgd", several(2, 1), lr_spread="power"))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(one.opt, 0.5)
        type(one.opt)._wrapped_class = Recording
        one.opt.register_step_pre_hook(lambda opt, *_: hooks.append(opt.param_groups[0]["lr"]))
        for step in range(3):
            one.train(1)
            assert one.opt.param_groups[0]["lr"] == 0.1 * 0.5**step
            scheduler.step()
        assert inside == [0.1 * 2**rank * 0.5**step for step in range(3)]
        assert hooks == [0.1 * 0.5**step for step in range(3)]
        one.opt.drain()
        assert one.state()["param_groups"][0]["lr"] == 0.1 / 8

    Cluster(2).run(train)


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64])
def test_parameters_that_a_pull_would_spoil(dtype):
    """Also those of a group that is added later."""
    right = torch.nn.Parameter(torch.zeros(2))
    wrong = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    with scripted_engine(2), pytest.raises(ValueError, match=rf"{dtype} cannot be mixed"):
        hvd.LeaderOptimizer(torch.optim.SGD([right, wrong], lr=0.1), group=1)

    def train(rank: int) -> None:
        opt = hvd.LeaderOptimizer(torch.optim.SGD([right], lr=0.1), group=1)
        opt.add_param_group({"params": [wrong]})
        with pytest.raises(ValueError, match=rf"{dtype} cannot be mixed"):
            opt.drain()

    Cluster(1).run(train)


def test_lbfgs_and_parameters_without_names_are_refused():
    with scripted_engine(2):
        with pytest.raises(ValueError, match="LBFGS"):
            hvd.LeaderOptimizer(torch.optim.LBFGS(conv_model().parameters()), group=1)
        with pytest.raises(ValueError, match="leaves out 4 of the optimizer's 4"):
            hvd.LeaderOptimizer(TorchRank.plain(), group=1, named_parameters=[("a", torch.zeros(1))])


@pytest.mark.parametrize("kinds", [(torch.float64, torch.float16), (torch.float32, torch.int64)])
def test_statistics_of_several_kinds(kinds):
    """Floating ones are averaged each in its own kind, integers and empty ones are left alone."""
    following = dataclasses.replace(ALONE, algorithm="easgd", global_period=1)

    def train(rank: int) -> Any:
        first, last = (torch.full((2, 3), 2 * rank + 1).to(kind) for kind in kinds)
        named = [("a.running_mean", first), ("b.running_mean", torch.zeros(0)), ("c.running_mean", last)]
        in_step(TorchRank(TorchRank.least_squares(2, SGD), rank, following, named_buffers=named), 2)
        assert (first.dtype, last.dtype) == kinds
        return first.tolist(), last.tolist()

    for rank, (first, last) in enumerate(Cluster(2).run(train)):
        assert first == [[2.0] * 3] * 2
        assert last == [[2.0 if kinds[1].is_floating_point else 2 * rank + 1] * 3] * 2


def test_counters_of_batches_are_the_ranks_own_until_the_leaders_are_taken():
    def train(rank: int) -> list[int]:
        count = torch.tensor(5 + rank)
        following = Following("lsgd", several(2, 2), 1, 1, told=lambda z, own, step: 1.0 - own)
        one = TorchRank(TorchRank.least_squares(2, SGD), rank, following, named_buffers=[("n", count)], buffers="local")
        in_step(one, 2)
        seen = [int(count)]
        with one.opt.consensus():
            seen.append(int(count))
        seen.append(int(count))
        one.opt.drain()
        return [*seen, int(count)]

    assert Cluster(2).run(train) == [[5, 6, 5, 6], [6, 6, 6, 6]]
