"""Extrapolated updates in both bindings: what is extrapolated, and that the weights are always in the model.

That they equal the reference for each optimizer is in ``test_eager``; that a saved state has their leads is in
``test_saved_states``.
"""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_async.algorithms.eager.extrapolation import factor, momentum_of
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.eager_ranks import KERAS, MOMENTUM, NAN, TINY, TORCH, all_modes, both
from tests.conformance.reference import Applied, replay


@all_modes
@pytest.mark.parametrize("end", ["drain", "cut", "discard"])
def test_an_end_leaves_the_weights_as_they_are(binding, end, tapes):
    def train(rank):
        trainer = binding.trainer(MOMENTUM, quorum=2, weight_prediction=2)
        before = trainer.weights()
        for step in range(4):
            trainer.gradient(rank, step)
            trainer.step()
        trained = trainer.weights()
        with contextlib.nullcontext() if end == "discard" else trainer.opt.consensus():
            held = trainer.weights()
        getattr(trainer.opt, end)()
        return before, trained, held, trainer.weights()

    outcomes = Cluster(2).run(train)
    for rank, (before, trained, held, after) in enumerate(outcomes):
        expected = replay(binding.framework, MOMENTUM, before, tapes[rank].applied[:4], 2, 2)
        np.testing.assert_allclose(trained, expected, rtol=0, atol=1e-6)
        assert trained.tobytes() == held.tobytes() == after.tobytes() == outcomes[0][1].tobytes()


def test_momentum_that_a_scheduler_ends_and_begins_in_torch():
    """Each round extrapolates by its own momentum; the other group has none."""
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
    expected.append(expected[-1])
    for seen in Cluster(2).run(train):
        np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-6)


@both
@pytest.mark.parametrize(("given", "ahead"), [("auto", 0), (1, 1)])
def test_nothing_is_extrapolated_where_memory_lets_no_rank_be_late(binding, given, ahead):
    def train(rank):
        weights = []
        for asked in (given, 0):
            trainer = binding.trainer(MOMENTUM, weight_prediction=asked, late_cap_mb=1e-4)
            trainer.train(rank, range(3))
            settings = trainer.opt.settings
            assert settings["max_staleness"] == 0
            assert settings["weight_prediction"] == (ahead if asked == given else 0)
            trainer.opt.drain()
            weights.append(trainer.weights())
        return weights

    for ours, plain in Cluster(2).run(train):
        assert (np.abs(ours - plain).max() > 1e-4) == bool(ahead)


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
        assert after.tobytes() == seen[-1].tobytes()


