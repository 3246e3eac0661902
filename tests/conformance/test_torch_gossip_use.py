"""torch: gossip beside what training scripts do: schedulers, closures, scalers, two optimizers, odd parameters."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async import mixing, topology
from hvd_async.errors import ReplicaStateError, WaitTimeoutError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conformance import gossip_reference as reference
from tests.conformance.cases import CASES, Case
from tests.conformance.drive import scripted_engine
from tests.conformance.gossip_reference import least_squares
from tests.conformance.torch_gossip_ranks import GossipTrainer
from tests.conformance.torch_ranks import ProcessSet, batch, conv_model, flat

SGD, MOMENTUM = CASES[0], CASES[1]
STAR = {"algorithm": "sgp", "topology": "star"}
RING = {"algorithm": "dpsgd", "topology": "ring"}


def ends(train: Callable[[int], Any], size: int = 3) -> Any:
    """What all ranks return; it must be the same."""
    first, *others = Cluster(size).run(train)
    assert others == [first] * (size - 1)
    return first


def bits(trainer: GossipTrainer) -> bytes:
    trainer.opt.drain()
    return trainer.weights().tobytes()


# -- what is called around a step -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_the_result_is_an_instance_of_the_wrapped_class(kind):
    with scripted_engine(2):
        plain = kind(conv_model().parameters(), lr=0.1)
        wrapped = hvd.GossipOptimizer(plain)
    assert isinstance(wrapped, kind)
    assert wrapped.param_groups is plain.param_groups
    assert repr(wrapped).startswith(kind.__name__)
    assert wrapped.stats().steps == wrapped.rounds == 0
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ReplicaStateError, match=r"save its state_dict\(\)"):
            copying(wrapped)


@pytest.mark.parametrize("made", ["before", "after"])
def test_schedulers_change_each_ranks_own_rate(made):
    def train(rank: int, by_hand: bool = False) -> bytes:
        schedulers = []

        def make(parameters: Any) -> Any:
            plain = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
            if made == "before":
                schedulers.append(torch.optim.lr_scheduler.ExponentialLR(plain, 0.5))
            return plain

        trainer = GossipTrainer(least_squares(3, MOMENTUM), rank, make=make, **STAR)
        if made == "after":
            schedulers.append(torch.optim.lr_scheduler.ExponentialLR(trainer.opt, 0.5))
        for step in range(4):
            trainer.step()
            if by_hand:
                trainer.opt.param_groups[0]["lr"] = 0.1 * 0.5 ** (step + 1)
            else:
                schedulers[0].step()
        assert trainer.opt.param_groups[0]["lr"] == 0.1 / 16
        return bits(trainer)

    assert ends(train) == ends(lambda rank: train(rank, by_hand=True))


def test_a_closure_is_evaluated_once_a_step_at_the_models_own_weights():
    calls = []

    def train(rank: int, closure: bool = False) -> bytes:
        trainer = GossipTrainer(least_squares(3, MOMENTUM), rank, **STAR)

        def evaluate() -> float:
            assert torch.is_grad_enabled()
            trainer.gradient()
            calls.append(rank)
            return 7.0

        for _ in range(4):
            if closure:
                assert trainer.opt.step(evaluate) == 7.0
            else:
                trainer.step()
        return bits(trainer)

    assert ends(train) == ends(lambda rank: train(rank, closure=True))
    assert sorted(calls) == [0] * 4 + [1] * 4 + [2] * 4


def test_step_hooks_run_once_a_step():
    def train(rank: int) -> list[str]:
        trainer, log = GossipTrainer(least_squares(2, SGD), rank), list[str]()
        trainer.opt.register_step_pre_hook(lambda *_: log.append("pre"))
        trainer.opt.register_step_post_hook(lambda *_: log.append("post"))
        trainer.train(2)
        trainer.opt.drain()
        return log

    assert ends(train, 2) == ["pre", "post"] * 2


@pytest.mark.parametrize("options", [STAR, RING, {"algorithm": "adpsgd"}, {"algorithm": "allreduce"}], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_on_one_rank(options, fused):
    """It is one step less of this rank, or, where the optimizer itself skips, one that moves nothing."""

    def train(rank: int) -> tuple[Any, ...]:
        trainer = GossipTrainer(
            least_squares(3, SGD), rank, make=lambda ps: torch.optim.SGD(ps, lr=0.1, fused=fused), **options
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        seen = trainer.watch()
        for step in range(5):
            trainer.gradient()
            for parameter in trainer.parameters:
                parameter.grad *= scaler.get_scale()
            if (rank, step) == (1, 2):
                trainer.parameters[0].grad[0] = torch.inf
            scaler.scale(torch.zeros(1))
            scaler.step(trainer.opt)
            scaler.update()
        trainer.opt.drain()
        assert scaler.get_scale() == (512.0 if rank == 1 else 1024.0)
        return trainer.weights(), sum(seen.moved), trainer.opt.stats().steps

    weights, moved, steps = zip(*Cluster(3).run(train), strict=True)
    assert steps == (5, 5 if fused else 4, 5)
    np.testing.assert_allclose(weights[0], least_squares(3, SGD).start[0] + sum(moved) / 3, rtol=0, atol=1e-5)
    assert len({one.tobytes() for one in weights}) == 1


def test_backward_under_autocast_and_several_backward_passes():
    def train(rank: int) -> bytes:
        model = conv_model()
        opt = hvd.GossipOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2, **STAR
        )
        for step in range(4):
            opt.zero_grad()
            for part in range(2):
                images, labels = batch(rank, 2 * step + part)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss.backward()
            opt.step()
        opt.drain()
        assert opt.stats().steps == 4
        assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in model.parameters())
        assert np.abs(flat(model.parameters()) - flat(conv_model().parameters())).max() > 1e-3
        return flat(model.parameters()).tobytes()

    ends(train)


# -- parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [STAR, RING, {"algorithm": "adpsgd", "compression": "bf16"}], ids=str)
def test_parameters_of_all_shapes_and_layouts(options):
    """A scalar, an empty one, float64, channels last: all as one vector."""
    values = [torch.tensor(1.5), torch.zeros(0, 3), torch.ones(3, dtype=torch.float64), torch.ones(2, 3, 2, 2)]

    def drawn(shape: tuple[int, ...], *seed: int) -> Any:
        return np.random.default_rng(seed).normal(size=shape)

    def train(rank: int, last: bool = False) -> list[bytes]:
        parameters = [torch.nn.Parameter(value.clone()) for value in values]
        if last:
            parameters[3].data = parameters[3].data.contiguous(memory_format=torch.channels_last)
        opt = hvd.GossipOptimizer(torch.optim.SGD(parameters, lr=0.1), **options)
        for step in range(3):
            for index, parameter in enumerate(parameters):
                gradient = drawn(tuple(parameter.shape), rank, step, index)
                parameter.grad = torch.as_tensor(gradient, dtype=parameter.dtype)
            opt.step()
            assert parameters[3].is_contiguous(memory_format=torch.channels_last) == last
        opt.drain()
        assert [p.dtype for p in parameters] == [value.dtype for value in values]
        moved = sum(drawn((3,), own, step, 2) for own in range(2) for step in range(3))
        np.testing.assert_allclose(parameters[2].detach(), 1.0 - 0.1 * moved / 2, rtol=0, atol=1e-14)
        return [p.detach().contiguous().numpy().tobytes() for p in parameters]

    plain = ends(train, 2)
    if options["algorithm"] != "adpsgd":
        assert ends(lambda rank: train(rank, last=True), 2) == plain
    else:
        ends(lambda rank: train(rank, last=True), 2)


def test_frozen_parameters_and_those_without_gradient_are_only_mixed():
    def train(rank: int) -> tuple[bytes, Any]:
        trainer = GossipTrainer(least_squares(3, MOMENTUM), rank, **STAR)
        trainer.parameters[0].requires_grad_(False)
        for _ in range(6):
            trainer.gradient()
            trainer.parameters[0].grad = None
            if rank == 1:
                trainer.parameters[1].grad = None
            trainer.opt.step()
        return bits(trainer), trainer.parameters[0].detach().numpy()

    start = least_squares(3, MOMENTUM).start[0]
    for _, frozen in Cluster(3).run(train):
        np.testing.assert_allclose(frozen, start[:2], rtol=1e-6)
    assert len({weights for weights, _ in Cluster(3).run(train)}) == 1


@pytest.mark.parametrize("algorithm", ["sgp", "dpsgd", "adpsgd", "allreduce"])
def test_weights_that_were_changed_between_steps_stay_changed(algorithm):
    """As by EarlyStopping(restore_best_weights=True), or by clipping weights: the ranks' mean moves as much."""

    def train(rank: int) -> list[float]:
        weight = torch.nn.Parameter(torch.ones(4))
        opt = hvd.GossipOptimizer(torch.optim.SGD([weight], lr=0.0), algorithm=algorithm)
        for step in range(4):
            weight.grad = torch.ones(4)
            opt.step()
            if rank == 2:
                with torch.no_grad():
                    weight.add_(3.0 * step)
        opt.drain()
        return weight.tolist()

    np.testing.assert_allclose(ends(train), [1.0 + 3.0 * (0 + 1 + 2 + 3) / 3] * 4, atol=1e-5)


