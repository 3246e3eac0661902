"""torch: following that goes on in another job, from what was saved after drain() and after cut()."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_async.torch as hvd
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conformance import reference
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import least_squares
from tests.conformance.leader_drive import Seen, check, go_on, renumbered, wait_for_pulls
from tests.conformance.leader_reference import Following, replay, several
from tests.conformance.torch_gossip_ranks import GossipTrainer, resume, saved
from tests.conformance.torch_leader_ranks import LeaderTrainer, NormedTrainer
from tests.conformance.torch_ranks import plain

MOMENTUM, ADAM = CASES[1], CASES[6]
PAIRS = Following("lsgd", several(4, 2), 8, 16, loss_window=3)
ELASTIC = Following("easgd", global_period=8)
BY_STEP = dataclasses.replace(PAIRS, local_pull=lambda step: 0.9 / step, global_prox=lambda step: step / 100)


@pytest.mark.parametrize("done", [3, 7, 16, 17])
@pytest.mark.parametrize(
    ("following", "kind"),
    [(PAIRS, LeaderTrainer), (BY_STEP, NormedTrainer), (ELASTIC, LeaderTrainer), (ELASTIC, NormedTrainer)],
    ids=["lsgd", "by-step-normed", "easgd", "easgd-normed"],
)
def test_each_ranks_own_state_goes_on_as_if_nothing_had_been(following, kind, done):
    """Bit by bit, beside a job that made the cut and went on, and one that made none: before the first pull, right
    before one is due, when one has come and was not taken up, and when it was. (At the end none is due where some are
    done before others.)"""
    if following is ELASTIC and done == 3:
        done = 1
    problem = least_squares(4, MOMENTUM)
    states, norms = list[Any]([None] * 4), list[Any]([None] * 4)

    def uncut(rank: int) -> tuple[Any, ...]:
        trainer = kind(problem, rank, following)
        go_on(trainer, done)
        return finish(trainer)

    def whole(rank: int) -> tuple[Any, ...]:
        trainer = kind(problem, rank, following)
        go_on(trainer, done)
        trainer.opt.cut()
        states[rank] = saved(trainer)
        if kind is NormedTrainer:
            norms[rank] = {name: tensor.clone() for name, tensor in trainer.norm.state_dict().items()}
        return finish(trainer)

    def second(rank: int) -> tuple[Any, ...]:
        trainer = kind(problem, rank, following)
        if kind is NormedTrainer:
            trainer.norm.load_state_dict(norms[rank])
        resume(states[rank], trainer, done)
        again = saved(trainer)["opt"]["hvd_async"]  # (what was loaded can be saved again)
        assert again["cut"]
        assert again["standing"] == states[rank]["opt"]["hvd_async"]["standing"]
        return finish(trainer, following.pulls(rank, done))

    def finish(trainer: LeaderTrainer, first: int = 0) -> tuple[Any, ...]:
        path = go_on(trainer, 33, first)
        before = trainer.opt.stats()
        trainer.opt.drain()
        return path, before.mean_loss, trainer.weights().tobytes()

    ends = Cluster(4).run(whole)
    assert {bool(state["opt"]["hvd_async"]["fresh"]) for state in states} == {done == 16}
    assert Cluster(4).run(second) == ends
    assert Cluster(4).run(uncut) == ends
    assert len({path[20] for path, _, _ in ends}) == 4
    assert len({drained for _, _, drained in ends}) == 1


@pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])
def test_a_cut_state_that_is_drained_at_once_gives_what_a_drain_would_have(following):
    """The leader's weights, though no loss was told in this job; or the centre."""
    problem, states = least_squares(4, MOMENTUM), list[Any]([None] * 4)

    def first(rank: int) -> Any:
        trainer = LeaderTrainer(problem, rank, following).train(20 + rank)
        for _ in range(2):  # (steps that are left may be enough for those that are done last, but for one pull only)
            trainer.opt.cut()
        states[rank] = saved(trainer)
        trainer.opt.drain()
        return trainer.weights().tolist()

    def second(rank: int) -> Any:
        trainer = resume(states[rank], LeaderTrainer(problem, rank, following), 20 + rank)
        trainer.opt.drain()
        return trainer.weights().tolist()

    ends = Cluster(4).run(first)
    assert Cluster(4).run(second) == ends


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("algorithm", ["lsgd", "easgd"])
def test_rank_0s_drained_state_resumes_at_any_size(algorithm, size):
    """With its optimizer's moments, from the weights that all had, also under the other algorithm."""
    problem = least_squares(2, ADAM)

    def first(rank: int) -> dict[str, Any]:
        trainer = LeaderTrainer(problem, rank, Following("lsgd", several(2, 2), 1, 2)).train(4)
        trainer.opt.drain()
        return saved(trainer)

    state = Cluster(2).run(first)[0]
    problem, following = least_squares(size, ADAM), Following(algorithm, several(size, 1), 1, 2)

    def second(rank: int) -> Seen:
        trainer, seen = resume(state, LeaderTrainer(problem, rank, following), 0), Seen()
        assert trainer.opt.rounds == state["opt"]["hvd_async"]["rounds"]
        seen.log = trainer.worker().receiver.log = []
        for _ in range(5):
            trainer.step()
            seen.path.append(trainer.weights())
            wait_for_pulls(trainer.worker(), following.pulls(rank, trainer.steps))
        trainer.opt.drain()
        seen.drained, seen.stats = trainer.weights(), trainer.opt.stats()
        assert trainer.opt.rounds == state["opt"]["hvd_async"]["rounds"] + seen.stats.pulls
        return seen

    seen = Cluster(size).run(second)
    moments = [state["opt"]["state"][index] for index in (0, 1)]
    held = [np.concatenate([one[key].double().numpy().ravel() for one in moments]) for key in ("exp_avg", "exp_avg_sq")]
    weights = np.concatenate([one.double().numpy().ravel() for one in state["model"]])
    resumed = dataclasses.replace(
        problem, start=np.tile(weights, (size, 1)), states=(reference.State(4, *held),) * size
    )
    check(replay(resumed, following, [renumbered(own.log, 4) for own in seen]), seen)


