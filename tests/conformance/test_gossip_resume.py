"""Gossip of every binding that continues in another job, from what was saved after drain() and after cut()."""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import numpy as np
import pytest

from hvd_async.errors import ReplicaMismatchError
from hvd_async.testing import Cluster
from tests.conformance import gossip_ranks as ranks
from tests.conformance import outer_reference
from tests.conformance.gossip_ranks import (
    DILOCO,
    EXACT,
    LOCAL,
    ON,
    PAIRED,
    PAIRS,
    RING,
    SLOWMO,
    STAR,
    by_turns,
)
from tests.conformance.weight_ranks import Rank, Saved, both, share


@functools.cache
def states(binding: type[Rank], algorithm: str = "sgp", end: str = "cut") -> list[Saved]:
    """States that three ranks have saved after four steps."""

    def work(rank: int) -> Saved:
        one = binding(binding.least_squares(3), rank, **(PAIRS if algorithm == "adpsgd" else STAR)).train(4)
        getattr(one.opt, end)()
        return one.saved()

    return Cluster(3).run(work)


# -- each rank's own, after cut() ---------------------------------------------------------------------------------

CUT = [
    STAR,
    RING | {"compression": "int8"},
    STAR | {"hierarchical": 3, "compression": "int8", "average_every": 3},
    PAIRS | {"hierarchical": 3},
    SLOWMO | {"hierarchical": 3, "compression": "bf16"},
    STAR | {"gossip_every": 3},
    PAIRED,
    EXACT,
    EXACT | {"compression": "int8", "gossip_every": 2},
    RING | {"gossip_every": 2},
    RING | ON,
    STAR | ON | {"compression": "int8"},
    LOCAL,
    SLOWMO,
    DILOCO | {"compression": "int8"},
    SLOWMO | {"compression": "bf16", "max_staleness": 4},
]
STEPS = ((5, 5, 5), (3, 6, 4), (3, 6, 4), (5, 5, 5))
"""Steps of the ranks before the cut, which the options take by turns."""


@by_turns("case", *((options, STEPS[place % 4]) for place, options in enumerate(CUT)))
def test_each_ranks_own_state_continues_as_if_nothing_had_been(binding, case):
    """Bit by bit the same as a job that made the cut and continued; averages were under way, and rates had fallen."""
    options, steps = case
    problem, saved = binding.least_squares(3), list[Any]([None] * 3)

    def whole(rank: int) -> tuple[Any, ...]:
        one = binding(problem, rank, **options).train(2)
        one.set_rate(0.02)
        one.train(steps[rank] - 2).opt.cut()
        saved[rank] = one.saved()
        return finish(one)

    def second(rank: int) -> tuple[Any, ...]:
        one = binding(problem, rank, **options).resume(saved[rank], steps[rank])
        one.set_rate(0.02)
        assert share(one.saved(), "cut")  # (what was loaded can be saved again)
        return finish(one)

    def finish(one: Rank) -> tuple[Any, ...]:
        path = [one.train(1).weights().tobytes() for _ in range(7)]
        weight = one.opt.stats().push_sum_weight
        return path, weight, one.drained(), one.moments().first.tobytes(), one.train(4).weights().tobytes()

    ends = Cluster(3).run(whole)
    assert Cluster(3).run(second) == ends
    if options == STAR:
        assert all(abs(share(state, "weight") - 1.0) > 0.01 for state in saved)


@by_turns("by_epoch", {"peers": {0: 1, 1: 2}}, {"schedule": {0: "allreduce", 1: "dpsgd"}, "average_every": 3})
def test_a_cut_is_resumed_in_an_epoch_that_has_other_settings_than_the_first(binding, by_epoch):
    """Bit by bit: the correction is there before ``set_epoch`` says that the plan has one."""
    problem, saved = binding.least_squares(3), list[Any]([None] * 3)

    def whole(rank: int) -> list[bytes]:
        one = binding(problem, rank, **by_epoch, **ON)
        one.opt.set_epoch(1)
        one.train(4).opt.cut()
        saved[rank] = one.saved()
        return finish(one)

    def second(rank: int) -> list[bytes]:
        one = binding(problem, rank, **by_epoch, **ON).resume(saved[rank], 4)
        one.opt.set_epoch(1)
        return finish(one)

    def finish(one: Rank) -> list[bytes]:
        return [*(one.train(1).weights().tobytes() for _ in range(4)), one.drained(), one.moments().first.tobytes()]

    ends = Cluster(3).run(whole)
    assert Cluster(3).run(second) == ends


@by_turns("compressions", ("int8", "none"), ("bf16", "int8"))
def test_a_cut_may_be_resumed_with_another_compression(binding, compressions):
    before, after = compressions
    problem, saved = binding.least_squares(3), list[Any]([None] * 3)

    def first(rank: int) -> None:
        one = binding(problem, rank, compression=before, **LOCAL).train(6)
        one.opt.cut()
        saved[rank] = one.saved()

    Cluster(3).run(first)
    exact = outer_reference.train(problem, (12, 12, 12), ranks.outer_of(3, LOCAL)).drained()
    for weights in Cluster(3).run(
        lambda rank: binding(problem, rank, compression=after, **LOCAL).resume(saved[rank], 6).train(6).drained()
    ):
        np.testing.assert_allclose(np.frombuffer(weights), exact, rtol=0, atol=0.02)


