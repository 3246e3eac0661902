"""Gossip of every binding that continues with other settings in the middle of training, by switch() and by epoch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvd_async import topology
from hvd_async.testing import Cluster
from tests.conformance import gossip_ranks as ranks
from tests.conformance import gossip_reference as reference
from tests.conformance import outer_reference
from tests.conformance.drive import scripted_engine
from tests.conformance.gossip_ranks import STAR, Seen
from tests.conformance.gossip_reference import Problem
from tests.conformance.weight_ranks import MOMENTUM, NESTEROV, TorchRank, also_graph, both

STEPS = 6
COMPLETE = np.full((4, 4), 0.25)


def segments(binding: Any, problem: Problem, changes: Sequence[Any], **options: Any) -> list[list[Seen]]:
    """For each segment what each rank did in it; ``changes`` are called with the optimizer, before each."""
    together = threading.Barrier(len(problem.start))

    def work(rank: int) -> list[Seen]:
        one, parts = binding(problem, rank, **options), list[Seen]()
        for change in changes:
            change(one.opt)
            if parts:
                parts[-1].drained = one.weights()
            parts.append(Seen(one))
            together.wait(30)
            one.train(STEPS)
            parts[-1].end_path()
            together.wait(30)  # (who is done is sent less)
        parts[-1].drain()
        return parts

    return [list(part) for part in zip(*Cluster(len(problem.start)).run(work), strict=True)]


def check_segments(problem: Problem, parts: Sequence[Sequence[Seen]], settings: Sequence[dict[str, Any]]) -> None:
    """Each segment begins at the average that the one before ended with."""
    for options, seen in zip(settings, parts, strict=True):
        outcome = ranks.expected(problem, seen, options)
        ranks.check(outcome, seen)
        problem = problem.after(outcome)


@also_graph
def test_one_algorithm_after_the_other(binding):
    """From the average of all ranks, with momentum of their own; a step that is a graph is traced once."""
    chain: list[dict[str, Any]] = [
        STAR, {"topology": "ring"}, {"algorithm": "adpsgd"}, {"algorithm": "allreduce"},
        {"algorithm": "dpsgd", "topology": "star", "mixing": "metropolis"},
        {"algorithm": "osgp", "max_staleness": 1}, {"topology": "exponential", "peers": 2, "mixing": "uniform"},
        {"algorithm": "sgp", "mixing": COMPLETE},
    ]  # fmt: skip
    late = {"algorithm": "osgp", "max_staleness": 1}
    settings = [
        STAR, {"topology": "ring"}, {"algorithm": "adpsgd"}, {"algorithm": "allreduce"},
        chain[4], late | {"topology": "star", "mixing": "metropolis"}, late | {"topology": "exponential", "peers": 2},
        {"mixing": [COMPLETE]},
    ]  # fmt: skip
    problem = binding.least_squares(4, NESTEROV)
    changes = [lambda opt, one=one: opt.switch(**one) for one in chain]
    parts = segments(binding, problem, changes, topology="complete")
    check_segments(problem, parts, settings)
    stats = [own.stats for own in parts[-1]]
    assert {one.steps for one in stats} == {STEPS * len(chain)}
    settled = sum(one.messages_taken + one.messages_left for one in stats)
    assert sum(one.messages_sent for one in stats) == settled > 4 * STEPS
    assert all(one.averagings > STEPS and len(one.waited_for) == 4 for one in stats)


@ranks.by_turns("compression", "none", "int8")
def test_hosts_switch_with_their_compression_and_averages(binding, compression):
    """8-bit differences begin again at the average of all ranks, so averages stay close to those of exact messages."""
    hosts = {"topology": "ring", "hierarchical": 2}
    chain: list[dict[str, Any]] = [{"topology": "ring"}, {"algorithm": "dpsgd"}, {"algorithm": "adpsgd"}]
    chain += [{"algorithm": "sgp", "average_every": 0, "gossip_every": 2}]
    settings = [hosts | {"average_every": 4}, hosts | {"algorithm": "dpsgd", "average_every": 4}]
    settings += [hosts | {"algorithm": "adpsgd"}, hosts | {"gossip_every": 2}]
    if compression == "int8":  # (which adpsgd has not)
        del chain[2], settings[2]
    problem, common = binding.least_squares(4), {"hierarchical": 2, "average_every": 4, "compression": compression}
    parts = segments(binding, problem, [lambda opt, one=one: opt.switch(**one) for one in chain], **common)
    if compression == "none":
        check_segments(problem, parts, settings)
    for options, seen in zip(settings, parts, strict=True):
        outcome = ranks.expected(problem, seen, options)
        drained = [own.drained for own in seen]
        np.testing.assert_allclose(drained, np.tile(outcome.drained(), (4, 1)), rtol=0, atol=2e-3)
        problem = problem.after(outcome)


@both
def test_switches_between_outer_optimizers_and_others(binding):
    """Momentum continues where the outer optimizer is the same; another begins with none."""
    problem = binding.least_squares(3)
    chain: list[dict[str, Any]] = [
        {"algorithm": "slowmo", "average_every": 4},
        {"average_every": 3, "fragments": 2},
        {"algorithm": "diloco", "fragments": 1, "max_staleness": 0},
        {"algorithm": "sgp", "average_every": 0, "max_staleness": None},
        {"algorithm": "local", "average_every": 2},
        {"algorithm": "noloco", "average_every": 0, "outer_momentum": 0.2},
    ]

    def work(rank: int) -> tuple[list[Any], list[bytes]]:
        one, found, ends = binding(problem, rank), list[Any](), list[bytes]()
        for changes in chain:
            one.opt.switch(**changes)
            ends.append(one.weights().tobytes())
            found.append(one.train(7).opt.settings)
        return found, [*ends, one.drained()]

    settings, ends = ranks.alike(work)
    assert [one["algorithm"] for one in settings] == ["slowmo", "slowmo", "diloco", "sgp", "local", "noloco"]
    assert (settings[1]["fragments"], settings[1]["outer_momentum"], settings[1]["max_staleness"]) == (2, 0.3, 1)
    names = ("topology", "gossip_every", "outer_lr", "outer_momentum")
    assert [settings[-1][name] for name in names] == ["random-pairs", 8, 0.7, 0.2]
    slow = outer_reference.Outer("slowmo", 4, 2, 1, 1.0, 0.3, rate=lambda step: MOMENTUM.lr)
    for place, outer in enumerate(
        [slow, slow, outer_reference.Outer("diloco", 3, 0, 1, 0.7, 0.5), None, outer_reference.Outer("local", 2, 1)]
    ):
        if place == 1:
            slow.every, slow.late, slow.fragments = 3, 1, 2
        if outer is None:
            outcome = reference.sgp(problem, ranks.graph("exponential", 3), 7)
        else:
            outcome = outer_reference.train(problem, (7, 7, 7), outer)
        np.testing.assert_allclose(np.frombuffer(ends[place + 1]), outcome.drained(), rtol=0, atol=1e-5)
        problem = problem.after(outcome)


# -- by epoch -------------------------------------------------------------------------------------------------------


@both
def test_a_schedule_and_peers_by_epoch(binding):
    problem, counts = binding.least_squares(5), list[int]()

    def enter(epoch: int) -> Any:
        def change(opt: Any) -> None:
            worker = opt._async.worker
            opt.set_epoch(epoch)
            assert (opt._async.worker is worker) == (epoch < 2)  # nothing changes in epoch 1, nor is said
            counts.append(opt.stats().steps)

        return change

    schedule, peers = {0: "allreduce", 2: "sgp", 4: "dpsgd"}, {0: 1, 3: 2, 4: 1}
    parts = segments(binding, problem, list(map(enter, range(5))), schedule=schedule, peers=peers)
    for own in parts[0]:  # (the worker of epoch 0 is that of epoch 1, where it has all ranks' average)
        own.drained = own.path[-1]
    average, sgp = {"algorithm": "allreduce"}, {"topology": "exponential"}
    dpsgd = {"algorithm": "dpsgd", "topology": "bipartite-exponential"}
    check_segments(problem, parts, [average, average, sgp, sgp | {"peers": 2}, dpsgd])
    assert sorted(counts) == [STEPS * epoch for epoch in range(5) for _ in range(5)]


BY_EPOCH: dict[str, dict[str, Any]] = {
    "local": {"algorithm": "local", "average_every": {0: 1, 1: 4}},
    "allreduce": {"schedule": {0: "allreduce", 1: "local"}, "average_every": 4},
}


@pytest.mark.parametrize("first", BY_EPOCH)
@both
def test_post_local_sgd_by_epoch(binding, first):
    """Averages after each step, then after every fourth."""
    problem = binding.least_squares(3)

    def work(rank: int) -> tuple[Any, ...]:
        one, settings = binding(problem, rank, **BY_EPOCH[first]), []
        for epoch in range(3):
            one.opt.set_epoch(epoch)
            settings.append((one.opt.settings["algorithm"], one.opt.settings["average_every"]))
            one.train(6)
        return settings, one.drained()

    settings, weights = ranks.alike(work)
    assert settings == [(first, 1), ("local", 4), ("local", 4)]
    outcome = reference.allreduce(problem, 6)
    expected = outer_reference.train(
        problem.after(outcome), (12, 12, 12), outer_reference.Outer("local", 4, 2)
    ).drained()
    np.testing.assert_allclose(np.frombuffer(weights), expected, rtol=0, atol=1e-5)


@also_graph
def test_only_some_epochs_may_have_quasi_global_momentum(binding):
    problem = binding.least_squares(2)

    def work(rank: int) -> tuple[Any, ...]:
        one = binding(problem, rank, schedule={0: "allreduce", 1: "dpsgd", 2: "osgp"}, quasi_global=True)
        found = []
        for epoch in range(3):
            one.opt.set_epoch(epoch)
            one.train(3)
            vector = one.opt._async._correction.vector
            found.append((one.opt.settings.get("quasi_global"), vector is not None and bool(vector.any())))
        one.opt.drain()
        return tuple(found)

    assert ranks.alike(work, 2) == ((None, False), (True, True), (None, False))


@pytest.mark.parametrize("epochs", [False, True])
@both
def test_a_rank_that_had_no_batch_continues_with_the_others(binding, epochs):
    def change(opt: Any, epoch: int) -> None:
        if epochs:
            opt.set_epoch(epoch)
        elif epoch:
            opt.switch(topology="ring")

    def work(rank: int) -> bytes:
        one = binding(binding.least_squares(3), rank, schedule={1: "osgp"})
        change(one.opt, 0)
        one.train(0 if rank == 1 else 3)
        change(one.opt, 1)
        return one.train(2).drained()

    ranks.alike(work)


REFUSED = [
    ({"algo": "sgp"}, r"does not know algo: pass algorithm, topology, peers, mixing"),
    ({"compression": "fp16", "lr": 1}, r"does not know compression, lr"),
    ({"topology": topology.ring(4)}, r"one of 4 ranks, and there are 3"),
    ({"algorithm": "dpsgd", "topology": "star"}, "use mixing='metropolis'"),
]


@both
def test_settings_that_cannot_be_change_nothing(binding):
    def work(rank: int) -> tuple[Any, int]:
        one = binding(binding.least_squares(3), rank)
        for steps in (0, 2):  # before and after the first step
            one.train(steps)
            held = one.opt.settings, one.weights().tobytes()
            for changes, hint in REFUSED:
                with pytest.raises(ValueError, match=hint):
                    one.opt.switch(**changes)
            for epoch in (-1, 1.0, True, "1"):
                with pytest.raises(ValueError, match="epoch must be an integer of at least 0, got"):
                    one.opt.set_epoch(epoch)
            assert held == (one.opt.settings, one.weights().tobytes())
        return one.train(2).drained(), one.opt.stats().messages_sent

    assert ranks.alike(work)[1] == 4


# -- what the driver makes of settings, whatever the framework ----------------------------------------------------


@pytest.mark.parametrize("hosts", [1, 2])
def test_each_algorithm_of_a_schedule_takes_what_is_its_own(hosts):
    schedule = {0: "allreduce", 1: "dpsgd", 2: "adpsgd", 3: "osgp"}
    options = {"mixing": "metropolis", "max_staleness": 3, "hierarchical": hosts, "average_every": 10}

    def work(rank: int) -> list[Any]:
        opt = TorchRank(TorchRank.least_squares(4), rank, topology="ring", schedule=schedule, **options).opt
        found = []
        for epoch in range(4):
            opt.set_epoch(epoch)
            config = opt._async.plan.config
            found.append((config.algorithm, config.average_every, config.max_staleness, config.local_size))
        return found

    mixing = [("dpsgd", 10, 0, hosts), ("adpsgd", 0, 0, hosts), ("osgp", 10, 3, hosts)]
    assert ranks.alike(work, 4) == [("allreduce", 1, 0, 1), *mixing]


def test_compression_and_peers_are_of_the_epochs_whose_algorithm_has_them():
    """Also of a resumed job that begins in the middle of its schedule."""
    with scripted_engine(4):
        schedule = {"schedule": {0: "allreduce", 5: "sgp"}, "compression": "int8", "peers": {5: 3}}
        opt = TorchRank(TorchRank.least_squares(4), 0, **schedule).opt
        assert opt._async.plan.config.compression == "none"
        opt.set_epoch(7)  # before the first step: no other rank hears of it
        assert opt._async.plan.config.compression == "int8"
        assert (opt._async.plan.max_messages, len(opt._async.plan.matrices)) == (3, 1)
