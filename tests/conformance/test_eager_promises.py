"""Promises of either binding: whose rate a round has, what an end leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster, InjectedError
from tests.conformance.cases import CASES, SCHEDULES
from tests.conformance.drive import check_late_rank, with_late_rank
from tests.conformance.eager_ranks import ADAM, MOMENTUM, SGD, TORCH, Binding, all_modes, both
from tests.conformance.fake_gpu import LateCollectives
from tests.conformance.reference import Array

# -- rounds ---------------------------------------------------------------------------------------------------


@all_modes
@pytest.mark.parametrize(("schedule", "case"), [(SCHEDULES[0], CASES[5]), (SCHEDULES[1], ADAM)], ids=["solo", "two"])
def test_every_round_that_a_late_rank_finds_has_its_leaders_learning_rate(binding, schedule, case, tapes):
    """Rank r begins at 0.01 (r + 1) and multiplies its rate by 0.5 + 0.1 r in every step."""

    def make(rank: int) -> Any:
        trainer = binding.trainer(case, quorum=schedule.quorum)
        done, factor = trainer.step, 0.5 + 0.1 * rank
        trainer.set_rate(0.01 * (rank + 1))

        def step() -> None:
            done()
            assert trainer.rate() == pytest.approx(0.01 * (rank + 1) * factor ** taken[rank])  # its own again
            taken[rank] += 1
            trainer.set_rate(trainer.rate() * factor)

        trainer.step = step
        return trainer

    taken = [0] * schedule.size
    outcomes = with_late_rank(schedule, make)
    check_late_rank(binding.framework, case, outcomes, tapes)
    for rank in range(schedule.size):
        for index, one in enumerate(tapes[rank].applied[:3]):
            leaders = [0.01 * (r + 1) * (0.5 + 0.1 * r) ** index for r in range(schedule.size - 1)]
            assert any(one.lr == pytest.approx(lr) for lr in leaders), "the late rank led a round it was not in"


def clipping(binding: Binding, seen: list[float]) -> Any:
    """A ``round_transform`` that notes the sum of a round's gradients, and clips their norm to 0.1."""
    if binding is TORCH:

        def clip(parameters: Any) -> None:
            seen.append(float(sum(p.grad.sum() for p in parameters)))
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)

        return clip

    def clipped(gradients: list[tf.Tensor]) -> Any:
        total = tf.add_n([tf.reduce_sum(g) for g in gradients])
        with tf.control_dependencies([tf.py_function(lambda x: seen.append(float(x)), [total], [])]):
            return tf.clip_by_global_norm([tf.identity(g) for g in gradients], 0.1)[0]

    return clipped


@all_modes
def test_round_transform_sees_every_round_in_step_and_in_drain(binding, tapes):
    seen: dict[int, list[float]] = {0: [], 1: []}
    outcomes = with_late_rank(
        SCHEDULES[0], lambda rank: binding.trainer(SGD, round_transform=clipping(binding, seen[rank]))
    )
    for rank, outcome in enumerate(outcomes):
        assert outcome.stats.rounds_applied == len(seen[rank]) >= 3
        assert seen[rank] == pytest.approx([a.sums[:-1].sum() / 2 for a in tapes[rank].applied if a.sums[-1]], abs=1e-5)
        moved = np.linalg.norm(outcome.after - outcome.before)
        assert moved <= 0.1 * SGD.lr * len(seen[rank]) * 1.001
        assert outcome.after.tobytes() == outcomes[0].after.tobytes()


@both
def test_a_round_that_could_not_be_applied_stops_the_rank_for_good(binding):
    def fail(_: Any) -> Any:
        raise FloatingPointError("nan")

    why = "FloatingPointError: nan" if binding is TORCH else "it was interrupted"  # (Keras applies in several calls)
    said = f"round 1 could not be applied: {why}.*restart from a checkpoint"

    def train(rank: int) -> None:
        trainer = binding.trainer(MOMENTUM, round_transform=fail)
        with pytest.raises(FloatingPointError):
            trainer.train(0, range(1))
        calls = [trainer.step, trainer.opt.drain, trainer.opt.consensus_distance]
        for call in [*calls, trainer.opt.synchronize] if binding is TORCH else calls:
            with pytest.raises(ReplicaStateError, match=said):
                call()

    Cluster(1).run(train)


# -- ends -----------------------------------------------------------------------------------------------------


