"""Leader-pull resumed in another job, from what was saved after drain() and cut(); states of all wrappers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.leader_drive import TIMEOUT, Seen, check, in_step, renumbered
from tests.conformance.leader_reference import Following, replay, several
from tests.conformance.weight_ranks import (
    ADAM,
    MOMENTUM,
    KerasGraphRank,
    KerasRank,
    Rank,
    TorchRank,
    both,
    values,
)

BY_STEP = Following(
    "lsgd", several(4, 2), 8, 16, loss_window=3, local_pull=lambda step: 0.9 / step, global_prox=lambda step: step / 100
)
ELASTIC = Following("easgd", global_period=8)


def proceed(one: Rank, steps: int, first: int = 0) -> list[bytes]:
    """Steps of ranks in step; ``first`` as of ``in_step``. Returns the weights and statistics after each."""
    path = []
    for _ in range(steps):
        in_step(one, 1, first)
        path.append(one.bits())
    return path


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
def test_each_ranks_own_state_continues_as_if_nothing_had_been(binding, following, normed, done):
    """Bit by bit, next to a job that made the cut and continued, and one that made none: before the first pull, right
    before one is due, when one has come and was not taken up, and when it was. (After the last step none may be due
    for ranks that are left when others are done.)"""
    problem, saved = binding.least_squares(4), list[Any]([None] * 4)

    def uncut(rank: int) -> tuple[Any, ...]:
        one = binding(problem, rank, following, normed=normed)
        proceed(one, done)
        return finish(one)

    def whole(rank: int) -> tuple[Any, ...]:
        one = binding(problem, rank, following, normed=normed)
        proceed(one, done)
        one.opt.cut()
        saved[rank] = one.saved()
        kept = one.worker().saved_state()
        assert kept is not None
        assert bool(kept.results.fresh) == (done == 16)
        return finish(one)

    def second(rank: int) -> tuple[Any, ...]:
        one = binding(problem, rank, following, normed=normed).resume(saved[rank], done)
        assert values(one.saved()) == values(saved[rank])  # what was loaded can be saved again
        return finish(one, following.pulls(rank, done))

    def finish(one: Rank, first: int = 0) -> tuple[Any, ...]:
        path = proceed(one, 17 if done == 7 else 16, first)
        mean = one.opt.stats().mean_loss
        one.opt.drain()
        return path, mean, one.bits()

    ends = Cluster(4).run(whole)
    assert Cluster(4).run(second) == ends
    if binding is TorchRank:
        assert Cluster(4).run(uncut) == ends
    assert len({path[10] for path, _, _ in ends}) == 4
    assert len({drained for _, _, drained in ends}) == 1


@pytest.mark.parametrize(("binding", "following"), [(TorchRank, BY_STEP), (KerasRank, ELASTIC)], ids=["lsgd", "easgd"])
def test_a_cut_state_that_is_drained_at_once_gives_what_a_drain_would_have(binding, following):
    """The leader's weights, though no loss was recorded in this job; or the center."""
    problem, saved = binding.least_squares(4), list[Any]([None] * 4)

    def first(rank: int) -> Any:
        one = binding(problem, rank, following).train(20 + rank)
        for _ in range(
            2
        ):  # (steps that are left may be enough for the ones that are done last, except for one pull only)
            one.opt.cut()
        saved[rank] = one.saved()
        one.opt.drain()
        return one.weights().tolist()

    def second(rank: int) -> Any:
        one = binding(problem, rank, following).resume(saved[rank], 20 + rank)
        one.opt.drain()
        return one.weights().tolist()

    ends = Cluster(4).run(first)
    assert Cluster(4).run(second) == ends