def test_a_state_after_cut_goes_to_its_own_rank_and_size_only():
    states = cut_states(lambda rank: LeaderTrainer(least_squares(3, MOMENTUM), rank, Following(groups=several(3, 1))))

    def load(rank: int) -> None:
        size = local_engine().size  # type: ignore[union-attr]
        trainer = LeaderTrainer(least_squares(size, MOMENTUM), rank, Following(groups=several(size, 1)))
        before = trainer.opt.state_dict()
        other = states[(rank + 1) % 3 if size == 3 else 1]["opt"]
        said = rf"rank {other['hvd_async']['index']} of 3 after cut.*this is rank {rank} of {size}. Load each rank's"
        with pytest.raises(ValueError, match=said + r".*or save after drain\(\)"):
            trainer.opt.load_state_dict(other)
        assert trainer.opt.state_dict() == before  # nothing has changed
        trainer.train(2).opt.drain()

    for size in (1, 2, 3):
        Cluster(size).run(load)


def cut_states(make: Callable[[int], Any], size: int = 3) -> list[dict[str, Any]]:
    """Each rank's, after four steps."""

    def train(rank: int) -> dict[str, Any]:
        trainer = make(rank).train(4)
        trainer.opt.cut()
        return saved(trainer)

    return Cluster(size).run(train)


WRAPPERS: dict[str, Callable[[int], Any]] = {
    "gossip": lambda rank: GossipTrainer(least_squares(3, MOMENTUM), rank, topology="star"),
    "lsgd": lambda rank: LeaderTrainer(least_squares(3, MOMENTUM), rank, Following(groups=several(3, 3))),
    "alone": lambda rank: LeaderTrainer(least_squares(3, MOMENTUM), rank, Following(groups=several(3, 1))),
    "easgd": lambda rank: LeaderTrainer(least_squares(3, MOMENTUM), rank, Following("easgd")),
}


@pytest.mark.parametrize("before", WRAPPERS)
@pytest.mark.parametrize("now", WRAPPERS)
def test_a_cut_state_of_another_kind_is_refused_with_a_hint(before, now):
    """On the rank that loads it, and nothing has changed; what was drained is taken by all."""
    states = cut_states(WRAPPERS[before])

    def load(rank: int) -> Any:
        trainer = WRAPPERS[now](rank)
        held, state = trainer.opt.state_dict(), states[rank]["opt"]
        if before == now:
            resume(states[rank], trainer, 4)
        else:
            with pytest.raises(ValueError, match=r"save it after drain\(\)"):
                trainer.opt.load_state_dict(state)
            assert trainer.opt.state_dict() == held
        trainer.train(2).opt.drain()
        drained = trainer.opt.state_dict()
        for wrapper in WRAPPERS.values():
            wrapper(rank).opt.load_state_dict(drained)
        return trainer.weights().tolist()

    one, *others = Cluster(3).run(load)
    assert others == [one, one]


