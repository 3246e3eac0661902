"""Quasi-global momentum in every binding: equal to the float64 reference, its ends, and what optimizers may have."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import torch

from hvd_async.testing import Cluster
from tests.conformance import gossip_ranks as ranks
from tests.conformance.drive import scripted_engine
from tests.conformance.gossip_ranks import MOMENTUM, NESTEROV, PAIRS, RING, STAR, TORCH, also_graph, both, by_options
from tests.conformance.gossip_reference import Problem
from tests.conformance.quasi_global_reference import Corrected
from tests.conformance.reference import Array
from tests.conformance.torch_gossip_ranks import GossipTrainer

ON = {"quasi_global": True}


@pytest.mark.parametrize("case", [MOMENTUM, NESTEROV], ids=ranks.name)
@by_options(STAR | ON, RING | ON, PAIRS | ON, RING | ON | {"gossip_every": 2, "average_every": 5})
@also_graph
def test_every_step_equals_the_reference(binding, options, case):
    problem = binding.problem(4, case)
    seen = ranks.run(binding, problem, 14, **options)
    ranks.check(ranks.expected(Corrected(problem), seen, options), seen)  # type: ignore[arg-type]
    alone = ranks.expected(problem, seen, options)
    assert any(np.abs(own.path[-1] - path[-1]).max() > 1e-3 for own, path in zip(seen, alone.path, strict=True))


@both
def test_ranks_that_end_early_hold_nobody_up(binding):
    problem, steps, options = binding.problem(4), [12, 3, 1, 7], PAIRS | ON
    seen = ranks.run(binding, problem, steps, Cluster(4, jitter=0.001), **options)
    outcome = ranks.expected(Corrected(problem), seen, options)  # type: ignore[arg-type]
    for own, path in zip(seen, outcome.path, strict=True):
        np.testing.assert_allclose(np.array(own.path), np.array(path), rtol=1e-6, atol=1e-5)


@also_graph
def test_a_drain_averages_the_momenta_and_begins_the_correction_anew(binding):
    problem = binding.problem(3)

    def work(rank: int) -> tuple[Any, ...]:
        trainer = binding.make(problem, rank, **RING, **ON).train(5)
        apart = trainer.moments()
        trainer.opt.drain()
        return apart, trainer.moments(), trainer.opt._async._correction.vector, trainer.train(1).weights()

    apart, together, corrections, _ = zip(*Cluster(3).run(work), strict=True)
    assert np.abs(apart[0] - apart[1]).max() > 1e-2
    for own in together:
        np.testing.assert_allclose(own, np.mean(apart, axis=0), rtol=0, atol=1e-6)
    assert len({own.tobytes() for own in together}) == 1
    assert corrections == (None, None, None)


@also_graph
def test_where_ranks_see_the_same_it_is_the_optimizers_own_momentum(binding):
    """To the bit: what rounding does to the weights is no disagreement."""
    problem = binding.problem(3)
    same = Problem(problem.start, lambda z, rank, step: problem.gradient(z, 0, step), problem.case, problem.framework)
    runs = [ranks.run(binding, same, 8, **RING, **own) for own in ({}, ON)]
    assert [[one.tobytes() for one in seen.path] for seen in runs[0]] == [
        [one.tobytes() for one in seen.path] for seen in runs[1]
    ]


@also_graph
def test_only_some_epochs_may_have_it(binding):
    problem = binding.problem(2)

    def work(rank: int) -> tuple[Any, ...]:
        trainer, found = binding.make(problem, rank, schedule={0: "allreduce", 1: "dpsgd", 2: "osgp"}, **ON), []
        for epoch in range(3):
            trainer.opt.set_epoch(epoch)
            trainer.train(3)
            vector = trainer.opt._async._correction.vector
            found.append((trainer.opt.settings.get("quasi_global"), vector is not None and bool(vector.any())))
        trainer.opt.drain()
        return tuple(found)

    assert ranks.alike(work, 2) == ((None, False), (True, True), (None, False))


@pytest.mark.parametrize(
    "by_epoch", [{"peers": {0: 1, 1: 2}}, {"schedule": {0: "allreduce", 1: "dpsgd"}, "average_every": 3}], ids=str
)
@both
def test_a_cut_is_resumed_in_an_epoch_that_has_other_settings_than_the_first(binding, by_epoch):
    """Bit by bit: the correction is there before ``set_epoch`` says that the plan has one."""
    problem, saved = binding.problem(3), list[Any]([None] * 3)

    def whole(rank: int) -> list[bytes]:
        trainer = binding.make(problem, rank, **by_epoch, **ON)
        trainer.opt.set_epoch(1)
        trainer.train(4).opt.cut()
        saved[rank] = trainer.saved()
        return finish(trainer)

    def second(rank: int) -> list[bytes]:
        trainer = binding.make(problem, rank, **by_epoch, **ON).resumed(saved[rank], 4)
        trainer.opt.set_epoch(1)
        return finish(trainer)

    def finish(trainer: Any) -> list[bytes]:
        path = [trainer.train(1).weights().tobytes() for _ in range(4)]
        trainer.opt.drain()
        return [*path, trainer.moments().tobytes()]

    ends = Cluster(3).run(whole)
    assert Cluster(3).run(second) == ends


@both
def test_only_sgd_with_momentum_may_have_it(binding):
    def made(kind: Any, **more: Any) -> Any:
        if binding is TORCH:
            return getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(2))], lr=0.1, **more)
        return getattr(keras.optimizers, kind)(0.1, **more)

    with scripted_engine(2):
        for kind in ("SGD", "Adam"):
            with pytest.raises(ValueError, match=r"corrects the momentum of \w+\.optim\w*\.SGD, and .* has none"):
                binding.hvd.GossipOptimizer(made(kind), **ON)
        assert binding.hvd.GossipOptimizer(made("SGD", momentum=0.5), **ON).settings["quasi_global"]
        assert not binding.hvd.GossipOptimizer(made("Adam")).settings["quasi_global"]


def test_torchs_groups_have_their_own_rates_and_at_0_their_own_momentum():
    """The second group's rate is 0: its momentum is that of torch alone. Parameters without a gradient have none."""
    problem = TORCH.problem(2)

    def make(parameters: Any) -> Any:
        still = {"params": parameters[1:], "lr": 0.0}
        return torch.optim.SGD([{"params": parameters[:1], "lr": 0.05}, still], lr=1.0, momentum=0.9)

    def work(rank: int) -> tuple[Array, Array]:
        trainer = GossipTrainer(problem, rank, make, **RING, **ON)
        plain = np.zeros(6)
        for _ in range(5):
            trainer.gradient()
            gradient = np.concatenate([p.grad.double().numpy().reshape(-1) for p in trainer.parameters])  # type: ignore[union-attr]
            plain = 0.9 * plain + gradient
            trainer.opt.step()
        found = trainer.moments()
        assert trainer.opt._async.replica.learning_rates() == [(2, 0.05), (4, 0.0)]
        trainer.opt.drain()
        return found, plain

    for found, plain in Cluster(2).run(work):
        np.testing.assert_allclose(found[2:], plain[2:], rtol=0, atol=1e-5)
        assert np.abs(found[:2] - plain[:2]).max() > 1e-3


def test_parameters_that_have_no_momentum_yet_are_left_alone_and_have_all_ranks_after_a_drain():
    problem = TORCH.problem(2)

    def work(rank: int) -> tuple[int, list[float]]:
        trainer = GossipTrainer(problem, rank, **RING, **ON)
        for _ in range(3):
            trainer.gradient()
            if rank == 0:
                trainer.parameters[1].grad = None
            trainer.opt.step()
        had = len([p for p in trainer.parameters if trainer.opt.state.get(p, {}).get("momentum_buffer") is not None])
        trainer.opt.drain()
        return had, trainer.moments().tolist()

    (own, one), (others, other) = Cluster(2).run(work)
    assert (own, others) == (1, 2)
    assert one == other
    assert np.abs(one[2:]).min() > 0
