"""torch: gossip that goes on with other settings in the middle of training, by switch() and by epoch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvd_async import mixing, topology
from hvd_async.testing import Cluster
from tests.conformance import gossip_reference as reference
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import Problem, least_squares
from tests.conformance.torch_gossip_ranks import GossipTrainer, Seen, graph

MOMENTUM, NESTEROV = CASES[1], CASES[5]
STAR = {"algorithm": "sgp", "topology": "star"}


def segments(problem: Problem, changes: Sequence[Any], steps: int = 6, **options: Any) -> list[list[Seen]]:
    """For each rank what it did in each segment; ``changes`` are called with the optimizer, before each."""
    together = threading.Barrier(len(problem.start))

    def train(rank: int) -> list[Seen]:
        trainer, parts = GossipTrainer(problem, rank, **options), list[Seen]()
        for change in changes:
            change(trainer.opt)
            if parts:
                parts[-1].drained = trainer.weights()
            parts.append(trainer.watch())
            together.wait(30)
            trainer.train(steps)
        trainer.opt.drain()
        parts[-1].drained, parts[-1].stats = trainer.weights(), trainer.opt.stats()
        return parts

    return Cluster(len(problem.start)).run(train)


def check_segments(problem: Problem, parts: Sequence[Sequence[Seen]], plans: Sequence[Any], steps: int = 6) -> None:
    """Each segment begins at the average that the one before ended with; ``plans`` are algorithms and matrices."""
    for (algorithm, matrices), seen in zip(plans, zip(*parts, strict=True), strict=True):
        if algorithm == "allreduce":
            outcome = reference.allreduce(problem, steps)
        elif algorithm == "adpsgd":
            outcome = reference.adpsgd(problem, [own.log[: own.log.index(("drained",))] for own in seen])
        else:
            takes = [own.taken() for own in seen]
            pushes = {"algorithm": "dpsgd"} if algorithm == "dpsgd" else {"overlap": int(algorithm == "osgp")}
            outcome = reference.gossip(problem, matrices, steps, takes, max_staleness=1, **pushes)
        for rank, own in enumerate(seen):
            np.testing.assert_allclose(own.path, outcome.path[rank], rtol=0, atol=1e-5)
            np.testing.assert_allclose(own.drained, outcome.drained(), rtol=0, atol=1e-5)
            assert own.drained.tobytes() == seen[0].drained.tobytes()
        problem = problem.after(outcome)


def test_one_algorithm_after_the_other():
    """From the average of all ranks, with momentum of their own."""
    chain: list[dict[str, Any]] = [
        STAR, {"topology": "ring"}, {"algorithm": "adpsgd"}, {"algorithm": "allreduce"},
        {"algorithm": "dpsgd", "topology": "star", "mixing": "metropolis"},
        {"algorithm": "osgp", "max_staleness": 1}, {"topology": "exponential", "peers": 2, "mixing": "uniform"},
        {"algorithm": "sgp", "mixing": np.full((4, 4), 0.25)},
    ]  # fmt: skip
    problem = least_squares(4, NESTEROV)
    parts = segments(problem, [lambda opt, one=one: opt.switch(**one) for one in chain], topology="complete")
    plans = [
        ("sgp", graph("star", 4)), ("sgp", graph("ring", 4)), ("adpsgd", None), ("allreduce", None),
        ("dpsgd", graph("star", 4, "metropolis")), ("osgp", graph("star", 4, "metropolis")),
        ("osgp", mixing.matrices(topology.exponential(4, 2), "uniform")), ("sgp", graph("complete", 4)),
    ]  # fmt: skip
    check_segments(problem, parts, plans)
    stats = [own[-1].stats for own in parts]
    assert {one.steps for one in stats} == {6 * len(chain)}
    settled = sum(one.messages_taken + one.messages_left for one in stats)
    assert sum(one.messages_sent for one in stats) == settled > 4 * 6
    assert all(one.averagings > 6 and len(one.waited_for) == 4 for one in stats)


def test_a_schedule_and_peers_by_epoch():
    schedule, peers = {0: "allreduce", 2: "sgp", 4: "dpsgd"}, {0: 1, 3: 2, 4: 1}
    problem, counts = least_squares(5, MOMENTUM), list[int]()

    def enter(epoch: int) -> Any:
        def change(opt: Any) -> None:
            worker = opt._async.worker
            opt.set_epoch(epoch)
            assert (opt._async.worker is worker) == (epoch < 2)  # nothing changes in epoch 1, nor is said
            counts.append(opt.stats().steps)

        return change

    parts = segments(problem, [enter(epoch) for epoch in range(5)], schedule=schedule, peers=peers)
    plans = [
        ("allreduce", None), ("allreduce", None), ("sgp", graph("exponential", 5)),
        ("sgp", mixing.matrices(topology.exponential(5, 2), "uniform")), ("dpsgd", graph("bipartite-exponential", 5)),
    ]  # fmt: skip
    for own in parts:  # (the worker of epoch 0 is that of epoch 1, where it has all ranks' average)
        own[0].path, own[0].drained = own[0].path[:6], own[0].path[5]
    check_segments(problem, parts, plans)
    assert sorted(counts) == [6 * epoch for epoch in range(5) for _ in range(5)]


def test_each_algorithm_of_a_schedule_takes_what_is_its_own():
    options = {"mixing": "metropolis", "topology": "ring", "average_every": 10, "max_staleness": 3, "hierarchical": 2}
    schedule = {0: "allreduce", 1: "dpsgd", 2: "adpsgd", 3: "osgp"}

    def train(rank: int) -> list[Any]:
        opt, found = GossipTrainer(least_squares(4, MOMENTUM), rank, schedule=schedule, **options).opt, []
        for epoch in range(4):
            opt.set_epoch(epoch)
            config = opt._async.plan.config
            found.append((config.algorithm, config.average_every, config.max_staleness, config.local_size))
        return found

    del options["average_every"]  # (which hierarchical does not go with)
    expected = [("allreduce", 1, 0, 1), ("dpsgd", 0, 0, 2), ("adpsgd", 0, 0, 1), ("osgp", 0, 3, 2)]
    assert Cluster(4).run(train) == [expected] * 4
    del options["hierarchical"]
    options["average_every"] = 10
    expected = [("allreduce", 1, 0, 1), ("dpsgd", 10, 0, 1), ("adpsgd", 0, 0, 1), ("osgp", 10, 3, 1)]
    assert Cluster(4).run(train) == [expected] * 4


def test_a_resumed_job_begins_in_the_middle_of_its_schedule():
    def train(rank: int) -> list[int]:
        opt = GossipTrainer(least_squares(4, MOMENTUM), rank, schedule={0: "allreduce", 3: "sgp"}, peers={3: 3}).opt
        opt.set_epoch(7)  # before the first step: nobody else hears of it
        plan = opt._async.plan
        return [plan.max_messages, len(plan.matrices)]

    assert Cluster(4).run(train) == [[3, 1]] * 4


@pytest.mark.parametrize("epochs", [False, True])
def test_a_rank_that_had_no_batch_goes_on_with_the_others(epochs):
    def change(opt: Any, epoch: int) -> None:
        if epochs:
            opt.set_epoch(epoch)
        elif epoch:
            opt.switch(topology="ring")

    def train(rank: int) -> bytes:
        trainer = GossipTrainer(least_squares(3, MOMENTUM), rank, schedule={1: "osgp"})
        change(trainer.opt, 0)
        trainer.train(0 if rank == 1 else 3)
        change(trainer.opt, 1)
        trainer.train(2)
        trainer.opt.drain()
        return trainer.weights().tobytes()

    assert len(set(Cluster(3).run(train))) == 1


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"algo": "sgp"}, r"does not know algo: take algorithm, topology, peers, mixing"),
        ({"compression": "fp16", "lr": 1}, r"does not know compression, lr"),
        ({"algorithm": "local"}, r"'local' is not known: take one of 'sgp'"),
        ({"topology": "torus"}, r"'torus' is not known: take one of exponential"),
        ({"topology": topology.ring(4)}, r"one of 4 ranks, and there are 3"),
        ({"algorithm": "dpsgd", "topology": "ring-right"}, r"gets no answer; dpsgd needs a symmetric graph"),
        ({"peers": 3}, r"peers=3 at 3 ranks"),
        ({"max_staleness": 1}, r"never late; take 'osgp'"),
        ({"average_every": -1}, r"take 0 or more"),
        ({"algorithm": "adpsgd", "max_local_steps": 0}, r"take 1 or more"),
    ],
)
def test_settings_that_cannot_be_change_nothing(changes, hint):
    def train(rank: int) -> tuple[Any, int]:
        trainer = GossipTrainer(least_squares(3, MOMENTUM), rank)
        for steps in (0, 2):  # before and after the first step
            trainer.train(steps)
            held = trainer.opt._async.worker, trainer.opt._async.plan, trainer.weights().tobytes()
            with pytest.raises(ValueError, match=hint):
                trainer.opt.switch(**changes)
            assert held == (trainer.opt._async.worker, trainer.opt._async.plan, trainer.weights().tobytes())
        trainer.train(2)
        trainer.opt.drain()
        return trainer.weights().tobytes(), trainer.opt.stats().messages_sent

    ends = Cluster(3).run(train)
    assert len({weights for weights, _ in ends}) == 1
    assert [sent for _, sent in ends] == [4, 4, 4]


@pytest.mark.parametrize("epoch", [-1, 1.0, True, "1"])
def test_no_epoch(epoch):
    def train(rank: int) -> None:
        opt = GossipTrainer(least_squares(1, MOMENTUM), rank, schedule={1: "allreduce"}).opt
        with pytest.raises(ValueError, match="is not the number of an epoch"):
            opt.set_epoch(epoch)

    Cluster(1).run(train)
