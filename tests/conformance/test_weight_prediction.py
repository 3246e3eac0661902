"""Weights predicted ahead between rounds, in both bindings: by the reference, until a drain or cut, on all ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hvd_async.algorithms.eager.weight_prediction import factor, momentum_of
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.cases import CASES, Case, Schedule, Script
from tests.conformance.drive import scripted_engine, tapes, with_late_rank  # noqa: F401  a fixture
from tests.conformance.eager_ranks import MOMENTUM, NAMES, NAN, TINY, TORCH, all_modes, both
from tests.conformance.reference import Applied, replay

SCRIPT = Script("uneven", ((), (1,), (2, 1, 3), (0,), (4, 0), (1, 1, 1)))
CARRIED = [case for case in CASES if case.momentum or case.kind == "adam"]


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize(
    ("binding", "case"),
    [
        *(pytest.param(NAMES[name], case, id=f"{name}-{case.name}")
          for name, case in itertools.product(("torch", "keras"), CARRIED)),
        pytest.param(NAMES["keras-graph"], MOMENTUM, id="keras-graph-momentum"),
    ],
)  # fmt: skip
def test_the_model_holds_predicted_weights(binding, case, ahead):
    trainer, worker = binding.scripted(case, SCRIPT, 4, weight_prediction=ahead)
    before = trainer.weights()
    for step in range(len(SCRIPT.steps)):
        trainer.gradient(0, step)
        trainer.step()
        expected = replay(binding.framework, case, before, worker.applied, 4, ahead)
        np.testing.assert_allclose(trainer.weights(), expected, rtol=0, atol=1e-5)


@both
def test_one_round_ahead_is_nesterovs_momentum(binding):
    """At a constant rate: gradients are computed at the same weights."""
    rounds = Script("rounds", ((4,),) * 6)
    ours, _ = binding.scripted(MOMENTUM, rounds, 4, weight_prediction=1)
    nesterov = Case("nesterov", "sgd", MOMENTUM.lr, momentum=MOMENTUM.momentum, nesterov=True)
    plain, _ = binding.scripted(nesterov, rounds, 4, weight_prediction=0)
    for step in range(6):
        for trainer in (ours, plain):
            trainer.gradient(0, step)
            trainer.step()
        np.testing.assert_allclose(ours.weights(), plain.weights(), rtol=0, atol=1e-5)


@all_modes
@pytest.mark.parametrize("end", ["drain", "cut"])
def test_an_end_leaves_the_weights_themselves(binding, end, tapes):  # noqa: F811
    """Bit for bit those that the rounds have led to, as without prediction, on every rank."""

    def train(rank):
        trainer = binding.trainer(MOMENTUM, quorum=2, weight_prediction=2)
        before = trainer.weights()
        for step in range(4):
            trainer.gradient(rank, step)
            trainer.step()
        ahead = trainer.weights()
        getattr(trainer.opt, end)()
        after = trainer.weights()
        trainer.opt.drain()
        return before, ahead, after

    outcomes = Cluster(2).run(train)
    for rank, (before, ahead, after) in enumerate(outcomes):
        rounds = tapes[rank].applied[:4]
        mode = binding.framework
        np.testing.assert_allclose(after, replay(mode, MOMENTUM, before, rounds, 2), rtol=0, atol=1e-6)
        np.testing.assert_allclose(ahead, replay(mode, MOMENTUM, before, rounds, 2, 2), rtol=0, atol=1e-6)
        assert np.abs(ahead - after).max() > 1e-3
        assert after.tobytes() == outcomes[0][2].tobytes()


@both
def test_after_a_drain_training_goes_on_from_weights_that_were_written(binding):
    """A checkpoint that is loaded, say: nothing of the weights before it comes back."""

    def train(ahead):
        trainer, worker = binding.scripted(MOMENTUM, Script("two", ((4,), (4,))), 4, weight_prediction=ahead)
        for step in range(2):
            trainer.gradient(0, step)
            trainer.step()
            trainer.opt._async.replica.finish(worker, True)
            if step == 0:
                for index, parameter in enumerate(trainer.parameters):
                    trainer.assign(index, np.zeros(parameter.shape))
        return trainer.weights()

    assert train(2).tobytes() == train(0).tobytes()


@pytest.mark.parametrize("how", ["data", "copy"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_weights_written_between_rounds_in_torch_are_the_weights(how, goes_on):
    """All of a parameter of which a part was written; of the others nothing."""
    trainer, worker = TORCH.scripted(MOMENTUM, Script("two", ((4,), (4,))), 4)
    before = trainer.weights()
    trainer.gradient(0, 0)
    trainer.step()
    ahead = trainer.parameters[0].detach().numpy()
    clipped = np.clip(ahead, 0.0, 1.0)
    assert (clipped != ahead).any()
    if how == "data":  # (counted by nothing)
        trainer.parameters[0].data.copy_(torch.as_tensor(clipped))
    else:
        trainer.assign(0, clipped)
    start = replay("torch", MOMENTUM, before, worker.applied, 4)
    if goes_on:
        trainer.gradient(0, 1)
        trainer.step()
    trainer.opt._async.replica.finish(worker, True)
    moved = replay("torch", MOMENTUM, before, worker.applied, 4) - start
    start[: clipped.size] = clipped.ravel()
    np.testing.assert_allclose(trainer.weights(), start + moved, rtol=0, atol=1e-6)


@all_modes
def test_weights_put_back_to_the_bit_are_no_others(binding, tapes):  # noqa: F811
    """On one rank alone, which tests the average of its weights, say: replicas stay the same."""

    def train(rank):
        trainer, seen = binding.trainer(MOMENTUM, quorum=2, weight_prediction=2), []
        for step in range(3):
            trainer.gradient(rank, step)
            trainer.step()
            if rank == 0:
                own = [np.asarray(p.detach() if binding is TORCH else p).copy() for p in trainer.parameters]
                for other in ([np.zeros_like(kept) for kept in own], own):
                    for index, values in enumerate(other):
                        trainer.assign(index, values)
            seen.append(trainer.weights().tobytes())
        trainer.opt.drain()
        return seen, trainer.weights().tobytes()

    one, other = Cluster(2).run(train)
    assert one == other


@both
def test_a_discarded_optimizer_leaves_the_weights_themselves(binding, tapes):  # noqa: F811
    def train(rank):
        trainer = binding.trainer(MOMENTUM, quorum=2, weight_prediction=2)
        before = trainer.weights()
        for step in range(3):
            trainer.gradient(rank, step)
            trainer.step()
        trainer.opt.discard()
        return before, trainer.weights()

    for rank, (before, after) in enumerate(Cluster(2).run(train)):
        expected = replay(binding.framework, MOMENTUM, before, tapes[rank].applied[:3], 2)
        np.testing.assert_allclose(after, expected, rtol=0, atol=1e-6)


def test_momentum_that_a_scheduler_ends_and_begins_in_torch():
    """Each round starts from the weights, by the momentum of that round; the other group has none."""
    momenta, gradients, rate = (0.9, 0.9, 0.0, 0.0, 0.9), (1.0, -3.0, 2.0, 1.0, 4.0), 0.1

    def train(rank):
        def groups(parameters):
            first, second = parameters
            return torch.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": [second]}], lr=rate)

        one, seen = TORCH.vectors([1, 1], groups, quorum=2, weight_prediction=2), []
        for momentum, gradient in zip(momenta, gradients, strict=True):
            one.opt.param_groups[0]["momentum"] = momentum
            one.take(gradient, gradient)
            seen.append(one.weights())
        one.opt.drain()
        return [*seen, one.weights()]

    weight, velocity, expected = 0.0, 0.0, []
    for momentum, gradient in zip(momenta, gradients, strict=True):
        if momentum:
            velocity = momentum * velocity + gradient
        before, weight = weight, weight - rate * (velocity if momentum else gradient)
        plain = -rate * sum(gradients[: len(expected) + 1])
        expected.append([weight + (momentum + momentum**2) * (weight - before), plain])
    expected.append([weight, plain])
    for seen in Cluster(2).run(train):
        np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-6)


@both
@pytest.mark.parametrize(("given", "ahead"), [("auto", 0), (1, 1)])
def test_nothing_is_predicted_where_memory_lets_nobody_be_late(binding, given, ahead):
    """And so the state of then may be saved between rounds, as under a bound of 0."""

    def train(rank):
        trainer = binding.trainer(MOMENTUM, weight_prediction=given, late_cap_mb=1e-4)
        trainer.train(rank, range(3))
        seen, settings = trainer.weights(), trainer.opt.settings
        trainer.opt.drain()
        assert settings["max_staleness"] == 0
        assert (np.abs(seen - trainer.weights()).max() > 1e-4) == bool(ahead)
        return settings["weight_prediction"]

    assert Cluster(2).run(train) == [ahead] * 2


@both
@pytest.mark.parametrize("how", ["empty", "frozen"])
def test_what_a_round_does_not_move_stays(binding, how):
    """A bucket in which a round carries nothing; a parameter that its leader has frozen."""

    def train(rank):
        options = {"quorum": 2, "bucket_cap_mb": TINY, "weight_prediction": 2}
        trainer, seen = binding.vectors([1, 1], MOMENTUM, **options), []
        for step in range(4):
            spared = step % 2 == 1
            if how == "frozen":
                trainer.freeze(0, spared)
            trainer.take(None if spared and how == "frozen" else NAN if spared else 1.0, 1.0)
            seen.append(trainer.weights())
        trainer.freeze(0, False)
        trainer.opt.drain()
        return np.array(seen), trainer.weights()

    def replayed(rounds, ahead):
        return replay(
            binding.framework, MOMENTUM, np.zeros(1), [Applied(np.array([2.0, 2.0]), 0.05)] * rounds, 2, ahead
        )

    for seen, after in Cluster(2).run(train):
        for vector, rounds in enumerate([(1, 1, 2, 2), (1, 2, 3, 4)]):
            np.testing.assert_allclose(seen[:, vector], np.ravel([replayed(n, 2) for n in rounds]), atol=1e-6)
        np.testing.assert_allclose(after, np.ravel([replayed(2, 0), replayed(4, 0)]), atol=1e-6)


@both
def test_a_state_that_holds_predicted_weights_is_not_saved(binding):
    def train(rank):
        trainer = binding.trainer(MOMENTUM, quorum="all", weight_prediction=2)
        trainer.train(rank, range(2))
        with pytest.raises(ReplicaStateError, match=r"drain\(\)"):
            trainer.saved()
        trainer.opt.drain()
        return trainer.saved() is not None

    assert all(Cluster(2).run(train))


@both
def test_late_ranks_compute_at_the_same_predicted_weights(binding, tapes):  # noqa: F811
    outcomes = with_late_rank(Schedule("solo", 2), lambda rank: binding.trainer(MOMENTUM, quorum="solo"))
    assert len({outcome.after.tobytes() for outcome in outcomes}) == 1


@both
def test_one_rank_predicts_nothing(binding):
    with scripted_engine(1):
        assert binding.trainer(MOMENTUM, weight_prediction=2).opt.settings["weight_prediction"] == 0
    with scripted_engine(2):
        assert binding.trainer(MOMENTUM, quorum="all").opt.settings["weight_prediction"] == 0
        assert binding.trainer(MOMENTUM, max_staleness=0).opt.settings["weight_prediction"] == 0
        assert binding.trainer(MOMENTUM).opt.settings["weight_prediction"] == 2


@pytest.mark.parametrize("wrong", [-1, 101, float("nan"), "two", True, None])
def test_what_is_no_number_of_rounds_is_refused(wrong):
    with scripted_engine(2), pytest.raises(ValueError, match="weight_prediction"):
        TORCH.trainer(MOMENTUM, weight_prediction=wrong)


def test_how_far_momentum_carries():
    assert factor(0.9, 2) == pytest.approx(0.9 + 0.81)
    assert factor(0.5, 3) == pytest.approx(0.5 + 0.25 + 0.125)
    assert factor(0.9, 0) == factor(0.0, 2) == factor(1.0, 2) == 0
    assert 0 < factor(0.9, 0.5) < factor(0.9, 1)
    assert momentum_of({"betas": [0.8, 0.99]}) == momentum_of({"beta_1": 0.8}) == momentum_of({"momentum": 0.8}) == 0.8
    assert momentum_of({"lr": 0.1}) == momentum_of({"betas": []}) == 0
