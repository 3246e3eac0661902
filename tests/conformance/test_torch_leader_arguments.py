"""torch: what ``LeaderOptimizer`` cannot do is refused with a hint, on every rank; what has no meaning is accepted."""

from __future__ import annotations

import dataclasses
import math
import threading
from types import SimpleNamespace
from typing import Any

import horovod.torch
import pytest
import torch

import hvd_async
import hvd_async.torch as hvd
from hvd_async.errors import NotInitializedError, ReplicaMismatchError
from hvd_async.runtime.lifecycle import local_engine, use_engine
from hvd_async.testing import Cluster, InjectedError
from tests.conformance.cases import CASES
from tests.conformance.drive import scripted_engine
from tests.conformance.gossip_reference import least_squares
from tests.conformance.leader_cases import DEFAULT, REFUSED
from tests.conformance.leader_drive import TIMEOUT
from tests.conformance.leader_reference import Following, drawn, several
from tests.conformance.torch_leader_ranks import LeaderTrainer
from tests.conformance.torch_ranks import ProcessSet, conv_model

SGD = CASES[0]
LSGD = Following("lsgd", several(4, 2), 2, 4)


def make(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(conv_model().parameters(), lr=0.1, **options)


def trainer(size: int, rank: int, following: Following, **options: Any) -> LeaderTrainer:
    return LeaderTrainer(least_squares(size, SGD), rank, following, **options)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        *REFUSED,
        ({"group": [ProcessSet(0, 1), ProcessSet(2)]}, r"must be in one group"),
        ({"compression": hvd.Compression.fp16}, r"compression: a leader's weights travel as they are; leave it out"),
        ({"compression": hvd.Compression.int8}, r"compression: a leader's weights travel as they are"),
        ({"op": horovod.torch.Sum}, r"leave op out, or take hvd\.Average"),
        ({"op": horovod.torch.Adasum}, r"leave op out"),
        ({"named_parameters": [("a", torch.zeros(1))]}, r"leaves out 4 of the optimizer's 4"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_with_a_hint_on_every_rank(options, hint):
    lsgd = options.get("algorithm") != "easgd"
    for rank in range(4):  # (an engine that can do nothing: nothing is said to anybody)
        with use_engine(SimpleNamespace(rank=rank, size=4)), pytest.raises(ValueError, match=hint):  # type: ignore[arg-type]
            hvd.LeaderOptimizer(make(), **({"group": 2} if lsgd else {}) | options)


def test_what_is_refused_says_nothing_of_gossip():
    """Users of this wrapper need not know the other."""
    for options in ({"op": horovod.torch.Sum}, {"gradient_predivide_factor": 2.0}, {"num_groups": 2}):
        with scripted_engine(4), pytest.raises(ValueError, match="leave") as caught:
            hvd.LeaderOptimizer(make(), group=2, **options)
        assert "gossip" not in str(caught.value)


def test_what_has_no_meaning_or_horovods_is_accepted():
    with scripted_engine(4):
        hvd.LeaderOptimizer(make(), group=4, sparse_as_dense=True, backward_passes_per_step=4)
        hvd.LeaderOptimizer(make(), group=4, compression=horovod.torch.Compression.none, op=hvd.Average)
        opt = hvd_async.LeaderOptimizer(make(), algorithm="easgd", compression=hvd.Compression.none)
        opt.set_backward_passes_per_step(2)
        hvd.LeaderOptimizer(make(), group=1, local_pull=lambda step: 0.5 / step, global_prox=0)
        hvd.LeaderOptimizer(make(), group=[ProcessSet(0, 3), ProcessSet(1, 2)])


@pytest.mark.parametrize(("options", "config"), DEFAULT)
def test_defaults_by_horovods_hosts(options, config, monkeypatch):
    for name, value in {"size": 4, "local_size": 2, "cross_size": 2}.items():
        monkeypatch.setattr(horovod.torch, name, lambda value=value: value)
    for name, value in {"rank": lambda r: r, "local_rank": lambda r: r % 2, "cross_rank": lambda r: r // 2}.items():
        monkeypatch.setattr(horovod.torch, name, lambda value=value: value(local_engine().rank))  # type: ignore[union-attr]
    for rank in range(4):
        with use_engine(SimpleNamespace(rank=rank, size=4)):  # type: ignore[arg-type]
            settings = hvd.LeaderOptimizer(make(), **options)._async
        own = settings.config
        assert (own.algorithm, own.groups, own.local_period, own.global_period) == config
        assert settings.window == (1 if options.get("algorithm") else 10)
        alpha = 0.43 / 4 if options.get("algorithm") else 0.0
        assert vars(settings.strengths) == dict.fromkeys(
            ("local_pull", "global_pull", "local_prox", "global_prox"), 0.1
        ) | {"alpha": alpha, "beta": 0.43}


def test_optimizers_that_cannot_be_wrapped():
    with scripted_engine(2):
        with pytest.raises(ValueError, match="LBFGS"):
            hvd.LeaderOptimizer(torch.optim.LBFGS(conv_model().parameters()), group=1)
        for wrapped in (hvd.LeaderOptimizer(make(), group=1), hvd.EagerOptimizer(make())):
            with pytest.raises(ValueError, match="already: wrap the plain one"):
                hvd.LeaderOptimizer(wrapped, group=1)
        with pytest.raises(ValueError, match="no torch optimizer: pass one, as in LeaderOptimizer"):
            hvd.LeaderOptimizer(conv_model(), group=1)  # type: ignore[arg-type]
    with pytest.raises(NotInitializedError, match=r"call hvd.init\(\) first"):
        hvd.LeaderOptimizer(make())


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


@pytest.mark.parametrize(
    "group",
    [3, 1, [[0, 2], [3]], [ProcessSet(2, 0), ProcessSet(3)], [[0, 2, 3]]],
    ids=["3", "1", "lists", "sets", "all"],
)
def test_ranks_outside_of_a_process_set_need_not_fit_its_groups(group):
    for rank in range(4):
        with use_engine(SimpleNamespace(rank=rank, size=4)):  # type: ignore[arg-type]
            config = hvd.LeaderOptimizer(make(), process_set=ProcessSet(0, 2, 3), group=group)._async.config
            assert sorted(place for places in config.groups for place in places) == ([0] if rank == 1 else [0, 1, 2])
            for wrong in (2, [[0, 1], [2, 3]], "host"):
                if rank != 1:
                    with pytest.raises(ValueError, match=r"do not divide|must be in one group|that are inside"):
                        hvd.LeaderOptimizer(make(), process_set=ProcessSet(0, 2, 3), group=wrong)


# -- losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silent", [(0, 1, 2), (1,), (0, 2)])
def test_a_rank_that_tells_no_loss_hears_so_at_the_first_pull_and_cannot_end(silent):
    """No rank leads for want of losses; once they are told, all goes on."""
    together = threading.Barrier(3)

    def train(rank: int) -> bytes:
        own = trainer(3, rank, dataclasses.replace(LSGD, groups=several(3, 3), told=lambda *_: None))
        told = rank not in silent
        own.opt._async.worker_now()
        before = b""

        def step(times: int) -> None:
            nonlocal before
            for _ in range(times):
                own.gradient()
                if told:
                    own.opt.record_loss(drawn(own.weights(), rank, own.steps))
                before = own.weights().tobytes()
                own.opt.step()

        if not told:
            with pytest.raises(ValueError, match=r"this rank has recorded none: call opt.record_loss\(loss\) before"):
                step(10_000)
            assert own.weights().tobytes() == before
            for end in (own.opt.drain, own.opt.cut, own.opt.consensus_distance):
                with pytest.raises(ValueError, match="this rank has recorded none"):
                    end()
        else:
            step(8)
        together.wait(TIMEOUT)
        told = True
        step(3)
        own.opt.drain()
        return own.weights().tobytes()

    assert len(set(Cluster(3).run(train, timeout=40))) == 1


def test_where_one_rank_tells_no_loss_and_gives_up_the_others_hear_which():
    def train(rank: int) -> None:
        own = trainer(3, rank, dataclasses.replace(LSGD, groups=several(3, 1), told=lambda *_: None))
        while own.steps < 10_000:
            if rank != 1:
                own.opt.record_loss(1.0)
            own.step()

    one, silent, other = Cluster(3).outcomes(train)
    assert isinstance(silent, ValueError)
    for outcome in (one, other):
        assert isinstance(outcome, InjectedError)
        assert "rank 1 on host host1 failed: ValueError: a leader is to be chosen" in str(outcome)


def test_easgd_asks_for_no_loss():
    def train(rank: int) -> Any:
        own = trainer(2, rank, Following("easgd", global_period=1, told=lambda *_: None)).train(5)
        own.opt.drain()
        return own.weights().tolist()

    one, other = Cluster(2).run(train)
    assert one == other


def test_what_a_loss_may_be():
    """A number or a tensor of one; a closure's counts where none was recorded; several since the last step all do."""

    def train(rank: int) -> None:
        own = trainer(1, rank, dataclasses.replace(LSGD, groups=((0,),), loss_window=4, told=lambda *_: None))
        for several_numbers in (torch.ones(2), torch.ones(1, 2), torch.ones(0)):
            with pytest.raises(ValueError, match="takes one number, and this is a tensor of shape"):
                own.opt.record_loss(several_numbers)
        leaf = torch.tensor(2.0, requires_grad=True)
        for loss in (1, 0.5, torch.tensor([[3.0]]), leaf * 2):
            own.opt.record_loss(loss)
        own.step()
        assert own.opt.stats().mean_loss == (1 + 0.5 + 3.0 + 4.0) / 4
        own.gradient()
        assert own.opt.step(lambda: torch.tensor(6.0)) == 6.0
        assert own.opt.stats().mean_loss == (0.5 + 3.0 + 4.0 + 6.0) / 4
        own.gradient()
        own.opt.record_loss(1.0)
        own.opt.step(lambda: torch.tensor(100.0))
        assert own.opt.stats().mean_loss == (3.0 + 4.0 + 6.0 + 1.0) / 4
        own.gradient()
        before = own.weights().tolist()
        with pytest.raises(ValueError, match="takes one number"):
            own.opt.step(lambda: torch.ones(3))
        assert own.weights().tolist() == before
        own.opt.step()
        own.opt.drain()

    Cluster(1).run(train)


@pytest.mark.parametrize("value", [1.0, -0.5, math.nan, "0.1"])
def test_a_strength_that_leaves_its_bounds_is_refused_before_any_weight_has_changed(value):
    """At the very step that would use it, on every rank, and training goes on once it is in them again."""

    def train(rank: int) -> bytes:
        bad = {3: value}
        following = dataclasses.replace(LSGD, groups=several(3, 3), global_prox=lambda step: bad.get(step, 0.2))
        own = trainer(3, rank, following).train(2)
        own.gradient()
        before = own.weights().tobytes()
        with pytest.raises(ValueError, match=r"a strength of .* at step 3: take 0 \(no pull\) or more"):
            own.opt.step()
        assert own.weights().tobytes() == before
        assert own.opt.stats().steps == 2
        bad.clear()
        own.opt.step()
        own.opt.drain()
        return own.weights().tobytes()

    assert len(set(Cluster(3).run(train))) == 1


# -- ranks that differ ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"algorithm": "easgd", "global_period": 4},
        {"global_period": 5},
        {"local_period": 1},
        {"local_pull": 0.2},
        {"global_prox": lambda step: 0.1},
        {"group": 4},
        {"loss_window": 3},
        {"lr_spread": "linear"},
        {"buffers": "local"},
        {"named_buffers": [("mean", torch.zeros(3))]},
    ],
    ids=lambda other: ",".join(other),
)
def test_ranks_that_differ_are_told_so_everywhere(other):
    def train(rank: int) -> None:
        own = trainer(4, rank, LSGD)
        if rank == 2:
            options = LSGD.options() if "algorithm" not in other else {}
            own.opt = hvd.LeaderOptimizer(torch.optim.SGD(own.parameters, lr=0.1), **options | other)
        own.train(1)

    cluster = Cluster(4)
    for outcome in cluster.outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)
    assert cluster.board.count == 0  # no tensor has travelled
