"""NoLoCo in every binding: equal to the float64 reference, of ranks that end early too; in force by ``switch()``."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from hvd_async.testing import Cluster
from tests.conformance import gossip_ranks as ranks
from tests.conformance.gossip_ranks import ADAM, MOMENTUM, PAIRED, also_graph, both


@pytest.mark.parametrize(("size", "case"), [(1, ADAM), (4, MOMENTUM), (5, ADAM)], ids=str)
@also_graph
def test_every_step_equals_the_reference(binding, size, case):
    problem = binding.problem(size, case)
    seen = ranks.run(binding, problem, 12, **PAIRED)
    ranks.check(ranks.expected(problem, seen, PAIRED), seen)
    assert {own.stats.push_sum_weight for own in seen} == {1.0}


@both
def test_ranks_that_end_early_hold_nobody_up(binding):
    """Also one that had no batch at all."""
    problem, steps = binding.problem(4, MOMENTUM), [12, 3, 0, 7]
    seen = ranks.run(binding, problem, steps, Cluster(4, jitter=0.001), **PAIRED)
    outcome = ranks.expected(problem, seen, PAIRED)
    for own, path in zip(seen, outcome.path, strict=True):
        np.testing.assert_allclose(np.array(own.path), np.array(path), rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(own.drained, outcome.drained(), rtol=1e-6, atol=1e-5)


@both
def test_it_may_be_switched_to(binding):
    problem = binding.problem(4)

    def work(rank: int) -> dict[str, Any]:
        one = binding.make(problem, rank, algorithm="sgp").train(3)
        one.opt.switch(algorithm="noloco", outer_momentum=0.2)
        one.train(9)
        one.opt.drain()
        return {"settings": one.opt.settings, "weights": one.weights().tobytes()}

    first = ranks.alike(work, 4)
    names = ("algorithm", "topology", "gossip_every", "outer_lr", "outer_momentum")
    assert [first["settings"][name] for name in names] == ["noloco", "random-pairs", 8, 0.7, 0.2]


@both
def test_weights_that_a_script_replaces_after_a_drain_are_the_slow_weights(binding):
    """Also in a job that was resumed from a cut: the momentum does not take the replacement for a step."""
    problem, saved = binding.problem(2, dataclasses.replace(MOMENTUM, lr=0.0, momentum=0.0)), list[Any]([None] * 2)
    replaced = np.arange(6.0)

    def begin(rank: int) -> None:
        trainer = binding.make(problem, rank, **PAIRED).train(2)
        trainer.opt.cut()
        saved[rank] = trainer.saved()

    def go_on(rank: int) -> Any:
        trainer = binding.make(problem, rank, **PAIRED).resumed(saved[rank], 2).train(2)
        trainer.opt.drain()
        trainer.assign(replaced)
        trainer.opt._async.on_weights_replaced()
        return trainer.train(7).weights()

    Cluster(2).run(begin)
    for weights in Cluster(2).run(go_on):
        np.testing.assert_allclose(weights, replaced, rtol=0, atol=1e-6)