def test_statistics_that_were_computed_anew_agree_in_consensus():
    def train(rank: int) -> list[float]:
        model = torch.nn.BatchNorm1d(2)
        opt = hvd.GossipOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_buffers=model.named_buffers())
        model(torch.ones(3, 2)).sum().backward()
        opt.step()
        opt.drain()
        model.running_mean.fill_(rank)
        opt.drain()
        with opt.consensus():
            return model.running_mean.tolist()

    assert ends(train) == [1.0, 1.0]


def test_a_consensus_that_is_never_left_puts_nothing_back():
    """As an evaluation that was broken off, after which other weights were loaded."""

    def train(rank: int) -> bytes:
        trainer = GossipTrainer(least_squares(2, SGD), rank).train(2)
        context = trainer.opt.consensus()
        context.__enter__()
        with torch.no_grad():
            trainer.parameters[0].fill_(7.0)
        del context
        gc.collect()
        assert trainer.parameters[0].tolist() == [7.0, 7.0]
        return bits(trainer.train(1))

    ends(train, 2)


def test_a_group_may_be_added_before_the_first_step_only():
    def train(rank: int) -> float:
        trainer = GossipTrainer(least_squares(2, SGD), rank, named_parameters=None)
        extra = torch.nn.Parameter(torch.zeros(1))
        trainer.opt.add_param_group({"params": [extra], "lr": 0.5})
        trainer.gradient()
        extra.grad = torch.full((1,), 1.0 + rank)
        trainer.opt.step()
        with pytest.raises(ReplicaStateError, match="Add all groups before training"):
            trainer.opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        trainer.opt.drain()
        return extra.item()

    assert ends(train, 2) == -0.75


