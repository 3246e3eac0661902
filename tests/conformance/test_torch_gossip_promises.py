"""torch: what gossip promises on real steps: mass, agreement, consensus, ends, and no NaN that spreads."""

from __future__ import annotations

import itertools
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async import mixing, topology
from hvd_async.algorithms.gossip.hierarchical import GOSSIP, STAGES
from hvd_async.algorithms.gossip.messages import ExchangeDone
from hvd_async.algorithms.gossip.worker import PushSumWorker
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster, InjectedError
from tests.conformance.cases import CASES, Case
from tests.conformance.gossip_reference import least_squares
from tests.conformance.torch_gossip_ranks import GossipTrainer, Seen, holding, run

SGD, NESTEROV = CASES[0], CASES[5]
STAR = {"algorithm": "sgp", "topology": "star"}
EXPONENTIAL = {"algorithm": "sgp", "topology": "exponential"}
BIPARTITE = {"algorithm": "dpsgd", "topology": "bipartite-exponential"}
SMALL_STAR = {"algorithm": "dpsgd", "topology": "star", "mixing": "metropolis"}
PAIRS = {"algorithm": "adpsgd", "topology": "ring"}
LATE = {"algorithm": "osgp", "topology": "star", "max_staleness": 2}


def by_options(*options: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("options", options, ids=lambda one: "-".join(map(str, one.values())))


# -- mass -----------------------------------------------------------------------------------------------------


@by_options(STAR, EXPONENTIAL, BIPARTITE, SMALL_STAR, STAR | {"average_every": 3}, {"algorithm": "allreduce"})
@pytest.mark.parametrize("size", [3, 5])
def test_mixing_moves_neither_the_sum_of_weights_nor_that_of_push_sum_weights(options, size):
    problem = least_squares(size, NESTEROV)
    seen = run(problem, 20, **options)
    total = problem.start.sum(axis=0)
    for step in range(20):
        total = total + sum(own.moved[step] for own in seen)
        weighted = sum(own.path[step] * own.weights[step] for own in seen)
        np.testing.assert_allclose(weighted, total, rtol=0, atol=2e-5)
        assert sum(own.weights[step] for own in seen) == pytest.approx(size, abs=1e-9)
    check_mean(problem.start, seen)


def check_mean(start: Any, seen: list[Seen]) -> None:
    """What the ranks end with is what they began with, and all that local updates did to it."""
    moved = sum((sum(own.moved) for own in seen if own.moved), np.zeros(start.shape[1]))
    np.testing.assert_allclose(seen[0].drained, start.mean(axis=0) + moved / len(seen), rtol=0, atol=2e-5)
    for own in seen:
        assert own.drained.tobytes() == seen[0].drained.tobytes()
    stats = [own.stats for own in seen]
    assert sum(s.messages_sent for s in stats) == sum(s.messages_taken + s.messages_left for s in stats)


@by_options(
    STAR, EXPONENTIAL, BIPARTITE, SMALL_STAR, LATE, PAIRS, LATE | {"average_every": 2}, {"algorithm": "allreduce"},
    EXPONENTIAL | {"hierarchical": 2}, LATE | {"hierarchical": 2}, PAIRS | {"max_local_steps": 1},
    LATE | {"compression": "bf16"}, LATE | {"compression": "int8"}, SMALL_STAR | {"compression": "fp16"},
    BIPARTITE | {"compression": "int8"}, PAIRS | {"compression": "bf16"},
)  # fmt: skip
def test_ranks_that_end_early_hold_nobody_up_and_lose_nothing(options):
    problem = least_squares(4, NESTEROV)
    seen = run(problem, [12, 3, 0, 7], Cluster(4, jitter=0.001), **options)
    assert [own.stats.steps for own in seen] == [12, 3, 0, 7]
    check_mean(problem.start, seen)


@by_options(
    STAR | {"compression": "int8"}, SMALL_STAR | {"compression": "int8"}, LATE, LATE | {"hierarchical": 3}, PAIRS
)
def test_a_cut_after_uneven_steps_loses_nothing(options):
    """Which edges were left out is known at one end only; copies of 8-bit messages must be the same at both."""
    problem = least_squares(3, NESTEROV)

    def train(rank: int) -> Seen:
        trainer = GossipTrainer(problem, rank, **options)
        seen = trainer.watch()
        for steps in ((6, 1, 3), (4, 4, 4), (0, 5, 2)):
            trainer.train(steps[rank])
            trainer.opt.cut()
        trainer.opt.drain()
        seen.drained, seen.stats = trainer.weights(), trainer.opt.stats()
        return seen

    check_mean(problem.start, Cluster(3, jitter=0.001).run(train))


@by_options(STAR, SMALL_STAR, PAIRS)
def test_weights_that_half_precision_cannot_hold_stay_with_their_rank(options):
    problem = least_squares(3, Case("still", "sgd", 0.0))
    problem.start[:, 1] = 1e5

    def train(rank: int) -> Any:
        trainer = GossipTrainer(problem, rank, compression="fp16", **options)
        for _ in range(5):
            for parameter in trainer.parameters:
                parameter.grad = torch.zeros_like(parameter)
            trainer.opt.step()
        trainer.opt.cut()
        return trainer.weights() * trainer.opt.stats().push_sum_weight

    x = np.array(Cluster(3).run(train))
    np.testing.assert_allclose(x.mean(axis=0), problem.start[0], rtol=1e-6)


def test_what_a_rank_that_is_done_would_get_stays_where_it_is():
    first, other = run(least_squares(2, SGD), [30, 1], topology="ring")
    assert first.weights[-1] >= 0.5  # (or less and less would be left)
    assert first.stats.messages_sent <= 2
    assert other.stats.steps == 1


@by_options(STAR, LATE, LATE | {"topology": "exponential"}, EXPONENTIAL, BIPARTITE)
@pytest.mark.parametrize("local", [1, 2])
def test_equal_weights_stay_equal_whatever_comes_late_or_stays_out(options, local):
    """A rank whose x and w did not belong together would show it: without gradients nothing may move."""
    problem = least_squares(8, Case("still", "sgd", 0.0))
    seen = run(problem, [9, 14, 4, 2, 7, 7, 12, 1], Cluster(8, jitter=0.002, seed=1), hierarchical=local, **options)
    for own in seen:
        np.testing.assert_allclose(own.path, np.tile(problem.start[0], (len(own.path), 1)), rtol=2e-6, atol=2e-6)


# -- agreement ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "graph"),
    [("sgp", "ring"), ("sgp", "exponential"), ("sgp", "linear"), ("sgp", "static-exponential"),
     ("dpsgd", "ring"), ("dpsgd", "bipartite-exponential"), ("dpsgd", "star"), ("dpsgd", "mesh")],
)  # fmt: skip
@pytest.mark.parametrize("size", [4, 5])
def test_disagreement_shrinks_as_the_second_singular_value_says(algorithm, graph, size):
    scheme = "metropolis" if algorithm == "dpsgd" else "uniform"
    weights = mixing.matrices(topology.named(graph, size), scheme)
    period, shrinks = len(weights), mixing.contraction(weights)
    assert shrinks < 0.95

    def train(rank: int) -> list[Any]:
        trainer = GossipTrainer(least_squares(size, SGD), rank, algorithm=algorithm, topology=graph, mixing=scheme)
        trainer.train(period)
        models = [trainer.weights()]
        trainer.opt.param_groups[0]["lr"] = 0.0
        for _ in range(4):
            models.append(trainer.train(period).weights())
        trainer.opt.drain()
        return models

    models = np.array(Cluster(size).run(train))
    apart = [float(np.linalg.norm(z - z.mean(axis=0))) for z in models.swapaxes(0, 1)]
    assert apart[0] > 0.01
    for before, after in itertools.pairwise(apart):
        assert after <= shrinks * before + 1e-6
    means = models.mean(axis=0)
    np.testing.assert_allclose(means, np.tile(means[0], (5, 1)), rtol=0, atol=2e-6)


