"""Gossip and leader-pull that continue in another job, from what was saved after drain() and after cut().

Every algorithm in every form of a state, and at another number of ranks: ``test_saved_states``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance import gossip_ranks as ranks
from tests.conformance import outer_reference
from tests.conformance.drive import scripted_engine
from tests.conformance.gossip_ranks import DILOCO, EXACT, LOCAL, ON, PAIRED, PAIRS, RING, SLOWMO, STAR, by_turns
from tests.conformance.leader_drive import in_step
from tests.conformance.leader_reference import Following, several
from tests.conformance.weight_ranks import (
    ADAM,
    MOMENTUM,
    KerasGraphRank,
    KerasRank,
    Rank,
    Saved,
    TorchRank,
    both,
    values,
)


def over_a_cut(
    size: int, make: Callable[[int], Rank], begin: Callable[[Rank], object], finish: Callable[[Rank, bool], Any]
) -> tuple[list[Saved], list[Any]]:
    """Have ranks train, cut, save and continue; and others continue from what they saved, which must end the same.

    Args:
        size: number of ranks.
        make: makes a rank.
        begin: has it train, before the cut.
        finish: returns what comes of it; also called with whether it was resumed.

    Returns:
        What each rank saved, and what came of it.
    """
    saved, done = list[Any]([None] * size), [0] * size

    def whole(rank: int) -> Any:
        one = make(rank)
        begin(one)
        one.opt.cut()
        saved[rank], done[rank] = one.saved(), len(one.path)
        return finish(one, False)

    def second(rank: int) -> Any:
        one = make(rank).resume(saved[rank], done[rank])
        assert values(one.saved()) == values(saved[rank])  # what was loaded can be saved again
        return finish(one, True)

    ends = Cluster(size).run(whole)
    assert Cluster(size).run(second) == ends
    return saved, ends


# -- gossip -------------------------------------------------------------------------------------------------------

CUT = [
    STAR | {"hierarchical": 3, "compression": "int8", "average_every": 3},
    PAIRS | {"hierarchical": 3},
    SLOWMO | {"hierarchical": 3, "compression": "bf16"},
    STAR | ON | {"compression": "int8"},
    {"peers": {0: 1, 1: 2}} | ON,
    {"schedule": {0: "allreduce", 1: "dpsgd"}, "average_every": 3} | ON,
]


@by_turns("options", *CUT)
def test_each_ranks_own_state_continues_as_if_nothing_had_been(binding, options):
    """Bit by bit, with averages under way and rates that had fallen, after uneven steps. Also in an epoch with other
    settings than the first: the correction is there before ``set_epoch`` says that the plan has one."""
    problem = binding.least_squares(3)

    def settle(one: Rank) -> None:
        one.set_rate(0.02)
        if {"peers", "schedule"} & set(options):
            one.opt.set_epoch(1)

    def begin(one: Rank) -> None:
        settle(one)
        one.train((3, 6, 4)[one.rank])

    def finish(one: Rank, resumed: bool) -> tuple[Any, ...]:
        if resumed:
            settle(one)
        path = [one.train(1).weights().tobytes() for _ in range(7)]
        weight = one.opt.stats().push_sum_weight
        return path, weight, one.drained(), one.moments().first.tobytes(), one.train(4).weights().tobytes()

    over_a_cut(3, lambda rank: binding(problem, rank, **options), begin, finish)


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


# -- leader-pull --------------------------------------------------------------------------------------------------

BY_STEP = Following(
    "lsgd", several(4, 2), 8, 16, loss_window=3, local_pull=lambda step: 0.9 / step, global_prox=lambda step: step / 100
)
ELASTIC = Following("easgd", global_period=8)


@pytest.mark.parametrize(
    ("binding", "following", "normed", "done"),
    [
        *((TorchRank, BY_STEP, True, done) for done in (3, 7, 16)),
        *((TorchRank, ELASTIC, True, done) for done in (16, 17)),
        (KerasRank, ELASTIC, False, 3),
        (KerasRank, ELASTIC, True, 17),
        (KerasGraphRank, BY_STEP, True, 16),
    ],
    ids=lambda of: of.algorithm if isinstance(of, Following) else getattr(of, "__name__", None),
)
def test_each_ranks_own_state_continues_a_leaders_pulls(binding, following, normed, done):
    """Bit by bit, next to a job that made the cut and continued, and one that made none: before the first pull, right
    before one is due, when one has come and was not taken up, and when it was. (After the last step none may be due
    for ranks that are left when others are done.)"""
    problem = binding.least_squares(4)

    def make(rank: int) -> Rank:
        return binding(problem, rank, following, normed=normed)

    def finish(one: Rank, resumed: bool) -> tuple[Any, ...]:
        if not resumed and one.worker().settled:
            assert bool(one.worker().saved_state().results.fresh) == (done == 16)
        path, first = [], following.pulls(one.rank, done) if resumed else 0
        for _ in range(17 if done == 7 else 16):
            in_step(one, 1, first)
            path.append(one.bits())
        mean = one.opt.stats().mean_loss
        one.opt.drain()
        return path, mean, one.bits()

    def uncut(rank: int) -> tuple[Any, ...]:
        one = make(rank)
        in_step(one, done)
        return finish(one, False)

    _, ends = over_a_cut(4, make, lambda one: in_step(one, done), finish)
    if binding is TorchRank:
        assert Cluster(4).run(uncut) == ends
    assert len({path[10] for path, _, _ in ends}) == 4
    assert len({drained for _, _, drained in ends}) == 1


@pytest.mark.parametrize(("binding", "following"), [(TorchRank, BY_STEP), (KerasRank, ELASTIC)], ids=["lsgd", "easgd"])
def test_a_cut_state_that_is_drained_at_once_gives_what_a_drain_would_have(binding, following):
    """The leader's weights, though no loss was recorded in this job; or the center."""
    problem = binding.least_squares(4)

    def begin(one: Rank) -> None:
        one.train(20 + one.rank)
        one.opt.cut()  # (steps that are left may be enough for the ones that are done last, except for one pull only)

    over_a_cut(4, lambda rank: binding(problem, rank, following), begin, lambda one, _: one.drained())