# -- rank 0's, after drain() --------------------------------------------------------------------------------------


@by_turns("case", (STAR, 5), (STAR | ON, 5), (EXACT, 1), (PAIRED, 5), (LOCAL, 1), (SLOWMO, 1), (DILOCO, 5), (SLOWMO, 5))
def test_rank_0s_drained_state_resumes_at_any_size(binding, case):
    """Weights, momentum, that of an outer optimizer, and the number of rounds; the data continues."""
    options, size = case
    first, problem, together = binding.least_squares(3), binding.least_squares(size), threading.Barrier(size)

    def save(rank: int) -> Saved:
        one = binding(first, rank, **options).train(8)
        one.opt.drain()
        return one.saved()

    state = Cluster(3).run(save)[0]

    def work(rank: int) -> tuple[Any, ...]:
        one = binding(problem, rank, **options).resume(state, 8)
        assert one.opt.rounds == share(state, "rounds") > 0
        began, moments = one.weights(), one.moments()
        seen = ranks.watch(one)
        together.wait(30)
        ranks.train(one, seen, 6)
        together.wait(60)
        assert one.opt.rounds == share(state, "rounds") + one.opt.stats().rounds
        return began, moments, ranks.drain(one, seen)

    began, moments, seen = zip(*Cluster(size).run(work), strict=True)
    resumed = dataclasses.replace(
        problem,
        start=np.array(began),
        gradient=lambda z, rank, step: problem.gradient(z, rank, 8 + step),
        states=moments,
    )
    if options in (SLOWMO, DILOCO):
        outer = ranks.outer_of(3, options)
        outer_reference.train(first, (8, 8, 8), outer)
        ranks.check(outer_reference.train(resumed, [6] * size, outer), seen)
    else:
        ranks.check(ranks.expected(resumed, list(seen), options), seen)


@by_turns("options", RING | ON, EXACT, PAIRED, LOCAL, SLOWMO, DILOCO)
def test_an_earlier_state_may_be_loaded_in_the_same_job(binding, options):
    """Weights and the optimizer's state, after a drain: training continues from there, bit by bit as it did."""

    def work(rank: int) -> list[list[bytes]]:
        one = binding(binding.least_squares(3), rank, **options).train(5)
        one.opt.drain()
        state, paths = one.saved(), []
        for _ in range(2):
            one.resume(state, 5)
            paths.append([one.train(1).weights().tobytes() for _ in range(7)])
            one.opt.drain()
        return paths

    for first, again in Cluster(3).run(work):
        assert first == again


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [[0, 1, 2], [1]], ids=["adpsgd", "one-rank-only"])
@both
def test_states_after_cut_that_do_not_fit_are_refused(binding, who):
    saved = states(binding)

    def work(rank: int) -> None:
        one = binding(binding.least_squares(3), rank, **(PAIRS if len(who) > 1 else STAR))
        if rank in who:
            one.resume(saved[rank], 4)
        one.train(1)

    for outcome in Cluster(3).outcomes(work):
        if len(who) > 1:
            assert "push-sum weight" in str(outcome)
            assert "which adpsgd does not support" in str(outcome)
        else:
            assert isinstance(outcome, ReplicaMismatchError)
            assert "weights as after cut()" in str(outcome)


@both
def test_states_of_other_outer_optimizers_are_refused(binding):
    def work(rank: int) -> tuple[Any, ...]:
        def saved(end: str, **options: Any) -> Saved:
            one = binding(binding.least_squares(2), rank, **options).train(5)
            getattr(one.opt, end)()
            state = one.saved()
            one.opt.drain()
            return state

        return saved("cut", **STAR), saved("cut", **SLOWMO), saved("drain", **SLOWMO)

    cut = Cluster(2).run(work)

    def resume(which: int, loads: Any, **options: Any) -> list[str]:
        def train(rank: int) -> None:
            one = binding(binding.least_squares(2), rank, **options)
            if rank in loads:
                one.resume(cut[rank][which], 5)
            else:
                one.assign(cut[rank][which][1])
            one.train(1)

        return [str(one) for one in Cluster(2).outcomes(train)]

    assert "by an algorithm without an anchor, which local needs" in resume(0, (0, 1), **LOCAL)[0]
    other = SLOWMO | {"fragments": 2}
    assert "averages of other fragments or another average_every" in resume(1, (0, 1), **other)[0]
    assert all("outer momentum of slowmo" in one for one in resume(2, (0,), **SLOWMO))
    assert resume(2, (0, 1), **SLOWMO) == ["None", "None"]
