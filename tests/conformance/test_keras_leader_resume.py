"""Keras: following that goes on in another job, from what was saved after drain() and after cut()."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import hvd_async.tensorflow.keras as hvd
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance import reference
from tests.conformance.cases import CASES
from tests.conformance.drive import scripted_engine
from tests.conformance.keras_gossip_ranks import GossipTrainer, least_squares
from tests.conformance.keras_leader_ranks import LeaderTrainer, resume, saved
from tests.conformance.keras_ranks import Scalar, plain
from tests.conformance.leader_drive import TIMEOUT, Seen, check, go_on, renumbered
from tests.conformance.leader_reference import Following, replay, several

MOMENTUM, ADAM = CASES[1], CASES[6]
BY_STEP = Following(
    "lsgd", several(2, 2), 8, 16, loss_window=3, local_pull=lambda step: 0.9 / step, global_prox=lambda step: step / 100
)
ELASTIC = Following("easgd", global_period=8)


class Normed(LeaderTrainer):
    """A rank with batch-norm statistics that move with each step, and are averaged by pulls."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
        super().__init__(*args, **{"model": self.model} | options)

    def given(self, before: Any) -> list[Any]:
        mean = self.model.layers[0].moving_mean
        mean.assign_add([(self.rank + 1.0) / (self.steps + 1)] * 2)
        return super().given(before[:6])

    def weights(self) -> Any:
        """The statistics too."""
        return np.concatenate([super().weights(), *self.model.get_weights()[2:]])

    def assign(self, weights: Any) -> None:
        super().assign(weights[:6])
        if len(weights) > 6:
            self.model.set_weights([np.ones(2), np.zeros(2), weights[6:8], weights[8:]])


@pytest.mark.parametrize("done", [3, 16, 17])
@pytest.mark.parametrize(
    ("following", "kind", "graph"),
    [
        (BY_STEP, LeaderTrainer, True),
        (BY_STEP, Normed, False),
        (ELASTIC, LeaderTrainer, False),
        (ELASTIC, Normed, True),
    ],
    ids=["lsgd", "lsgd-normed", "easgd", "easgd-normed"],
)
def test_each_ranks_own_state_goes_on_as_if_nothing_had_been(following, kind, graph, done):
    """Bit by bit, beside a job that made the cut and went on: before the first pull, when one has come and was not
    taken up, and when it was. (So few steps after a pull no other is due where some are done before others.)"""
    problem, states = least_squares(2, ADAM if graph else MOMENTUM), list[Any]([None] * 2)

    def whole(rank: int) -> tuple[Any, ...]:
        trainer = kind(problem, rank, following, graph=graph)
        go_on(trainer, done)
        trainer.opt.cut()
        states[rank] = saved(trainer)
        return finish(trainer)

    def second(rank: int) -> tuple[Any, ...]:
        trainer = resume(states[rank], kind(problem, rank, following, graph=graph), done)
        again = saved(trainer)  # (what was loaded can be saved again)
        assert {name: value.tolist() for name, value in again.items()} == {
            name: value.tolist() for name, value in states[rank].items()
        }
        return finish(trainer, following.pulls(rank, done))

    def finish(trainer: Any, first: int = 0) -> tuple[Any, ...]:
        path = go_on(trainer, 16, first)
        before = trainer.opt.stats()
        trainer.opt.drain()
        return path, before.mean_loss, trainer.weights().tobytes()

    ends = Cluster(2).run(whole)
    assert {bool(state["hvd_async.fresh"].size) for state in states} == {done == 16}
    assert {"hvd_async.copy.statistics" in state for state in states} == {done == 16 and kind is Normed}
    assert Cluster(2).run(second) == ends
    assert len({path[10] for path, _, _ in ends}) == 2
    assert len({drained for _, _, drained in ends}) == 1


@pytest.mark.parametrize("following", [BY_STEP, ELASTIC], ids=["lsgd", "easgd"])
def test_a_cut_state_that_is_drained_at_once_gives_what_a_drain_would_have(following):
    """The leader's weights, though no loss was told in this job; or the centre."""
    problem, states = least_squares(2, MOMENTUM), list[Any]([None] * 2)

    def first(rank: int) -> Any:
        trainer = LeaderTrainer(problem, rank, following)
        trainer.train(20 + rank)
        for _ in range(2):  # (steps that are left may be enough for who is done last, but for one pull only)
            trainer.opt.cut()
        states[rank] = saved(trainer)
        trainer.opt.drain()
        return trainer.weights().tolist()

    def second(rank: int) -> Any:
        trainer = resume(states[rank], LeaderTrainer(problem, rank, following), 20 + rank)
        trainer.opt.drain()
        return trainer.weights().tolist()

    ends = Cluster(2).run(first)
    assert Cluster(2).run(second) == ends


