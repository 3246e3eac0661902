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


def test_weights_written_between_rounds_in_torch_are_the_weights():
    trainer, worker = TORCH.scripted(MOMENTUM, Script("two", ((4,), (4,))), 4)
    trainer.gradient(0, 0)
    trainer.step()
    with torch.no_grad():
        for parameter in trainer.parameters:
            parameter.clamp_(-0.01, 0.01)
    trainer.opt._async.replica.finish(worker, True)
    assert np.abs(trainer.weights()).max() <= 0.01


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
