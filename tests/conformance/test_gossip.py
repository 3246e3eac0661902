"""Gossip of every binding equals the float64 reference, on the messages that each rank took in.

That graphs, sizes and late messages are handled as they must be is proved in ``tests/threads``, for any framework.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import torch

import hvd_async.tensorflow.keras as hvd
from hvd_async.algorithms.gossip.message_format import NumpyMessageFormat
from hvd_async.testing import Cluster
from tests.conformance import gossip_ranks as ranks
from tests.conformance import gossip_reference as reference
from tests.conformance import outer_reference
from tests.conformance.cases import CASES
from tests.conformance.gossip_ranks import (
    BASE,
    DILOCO,
    EXACT,
    FEW,
    LATE,
    LOCAL,
    ON,
    PAIRED,
    PAIRS,
    RING,
    SLOWMO,
    STAR,
    by_options,
)
from tests.conformance.gossip_reference import Problem
from tests.conformance.keras_ranks import flat, plain
from tests.conformance.torch_ranks import ProcessSet
from tests.conformance.weight_ranks import MOMENTUM, NESTEROV, SGD, KerasGraphRank, KerasRank, Rank, TorchRank, both
from tests.conftest import LONG_RUN

STEPS = 9
UNEVEN = (9, 3, 0, 7, 5, 9)
"""Steps by rank."""
PUSH_SUM = ("sgp", "osgp", "dpsgd")
"""Algorithms that leave edges to ranks that are done out, which the reference does not know."""
SENT = {"fp16": 2 * 6, "bf16": 2 * 6, "int8": 2048 + 4}
"""Bytes of a message."""


class Job(NamedTuple):
    """Number of ranks, and options of ``GossipOptimizer``."""

    size: int
    options: dict[str, Any]


JOBS = [
    Job(1, {"algorithm": "sgp", "topology": "exponential"}),
    Job(5, {"algorithm": "sgp", "topology": "exponential"}),
    Job(3, LATE),
    Job(4, LATE | {"gossip_every": 3}),
    Job(3, {"algorithm": "dpsgd", "topology": "star", "mixing": "metropolis"}),
    Job(4, RING | {"gossip_every": 2, "average_every": 5}),
    Job(5, BASE),
    Job(6, {"algorithm": "sgp", "topology": "base", "peers": 2}),
    Job(2, {"algorithm": "allreduce"}),
    Job(3, STAR | {"average_every": 3}),
    Job(4, PAIRS),
    Job(5, EXACT),
    Job(4, EXACT | {"topology": "star", "mixing": "metropolis", "gossip_every": 3, "average_every": 5}),
    Job(5, PAIRED),
    Job(3, LOCAL),
    Job(3, SLOWMO),
    Job(3, DILOCO),
    # quasi-global momentum
    Job(4, STAR | ON),
    Job(4, PAIRS | ON),
    Job(4, RING | ON | {"gossip_every": 2, "average_every": 5}),
    # hosts
    Job(4, PAIRS | {"hierarchical": 2}),
    Job(6, PAIRS | {"hierarchical": 3, "max_local_steps": 1}),
    Job(6, STAR | {"hierarchical": 2, "average_every": 3}),
    Job(4, LATE | {"hierarchical": 2}),
    Job(6, BASE | {"hierarchical": 2, "gossip_every": 2, "average_every": 5}),
    Job(4, LOCAL | {"hierarchical": 2}),
    Job(6, DILOCO | {"hierarchical": 3}),
    # compression
    Job(4, STAR | {"compression": "fp16"}),
    Job(4, LATE | {"compression": "bf16"}),
    Job(4, LATE | {"compression": "int8"}),
    Job(4, RING | {"compression": "int8"}),
    Job(4, EXACT | {"compression": "int8"}),
    Job(4, PAIRS | {"compression": "bf16"}),
    Job(4, PAIRS | {"compression": "fp16", "hierarchical": 2}),
    Job(4, STAR | {"compression": "int8", "hierarchical": 2, "average_every": 3}),
    Job(4, LOCAL | {"compression": "int8"}),
    Job(4, LOCAL | {"compression": "int8", "hierarchical": 2}),
    Job(3, SLOWMO | {"compression": "bf16"}),
    Job(3, DILOCO | {"compression": "int8"}),
]


class Cell(NamedTuple):
    """A job in a binding: steps are "even" or "uneven", or even with a rank outside of a process set."""

    job: Job
    how: str
    binding: type[Rank]

    @property
    def id(self) -> str:
        """Name of the test."""
        return f"{self.binding.__name__}-{self.how}-{self.job.size}-{ranks.name(self.job.options)}"


def cells() -> list[Any]:
    """Each job once, in each way and binding by turns, and graphs of every mechanism; in a long run all."""
    ways, bindings = ("even", "uneven", "set"), (TorchRank, KerasRank)
    rows = [(job, ways[place % 3], bindings[place % 2]) for place, job in enumerate(JOBS)]
    if LONG_RUN:
        rows = list(itertools.product(JOBS, ways, bindings))
    graphs = [job for job in JOBS if LONG_RUN or (job.options in FEW and job.size < 5)]
    made = [Cell(*row) for row in rows] + [Cell(job, "even", KerasGraphRank) for job in graphs]
    return [pytest.param(cell, id=cell.id) for cell in made]


def of(problem: Problem, members: list[int]) -> Problem:
    """Return the problem of some of the ranks."""
    return dataclasses.replace(
        problem,
        start=problem.start[members],
        gradient=lambda z, place, step: problem.gradient(z, members[place], step),
    )


@pytest.mark.parametrize("cell", cells())
def test_every_job_equals_the_reference(cell):
    """Uneven steps with edges left out, and compression, keep the mean. Ranks outside of the set train alone."""
    (size, options), how, binding = cell
    algorithm, compression = options["algorithm"], options.get("compression")
    case = SGD if compression else (MOMENTUM, NESTEROV)[size % 2] if "quasi_global" in options else CASES[size]
    total = size + (how == "set")
    groups = [[0, *range(2, total)], [1]] if how == "set" and size > 1 else [list(range(total))]
    if how == "set" and size == 1:
        groups = [[0], [1]]
    given = dict(options)
    if compression and algorithm != "osgp":  # (which has it by name)
        given["compression"] = getattr(binding.hvd.Compression, compression)
    if how == "set":
        given["process_set"] = ProcessSet(*groups[0])
    problem = binding.least_squares(total, case)
    steps = UNEVEN[:total] if how == "uneven" and size > 1 and algorithm != "allreduce" else STEPS
    seen = ranks.run(binding, problem, steps, Cluster(total, jitter=0.001 * (algorithm == "osgp")), **given)
    assert [own.stats.steps for own in seen] == ([STEPS] * total if steps == STEPS else list(steps))
    for members in groups:
        own, inside = [seen[rank] for rank in members], of(problem, members)
        if not outer(options) and "quasi_global" not in options and algorithm != "noloco":
            ranks.check_mean(inside.start, own)
        if (steps != STEPS and algorithm in PUSH_SUM) or (algorithm == "osgp" and "hierarchical" in options):
            continue
        outcome = ranks.expected(inside, own, options if len(members) > 1 else without_graph(options))
        if compression and len(members) > 1:
            off = max(np.abs(one.drained - outcome.drained()).max() for one in own)
            assert off < 0.05
            if steps == STEPS and not outer(options) and "hierarchical" not in options:
                sent = [one.stats for one in own if one.stats.messages_sent]
                assert {one.bytes_sent / one.messages_sent - 16 for one in sent} == {SENT[compression]}
        else:
            ranks.check(outcome, own)


def outer(options: dict[str, Any]) -> bool:
    """Whether an algorithm has an outer optimizer on averages of all ranks."""
    return options["algorithm"] in ("local", "slowmo", "diloco")


def without_graph(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a rank that trains alone."""
    lone = {"topology": "exponential"} if options["algorithm"] in PUSH_SUM else {}
    return {name: value for name, value in options.items() if name not in ("hierarchical", "mixing", "peers")} | lone


