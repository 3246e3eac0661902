"""torch: what a user of the wrapper can rely on: one round at a time, parameters of all kinds, states."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.algorithms.eager.gradient_format import ReducedRound
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.cases import SCHEDULES, SCRIPTS, Case, Script
from tests.conformance.drive import ScriptedWorker, attach, scripted_engine, wait_for_rounds, with_late_rank
from tests.conformance.reference import replay
from tests.conformance.torch_ranks import TorchTrainer, backwards, conv_model, flat, quadratic, wrap_scripted

SGD = Case("sgd", "sgd", 0.1)
MOMENTUM = Case("momentum", "sgd", 0.05, momentum=0.9)


# -- round by round -------------------------------------------------------------------------------------------


def test_round_transform_sees_every_round_in_step_and_in_drain(tapes):
    seen: dict[int, list[float]] = {0: [], 1: []}

    def make(rank: int) -> TorchTrainer:
        def clip(parameters: Any) -> None:
            seen[rank].append(flat(p.grad for p in parameters).sum())
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)

        return TorchTrainer(SGD, round_transform=clip)

    outcomes = with_late_rank(SCHEDULES[0], make)
    for rank, outcome in enumerate(outcomes):
        assert outcome.stats.rounds_applied == len(seen[rank]) >= 3
        assert seen[rank] == pytest.approx([a.sums[:-1].sum() / 2 for a in tapes[rank].applied if a.sums[-1]], abs=1e-5)
        moved = np.linalg.norm(outcome.after - outcome.before)
        assert moved <= 0.1 * SGD.lr * len(seen[rank]) * 1.001
        assert outcome.after.tobytes() == outcomes[0].after.tobytes()


def _late_synchronize(steps: int, tapes: Any, **options: Any) -> Any:
    """Both ranks use Horovod's idiom; rank 1 comes when rank 0 has taken its three steps."""
    three_taken = threading.Event()

    def train(rank: int) -> Any:
        trainer = TorchTrainer(SGD, **options)
        opt, shown = trainer.opt, []
        worker = opt._async.worker_now()
        if rank == 1:
            assert three_taken.wait(30)
            wait_for_rounds(worker, 3)
        for step in range(1, steps + 1):
            trainer.gradient(rank, step)
            opt.synchronize()
            shown.append(flat(p.grad for p in backwards(trainer.model)))
            with opt.skip_synchronize():
                opt.step()
            assert worker.version == step
        three_taken.set()
        opt.drain()
        return trainer.weights(), shown

    with warnings.catch_warnings(record=True) as warned:  # (around all ranks: it is not made for threads)
        warnings.simplefilter("always")
        outcomes = Cluster(2).run(train)
    for rank, (weights, shown) in enumerate(outcomes):
        assert weights.tobytes() == outcomes[0][0].tobytes()
        for index, gradient in enumerate(shown):
            np.testing.assert_allclose(gradient, tapes[rank].applied[index].sums[:-1] / 2, atol=1e-6)
    return [str(w.message) for w in warned]


def test_synchronize_shows_one_round_a_step(tapes):
    told = _late_synchronize(3, tapes)
    # Rank 1's three gradients are in a fourth round, which only drain() brings:
    assert len(told) == 2
    for text in told:
        assert "round_transform=" in text
        assert "drain() applied 1 round(s)" in text


def test_synchronize_does_not_warn_with_a_round_transform(tapes):
    assert _late_synchronize(3, tapes, round_transform=lambda parameters: None) == []


def test_step_after_synchronize_says_what_to_write():
    parameter = quadratic(1.0)
    opt = wrap_scripted(torch.optim.SGD([parameter], lr=1.0), SCRIPTS[0])
    opt.synchronize()
    shown = parameter.grad.clone()
    with pytest.raises(ReplicaStateError, match=r"with optimizer\.skip_synchronize"):
        opt.step()
    assert parameter.item() == 1.0
    with opt.skip_synchronize():
        opt.step()
    assert torch.equal(parameter.detach(), 1.0 - shown)
    with pytest.raises(ReplicaStateError, match="without synchronize"), opt.skip_synchronize():
        opt.step()


def test_a_round_that_is_shown_and_not_stepped_is_left_out_on_all_ranks():
    def train(rank: int) -> float:
        parameter = quadratic(0.0)
        opt = hvd.EagerOptimizer(torch.optim.SGD([parameter], lr=1.0), quorum="all")
        for step in range(3):
            parameter.grad = torch.full((1,), 10.0**step)
            opt.synchronize()
            if step == 1:
                with opt.skip_synchronize():
                    opt.step()
        opt.drain()
        return parameter.item()

    assert Cluster(2).run(train) == [-10.0, -10.0]


def test_closure_is_evaluated_once_before_the_gradients_leave():
    parameter = quadratic(3.0)
    opt = wrap_scripted(torch.optim.SGD([parameter], lr=0.0), SCRIPTS[0])
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        opt.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 9.0
    assert calls == [1]
    assert opt._async.worker.handed[0].tolist() == [6.0, 1.0]


