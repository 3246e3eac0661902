"""Keras gossip: checkpoints, after a drain for any number of ranks, after a cut for as many."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance import gossip_reference as reference
from tests.conformance.cases import CASES
from tests.conformance.drive import scripted_engine
from tests.conformance.keras_gossip_ranks import GossipTrainer, least_squares
from tests.conformance.keras_ranks import flat, plain

SGD, ADAM = CASES[0], CASES[6]
Saved = tuple[Any, dict[str, Any]]


def saved(trainer: GossipTrainer) -> Saved:
    """What a checkpoint holds; the arrays pass through bytes, as in a file."""
    return trainer.weights(), {name: np.array(value) for name, value in trainer.opt.get_state().items()}


def resumed(trainer: GossipTrainer, checkpoint: Saved) -> GossipTrainer:
    """The trainer as it was when it was saved."""
    weights, state = checkpoint
    trainer.assign(weights)
    trainer.opt.set_state(state)
    return trainer


def bits(trainer: GossipTrainer) -> bytes:
    """Of the weights and the optimizer's variables."""
    return flat(v.numpy() for v in [*trainer.variables, *trainer.opt.variables]).tobytes()


@pytest.mark.parametrize("end", ["drain", "cut"])
@pytest.mark.parametrize(
    "options",
    [
        {"topology": "star"},
        {"topology": "star", "average_every": 3},
        {"algorithm": "osgp", "topology": "ring", "max_staleness": 0},
        {"algorithm": "dpsgd", "compression": "int8"},
    ],
    ids=["sgp", "sgp-averaged", "osgp", "dpsgd-int8"],
)
def test_a_resumed_run_goes_on_with_the_same_bits(options, end):
    size = 3 if options.get("topology") == "star" else 2
    problem = least_squares(size, ADAM)

    def first(rank: int) -> tuple[Saved, bytes]:
        trainer = GossipTrainer(problem, rank, **options)
        trainer.train(5)
        getattr(trainer.opt, end)()
        checkpoint = saved(trainer)
        return checkpoint, goes_on(trainer)

    def second(rank: int) -> bytes:
        trainer = resumed(GossipTrainer(problem, rank, **options), outcomes[rank][0])
        trainer.path = [np.empty(0)] * 5
        return goes_on(trainer)

    def goes_on(trainer: GossipTrainer) -> bytes:
        trainer.train(5)
        trainer.opt.drain()
        return bits(trainer)

    outcomes = Cluster(size).run(first)
    assert Cluster(size).run(second) == [one for _, one in outcomes]
    weights = {float(checkpoint[1]["hvd_async.weight"]) for checkpoint, _ in outcomes}
    assert (weights != {1.0}) == (end == "cut" and size == 3)
    copies = [name for name in outcomes[0][0][1] if name.startswith("hvd_async.copy.")]
    assert bool(copies) == (end == "cut" and options.get("compression") == "int8")


def test_a_cut_of_pairs_is_resumed():
    """What is averaged when is another matter each time."""
    problem = least_squares(3, SGD)

    def first(rank: int) -> Saved:
        trainer = GossipTrainer(problem, rank, algorithm="adpsgd", topology="ring")
        trainer.train(5)
        trainer.opt.cut()
        return saved(trainer)

    def second(rank: int) -> Any:
        trainer = resumed(GossipTrainer(problem, rank, algorithm="adpsgd", topology="ring"), checkpoints[rank])
        trainer.train(5)
        trainer.opt.drain()
        return trainer.path, trainer.log[: trainer.log.index(("drained",))], trainer.weights()

    checkpoints = Cluster(3).run(first)
    start = np.stack([weights for weights, _ in checkpoints])
    assert np.ptp(start, axis=0).max() > 0.01
    outcomes = Cluster(3).run(second)
    outcome = reference.adpsgd(dataclasses.replace(problem, start=start), [log for _, log, _ in outcomes])
    for (path, _, drained), expected in zip(outcomes, outcome.path, strict=True):
        np.testing.assert_allclose(path, expected, atol=1e-5)
        np.testing.assert_allclose(drained, outcome.drained(), atol=1e-5)


def test_shares_after_a_cut_are_for_the_same_rank_of_as_many_ranks():
    def first(rank: int) -> Saved:
        trainer = GossipTrainer(least_squares(3, SGD), rank, topology="star")
        trainer.train(3)
        trainer.opt.cut()
        return saved(trainer)

    checkpoint = Cluster(3).run(first)[1]
    for size, index in ((3, 0), (2, 1)):
        with scripted_engine(size, index):
            trainer = GossipTrainer(least_squares(3, SGD), 0)
            with pytest.raises(ValueError, match=rf"rank 1 of 3 after cut.*this is rank {index} of {size}"):
                resumed(trainer, checkpoint)
    with scripted_engine(3, 1):
        resumed(GossipTrainer(least_squares(3, SGD), 0), checkpoint)


def test_a_drained_checkpoint_resumes_at_another_size_with_another_wrapper():
    def first(rank: int) -> Saved:
        trainer = GossipTrainer(least_squares(2, ADAM), rank)
        trainer.train(3)
        trainer.opt.drain()
        return saved(trainer)

    checkpoint = Cluster(2).run(first)[0]

    def second(rank: int) -> tuple[bytes, int]:
        trainer = resumed(GossipTrainer(least_squares(3, ADAM), rank), checkpoint)
        before = trainer.opt.rounds
        trainer.train(2)
        trainer.opt.drain()
        return flat(trainer.variables).tobytes(), before

    (one, before), *others = Cluster(3).run(second)
    assert [(one, before)] * 2 == others
    assert before == int(checkpoint[1]["hvd_async.rounds"]) >= 3

    def eager(rank: int) -> dict[str, Any]:
        trainer = GossipTrainer(least_squares(2, ADAM), rank)
        opt = hvd.EagerOptimizer(plain(ADAM), quorum="all")
        opt.build(trainer.variables)
        opt.set_state(checkpoint[1])
        opt.apply([tf.ones(v.shape) for v in trainer.variables], trainer.variables)
        opt.drain()
        return opt.get_state()

    state = Cluster(2).run(eager)[0]
    with scripted_engine(2):
        trainer = GossipTrainer(least_squares(2, ADAM), 0)
        trainer.opt.set_state(state)
        assert int(trainer.opt.iterations) == 4
        with pytest.raises(ValueError, match="gradients pending"):
            trainer.opt.set_state(state | {"hvd_async.versions.0": np.ones(2)})
        with pytest.raises(ValueError, match="of another optimizer"):
            GossipTrainer(least_squares(2, SGD), 0).opt.set_state(state)


def test_state_is_not_saved_while_messages_are_on_their_way():
    def train(rank: int) -> None:
        trainer = GossipTrainer(least_squares(2, SGD), rank)
        trainer.train(1)
        try:
            with pytest.raises(ReplicaStateError, match=r"Call drain\(\) on every rank first .* or call cut\(\)"):
                trainer.opt.get_state()
        finally:
            trainer.opt.drain()
        trainer.opt.get_state()

    Cluster(2).run(train)