@both
def test_wrappers_take_up_what_another_has_drained(binding):
    """With the optimizer's moments, and counts of what each calls a round."""
    problem = binding.least_squares(2, ADAM)
    following = Following(groups=several(2, 1), local_period=1, global_period=1)
    saved: Any = None
    for done, kind in enumerate(("Leader", "Gossip", "Leader", "Eager", "Leader")):
        options = {"quorum": "all"} if kind == "Eager" else {}

        def train(rank: int, done: int = done, kind: str = kind, before: Any = saved, options: Any = options) -> Any:
            one = binding(problem, rank, following, wrapper=f"{kind}Optimizer", **options)
            if before is not None:
                state, rounds, second = before
                one.resume(state, done)
                assert one.opt.rounds == rounds
                assert np.array_equal(one.moments().second, second)
            one.train(1).opt.drain()
            return one.saved(), one.opt.rounds, one.moments().second

        saved = Cluster(2).run(train)[0]


# -- what is refused ------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Any, int, int], Rank]] = {
    "gossip": lambda binding, size, rank: binding(binding.least_squares(size), rank, topology="star"),
    "eager": lambda binding, size, rank: binding(binding.least_squares(size), rank, wrapper="EagerOptimizer"),
    "lsgd": lambda binding, size, rank: binding(
        binding.least_squares(size), rank, Following(groups=several(size, size))
    ),
    "alone": lambda binding, size, rank: binding(binding.least_squares(size), rank, Following(groups=several(size, 1))),
    "easgd": lambda binding, size, rank: binding(binding.least_squares(size), rank, Following("easgd")),
}


def cut_states(binding: Any, kind: str, before: Any = None) -> list[Any]:
    """Return the states that three ranks save after four steps, or more after a cut ``before``."""

    def train(rank: int) -> Any:
        one = KINDS[kind](binding, 3, rank)
        if before is not None:
            one.resume(before[rank], 4)
        one.train(4).opt.cut()
        return one.saved()

    return Cluster(3).run(train)


@both
@pytest.mark.parametrize("before", ["gossip", "lsgd", "easgd"])
def test_a_cut_state_goes_to_its_own_rank_size_and_kind_only(binding, before):
    """On the rank that loads it, and nothing has changed."""
    saved = cut_states(binding, before)[1]
    for now in KINDS:
        for size, rank in ((3, 1), (3, 0), (2, 1)):
            with scripted_engine(size, rank):
                one = KINDS[now](binding, size, rank)
                if (now, size, rank) == (before, 3, 1):
                    one.resume(saved)
                    continue
                held = values(one.saved())
                said = (
                    rf"rank 1 of 3 after cut.*this is rank {rank} of {size}. Load each rank's.*or save after drain\(\)"
                )
                other = now == "eager" or (size, rank) == (3, 1)
                with pytest.raises(ValueError, match=r"save it after drain\(\)" if other else said):
                    one.load(saved[0])
                assert values(one.saved()) == held