# -- several optimizers, sets of ranks ------------------------------------------------------------------------


def test_two_optimizers_of_a_process_do_not_touch_each_other():
    """As in a GAN: each one ends where it ends alone."""
    generator = STAR | {"compression": "int8"}

    def both(rank: int) -> list[bytes]:
        trainers = [
            GossipTrainer(least_squares(3, MOMENTUM), rank, **generator),
            GossipTrainer(least_squares(3, SGD, elements=12), rank, **RING),
        ]
        for step in range(6):
            trainers[0].step()
            if step % 2:
                trainers[1].step()
        trainers[0].opt.drain()  # both
        assert [trainer.opt.stats().steps for trainer in trainers] == [6, 3]
        return [trainer.weights().tobytes() for trainer in trainers]

    def alone(which: int) -> bytes:
        problem = (least_squares(3, MOMENTUM), least_squares(3, SGD, elements=12))[which]
        options = (generator, RING)[which]
        weights: bytes = ends(lambda rank: bits(GossipTrainer(problem, rank, **options).train((6, 3)[which])))
        return weights

    assert ends(both) == [alone(0), alone(1)]


@pytest.mark.parametrize("options", [{"peers": 2}, {"algorithm": "dpsgd", "topology": topology.complete(3)}], ids=str)
def test_ranks_of_a_process_set_gossip_among_themselves(options):
    trio, problem = ProcessSet(0, 2, 3), least_squares(4, SGD)

    def train(rank: int) -> tuple[Any, ...]:
        trainer = GossipTrainer(problem, rank, process_set=trio, **options).train(5 + 2 * (rank == 1))
        every = GossipTrainer(problem, rank).train(2)  # and all of them in another one
        trainer.opt.drain()
        every.opt.drain()
        return trainer.weights(), trainer.opt.stats(), every.weights().tobytes()

    results = Cluster(4).run(train)
    members = [0, 2, 3]
    inside = reference.Problem(problem.start[:3], lambda z, r, k: problem.gradient(z, members[r], k), SGD)
    kind = "dpsgd" if "algorithm" in options else "sgp"
    expected = reference.gossip(inside, [np.full((3, 3), 1 / 3)], 5, algorithm=kind).drained()
    for rank in members:
        np.testing.assert_allclose(results[rank][0], expected, rtol=0, atol=1e-5)
        assert len(results[rank][1].waited_for) == 3
    outside = reference.Problem(problem.start[:1], lambda z, _, k: problem.gradient(z, 1, k), SGD)
    alone = reference.gossip(outside, mixing.matrices(topology.ring(1), "uniform"), 7).drained()
    np.testing.assert_allclose(results[1][0], alone, rtol=0, atol=1e-5)
    assert (results[1][1].steps, results[1][1].messages_sent) == (7, 0)
    assert len({every for _, _, every in results}) == 1


def test_construction_does_not_communicate():
    def train(rank: int) -> bytes:
        kept = [GossipTrainer(least_squares(2, SGD), rank)] if rank == 0 else []
        weights = bits(GossipTrainer(least_squares(2, SGD), rank).train(2))
        assert len(kept) == 1 - rank
        return weights

    ends(train, 2)


# -- ends that are broken off ---------------------------------------------------------------------------------


def test_a_drain_that_is_broken_off_can_be_called_again():
    """As Ctrl-C would, HVD_ASYNC_TIMEOUT ends a wait. A step before that is refused, and moves nothing."""
    stalled = threading.Event()

    def train(rank: int) -> bytes:
        engine = local_engine()
        assert engine is not None
        trainer = GossipTrainer(least_squares(2, Case("sgd", "sgd", 0.1)), rank, algorithm="osgp").train(2)
        if rank == 0:
            engine.timeout = 0.05
            with pytest.raises(WaitTimeoutError):
                trainer.opt.drain()
            engine.timeout = float("inf")
            held = trainer.weights().tobytes()
            with pytest.raises(ReplicaStateError, match="broken off: call it again before the next step"):
                trainer.step()
            assert trainer.weights().tobytes() == held
            stalled.set()
        assert stalled.wait(30)
        trainer.opt.drain()
        trainer.steps = 2
        return bits(trainer.train(2))

    ends(train, 2)
