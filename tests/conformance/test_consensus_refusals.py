"""Inside ``consensus()`` steps and ends are refused, and change nothing: in both bindings, for all algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_async.errors import ReplicaStateError
from tests.conformance.gossip_ranks import alike
from tests.conformance.weight_ranks import ALGORITHMS, KerasGraphRank, KerasRank, TorchRank, both
from tests.conftest import LONG_RUN

GRAPHS = [ALGORITHMS[0], *ALGORITHMS[-3:]]
"""The ones that have a kind of step of their own."""


def calls(opt: Any, wrapper: str) -> list[Callable[[], object]]:
    """Calls that a consensus refuses."""
    every = [opt.drain, opt.cut, opt.consensus().__enter__]
    of_gossip = [lambda: opt.switch(algorithm="sgp")] if wrapper == "GossipOptimizer" else []
    return [*every, *of_gossip, *([opt.consensus_distance] if wrapper != "EagerOptimizer" else [])]


@pytest.mark.parametrize(
    ("made", "wrapper", "options"),
    [
        pytest.param(made, *algorithm, id=f"{name}-{'-'.join(map(str, algorithm[1].values()))}")
        for name, made in (("torch", TorchRank), ("keras", KerasRank), ("keras-graph", KerasGraphRank))
        for algorithm in ALGORITHMS
        if LONG_RUN or name == "torch" or algorithm in GRAPHS
    ],
)
def test_calls_inside_consensus_are_refused_and_change_nothing(made, wrapper, options):
    def work(rank: int) -> tuple[list[float], int]:
        trainer = made(made.least_squares(2), rank, wrapper=wrapper, **options).train(3)
        trainer.opt.cut()
        own, steps = trainer.weights(), trainer.opt.stats().steps
        with trainer.opt.consensus():
            held = trainer.weights()
            for _ in range(2):  # (also when gradients are there of a step that was refused)
                for call in calls(trainer.opt, wrapper):
                    with pytest.raises(ReplicaStateError, match=r"inside consensus\(\).*Leave the `with` block first"):
                        call()
                with pytest.raises((ReplicaStateError, tf.errors.OpError), match=r"inside consensus\(\)"):
                    trainer.step()
            np.testing.assert_array_equal(trainer.weights(), held)
        if wrapper != "EagerOptimizer":  # (its consensus is a drain, after which all ranks have the same)
            np.testing.assert_array_equal(trainer.weights(), own)
        assert trainer.opt.stats().steps == steps
        trainer.train(3).opt.drain()
        return trainer.weights().tolist(), int(trainer.opt.stats().steps) - steps

    assert alike(work, 2)[1] == 3


@both
def test_another_optimizers_drain_is_refused_too(binding):
    """It would drain the one whose model holds the consensus."""

    def work(rank: int) -> list[float]:
        one, other = (binding(binding.least_squares(2), rank, algorithm="sgp") for _ in range(2))
        for trainer in (one, other):
            trainer.step()
        with one.opt.consensus():
            other.step()  # (its own model is no rank's consensus)
            with pytest.raises(ReplicaStateError, match=r"inside consensus\(\)"):
                other.opt.drain()
        one.step()
        other.opt.drain()
        return [*one.weights().tolist(), *other.weights().tolist()]

    alike(work, 2)


NESTED = [
    *(({"algorithm": name}, {"algorithm": name}) for name in ("adpsgd", "diloco")),
    (None, {"algorithm": "sgp"}),
    (None, None),
]


@both
@pytest.mark.parametrize(("first", "second"), NESTED, ids=str)
def test_two_models_hold_their_consensus_at_once(binding, first, second):
    """A GAN is evaluated so. Afterwards each model has its own weights again, and training continues."""

    def make(options: Any, rank: int) -> Any:
        wrapper = "EagerOptimizer" if options is None else "GossipOptimizer"
        return binding(binding.least_squares(2), rank, wrapper=wrapper, **options or {})

    def work(rank: int) -> list[list[float]]:
        one, other = make(first, rank), make(second, rank)
        for _ in range(3):
            one.step()
            other.step()
        one.opt.cut()
        own = [one.weights(), other.weights()]
        with one.opt.consensus():
            held = one.weights()
            with other.opt.consensus():
                np.testing.assert_array_equal(one.weights(), held)
                seen = [held.tolist(), other.weights().tolist()]
        for trainer, options, before in zip((one, other), (first, second), own, strict=True):
            if options is not None:
                np.testing.assert_array_equal(trainer.weights(), before)
            trainer.step()
        one.opt.drain()
        return [*seen, one.weights().tolist(), other.weights().tolist()]

    alike(work, 2)