def drained() -> dict[str, Any]:
    """Rank 0's state of two that have followed a leader."""

    def train(rank: int) -> dict[str, Any]:
        trainer = LeaderTrainer(least_squares(2, ADAM), rank, Following("lsgd", several(2, 2), 1, 2))
        trainer.train(4)
        trainer.opt.drain()
        return saved(trainer)

    return Cluster(2).run(train)[0]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("algorithm", ["lsgd", "easgd"])
def test_rank_0s_drained_state_resumes_at_any_size(algorithm, size):
    """With its optimizer's moments, from the weights that all had, also under the other algorithm."""
    state, problem = drained(), least_squares(size, ADAM)
    following = Following(algorithm, several(size, 1), 1, 2)

    def second(rank: int) -> Seen:
        trainer, seen = resume(state, LeaderTrainer(problem, rank, following)), Seen()
        assert trainer.opt.rounds == state["hvd_async.rounds"]
        seen.log = trainer.worker().receiver.log = []
        go_on(trainer, 5)
        trainer.opt.drain()
        seen.path, seen.drained, seen.stats = trainer.path, trainer.weights(), trainer.opt.stats()
        assert trainer.opt.rounds == state["hvd_async.rounds"] + seen.stats.pulls
        return seen

    seen = Cluster(size).run(second)
    held = [
        np.concatenate([state[f"{name}_{kind}"].astype(np.float64).ravel() for name in ("x2", "x1")])
        for kind in ("momentum", "velocity")
    ]
    resumed = dataclasses.replace(
        problem, start=np.tile(state["weights"], (size, 1)), states=(reference.State(4, *held),) * size
    )
    check(replay(resumed, following, [renumbered(own.log, 4) for own in seen]), seen)


@pytest.mark.parametrize("before", ["leader", "gossip", "eager"])
def test_other_wrappers_take_up_what_was_drained_and_hand_it_back(before):
    """With the optimizer's moments, and counts of what each calls a round."""
    made: dict[str, Callable[..., Any]] = {
        "leader": lambda: hvd.LeaderOptimizer(plain(ADAM), group=1, global_period=1),
        "gossip": lambda: hvd.GossipOptimizer(plain(ADAM)),
        "eager": lambda: hvd.EagerOptimizer(plain(ADAM), quorum="all"),
    }

    together, states = threading.Barrier(2), list[Any]([None] * 4)

    def train(rank: int) -> None:
        held, rounds = 0.0, 0
        for steps, name in enumerate((before, *[name for name in made if name != before], before), 1):
            one = Scalar(made[name]())
            one.weight.assign(held)
            if steps > 1:
                together.wait(TIMEOUT)
                one.opt.set_state(states[steps - 2])
                assert one.opt.rounds == rounds
            if name == "leader":
                one.opt.record_loss(1.0)
            one.step(1.0 + rank)
            one.opt.drain()
            held, rounds = float(one.weight), one.opt.rounds
            assert one.opt.get_state()["iteration"] == steps
            if rank == 0:
                states[steps - 1] = one.opt.get_state()

    Cluster(2).run(train)


# -- what is refused ------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[int], Any]] = {
    "gossip": lambda rank: GossipTrainer(least_squares(3, MOMENTUM), rank, topology="star"),
    "lsgd": lambda rank: LeaderTrainer(least_squares(3, MOMENTUM), rank, Following(groups=several(3, 3))),
    "alone": lambda rank: LeaderTrainer(least_squares(3, MOMENTUM), rank, Following(groups=several(3, 1))),
    "easgd": lambda rank: LeaderTrainer(least_squares(3, MOMENTUM), rank, Following("easgd")),
}


