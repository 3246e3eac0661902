"""Keras: gossip equals the float64 reference, for every algorithm and graph, on the messages that each rank took in."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import hvd_async.tensorflow.keras as hvd
from hvd_async import mixing, topology
from hvd_async.testing import Cluster
from tests.conformance import gossip_reference as reference
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import Outcome, Problem
from tests.conformance.keras_gossip_ranks import GossipTrainer, least_squares
from tests.conformance.keras_ranks import flat, plain

SIZES = {1: CASES[6], 2: CASES[2], 3: CASES[6], 5: CASES[7], 8: CASES[1]}
"""Ranks, and with which optimizer. (4 are tried under horovodrun, on a ring.)"""


class Run(NamedTuple):
    """An algorithm on a graph."""

    algorithm: str
    topology: str | None
    mixing: str = "uniform"
    max_staleness: int | None = None

    def steps(self, size: int) -> int:
        """To take: 50; the rest is slow."""
        few = self.algorithm == "allreduce" or (self.algorithm == "adpsgd" and size > 4)
        return 20 if few else 50

    def matrices(self, size: int) -> list[Any]:
        """Of the graph."""
        return mixing.matrices(topology.named(self.topology, size), self.mixing)


DIRECTED = [
    *(Run("sgp", name) for name in ("ring", "exponential", "star", "complete")),
    *(Run("osgp", name, max_staleness=late) for late, name in enumerate(("ring", "exponential", "star", "complete"))),
]
SYMMETRIC = [
    *(Run("dpsgd", name) for name in ("ring", "bipartite-exponential", "complete")),
    Run("dpsgd", "star", "metropolis"),
    *(Run("adpsgd", name) for name in ("ring", "bipartite-exponential", "star", "complete")),
    Run("allreduce", None),
]


class Seen(NamedTuple):
    """What one rank did."""

    path: list[Any]
    log: list[Any]
    weight: float
    drained: Any


def run(trainer: GossipTrainer, steps: int, ended: threading.Barrier) -> Seen:
    """Steps, then a drain; no rank is done while others still step, which send less then."""
    trainer.train(steps)
    weight = trainer.opt.stats().push_sum_weight
    ended.wait(300)
    trainer.opt.drain()
    return Seen(trainer.path, trainer.log, weight, trainer.weights())


def expected(problem: Problem, one: Run, seen: list[Seen]) -> Outcome:
    """What the reference makes of what was taken in."""
    steps = max(len(rank.path) for rank in seen)
    if one.algorithm == "allreduce":
        return reference.allreduce(problem, steps)
    if one.algorithm == "adpsgd":
        return reference.adpsgd(problem, [rank.log[: rank.log.index(("drained",))] for rank in seen])
    takes = [[list(taken) for _, taken in rank.log[: len(rank.path)]] for rank in seen]
    algorithm = "dpsgd" if one.algorithm == "dpsgd" else "sgp"
    late = one.max_staleness or 0
    return reference.gossip(
        problem, one.matrices(len(seen)), steps, takes, algorithm=algorithm, max_staleness=late, overlap=late
    )


def check(problem: Problem, one: Run, seen: list[Seen]) -> None:
    """Weights after each step, push-sum weights, what a drain leaves. (Late messages under momentum may swing weights
    far out, by chance; hence a tolerance relative to them as well.)"""
    outcome = expected(problem, one, seen)
    for rank, own in enumerate(seen):
        np.testing.assert_allclose(own.path, outcome.path[rank], rtol=1e-6, atol=1e-5, err_msg=f"{one}, rank {rank}")
        assert own.weight == pytest.approx(outcome.w[rank], abs=1e-12)
        assert own.drained.tobytes() == seen[0].drained.tobytes()
    np.testing.assert_allclose(seen[0].drained, outcome.drained(), rtol=1e-6, atol=1e-5, err_msg=str(one))


@pytest.mark.parametrize("runs", [DIRECTED, SYMMETRIC], ids=["directed", "symmetric"])
@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm_on_every_graph(size, runs):
    """In a graph that is traced once: between two runs the optimizer is switched."""
    problem, ended = least_squares(size, SIZES[size]), threading.Barrier(size)

    def train(rank: int) -> list[Seen]:
        trainer = GossipTrainer(problem, rank, graph=True)
        seen = []
        for one in runs:
            trainer.opt.switch(**one._asdict())
            trainer.restart()
            seen.append(run(trainer, one.steps(size), ended))
        return seen

    for one, *seen in zip(runs, *Cluster(size).run(train, timeout=300), strict=True):
        check(problem, one, seen)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_messages_that_come_late_in_a_fixed_schedule(late):
    """OSGP: rank 1 takes each step when the others have taken those that they can take without its message."""
    one, size, steps = Run("osgp", "ring", max_staleness=late), 3, 50
    problem, ended = least_squares(size, CASES[1]), threading.Barrier(size)
    done = [[threading.Event() for _ in range(steps + 1)] for _ in range(size)]

    def train(rank: int) -> Seen:
        trainer = GossipTrainer(problem, rank, graph=True, algorithm="osgp", topology="ring", max_staleness=late)
        trainer.opt._async.worker_now()  # all ranks meet here, so nobody is late before that
        for step in range(1, steps + 1):
            if rank == 1 and late:
                for other in (0, 2):
                    assert done[other][min(steps, step + late - 1)].wait(60)
            trainer.train(1)
            done[rank][step].set()
        return run(trainer, 0, ended)

    seen = Cluster(size).run(train)
    check(problem, one, seen)
    for own in (seen[0], seen[2]):
        arrived = [step - sent for step, taken in own.log[:steps] for sender, sent in taken if sender == 1]
        assert set(arrived) == {late}


@pytest.mark.parametrize("algorithm", ["sgp", "dpsgd"])
def test_an_average_every_few_steps(algorithm):
    problem, ended = least_squares(3, CASES[1]), threading.Barrier(3)
    options = {"topology": "star", "mixing": "metropolis" if algorithm == "dpsgd" else "uniform"}

    def train(rank: int) -> Seen:
        return run(GossipTrainer(problem, rank, algorithm=algorithm, average_every=3, **options), 10, ended)

    seen = Cluster(3).run(train)
    matrices = mixing.matrices(topology.star(3), options["mixing"])
    outcome = reference.gossip(problem, matrices, 10, algorithm=algorithm, average_every=3)
    for own, path in zip(seen, outcome.path, strict=True):
        np.testing.assert_allclose(own.path, path, rtol=0, atol=1e-5)
    assert all(np.array_equal(own.path[8], seen[0].path[8]) for own in seen)


@pytest.mark.parametrize(("compression", "within"), [("fp16", 4e-3), ("bf16", 3e-2)])
def test_messages_in_half_precision_keep_the_mean(compression, within):
    """What is rounded away stays with the sender."""
    problem, ended = least_squares(4, CASES[0]), threading.Barrier(4)

    def train(rank: int) -> tuple[Seen, int]:
        trainer = GossipTrainer(problem, rank, compression=getattr(hvd.Compression, compression))
        return run(trainer, 20, ended), trainer.opt.stats().bytes_sent

    outcome = reference.sgp(problem, mixing.matrices(topology.exponential(4), "uniform"), 20)
    for seen, nbytes in Cluster(4).run(train):
        np.testing.assert_allclose(seen.drained, outcome.drained(), rtol=0, atol=1e-5 + within / 20)
        np.testing.assert_allclose(seen.path[-1], outcome.path[0][-1], rtol=0, atol=1.0)
        assert nbytes == 20 * (6 * 2 + 16)


def test_messages_of_8_bits_still_reach_consensus():
    problem = dataclasses.replace(least_squares(4, CASES[0]), gradient=lambda z, rank, step: z - rank)
    mean = 1.5 + 0.9**10 * (problem.start[0] - 1.5)

    def train(rank: int) -> tuple[float, Any]:
        trainer = GossipTrainer(problem, rank, algorithm="dpsgd", compression="int8")
        trainer.train(10)
        trainer.opt.learning_rate = 0.0
        trainer.train(30)
        return trainer.opt.consensus_distance(), trainer.weights()

    for distance, weights in Cluster(4).run(train):
        assert distance < 1e-3
        np.testing.assert_allclose(weights, mean, atol=1e-3)


@pytest.mark.parametrize("algorithm", ["sgp", "osgp", "dpsgd"])
def test_ranks_of_a_host_are_averaged_first(algorithm):
    problem, ended = least_squares(6, CASES[1]), threading.Barrier(6)
    name = "ring" if algorithm == "dpsgd" else "exponential"

    def train(rank: int) -> Seen:
        trainer = GossipTrainer(problem, rank, algorithm=algorithm, topology=name, hierarchical=2, max_staleness=None)
        return run(trainer, 20, ended)

    seen = Cluster(6).run(train)
    for own in seen:
        assert own.drained.tobytes() == seen[0].drained.tobytes()
    if algorithm == "osgp":
        return
    matrices = mixing.matrices(topology.named(name, 3), "uniform")
    outcome = reference.gossip(problem, matrices, 20, algorithm=algorithm, local_size=2)
    for own, path in zip(seen, outcome.path, strict=True):
        np.testing.assert_allclose(own.path, path, rtol=0, atol=1e-5)


# -- fit() ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_fit_equals_the_reference(run_eagerly):
    """On a star, so with push-sum weights that are not 1; ranks with fewer batches are done earlier."""
    problem, batches = least_squares(3, CASES[1]), (5, 4, 5)

    def train(rank: int) -> tuple[Any, Any, Any]:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, use_bias=False)])
        model.layers[0].kernel.assign(problem.start[rank][:, None].astype(np.float32))
        opt = hvd.GossipOptimizer(plain(problem.case), topology="star")
        model.compile(optimizer=opt, loss=lambda y, z: (y - z) ** 2 / 2, run_eagerly=run_eagerly, jit_compile=False)
        data = [reference.batch(rank, step + 1) for step in range(batches[rank])]
        inputs, targets = (np.concatenate([one[i] for one in data]).astype(np.float32) for i in (0, 1))
        path: list[Any] = []
        keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: path.append(flat(model.weights)))
        ends = hvd.callbacks.GossipEpochCallback()
        model.fit(inputs, targets[:, None], batch_size=8, shuffle=False, verbose=0, callbacks=[keep, ends])
        return path, flat(model.weights), opt.stats()

    seen = Cluster(3).run(train)
    outcome = reference.sgp(problem, mixing.matrices(topology.star(3), "uniform"), 5)
    for (path, drained, stats), expected_path, steps in zip(seen, outcome.path, batches, strict=True):
        np.testing.assert_allclose(path[:4], expected_path[:4], rtol=0, atol=1e-5)
        assert stats.steps == len(path) == steps
        assert stats.push_sum_weight == 1.0
        assert drained.tobytes() == seen[0][1].tobytes()