@ranks.by_turns("case", *CASES)
def test_every_optimizer_works_on_biased_weights(binding, case):
    """On a star the push-sum weights are not 1: momentum, decay and moments are of z x w."""
    problem = binding.least_squares(3, case)
    seen = ranks.run(binding, problem, STEPS, **STAR)
    ranks.check(ranks.expected(problem, seen, STAR), seen)
    assert max(abs(own.weight - 1.0) for own in seen) > 0.1


@by_options(STAR, LATE, EXACT, DILOCO)
def test_models_in_float64_are_trained_in_it(options):
    problem = TorchRank.least_squares(3)
    seen = ranks.run(TorchRank, problem, 10, dtype=torch.float64, **options)
    ranks.check(ranks.expected(problem, seen, options), seen, 1e-11 if options is not LATE else 1e-9)


@both
def test_a_learning_rate_that_changes(binding):
    """Slow momentum is in units of gradients: when the rate falls, so does what the momentum moves."""
    case, options = dataclasses.replace(MOMENTUM, momentum=0.0), SLOWMO | {"outer_momentum": 0.6}
    problem = dataclasses.replace(binding.least_squares(2, case), rate=lambda step: 0.05 / step)
    seen = ranks.run(binding, problem, 13, **options)
    outer = ranks.outer_of(2, options)
    outer.rate = lambda step: float(np.mean([problem.lr(k) for k in range(max(1, step - 4), step + 1)]))
    expected = outer_reference.train(problem, (13, 13), outer).drained()
    np.testing.assert_allclose([own.drained for own in seen], [expected] * 2, rtol=0, atol=1e-5)