def cut_states(make: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Each of three ranks', after four steps."""

    def train(rank: int) -> dict[str, Any]:
        trainer = make(rank)
        trainer.train(4)
        trainer.opt.cut()
        return saved(trainer)

    return Cluster(3).run(train)


@pytest.mark.parametrize("before", KINDS)
def test_a_cut_state_goes_to_its_own_rank_size_and_kind_only(before):
    """On the rank that loads it, and nothing has changed."""
    state = cut_states(KINDS[before])[1]
    for now in KINDS:
        for size, index in ((3, 1), (3, 0), (2, 1)):
            with scripted_engine(size, index):
                if size == 2 and now == "lsgd":
                    continue  # (its groups are of three)
                following = Following("easgd") if now == "easgd" else Following(groups=several(size, 1))
                trainer = (
                    KINDS[now](0) if size == 3 or now == "gossip"
                    else LeaderTrainer(least_squares(2, MOMENTUM), 0, following)
                )  # fmt: skip
                held = saved(trainer)
                if (now, size, index) == (before, 3, 1):
                    resume(state, trainer)
                    continue
                said = rf"rank 1 of 3 after cut.*this is rank {index} of {size}. Load each rank's own file"
                with pytest.raises(ValueError, match=r"save it after drain\(\)" if (size, index) == (3, 1) else said):
                    trainer.opt.set_state({name: value for name, value in state.items() if name != "weights"})
                assert {name: value.tolist() for name, value in saved(trainer).items()} == {
                    name: value.tolist() for name, value in held.items()
                }
    del state["weights"]
    with scripted_engine(3, 1):
        eager = hvd.EagerOptimizer(plain(MOMENTUM))
        eager.build(KINDS["easgd"](0).variables)
        with pytest.raises(ValueError, match=r"save it after drain\(\)"):
            eager.set_state(state)


def test_gradients_pending_of_an_eager_optimizer_and_another_optimizers_state_are_refused():
    state = {name: value for name, value in drained().items() if name != "weights"}
    with scripted_engine(2):
        trainer = LeaderTrainer(least_squares(2, ADAM), 0, Following(groups=several(2, 1)))
        trainer.opt.set_state(state)
        assert int(trainer.opt.iterations) == 4
        with pytest.raises(ValueError, match="gradients pending"):
            trainer.opt.set_state(state | {"hvd_async.versions.0": np.ones(2)})
        with pytest.raises(ValueError, match="of another optimizer"):
            LeaderTrainer(least_squares(2, MOMENTUM), 0, Following(groups=several(2, 1))).opt.set_state(state)


def test_an_optimizer_that_is_not_built_says_so_and_goes_on_once_it_is():
    def train(rank: int) -> float:
        opt = hvd.LeaderOptimizer(plain(MOMENTUM), group=1)
        for call in (opt.get_state, lambda: opt.set_state({}), opt.drain, opt.cut, opt.consensus_distance):
            with pytest.raises(ValueError, match=r"optimizer.build\(model.trainable_variables\)"):
                call()
        one = Scalar(opt)
        one.step(1.0, 1.0)
        opt.drain()
        return float(one.weight)

    assert Cluster(2).run(train) == [pytest.approx(-MOMENTUM.lr)] * 2


def test_what_cannot_be_saved_or_loaded_says_what_to_do():
    def train(rank: int) -> None:
        trainer = KINDS["lsgd"](rank)
        fresh = saved(trainer)
        trainer.train(2)
        with pytest.raises(ReplicaStateError, match=r"on their way.*drain\(\).*rank 0's.*cut\(\)"):
            trainer.opt.get_state()
        with pytest.raises(ReplicaStateError, match=r"call drain\(\) before loading"):
            resume(fresh, trainer)
        trainer.opt.cut()
        trainer.opt.get_state()
        trainer.train(1)
        trainer.opt.drain()
        resume(saved(trainer), trainer)
        trainer.train(1)  # the ranks meet anew
        trainer.opt.drain()

    Cluster(3).run(train)


def test_states_of_a_cut_on_one_rank_only_or_of_two_cuts_are_told_to_all():
    """How it stood between the ranks must be the same for all."""
    early = cut_states(KINDS["lsgd"])

    def more(rank: int) -> dict[str, Any]:
        trainer = resume(early[rank], KINDS["lsgd"](rank), 4)
        trainer.train(3)
        trainer.opt.cut()
        return saved(trainer)

    late = Cluster(3).run(more)

    def train(rank: int, others: Any) -> None:
        trainer = KINDS["lsgd"](rank)
        state = early[rank] if rank == 1 else others and others[rank]
        (resume(state, trainer, 4) if state else trainer).train(1)

    for others in (None, late):
        for outcome in Cluster(3).outcomes(lambda rank, others=others: train(rank, others)):
            assert isinstance(outcome, ReplicaMismatchError)


def test_a_scale_is_saved_and_loaded_with_the_rest():
    def train(rank: int) -> list[float]:
        def scaled() -> Scalar:
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), initial_scale=16.0)
            return Scalar(hvd.LeaderOptimizer(optimizer, group=1, global_period=100), graph=True)

        one = scaled()
        for gradient in (16.0, np.inf, 8.0):
            one.step(gradient, 1.0)
        one.opt.cut()
        state, held = one.opt.get_state(), float(one.weight)
        other = scaled()
        other.weight.assign(held)
        other.opt.set_state(state)
        return [one.step(8.0, 1.0) - other.step(8.0, 1.0), float(other.opt.dynamic_scale.numpy()), held]

    assert Cluster(1).run(train) == [[0.0, 8.0, -2.5]]