def test_push_sum_agrees_on_the_mean_of_a_graph_that_is_not_regular():
    def train(rank: int) -> tuple[Any, ...]:
        trainer = GossipTrainer(least_squares(5, SGD), rank, **STAR)
        trainer.train(5)
        trainer.opt.param_groups[0]["lr"] = 0.0
        apart, weight = trainer.weights(), trainer.opt.stats().push_sum_weight
        agreed = trainer.train(60).weights()
        trainer.opt.drain()
        return apart, weight, agreed

    apart, weights, agreed = (np.array(part) for part in zip(*Cluster(5).run(train), strict=True))
    mean = (apart * weights[:, None]).sum(axis=0) / 5
    assert np.abs(apart.mean(axis=0) - mean).max() > 1e-3  # (an average without them would not do)
    np.testing.assert_allclose(agreed, np.tile(mean, (5, 1)), rtol=0, atol=1e-5)


# -- consensus ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "mean", "count"), [("average", 2.0, 5), ("root", 1.0, 5), ("local", None, None)])
@by_options(STAR, PAIRS, LATE, EXPONENTIAL | {"compression": "int8"}, STAR | {"hierarchical": 3})
def test_consensus_shows_the_average_and_puts_everything_back(options, policy, mean, count):
    def train(rank: int) -> tuple[Any, ...]:
        norm = torch.nn.BatchNorm1d(2)
        norm.running_mean.fill_(1.0 + rank)
        norm.num_batches_tracked.fill_(5 + rank)
        trainer = GossipTrainer(
            least_squares(3, NESTEROV), rank, named_buffers=norm.named_buffers(), buffers=policy, **options
        )
        seen = trainer.watch()
        trainer.train(3 + rank)
        trainer.opt.cut()
        own, weight = trainer.weights(), trainer.opt.stats().push_sum_weight
        held = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        for error in (None, KeyError):
            try:
                with trainer.opt.consensus():
                    shown = trainer.weights()
                    assert norm.running_mean.tolist() == [1.0 + rank if mean is None else mean] * 2
                    assert norm.num_batches_tracked.item() == (5 + rank if count is None else count)
                    if error is not None:
                        raise error
            except KeyError:
                pass
            assert trainer.weights().tobytes() == own.tobytes()
            assert all(torch.equal(buffer, held[name]) for name, buffer in norm.named_buffers())
        trainer.train(2)  # training goes on
        trainer.opt.drain()
        return own * weight, shown, norm.running_mean[0].item(), trainer.weights(), sum(seen.moved)

    x, shown, after, drained, moved = (
        np.array(part) for part in zip(*Cluster(3, jitter=0.001).run(train), strict=True)
    )
    assert np.abs(x - x[0]).max() > (-1.0 if "hierarchical" in options else 1e-3)
    np.testing.assert_allclose(shown[0], x.mean(axis=0), rtol=0, atol=1e-6)
    assert len({one.tobytes() for one in shown}) == len({one.tobytes() for one in drained}) == 1
    np.testing.assert_allclose(drained[0], least_squares(3, SGD).start[0] + moved.mean(axis=0), rtol=0, atol=1e-5)
    assert after.tolist() == ([1.0, 2.0, 3.0] if mean is None else [mean] * 3)