@by_options(SLOWMO | {"outer_momentum": 0.6}, DILOCO)
@pytest.mark.parametrize(
    ("case", "binding"),
    [
        ("cancels", TorchRank),
        ("tiny", KerasRank),
        *itertools.product(("frozen", "frozen on a rank"), (TorchRank, KerasRank, KerasGraphRank)),
        *([("cancels", KerasRank), ("cancels", KerasGraphRank), ("tiny", TorchRank)] if LONG_RUN else []),
    ],
    ids=ranks.name,
)
def test_an_outer_momentum_ends_only_where_no_rank_moves_a_parameter(binding, case, options):
    """Not where the ranks' changes cancel, where 8 bits leave nothing of them, or where one rank has none."""
    problem, frozen = binding.least_squares(2, SGD), range(16, 31)
    index, part = (0, slice(0, 2)) if binding is TorchRank else (1, slice(4, 6))
    compression, whole = "int8" if case == "tiny" else "none", {"fragments": 1} if case in ("tiny", "frozen") else {}
    options = options | {"compression": compression} | whole

    def gradient(z: Any, rank: int, step: int) -> Any:
        own = np.ones(6)
        if case == "tiny":
            own[part] = 1e-3
        elif step in frozen:
            own[part] = {"cancels": 1 - 2 * rank, "frozen": 0, "frozen on a rank": 1 - rank}[case]
        return own

    def work(rank: int) -> Any:
        one = binding(problem, rank, **options)
        for step in range(1, 46):
            one.freeze(index, step in frozen and case in ("frozen", ("", "frozen on a rank")[rank]))
            one.train(1)
        one.opt.drain()
        return one.weights()

    problem = dataclasses.replace(problem, gradient=gradient)
    seen = Cluster(2).run(work)
    outer = ranks.outer_of(2, options)
    post = NumpyMessageFormat(6, np.float64, compression, 2, parts=2)
    stages = outer_reference.TwoStages(6, 1, 2, lambda part: post.decode(post.encode(part)))
    end = outer_reference.train(problem, (45, 45), outer, stages if case == "tiny" else None)
    expected = (end.x - stages.errors).mean(axis=0)
    if case == "frozen":  # as if the frozen steps were not there
        without = outer_reference.train(problem, (15, 15), ranks.outer_of(2, options))
        begun = dataclasses.replace(problem, start=np.array(without.x))
        expected = outer_reference.train(begun, (15, 15), ranks.outer_of(2, options)).drained()
    for weights in seen:
        np.testing.assert_allclose(weights[part], expected[part], rtol=1e-5)