@both
@pytest.mark.parametrize(("algorithm", "size"), [("lsgd", 1), ("lsgd", 3), ("easgd", 3)])
def test_rank_0s_drained_state_resumes_at_any_size(binding, algorithm, size):
    """With its optimizer's moments, from the weights that all had, also under the other algorithm."""

    def first(rank: int) -> tuple[Any, int]:
        one = binding(binding.least_squares(2, ADAM), rank, Following("lsgd", several(2, 2), 1, 2)).train(4)
        one.opt.drain()
        return one.saved(), one.opt.rounds

    saved, rounds = Cluster(2).run(first)[0]
    problem, following = binding.least_squares(size, ADAM), Following(algorithm, several(size, 1), 1, 2)
    moments: list[Any] = []

    def second(rank: int) -> Seen:
        one = binding(problem, rank, following).resume(saved)
        assert one.opt.rounds == rounds
        moments.append(one.moments()._replace(t=4))
        seen = Seen(one)
        in_step(one, 5)
        seen.drain(one)
        assert one.opt.rounds == rounds + seen.stats.pulls
        return seen

    seen = Cluster(size).run(second)
    resumed = dataclasses.replace(problem, start=np.tile(saved[1], (size, 1)), states=(moments[0],) * size)
    check(replay(resumed, following, [renumbered(own.log, 4) for own in seen]), seen)


@both
def test_wrappers_take_up_what_another_has_drained(binding):
    """With the optimizer's moments, and counts of what each calls a round."""
    options: dict[str, dict[str, Any]] = {
        "LeaderOptimizer": {},
        "GossipOptimizer": {},
        "EagerOptimizer": {"quorum": "all"},
    }
    together, saved, problem = threading.Barrier(2), list[Any](), binding.least_squares(2, ADAM)
    moments: list[Any] = []

    def train(rank: int) -> None:
        rounds, one = 0, None
        for done, kind in enumerate(("Leader", "Gossip", "Leader", "Eager", "Leader")):
            wrapper = f"{kind}Optimizer"
            following = Following(groups=several(2, 1), local_period=1, global_period=1)
            one = binding(problem, rank, following, wrapper=wrapper, **options[wrapper])
            if done:
                together.wait(TIMEOUT)
                one.resume(saved[-1], done)
                assert one.opt.rounds == rounds
                assert np.array_equal(one.moments().second, moments[-1].second)
            one.train(1).opt.drain()
            rounds = one.opt.rounds
            together.wait(TIMEOUT)
            if rank == 0:
                moments.append(one.moments())
                saved.append(one.saved())

    Cluster(2).run(train)
    assert len(saved) == 5


# -- what is refused ------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Any, int, int], Rank]] = {
    "gossip": lambda binding, size, rank: binding(
        binding.least_squares(size), rank, Following(), wrapper="GossipOptimizer", topology="star"
    ),
    "eager": lambda binding, size, rank: binding(
        binding.least_squares(size), rank, Following(), wrapper="EagerOptimizer"
    ),
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


@pytest.mark.parametrize("kind", ["gossip", "lsgd"])
@both
def test_what_cannot_be_saved_or_loaded_says_what_to_do(binding, kind):
    def train(rank: int) -> None:
        one = KINDS[kind](binding, 3, rank)
        fresh = one.state()
        one.train(2)
        with pytest.raises(ReplicaStateError, match=r"on their way.*drain\(\).*rank 0's.*cut\(\)"):
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
            wrapper = {"gossip": "GossipOptimizer", "lsgd": "LeaderOptimizer"}[kind]
            adam = binding(binding.least_squares(3, ADAM), 0, Following(groups=several(3, 3)), wrapper=wrapper)
            with pytest.raises(ValueError, match="of another optimizer"):
                adam.load(state)


def test_states_of_a_cut_on_one_rank_only_or_of_two_cuts_are_reported_to_all():
    """How it stood between the ranks must be the same for all."""
    early = cut_states(TorchRank, "lsgd")
    late = cut_states(TorchRank, "lsgd", early)

    def train(rank: int, others: Any) -> None:
        one = KINDS["lsgd"](TorchRank, 3, rank)
        saved = early[rank] if rank == 1 else others and others[rank]
        (one.resume(saved, 4) if saved else one).train(1)

    for others in (None, late):
        for outcome in Cluster(3).outcomes(lambda rank, others=others: train(rank, others)):
            assert isinstance(outcome, ReplicaMismatchError)


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