@by_options(STAR, BIPARTITE, PAIRS)
def test_consensus_distance_is_numpys(options):
    def train(rank: int) -> tuple[Any, float, float]:
        trainer = GossipTrainer(least_squares(4, SGD), rank, **options)
        assert trainer.opt.consensus_distance() == 0.0
        trainer.train(5)
        distance = trainer.opt.consensus_distance()
        own = trainer.weights()
        trainer.opt.drain()
        return own, distance, trainer.opt.consensus_distance()

    models, distances, ends = zip(*Cluster(4).run(train), strict=True)
    z = np.array(models)
    expected = np.sqrt(np.mean(np.sum((z - z.mean(axis=0)) ** 2, axis=1)))
    assert expected > 0.01
    np.testing.assert_allclose(distances, expected, rtol=1e-6)
    assert ends == (0.0,) * 4


def test_what_another_host_sent_late_survives_a_cut():
    """Host 0's message of step 2 is on its way when host 1 is told that all are done; after the cut host 0 is a step
    ahead, and its next message of that number comes before host 1 takes that step."""
    step_2, told, released = 2 * STAGES + GOSSIP, set[int](), set[int]()
    behind, ahead = threading.Barrier(4), threading.Barrier(4)

    def lands(worker: Any, keys: list[int]) -> bool:
        if step_2 in keys and worker._place >= 2 and worker._place not in released:
            if worker._place not in told:  # (as if its first message had gone to another rank, which has it)
                told.add(worker._place)
                worker.engine.send(ExchangeDone(worker._opened_number(), worker._mail.completed + 1))
            if worker._inbox.drained is None:
                return False
            released.add(worker._place)
        return True

    def train(rank: int) -> bytes:
        trainer = GossipTrainer(least_squares(4, SGD), rank, hierarchical=2, algorithm="osgp", topology="ring")
        worker, come = trainer.opt._async.worker_now(), list[int]()
        deliver = worker._mail._deliver

        def counted(sender: int, key: int, weight: float, data: Any) -> None:
            deliver(sender, key, weight, data)
            come.extend([key] * (key % STAGES == GOSSIP))

        worker._mail._deliver = counted
        trainer.train(1 if rank < 2 else 2)
        behind.wait(30)  # (what is held up must be all that an exchange brings)
        trainer.train(1 if rank < 2 else 0).opt.cut()
        trainer.train(2 if rank < 2 else 1)
        ahead.wait(30)
        if rank >= 2:
            worker.engine.wait(lambda: len(come) == 4)
            trainer.train(1)
        trainer.opt.drain()
        return trainer.weights().tobytes()

    assert len(set(holding(4, lands, at_ends=True).run(train))) == 1
    assert released == {2, 3}