def test_step_hooks_run_once_a_round():
    parameter = quadratic(1.0)
    opt = wrap_scripted(torch.optim.SGD([parameter], lr=0.1), Script("", ((), (1, 1, 1))))
    ran = []
    opt.register_step_post_hook(lambda *_: ran.append(1))
    opt.step()
    assert ran == []
    opt.step()
    assert ran == [1, 1, 1]


# -- parameters -----------------------------------------------------------------------------------------------


def test_a_frozen_parameter_is_not_moved():
    frozen, free = quadratic(1.0, 2.0), quadratic(1.0)
    frozen.grad = None
    frozen.requires_grad_(False)
    opt = wrap_scripted(torch.optim.SGD([frozen, free], lr=0.1, momentum=0.9, weight_decay=0.5), SCRIPTS[0])
    for _ in range(3):
        free.grad = torch.ones(1)
        opt.step()
    assert frozen.tolist() == [1.0, 2.0]
    assert free.item() != 1.0
    assert opt._async.worker.handed[0].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_a_parameter_without_gradient_counts_as_zero_and_gets_the_others_average():
    def train(rank: int) -> tuple[list[float], bool]:
        used, other = quadratic(1.0), quadratic(1.0)
        if rank == 1:
            other.grad = None
        opt = hvd.EagerOptimizer(torch.optim.SGD([used, other], lr=1.0), quorum="all")
        opt.step()
        opt.drain()
        return [used.item(), other.item()], other.grad is None

    assert Cluster(2).run(train) == [([0.0, 0.5], False), ([0.0, 0.5], True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_and_several_buckets(dtype):
    """A second dtype that accumulates apart is a second bucket; half precision is summed as float32."""

    def train(rank: int) -> tuple[list[float], int]:
        one = torch.nn.Parameter(torch.zeros(2))
        two = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        opt = hvd.EagerOptimizer(torch.optim.SGD([one, two], lr=1.0), quorum=1, max_staleness=2)
        for step in range(4):
            one.grad, two.grad = torch.full((2,), 1.0 + rank), torch.full((3,), 2.0**-8 if step else 1.0, dtype=dtype)
            opt.step()
        opt.drain()
        return [*one.tolist(), *two.tolist()], len(opt._async.replica.layout)

    total = 1 + 3 * 2.0**-8
    for weights, buckets in Cluster(2).run(train):
        assert buckets == (2 if dtype == torch.float64 else 1)
        assert weights[:2] == [-6.0, -6.0]
        tolerance = {torch.float64: 0, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}[dtype]
        assert weights[2:] == pytest.approx([-total] * 3, abs=tolerance)


def test_sparse_gradients_travel_as_dense_ones():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    opt = wrap_scripted(torch.optim.SGD(embedding.parameters(), lr=0.1), SCRIPTS[0])
    opt.step()
    assert opt._async.worker.handed[0].tolist() == [0, 0, 2, 2, 0, 0, 1, 1, 1]


def test_state_dict_goes_into_a_plain_optimizer_and_back(tapes):
    outcomes = Cluster(2).run(_train_and_save)
    for weights, state in outcomes:
        model = conv_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.1)
        plain.load_state_dict(state)
        assert plain.param_groups[0]["momentum"] == 0.9
        assert len(plain.state) == 4
        again = wrap_scripted(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.1), SCRIPTS[0])
        again.load_state_dict(state)
        for index, held in again.state_dict()["state"].items():
            assert torch.equal(held["momentum_buffer"], outcomes[0][1]["state"][index]["momentum_buffer"])
        assert weights.tobytes() == outcomes[0][0].tobytes()


def _train_and_save(rank: int) -> Any:
    trainer = TorchTrainer(MOMENTUM)
    trainer.train(rank, range(3))
    trainer.opt.drain()
    return trainer.weights(), trainer.opt.state_dict()


def test_loaded_state_is_what_training_goes_on_with():
    """A wrapped optimizer that takes over a plain one's momentum continues as that one would have."""
    case, script = MOMENTUM, SCRIPTS[1]
    with scripted_engine(2):
        first = TorchTrainer(case)
        before = first.weights()
        worker = attach(first.opt, ScriptedWorker(script, 2, before.size, case.lr, torch.as_tensor))
        first.train(0, range(3))
        second = TorchTrainer(case)
        second.model.load_state_dict(first.model.state_dict())
        second.opt.load_state_dict(first.opt.state_dict())
        attach(second.opt, worker)
        second.train(0, range(3, 7))
    np.testing.assert_allclose(second.weights(), replay("torch", case, before, worker.applied, 2), atol=1e-5)


def test_different_weights_name_the_parameter_and_the_call_that_mends_it():
    def train(rank: int) -> None:
        trainer = TorchTrainer(SGD)
        with torch.no_grad():
            trainer.model[3].bias += rank
        trainer.train(rank, range(1))

    for outcome in Cluster(2).outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)
        assert "rank 1 from rank 0, first in '3.bias (3,) float32'" in str(outcome)
        assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in str(outcome)


def test_round_is_frozen():
    with pytest.raises(AttributeError):
        ReducedRound(1, (), [], ()).index = 2  # type: ignore[misc]