@both
def test_in_consensus_all_ranks_hold_the_same_weights_and_the_distance_is_numpys(binding):
    def train(rank: int) -> tuple[Array, Array, float]:
        trainer = binding.trainer(SGD)
        trainer.train(rank, range(3 - rank))
        with trainer.opt.consensus():
            together = trainer.weights()
        assert trainer.opt.consensus_distance() == 0.0
        random = np.random.default_rng(rank)
        for index, parameter in enumerate(trainer.parameters):
            trainer.assign(index, random.normal(size=tuple(parameter.shape)))
        return together, trainer.weights(), trainer.opt.consensus_distance()

    outcomes = Cluster(3).run(train)
    weights = np.stack([weights for _, weights, _ in outcomes])
    expected = np.sqrt(np.mean(np.sum((weights - weights.mean(axis=0)) ** 2, axis=1)))
    for together, _, apart in outcomes:
        assert together.tobytes() == outcomes[0][0].tobytes()
        assert apart == pytest.approx(expected, rel=1e-6)


def spoil_state(binding: Binding, one: Any) -> None:
    """Change a number of Adam's state."""
    if binding is TORCH:
        one.opt.state[one.parameters[0]]["exp_avg"][0] += 1e-6
    else:
        one.opt._momentums[0].assign_add([1e-6, 0.0, 0.0])


@both
@pytest.mark.parametrize("what", ["weights", "state"])
def test_a_replica_that_was_changed_on_one_rank_is_found_at_the_drain_and_at_the_start(binding, what):
    def train(rank: int) -> list[str]:
        one = binding.vectors([3], ADAM, quorum="all")
        one.take([1.0, 1.0, 1.0])
        one.opt.drain()
        one.take([1.0, 1.0, 1.0])
        if rank == 1 and what == "weights":
            one.assign(0, one.weights() + 1e-6)
        elif rank == 1:
            spoil_state(binding, one)
        with pytest.raises(
            ReplicaMismatchError, match=r"replicas differ after drain\(\): rank 1 from rank 0"
        ) as reported:
            one.opt.drain()
        again = binding.vectors([3], ADAM, quorum="all")
        again.load(one.saved())
        with pytest.raises(ReplicaMismatchError, match="rank 1 from rank 0") as refused:
            again.take([1.0, 1.0, 1.0])
        return [str(reported.value), str(refused.value)]

    state = "exp_avg" if binding is TORCH else "own0_momentum"
    for messages in Cluster(3).run(train):
        for message in messages:
            assert (state in message) == (what == "state")
            assert "broadcast" in message


def after_two_steps(late: Callable[[], bool], then: Callable[[int, Any], None]) -> None:
    """Take two steps on two ranks, whose second round's sums say by ``late`` whether they are complete, and continue.

    On NCCL a round's sums are applied before they are complete, and are of no use if they never are.
    """

    class Queued(LateCollectives):
        sums = 0

        def allreduce_sum(self, *args: Any, **options: Any) -> Any:
            handle = super().allreduce_sum(*args, **options)
            self.sums += 1
            if self.sums == 2:
                handle.done = late
            return handle

    def train(rank: int) -> None:
        one = TORCH.vectors([2], MOMENTUM, quorum="all")
        for _ in range(2):
            one.take(1.0)
        both_stepped.wait(60.0)
        then(rank, one)

    both_stepped = threading.Barrier(2)
    assert Cluster(2, wrap=lambda one: Queued(one._board, one.rank, one.size)).outcomes(train) == [None, None]


def check_not_saved(one: Any) -> None:
    with pytest.raises(ReplicaStateError, match="round 2 was applied before it was complete"):
        one.saved()


def test_weights_are_not_saved_after_a_round_that_was_applied_has_failed():
    stepped = threading.Event()

    def fail_later() -> bool:
        if stepped.is_set():
            raise InjectedError("the network is gone")
        return False

    def drain(rank: int, one: Any) -> None:
        stepped.set()
        with pytest.raises(InjectedError, match="the network is gone"):
            one.opt.drain()
        check_not_saved(one)

    after_two_steps(fail_later, drain)


@pytest.mark.parametrize("call", ["step", "drain"])
def test_a_rank_that_dies_with_rounds_queued_is_named(call):
    def die(rank: int, one: Any) -> None:
        if rank == 1:
            local_engine().stop()  # type: ignore[union-attr]
            return
        with pytest.raises(InjectedError, match="rank 1 on host host1 closed its channel without a goodbye"):
            one.take(1.0) if call == "step" else one.opt.drain()
        check_not_saved(one)

    after_two_steps(lambda: False, die)