# -- waiting, and bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_adpsgd_takes_so_many_steps_without_an_averaging_and_then_waits(limit):
    """Averagings that the engines have come to the ranks only when these can go no further."""
    cluster = holding(2, lambda worker, keys: worker._local >= limit and keys == [worker._mail.completed + 1])
    seen = run(least_squares(2, SGD), 3 * limit, cluster, in_step=True, max_local_steps=limit, **PAIRS)
    for own in seen:
        kinds = "".join(entry[0][0] for entry in own.log if entry[0] in ("step", "landed"))
        assert re.sub("l+", "l", kinds).startswith(("s" * limit + "l") * 2 + "s" * limit)
        assert own.stats.averagings >= 2


def test_a_rank_alone_never_waits():
    for options in (STAR, PAIRS, LATE, SMALL_STAR):
        (seen,) = run(least_squares(1, SGD), 10, **options)
        assert seen.stats.messages_sent == seen.stats.averagings == 0


@pytest.mark.parametrize(
    ("compression", "nbytes"),
    [("none", 12000), ("fp16", 6000), (hvd.Compression.bf16, 6000), (hvd.Compression.int8, 2 * 2052)],
)
def test_bytes_sent(compression, nbytes):
    """Of 3000 weights, with 16 of a header; int8 with a scale for each 2048, filled up."""
    problem = least_squares(4, SGD, elements=3000)
    for own in run(problem, 3, topology="exponential", compression=compression):
        assert own.stats.messages_sent == 3
        assert own.stats.bytes_sent == 3 * (nbytes + 16)


# -- NaN ------------------------------------------------------------------------------------------------------


@by_options(STAR, LATE, SMALL_STAR, PAIRS, EXPONENTIAL | {"hierarchical": 3}, {"algorithm": "allreduce"})
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_step_that_makes_nan_is_refused_there_and_others_hear_of_it(options, value):
    failed = threading.Event()

    def train(rank: int) -> None:
        names = ["first", "second"]
        trainer = GossipTrainer(least_squares(3, NESTEROV), rank, **options)
        trainer.opt._async.replica.named = {id(p): name for p, name in zip(trainer.parameters, names, strict=True)}
        trainer.train(2)
        if rank != 1:
            assert failed.wait(30)
            try:
                trainer.train(9)
                trainer.opt.drain()
            finally:
                assert np.isfinite(trainer.weights()).all()
            return
        trainer.gradient()
        trainer.parameters[1].grad[1, 0] = value
        try:
            trainer.opt.step()
        finally:
            assert trainer.opt.stats().steps == 2
            worker = trainer.opt._async.worker
            assert not isinstance(worker, PushSumWorker) or worker._giving.offered <= 3
            for call in (trainer.opt.step, trainer.opt.drain, trainer.opt.cut, trainer.opt.consensus_distance):
                with pytest.raises(
                    ReplicaStateError, match=r"broken off: FloatingPointError.*restart from a checkpoint"
                ):
                    call()
            failed.set()

    one, bad, other = Cluster(3).outcomes(train)
    assert isinstance(bad, FloatingPointError)
    assert "NaN or infinite (second)" in str(bad)
    for outcome in (one, other):
        assert isinstance(outcome, InjectedError)
        assert "rank 1 on host host1 failed: FloatingPointError" in str(outcome)


def test_large_finite_weights_are_no_reason_to_refuse():
    problem = least_squares(2, SGD)
    problem.start[:] = 2e38  # their sum is infinite in float32

    def train(rank: int) -> Any:
        trainer = GossipTrainer(problem, rank)
        for parameter in trainer.parameters:
            parameter.grad = torch.zeros_like(parameter)
        trainer.opt.step()
        return trainer.weights()

    for weights in Cluster(2).run(train):
        np.testing.assert_allclose(weights, 2e38, rtol=1e-6)