def test_an_eager_optimizer_and_one_that_follows_take_each_others_drained_states_only():
    def train(rank: int) -> None:
        trainer = LeaderTrainer(least_squares(2, MOMENTUM), rank, Following(groups=several(2, 1))).train(4)
        trainer.opt.cut()
        eager = hvd.EagerOptimizer(plain(MOMENTUM, trainer.parameters))
        with pytest.raises(ValueError, match=r"save it after drain\(\)"):
            eager.load_state_dict(trainer.opt.state_dict())
        trainer.opt.drain()
        eager.load_state_dict(trainer.opt.state_dict())
        assert eager.rounds == trainer.opt.rounds > 0
        trainer.opt.load_state_dict(eager.state_dict())
        trainer.train(1).opt.drain()

    Cluster(2).run(train)


def test_what_cannot_be_saved_or_loaded_says_what_to_do():
    def train(rank: int) -> None:
        trainer = LeaderTrainer(least_squares(2, MOMENTUM), rank, Following(groups=several(2, 2)))
        fresh = trainer.opt.state_dict()
        trainer.train(2)
        with pytest.raises(ReplicaStateError, match=r"on their way.*drain\(\).*rank 0's.*cut\(\)"):
            trainer.opt.state_dict()
        with pytest.raises(ReplicaStateError, match=r"call drain\(\) before loading"):
            trainer.opt.load_state_dict(fresh)
        trainer.opt.cut()
        trainer.opt.state_dict()
        trainer.train(1).opt.drain()
        trainer.opt.load_state_dict(trainer.opt.state_dict())
        trainer.train(1).opt.drain()  # the ranks meet anew

    Cluster(2).run(train)


def test_a_state_after_cut_on_one_rank_only_is_told_to_all():
    states = cut_states(WRAPPERS["lsgd"])

    def train(rank: int) -> None:
        trainer = WRAPPERS["lsgd"](rank)
        if rank == 1:
            resume(states[rank], trainer, 4)
        trainer.train(1)

    for outcome in Cluster(3).outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)


def test_states_of_two_different_cuts_are_refused():
    """How it stood between the ranks must be the same for all."""
    early, late = cut_states(WRAPPERS["lsgd"]), list[Any]()

    def more(rank: int) -> dict[str, Any]:
        trainer = resume(early[rank], WRAPPERS["lsgd"](rank), 4).train(3)
        trainer.opt.cut()
        return saved(trainer)

    late = Cluster(3).run(more)

    def train(rank: int) -> None:
        resume((late if rank == 2 else early)[rank], WRAPPERS["lsgd"](rank), 4).train(1)

    for outcome in Cluster(3).outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)


def test_strengths_by_step_go_on_from_a_drained_state():
    """They are functions of the rank's own step, earlier runs included."""
    problem, seen = least_squares(2, MOMENTUM), []
    following = Following("lsgd", several(2, 2), 2, 4)

    def watched(step: int) -> float:
        seen.append(step)
        return 0.1

    following = dataclasses.replace(following, local_prox=watched)

    def first(rank: int) -> dict[str, Any]:
        trainer = LeaderTrainer(problem, rank, following)
        for _ in range(5):
            trainer.step()
        trainer.opt.drain()
        return saved(trainer)

    state = Cluster(2).run(first)[0]

    def second(rank: int) -> int:
        trainer = resume(state, LeaderTrainer(problem, rank, following), 5)
        trainer.worker()  # (all are made)
        seen.clear()
        trainer.opt.cut()
        trainer.step()
        steps: int = trainer.opt.stats().steps
        trainer.opt.drain()
        return steps

    assert Cluster(2).run(second) == [1, 1]
    assert set(seen) == {6}


def test_a_cut_state_of_another_model_is_refused():
    """Before anything is taken over."""
    following = Following("lsgd", several(1, 1), 1, 1)

    def first(rank: int) -> dict[str, Any]:
        trainer = LeaderTrainer(least_squares(1, MOMENTUM), rank, following).train(2)
        trainer.opt.cut()
        return saved(trainer)

    (state,) = Cluster(1).run(first)
    state["opt"]["hvd_async"]["copies"]["target.-1"] = torch.zeros(3)

    def second(rank: int) -> None:
        opt = LeaderTrainer(least_squares(1, MOMENTUM), rank, following).opt
        with pytest.raises(ValueError, match=r"of another model: target\.-1"):
            opt.load_state_dict(state["opt"])
        opt.drain()

    Cluster(1).run(second)
