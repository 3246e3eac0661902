"""Local steps and outer optimizers in every binding: the float64 reference, ends, checkpoints, changes of settings."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import keras
import numpy as np
import pytest

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance import gossip_ranks as ranks
from tests.conformance import gossip_reference as reference
from tests.conformance import outer_reference
from tests.conformance.gossip_ranks import (
    ADAM,
    DILOCO,
    LOCAL,
    MOMENTUM,
    NESTEROV,
    SLOWMO,
    STAR,
    Rank,
    also_graph,
    both,
    by_options,
)
from tests.conformance.keras_ranks import flat, plain
from tests.conformance.torch_ranks import ProcessSet

CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.mark.parametrize(("size", "case"), [(1, MOMENTUM), (2, ADAM), (3, NESTEROV)], ids=ranks.name)
@by_options(LOCAL, SLOWMO, DILOCO)
@also_graph
def test_every_step_equals_the_reference(binding, options, size, case):
    problem = binding.problem(size, case)
    seen = ranks.run(binding, problem, 13, Cluster(size, jitter=0.001), **options)
    ranks.check(ranks.expected(problem, seen, options), seen)
    for own in seen:
        averaged = outer_reference.Outer("", options["average_every"], 0, options.get("fragments", 1))
        assert own.stats.averagings == sum(len(outer_reference.due(averaged, step)) for step in range(1, 14))
    if options is LOCAL:
        ranks.check_mean(problem.start, seen)


@by_options(LOCAL, SLOWMO, DILOCO)
@both
def test_ranks_that_finish_early_and_several_drains(binding, options):
    """The outer momentum goes on after a drain, and the anchor is where all ranks are then."""
    problem, counts = binding.problem(3, MOMENTUM), ((9, 2, 5), (4, 4, 7))

    def work(rank: int) -> list[Any]:
        trainer, found = binding.make(problem, rank, **options), list[Any]()
        for steps in counts:
            trainer.train(steps[rank]).opt.drain()
            found.append(trainer.weights())
        return found

    seen, outer = Cluster(3).run(work), ranks.outer_of(3, options)
    for end, steps in enumerate(counts):
        outcome = outer_reference.train(problem, steps, outer)
        for own in seen:
            np.testing.assert_allclose(own[end], outcome.drained(), **CLOSE)
            assert own[end].tobytes() == seen[0][end].tobytes()
        problem = problem.after(outcome)


@pytest.mark.parametrize("compression", ["fp16", "bf16", "int8"])
@by_options(LOCAL, SLOWMO, DILOCO)
@both
def test_compressed_differences_stay_near_those_that_are_exact(binding, options, compression):
    problem = binding.problem(4, MOMENTUM)
    seen = ranks.run(binding, problem, 20, compression=compression, **options)
    exact = ranks.expected(problem, seen, options)
    off = max(np.abs(own.drained - exact.drained()).max() for own in seen)
    assert 1e-8 < off < 0.02
    assert len({own.drained.tobytes() for own in seen}) == 1
    assert len({own.path[-1].tobytes() for own in seen}) == 4 or options is not LOCAL
    if options is LOCAL:
        ranks.check_mean(problem.start, seen)


@by_options(LOCAL, SLOWMO, DILOCO)
@both
def test_consensus_is_what_a_drain_would_leave_and_changes_nothing(binding, options):
    """Evaluations in mid-training leave what is under way for the step that is to take it; also of a rank that has
    finished before others sent it."""
    problem, steps = binding.problem(3, MOMENTUM), (9, 9, 7)

    def run(looks: bool, most: int = 9) -> Any:
        def train(rank: int) -> tuple[Any, ...]:
            trainer, shown = binding.make(problem, rank, compression="int8", **options), []
            for _ in range(min(most, 6)):
                trainer.train(1)
                if looks:
                    with trainer.opt.consensus():
                        shown.append(trainer.weights().tobytes())
            trainer.train(max(0, min(most, steps[rank]) - 6))
            with trainer.opt.consensus() if looks else contextlib.nullcontext():
                shown.append(trainer.weights().tobytes())
            trainer.opt.drain()
            return trainer.weights().tobytes(), shown

        return Cluster(3).run(train)

    (end, shown), *others = run(True)
    assert [own for _, own in others] == [shown] * 2
    assert [own for own, _ in run(False)] == [end] * 3
    assert [run(False, step)[0][0] for step in range(1, 7)] == shown[:6]
    assert shown[6] == end


@by_options(LOCAL | {"compression": "int8"}, SLOWMO)
@both
def test_ranks_of_a_process_set_and_one_outside(binding, options):
    """The one outside steps by itself, under the same outer optimizer."""
    trio, problem = ProcessSet(0, 2, 3), binding.problem(4, MOMENTUM)

    def work(rank: int) -> Any:
        trainer = binding.make(problem, rank, process_set=trio, **options).train(9)
        trainer.opt.drain()
        return trainer.weights()

    seen = Cluster(4).run(work)
    for members in ([0, 2, 3], [1]):
        own = dataclasses.replace(
            problem,
            start=problem.start[members],
            gradient=lambda z, place, step, members=members: problem.gradient(z, members[place], step),
        )
        outcome = outer_reference.train(own, [9] * len(members), ranks.outer_of(len(members), options))
        within = 1e-5 if "compression" not in options or len(members) == 1 else 5e-3
        for rank in members:
            np.testing.assert_allclose(seen[rank], outcome.drained(), rtol=0, atol=within)


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(5, 5, 5), (3, 6, 4)], ids=["even", "uneven"])
@by_options(LOCAL, SLOWMO, DILOCO | {"compression": "int8"}, SLOWMO | {"compression": "bf16", "max_staleness": 4})
@both
def test_each_ranks_own_state_goes_on_as_if_nothing_had_been(binding, options, steps):
    """Bit by bit, beside a job that made the cut and went on; averages were under way."""
    problem, saved = binding.problem(3), list[Any]([None] * 3)

    def whole(rank: int) -> tuple[Any, ...]:
        trainer = binding.make(problem, rank, **options).train(steps[rank])
        trainer.opt.cut()
        saved[rank] = trainer.saved()
        return finish(trainer)

    def second(rank: int) -> tuple[Any, ...]:
        return finish(binding.make(problem, rank, **options).resumed(saved[rank], steps[rank]))

    def finish(trainer: Rank) -> tuple[Any, ...]:
        path = [trainer.train(1).weights().tobytes() for _ in range(7)]
        trainer.opt.drain()
        return path, trainer.weights().tobytes(), trainer.train(4).weights().tobytes()

    ends = Cluster(3).run(whole)
    assert Cluster(3).run(second) == ends


@pytest.mark.parametrize("size", [1, 2, 5])
@by_options(SLOWMO, DILOCO)
@both
def test_rank_0s_drained_state_resumes_at_any_size_with_its_outer_momentum(binding, options, size):
    outer, first = ranks.outer_of(3, options), binding.problem(3, MOMENTUM)

    def save(rank: int) -> Any:
        trainer = binding.make(first, rank, **options).train(8)
        trainer.opt.drain()
        return trainer.saved()

    state = Cluster(3).run(save)[0]
    outer_reference.train(first, (8, 8, 8), outer)
    problem = binding.problem(size, MOMENTUM)

    def work(rank: int) -> tuple[Any, ...]:
        trainer = binding.make(problem, rank, **options).resumed(state, 8)
        began, moments = trainer.weights(), trainer.moments()
        trainer.train(6).opt.drain()
        return began, moments, trainer.weights()

    seen = Cluster(size).run(work)
    began, moments, _ = seen[0]
    resumed = dataclasses.replace(
        problem,
        start=np.tile(began, (size, 1)),
        gradient=lambda z, rank, step: problem.gradient(z, rank, 8 + step),
        states=(reference.start(began)._replace(t=8, first=moments),) * size,
    )
    expected = outer_reference.train(resumed, [6] * size, outer).drained()
    for _, _, weights in seen:
        np.testing.assert_allclose(weights, expected, **CLOSE)


@both
def test_states_that_do_not_fit_are_refused(binding):
    def work(rank: int) -> tuple[Any, ...]:
        def saved(end: str, **options: Any) -> Any:
            trainer = binding.make(binding.problem(2), rank, **options).train(5)
            getattr(trainer.opt, end)()
            state = trainer.saved()
            trainer.opt.drain()
            return state

        return saved("cut", **STAR), saved("cut", **SLOWMO), saved("drain", **SLOWMO)

    states = Cluster(2).run(work)

    def resume(which: int, loads: Any, **options: Any) -> list[str]:
        def train(rank: int) -> None:
            trainer = binding.make(binding.problem(2), rank, **options)
            if rank in loads:
                trainer.resumed(states[rank][which], 5)
            else:
                trainer.assign(binding.make(binding.problem(2), rank).resumed(states[rank][which], 5).weights())
            trainer.train(1)

        return [str(one) for one in Cluster(2).outcomes(train)]

    assert "by an algorithm without an anchor, which local needs" in resume(0, (0, 1), **LOCAL)[0]
    other = SLOWMO | {"fragments": 2}
    assert "averages of other fragments or another average_every" in resume(1, (0, 1), **other)[0]
    assert all("outer momentum of slowmo" in one for one in resume(2, (0,), **SLOWMO))
    assert resume(2, (0, 1), **SLOWMO) == ["None", "None"]


# -- changes of settings --------------------------------------------------------------------------------------------


@both
def test_post_local_sgd_by_epoch(binding):
    """Averages after each step, then after every fourth: ``average_every`` by epoch, or a schedule."""
    problem = binding.problem(3, MOMENTUM)

    def run(**options: Any) -> Any:
        def work(rank: int) -> tuple[Any, ...]:
            trainer, settings = binding.make(problem, rank, **options), []
            for epoch in range(3):
                trainer.opt.set_epoch(epoch)
                settings.append((trainer.opt.settings["algorithm"], trainer.opt.settings["average_every"]))
                trainer.train(6)
            trainer.opt.drain()
            return settings, trainer.weights()

        return Cluster(3).run(work)

    by_epoch = run(algorithm="local", average_every={0: 1, 1: 4})
    scheduled = run(schedule={0: "allreduce", 1: "local"}, average_every=4)
    assert by_epoch[0][0] == [("local", 1), ("local", 4), ("local", 4)]
    assert scheduled[0][0] == [("allreduce", 1), ("local", 4), ("local", 4)]
    first = reference.allreduce(problem, 6)
    expected = outer_reference.train(problem.after(first), (12, 12, 12), outer_reference.Outer("local", 4, 2)).drained()
    for _, weights in (*by_epoch, *scheduled):
        np.testing.assert_allclose(weights, expected, **CLOSE)


@both
def test_switches_between_outer_optimizers_and_others(binding):
    """Momentum goes on where the outer optimizer is the same; another begins with none."""
    problem = binding.problem(3, MOMENTUM)
    chain: list[dict[str, Any]] = [
        {"algorithm": "slowmo", "average_every": 4},
        {"average_every": 3, "fragments": 2},
        {"algorithm": "diloco", "fragments": 1, "max_staleness": 0},
        {"algorithm": "sgp", "average_every": 0, "max_staleness": None},
        {"algorithm": "local", "average_every": 2},
    ]

    def work(rank: int) -> list[Any]:
        trainer, found = binding.make(problem, rank), list[Any]()
        for changes in chain:
            trainer.opt.switch(**changes)
            trainer.train(7)
            found.append(trainer.opt.settings)
        trainer.opt.drain()
        return [found, trainer.weights()]

    (settings, weights), *others = Cluster(3).run(work)
    assert all(other[1].tobytes() == weights.tobytes() for other in others)
    assert [one["algorithm"] for one in settings] == ["slowmo", "slowmo", "diloco", "sgp", "local"]
    assert (settings[1]["fragments"], settings[1]["outer_momentum"], settings[1]["max_staleness"]) == (2, 0.3, 1)
    slow = outer_reference.Outer("slowmo", 4, 2, 1, 1.0, 0.3, rate=lambda step: MOMENTUM.lr)
    outcome = outer_reference.train(problem, (7, 7, 7), slow)
    slow.every, slow.late, slow.fragments = 3, 1, 2
    problem = problem.after(outcome)
    outcome = outer_reference.train(problem, (7, 7, 7), slow)
    problem = problem.after(outcome)
    outcome = outer_reference.train(problem, (7, 7, 7), outer_reference.Outer("diloco", 3, 0, 1, 0.7, 0.5))
    problem = problem.after(outcome)
    outcome = reference.sgp(problem, ranks.graph("exponential", 3), 7)
    problem = problem.after(outcome)
    outcome = outer_reference.train(problem, (7, 7, 7), outer_reference.Outer("local", 2, 1))
    np.testing.assert_allclose(weights, outcome.drained(), **CLOSE)


# -- the learning rate, and Keras' fit() ------------------------------------------------------------------------------


@both
def test_slow_momentum_follows_the_learning_rate(binding):
    """u is in units of gradients: when the learning rate falls, so does what the momentum moves."""
    problem, options = binding.problem(2, dataclasses.replace(MOMENTUM, momentum=0.0)), SLOWMO | {"outer_momentum": 0.6}

    def rate(step: int) -> float:
        return 0.05 / step

    def work(rank: int) -> Any:
        trainer = binding.make(problem, rank, **options)
        for step in range(1, 14):
            if binding.framework == "torch":
                trainer.opt.param_groups[0]["lr"] = rate(step)
            else:
                trainer.opt.learning_rate = rate(step)
            trainer.train(1)
        trainer.opt.drain()
        return trainer.weights()

    outer = ranks.outer_of(2, options)
    outer.rate = lambda step: float(np.mean([rate(k) for k in range(max(1, step - 4), step + 1)]))
    x = dataclasses.replace(problem, case=dataclasses.replace(problem.case, lr=1.0))
    scaled = dataclasses.replace(x, gradient=lambda z, r, step: rate(step) * problem.gradient(z, r, step))
    expected = outer_reference.train(scaled, (13, 13), outer).drained()
    for weights in Cluster(2).run(work):
        np.testing.assert_allclose(weights, expected, **CLOSE)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_fit_equals_the_reference(run_eagerly):
    problem, batches = ranks.KERAS.problem(3), (7, 4, 7)

    def train(rank: int) -> tuple[Any, Any]:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, use_bias=False)])
        model.layers[0].kernel.assign(problem.start[rank][:, None].astype(np.float32))
        opt = hvd.GossipOptimizer(plain(problem.case), **DILOCO)
        model.compile(optimizer=opt, loss=lambda y, z: (y - z) ** 2 / 2, run_eagerly=run_eagerly, jit_compile=False)
        data = [reference.batch(rank, step + 1) for step in range(batches[rank])]
        inputs, targets = (np.concatenate([one[i] for one in data]).astype(np.float32) for i in (0, 1))
        ends = hvd.callbacks.GossipEpochCallback()
        model.fit(inputs, targets[:, None], batch_size=8, shuffle=False, verbose=0, callbacks=[ends])
        return flat(model.weights), opt.stats()

    outcome = outer_reference.train(problem, batches, ranks.outer_of(3, DILOCO))
    for (drained, stats), steps in zip(Cluster(3).run(train), batches, strict=True):
        np.testing.assert_allclose(drained, outcome.drained(), **CLOSE)
        assert stats.steps == steps


@pytest.mark.parametrize(("before", "after"), [("int8", "none"), ("none", "int8"), ("bf16", "int8")])
@both
def test_a_cut_may_be_resumed_with_another_compression(binding, before, after):
    problem, saved = binding.problem(3), list[Any]([None] * 3)

    def first(rank: int) -> None:
        trainer = binding.make(problem, rank, compression=before, **LOCAL).train(6)
        trainer.opt.cut()
        saved[rank] = trainer.saved()

    def second(rank: int) -> Any:
        trainer = binding.make(problem, rank, compression=after, **LOCAL).resumed(saved[rank], 6).train(6)
        trainer.opt.drain()
        return trainer.weights()

    Cluster(3).run(first)
    exact = outer_reference.train(problem, (12, 12, 12), ranks.outer_of(3, LOCAL)).drained()
    for weights in Cluster(3).run(second):
        np.testing.assert_allclose(weights, exact, rtol=0, atol=0.02)


@both
def test_weights_that_a_script_replaces_after_a_drain_are_the_anchor(binding):
    """Also in a job that was resumed from a cut: the momentum does not take the replacement for a step."""
    problem, saved = binding.problem(2, dataclasses.replace(MOMENTUM, lr=0.0)), list[Any]([None] * 2)

    def first(rank: int) -> None:
        trainer = binding.make(problem, rank, **DILOCO).train(2)
        trainer.opt.cut()
        saved[rank] = trainer.saved()

    def second(rank: int) -> Any:
        trainer = binding.make(problem, rank, **DILOCO).resumed(saved[rank], 2).train(1)
        trainer.opt.drain()
        trainer.assign(np.arange(6.0))
        trainer.opt._async.on_weights_replaced()
        trainer.train(9).opt.drain()
        return trainer.weights().tolist()

    Cluster(2).run(first)
    assert Cluster(2).run(second) == [list(range(6))] * 2
