"""torch: the weights are those of the reference on the same rounds, whatever the rounds were."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch

from hvd_async.testing import Cluster
from tests.conformance.cases import CASES, SCHEDULES, SCRIPTS, Case
from tests.conformance.drive import ScriptedWorker, attach, check_late_rank, scripted_engine, with_late_rank
from tests.conformance.reference import replay
from tests.conformance.torch_ranks import TorchTrainer, backwards, conv_model, flat, plain

by_name = functools.partial(pytest.mark.parametrize, ids=lambda one: one.name)


@by_name("case", CASES)
@by_name("script", SCRIPTS)
def test_scripted_rounds(case, script):
    with scripted_engine(size=4):
        trainer = TorchTrainer(case)
        worker = ScriptedWorker(script, 4, trainer.weights().size, case.lr, torch.as_tensor)
        attach(trainer.opt, worker)
        before = trainer.weights()
        for step in range(1, len(script.steps) + 1):
            gradient = trainer.gradient(0, step)
            trainer.step()
            assert worker.handed[-1].tolist() == [*gradient, 1.0]
            assert flat(p.grad for p in backwards(trainer.model)).tolist() == gradient.tolist()  # put back
            expected = replay("torch", case, before, worker.applied, 4)
            np.testing.assert_allclose(trainer.weights(), expected, rtol=0, atol=1e-5)


@by_name("case", CASES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_rounds_of_a_cluster_with_a_late_rank(case, schedule, tapes):
    outcomes = with_late_rank(schedule, lambda rank: TorchTrainer(case, quorum=schedule.quorum))
    check_late_rank("torch", lambda x, rounds: replay("torch", case, x, rounds, schedule.size), outcomes, tapes)


@by_name("case", [CASES[0], CASES[2], CASES[6]])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_quorum_all_equals_averaging_by_hand(case, size):
    steps = 6

    def train(rank: int) -> np.ndarray:
        trainer = TorchTrainer(case, quorum="all")
        trainer.train(rank, range(steps))
        trainer.opt.drain()
        return trainer.weights()

    model = conv_model()
    optimizer = plain(case, model.parameters())
    reader = TorchTrainer.__new__(TorchTrainer)
    reader.model, reader.opt = model, optimizer
    for step in range(steps):
        gradients = [reader.gradient(rank, step) for rank in range(size)]
        average = torch.as_tensor(sum(gradients) / size, dtype=torch.float32)
        parts = average.split([p.numel() for p in backwards(model)])
        for parameter, part in zip(backwards(model), parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
    for weights in Cluster(size).run(train):
        np.testing.assert_allclose(weights, flat(backwards(model)), rtol=0, atol=1e-6)


def test_empty_rounds_do_not_move_momentum():
    case = Case("momentum-decay", "sgd", 0.1, momentum=0.9, weight_decay=0.1)
    with scripted_engine(size=2):
        trainer = TorchTrainer(case)
        script = SCRIPTS[2]
        attach(trainer.opt, ScriptedWorker(script, 2, trainer.weights().size, case.lr, torch.as_tensor))
        trainer.train(0, range(1))
        weights, state = trainer.weights(), copy.deepcopy(trainer.opt.state_dict())
        trainer.train(0, range(1, 2))  # an empty round
        assert trainer.weights().tolist() == weights.tolist()
        again = trainer.opt.state_dict()
        for index, held in state["state"].items():
            assert torch.equal(held["momentum_buffer"], again["state"][index]["momentum_buffer"])