class Skipping(torch.optim.Optimizer):
    """SGD with momentum that passes over gradients of zeros, and makes a parameter's state where that is empty."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.any():
                    state = self.state[p]
                    if not state:
                        state["velocity"] = torch.zeros_like(p)
                    p.sub_(state["velocity"].mul_(group["momentum"]).add_(p.grad), alpha=group["lr"])


def test_a_parameter_for_which_an_optimizer_has_no_state_yet_gets_none():
    def train(rank):
        def skipping(parameters):
            return Skipping(parameters, {"lr": MOMENTUM.lr, "momentum": MOMENTUM.momentum})

        one = TORCH.vectors([1], skipping, quorum=2, weight_prediction=2)
        for gradient in (0.0, 1.0, 2.0):
            one.take(gradient)
        return one.weights()

    rounds = [Applied(np.array([2 * gradient, 2.0]), MOMENTUM.lr) for gradient in (1.0, 2.0)]
    for weights in Cluster(2).run(train):
        np.testing.assert_allclose(weights, replay("torch", MOMENTUM, np.zeros(1), rounds, 2, 2), atol=1e-6)


def test_an_optimizer_that_derives_its_weights_is_not_extrapolated():
    """Schedule-free optimizers take other weights than their own for moved averages."""
    assert momentum_of({"betas": (0.9, 0.999), "train_mode": True}) == 0

    def train(rank):
        weights = []
        for ahead in (2, 0):
            one = KERAS.vectors(
                [3], lambda _: keras.optimizers.ScheduleFreeAdamW(0.1), quorum=2, weight_prediction=ahead
            )
            for step in range(4):
                one.take(np.array([1.0, -2.0, float(step)]))
            weights.append(one.weights().tobytes())
        return weights

    assert len({weights for rank in Cluster(2).run(train) for weights in rank}) == 1


@both
def test_one_rank_extrapolates_nothing(binding):
    with scripted_engine(1):
        assert binding.trainer(MOMENTUM, weight_prediction=2).opt.settings["weight_prediction"] == 0
    with scripted_engine(2):
        assert binding.trainer(MOMENTUM, quorum="all").opt.settings["weight_prediction"] == 0
        assert binding.trainer(MOMENTUM, max_staleness=0).opt.settings["weight_prediction"] == 0
        assert binding.trainer(MOMENTUM).opt.settings["weight_prediction"] == 2


def test_how_far_momentum_carries():
    assert factor(0.9, 2) == pytest.approx(0.9 + 0.81)
    assert factor(0.5, 3) == pytest.approx(0.5 + 0.25 + 0.125)
    assert factor(0.9, 0) == factor(0.0, 2) == factor(1.0, 2) == 0
    assert 0 < factor(0.9, 0.5) < factor(0.9, 1)
    assert momentum_of({"betas": [0.8, 0.99]}) == momentum_of({"beta_1": 0.8}) == momentum_of({"momentum": 0.8}) == 0.8
    assert momentum_of({"lr": 0.1}) == momentum_of({"betas": []}) == 0


def test_the_state_of_a_torch_optimizer_holds_its_own_entries_alone():
    """Tools that walk it, Horovod's broadcast among them, meet what the wrapped class has put there."""

    def train(rank):
        one = TORCH.vectors([3], MOMENTUM, quorum=2, weight_prediction=2)
        for step in range(3):
            one.take(np.full(3, 1.0 + step))
        one.opt.drain()
        plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=MOMENTUM.lr, momentum=MOMENTUM.momentum)
        plain.load_state_dict(one.opt.state_dict())
        return [list(state) for opt in (one.opt, plain) for state in opt.state.values()]

    assert Cluster(2).run(train) == [[["momentum_buffer"]] * 2] * 2


def test_keras_extrapolates_from_when_there_is_momentum():
    def train(rank):
        moved = []
        for ahead in (2, 0):
            one = KERAS.vectors(
                [1], lambda _: keras.optimizers.Adam(0.1, beta_1=0.0), quorum=2, weight_prediction=ahead
            )
            one.take(1.0)
            one.opt.drain()
            one.opt.beta_1, before = 0.5, one.weights()
            one.take(2.0)
            moved.append(one.weights() - before)
        return moved

    for extrapolated, plain in Cluster(2).run(train):
        np.testing.assert_allclose(extrapolated, plain * (1 + factor(0.5, 2)), rtol=1e-5)


def test_keras_starts_from_zero_where_it_loads_other_weights():
    """By Keras' own way, which knows no leads: nothing of those of the weights before is taken off the loaded ones."""

    def train(rank):
        one, store = KERAS.vectors([1], MOMENTUM, quorum=2, weight_prediction=2), {}
        one.take(1.0)
        one.opt.drain()
        one.opt.save_own_variables(store)
        saved = one.weights()
        one.take(float("1e30"))
        one.opt.drain()
        one.assign(0, saved)
        one.opt.load_own_variables(store)
        one.take(2.0)
        return one.weights() - saved

    update = MOMENTUM.momentum * -MOMENTUM.lr - MOMENTUM.lr * 2.0
    for moved in Cluster(2).run(train):
        np.testing.assert_allclose(moved, [update * (1 + factor(MOMENTUM.momentum, 2))], atol=1e-6)


class Calls(TorchDispatchMode):
    """Counts ATen calls, except for views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_extrapolation_costs_a_few_calls_whatever_the_number_of_parameters(monkeypatch):
    # Else a round's counts are read in the step that finds them there, which varies.
    monkeypatch.setenv("HVD_ASYNC_CONFIRM", "1")

    def train(rank):
        counts = []
        for ahead in (0, 2):
            one = TORCH.vectors([2] * 40, MOMENTUM, quorum=2, weight_prediction=ahead)
            for _ in range(3):
                one.backward([[1.0] * 40])
                with Calls() as calls:
                    one.opt.step()
            counts.append(calls.count)
        return counts

    for plain, extrapolated in Cluster(2).run(train):
        assert extrapolated - plain <= 5