@pytest.mark.parametrize("kind", ["gossip", "lsgd", "eager"])
@both
def test_what_cannot_be_saved_or_loaded_says_what_to_do(binding, kind):
    def train(rank: int) -> None:
        one = KINDS[kind](binding, 3, rank)
        fresh = one.state()
        one.train(2)
        with pytest.raises(ReplicaStateError, match=r"(?i)call drain\(\).*rank 0's.*cut\(\)"):
            one.state()
        with pytest.raises(ReplicaStateError, match=r"call drain\(\) before loading"):
            one.load(fresh)
        one.opt.cut()
        one.state()
        one.train(1).opt.drain()
        one.load(one.state())
        one.train(1).opt.drain()  # the ranks meet again

    Cluster(3).run(train)


@pytest.mark.parametrize("kind", ["gossip", "lsgd"])
@both
def test_states_with_gradients_pending_or_of_another_optimizer_are_refused(binding, kind):
    with scripted_engine(3):
        one = KINDS[kind](binding, 3, 0)
        state = one.state()
        one.load(state)
        pending: dict[str, Any] = {"hvd_async.nbytes": np.array([4]), "hvd_async.versions.0": np.ones(2)}
        pending["hvd_async.pending.0"] = np.ones(1, np.float32)
        if binding is TorchRank:
            pending = {"hvd_async": state["hvd_async"] | {"versions": [[1]]}}
        with pytest.raises(ValueError, match=r"has gradients pending, which would be lost: save it after drain\(\)"):
            one.load(state | pending)
        if binding is KerasRank:
            following = Following(groups=several(3, 3)) if kind == "lsgd" else None
            adam = binding(binding.least_squares(3, ADAM), 0, following)
            with pytest.raises(ValueError, match="of another optimizer"):
                adam.load(state)


@pytest.mark.parametrize("kind", ["gossip", "lsgd"])
@both
def test_states_of_a_cut_on_one_rank_only_or_of_two_cuts_are_reported_to_all(binding, kind):
    """How it stood between the ranks must be the same for all."""
    early = cut_states(binding, kind)
    late = cut_states(binding, kind, early)

    def train(rank: int, others: Any) -> None:
        one = KINDS[kind](binding, 3, rank)
        saved = early[rank] if rank == 1 else others and others[rank]
        (one.resume(saved, 4) if saved else one).train(1)

    for others in (None, late) if kind == "lsgd" else (None,):
        for outcome in Cluster(3).outcomes(lambda rank, others=others: train(rank, others)):
            assert isinstance(outcome, ReplicaMismatchError)
            assert kind == "lsgd" or "weights as after cut()" in str(outcome)


@both
def test_states_of_other_algorithms_are_refused(binding):
    """By an algorithm that needs an anchor, that has no push-sum weights, or whose averages are others; also the ones
    that some ranks only have loaded."""

    def work(rank: int) -> tuple[Any, ...]:
        def saved(end: str, **options: Any) -> Saved:
            one = binding(binding.least_squares(3), rank, **options).train(5)
            getattr(one.opt, end)()
            state = one.saved()
            one.opt.drain()
            return state

        return saved("cut", **STAR), saved("cut", **SLOWMO), saved("drain", **SLOWMO), saved("drain", **STAR)

    cut = Cluster(3).run(work)

    def resume(which: int, loads: Any, **options: Any) -> list[str]:
        def train(rank: int) -> None:
            one = binding(binding.least_squares(3), rank, **options)
            if rank in loads:
                one.resume(cut[rank][which], 5)
            else:
                one.assign(cut[rank][which][1])
            one.train(1)

        return [str(one) for one in Cluster(3).outcomes(train)]

    assert "which adpsgd does not support" in resume(0, (0, 1, 2), **PAIRS)[0]
    assert "by an algorithm without an anchor, which local needs" in resume(0, (0, 1, 2), **LOCAL)[0]
    other = SLOWMO | {"fragments": 2}
    assert "averages of other fragments or another average_every" in resume(1, (0, 1, 2), **other)[0]
    assert all("outer momentum of slowmo" in one for one in resume(2, (0,), **SLOWMO))
    assert resume(2, (0, 1, 2), **SLOWMO) == ["None"] * 3
    assert all("state differs" in one and "where rank 1 has" in one for one in resume(3, (1,), **STAR))


def test_a_cut_state_of_another_model_is_refused_before_anything_is_taken_over():
    def train(rank: int) -> None:
        one = TorchRank(TorchRank.least_squares(1, MOMENTUM), rank, Following("lsgd", several(1, 1), 1, 1)).train(2)
        one.opt.cut()
        state = one.saved()[0]
        state["hvd_async"]["copies"]["target.-1"] = torch.zeros(3)
        with pytest.raises(ValueError, match=r"of another model: target\.-1"):
            one.load(state)
        one.train(1).opt.drain()

    Cluster(1).run(train)
