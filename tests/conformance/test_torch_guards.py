"""torch: what would break the replicas' agreement is refused, and what failed can be mended or says why not."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.cases import SCRIPTS, Case
from tests.conformance.drive import ScriptedWorker, attach, scripted_engine
from tests.conformance.torch_ranks import TorchTrainer

SGD = Case("sgd", "sgd", 0.1)
MOMENTUM = Case("momentum", "sgd", 0.1, momentum=0.9)


def scripted(**options: Any) -> TorchTrainer:
    with scripted_engine(2):
        trainer = TorchTrainer(MOMENTUM, **options)
        attach(trainer.opt, ScriptedWorker(SCRIPTS[0], 2, trainer.weights().size, 0.1, torch.as_tensor))
    return trainer


def test_a_round_that_could_not_be_applied_stops_the_rank_for_good():
    def fail(parameters: Any) -> None:
        raise FloatingPointError("nan")

    trainer = scripted(round_transform=fail)
    with pytest.raises(FloatingPointError):
        trainer.train(0, range(1))
    said = r"round 1 could not be applied: FloatingPointError: nan.*checkpoint"
    for call in (trainer.opt.step, trainer.opt.drain, trainer.opt.consensus_distance, trainer.opt.synchronize):
        with pytest.raises(ReplicaStateError, match=said):
            call()


def test_a_group_may_be_added_before_the_first_step_only():
    extra = torch.nn.Parameter(torch.zeros(2))
    with scripted_engine(2):
        fresh = TorchTrainer(SGD)
    fresh.opt.add_param_group({"params": [extra], "lr": 0.5})
    assert len(fresh.opt.param_groups) == 2
    begun = scripted()
    begun.train(0, range(1))
    with pytest.raises(ReplicaStateError, match="Add all groups before training"):
        begun.opt.add_param_group({"params": [extra]})
    assert len(begun.opt.param_groups) == 1


def test_a_group_that_was_added_is_trained():
    def train(rank: int) -> float:
        trainer = TorchTrainer(SGD, quorum="all")
        extra = torch.nn.Parameter(torch.zeros(1))
        trainer.opt.add_param_group({"params": [extra], "lr": 0.5})
        trainer.gradient(rank, 0)
        extra.grad = torch.full((1,), 1.0 + rank)
        trainer.step()
        trainer.opt.drain()
        return extra.item()

    assert Cluster(2).run(train) == [-0.75, -0.75]


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_it_cannot_be_copied(copying):
    with pytest.raises(ReplicaStateError, match=r"save its state_dict\(\)"):
        copying(scripted().opt)


def test_freezing_between_two_drains_is_right():
    def train(rank: int) -> tuple[bytes, bool]:
        trainer = TorchTrainer(MOMENTUM)
        trainer.train(rank, range(3))
        trainer.opt.drain()
        held = trainer.model[0].weight.detach().clone()
        trainer.model[0].weight.requires_grad_(False)
        trainer.opt.drain()
        for _ in range(3):
            trainer.opt.zero_grad()
            trainer.model(torch.ones(4, 1, 5, 5)).sum().backward()
            trainer.opt.step()
        trainer.opt.drain()
        return trainer.weights().tobytes(), torch.equal(held, trainer.model[0].weight)

    outcomes = Cluster(2).run(train)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1], "the frozen parameter was moved"


def test_other_optimizer_state_is_refused_by_name():
    def train(rank: int) -> None:
        trainer = TorchTrainer(MOMENTUM)
        for parameter in trainer.model.parameters():
            trainer.opt.state[parameter]["momentum_buffer"] = torch.full_like(parameter, float(rank))
        trainer.train(rank, range(1))

    for outcome in Cluster(2).outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)
        assert "momentum_buffer of 0.weight" in str(outcome)
        assert "broadcast_optimizer_state" in str(outcome)


def test_another_kind_of_optimizer_is_refused():
    def train(rank: int) -> None:
        TorchTrainer(SGD if rank == 0 else Case("adam", "adam", 0.1)).opt.drain()

    for outcome in Cluster(2).outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)


def test_weights_that_differed_can_be_mended_and_trained():
    gate = threading.Barrier(2)

    def train(rank: int) -> bytes:
        trainer = TorchTrainer(SGD)
        right = copy.deepcopy(trainer.model.state_dict())
        with torch.no_grad():
            trainer.model[3].bias += rank
        with pytest.raises(ReplicaMismatchError, match=r"3\.bias"):
            trainer.train(rank, range(1))
        trainer.model.load_state_dict(right)  # (as hvd.broadcast_parameters does)
        gate.wait(30)
        trainer.train(rank, range(3))
        trainer.opt.drain()
        assert trainer.opt.stats().gradients_applied == 6
        return trainer.weights().tobytes()

    one, other = Cluster(2).run(train)
    assert one == other


def test_horovods_own_wrapper_is_not_wrapped():
    class Averaging(torch.optim.SGD):
        def _allreduce_grad_async(self) -> None:
            """As Horovod's has."""

    with scripted_engine(2), pytest.raises(ValueError, match="averages over ranks already: wrap the plain one"):
        hvd.EagerOptimizer(Averaging([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