def test_slow_momentum_moves_a_group_where_the_rate_of_another_is_0():
    """A head over a backbone that rests; the momentum's unit is the rate of the group that moves."""
    problem, options = TorchRank.least_squares(2, SGD), SLOWMO | {"outer_momentum": 0.6}

    def groups(parameters: Any) -> Any:
        return torch.optim.SGD([{"params": parameters[:1], "lr": 0.0}, {"params": parameters[1:]}], lr=0.1)

    def work(rank: int) -> Any:
        return np.frombuffer(TorchRank(problem, rank, make=groups, **options).train(17).drained())

    weights = Cluster(2).run(work)
    resting = dataclasses.replace(
        problem, gradient=lambda z, rank, step: problem.gradient(z, rank, step) * (np.arange(6) > 1)
    )
    expected = outer_reference.train(resting, (17, 17), ranks.outer_of(2, options)).drained()
    np.testing.assert_allclose(weights, [expected] * 2, rtol=0, atol=1e-5)


def test_several_backward_passes_make_a_step_that_corrects_the_momentum_once():
    binding = KerasGraphRank
    problem = binding.least_squares(3)
    seen = ranks.run(binding, problem, 12, backward_passes_per_step=2, **RING, **ON)
    whole = dataclasses.replace(
        problem,
        gradient=lambda z, rank, step: problem.gradient(z, rank, 2 * step - 1) + problem.gradient(z, rank, 2 * step),
    )
    for own, other in zip(seen, ranks.run(binding, whole, 6, **RING, **ON), strict=True):
        np.testing.assert_allclose(own.path[1::2], other.path, rtol=1e-5, atol=1e-5)


# -- Keras' fit() -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "run_eagerly"), [(STAR, False), (DILOCO, True)], ids=["sgp", "diloco"])
def test_fit_equals_the_reference(options, run_eagerly):
    """Ranks with fewer batches are done earlier."""
    problem, batches = KerasRank.least_squares(3), (5, 4, 5)

    def train(rank: int) -> tuple[Any, Any, Any]:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, use_bias=False)])
        model.layers[0].kernel.assign(problem.start[rank][:, None].astype(np.float32))
        opt = hvd.GossipOptimizer(plain(problem.case), **options)
        model.compile(optimizer=opt, loss=lambda y, z: (y - z) ** 2 / 2, run_eagerly=run_eagerly, jit_compile=False)
        data = [reference.batch(rank, step + 1) for step in range(batches[rank])]
        inputs, targets = (np.concatenate([one[i] for one in data]).astype(np.float32) for i in (0, 1))
        path: list[Any] = []
        keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: path.append(flat(model.weights)))
        ends = hvd.callbacks.GossipEpochCallback()
        model.fit(inputs, targets[:, None], batch_size=8, shuffle=False, verbose=0, callbacks=[keep, ends])
        return path, flat(model.weights), opt.stats()

    seen = Cluster(3).run(train)
    if options is STAR:
        outcome = reference.sgp(problem, ranks.graph("star", 3), 5)
    else:
        outcome = outer_reference.train(problem, batches, ranks.outer_of(3, options))
        np.testing.assert_allclose(seen[0][1], outcome.drained(), rtol=0, atol=1e-5)
    for (path, drained, stats), expected_path, steps in zip(seen, outcome.path, batches, strict=True):
        np.testing.assert_allclose(path[:4], expected_path[:4], rtol=0, atol=1e-5)
        assert stats.steps == len(path) == steps
        assert stats.push_sum_weight == 1.0
        assert drained.tobytes() == seen[0][1].tobytes()
