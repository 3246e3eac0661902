"""Extrapolated updates in both bindings: equal to the reference, and the weights are always in the model."""

from __future__ import annotations

import contextlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_async.algorithms.eager.extrapolation import factor, momentum_of
from hvd_async.testing import Cluster
from hvd_async.torch import functions
from tests.conformance.cases import CASES, Case, Schedule, Script
from tests.conformance.drive import ScriptedWorker, attach, scripted_engine, tapes, with_late_rank  # noqa: F401  a fixture
from tests.conformance.eager_ranks import KERAS, MOMENTUM, NAMES, NAN, TINY, TORCH, all_modes, both
from tests.conformance.reference import Applied, replay


def held(parameter):
    """Return a copy of its values."""
    return np.asarray(parameter.detach() if isinstance(parameter, torch.Tensor) else parameter).copy()


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
def test_the_model_holds_extrapolated_weights(binding, case, ahead):
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
@pytest.mark.parametrize("end", ["drain", "cut", "discard"])
def test_an_end_leaves_the_weights_as_they_are(binding, end, tapes):  # noqa: F811
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


@both
@pytest.mark.parametrize("drained", [False, True])
def test_weights_that_a_script_writes_are_the_weights(binding, drained):
    """Nothing of those before comes back; the next round moves what is there."""
    trainer, worker = binding.scripted(MOMENTUM, Script("two", ((4,), (4,))), 4, weight_prediction=2)
    before, written = trainer.weights(), np.linspace(-1, 1, int(np.prod(trainer.parameters[0].shape)))
    trainer.gradient(0, 0)
    trainer.step()
    if drained:
        trainer.opt._async.replica.finish(worker, True)
    start = trainer.weights()
    trainer.assign(0, written.reshape(trainer.parameters[0].shape))
    trainer.gradient(0, 1)
    trainer.step()
    moved = replay(binding.framework, MOMENTUM, before, worker.applied, 4, 2) - start
    start[: written.size] = written
    np.testing.assert_allclose(trainer.weights(), start + moved, rtol=0, atol=1e-6)


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
def test_nothing_is_extrapolated_where_memory_lets_nobody_be_late(binding, given, ahead):
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


@both
def test_a_resumed_run_goes_on_with_its_leads(binding):
    """Between rounds, bit for bit; where the leads are missing (a state of 0.2.0) they start from zero."""

    def train(rank):
        one = binding.trainer(MOMENTUM, quorum="all", weight_prediction=2)
        one.train(rank, range(2))
        state, weights = one.saved(), [held(p) for p in one.parameters]
        one.train(rank, range(2, 4))
        other = binding.trainer(MOMENTUM, quorum="all", weight_prediction=2)
        for index, values in enumerate(weights):
            other.assign(index, values)
        other.load(state)
        other.train(rank, range(2, 4))
        return one.weights().tobytes(), other.weights().tobytes()

    assert len({weights for pair in Cluster(2).run(train) for weights in pair}) == 1


def least_weights(binding, **options):
    """Train a weight that is kept at 0 or above, on a loss that is lowest at -1; return the least weight that any step
    started from, and the last one."""

    def train(rank):
        one, seen = binding.vectors([3], MOMENTUM, **options), []
        if binding is TORCH:
            one.opt.register_step_post_hook(lambda *_: one.parameters[0].data.clamp_(min=0.0))
        else:
            one.parameters[0].constraint = keras.constraints.NonNeg()
        one.assign(0, np.full(3, 0.5))
        for step in range(12):
            seen.append(one.weights().min())
            one.take(np.array([1.0, -0.5 if step % 3 else 1.5, 0.1 * step]))
        one.opt.drain()
        return min(seen), one.weights().min()

    return Cluster(2).run(train)


@both
@pytest.mark.parametrize("options", [{"quorum": 2}, {"quorum": "solo"}, {"quorum": 2, "pace": "rounds"}], ids=str)
def test_constraints_and_clamps_bound_the_weights_that_gradients_are_computed_at(binding, options):
    for least, last in least_weights(binding, weight_prediction=2, **options):
        assert min(least, last) >= 0


@both
def test_a_round_transform_sees_the_weights_that_the_round_is_applied_to(binding):
    seen = []

    def watch(given):
        if binding is TORCH:
            seen.append(given[0].detach().numpy().copy())
            return None
        tf.numpy_function(lambda value: seen.append(value.copy()) or value, [one.parameters[0].value], tf.float32)
        return given

    with scripted_engine(4):
        one = binding.vectors([3], MOMENTUM, weight_prediction=2, round_transform=watch)
        make = torch.tensor if binding is TORCH else tf.constant
        attach(one.opt, ScriptedWorker(Script("four", ((4,),) * 4), 4, 3, MOMENTUM.lr, make))
    between = []
    for step in range(4):
        between.append(one.weights())
        one.take(np.full(3, float(step)))
    np.testing.assert_array_equal(np.stack(seen)[-4:], np.stack(between))


def test_code_between_synchronize_and_step_sees_and_writes_the_weights():
    def train(rank):
        one, seen = TORCH.vectors([3], MOMENTUM, quorum=2, weight_prediction=2), []
        for step in range(5):
            before = one.weights()
            one.opt.zero_grad()
            (one.parameters[0] * torch.arange(1.0, 4.0) * (step + 1)).sum().backward()
            one.opt.synchronize()
            assert one.weights().tobytes() == before.tobytes()
            one.assign(0, before / 2)
            with one.opt.skip_synchronize():
                one.opt.step()
            seen.append(one.weights())
        return seen

    weights, velocity, lead = np.zeros(3), np.zeros(3), np.zeros(3)
    for step, found in enumerate(zip(*Cluster(2).run(train), strict=True)):
        velocity = MOMENTUM.momentum * velocity + np.arange(1.0, 4.0) * (step + 1)
        update, before = -MOMENTUM.lr * velocity, lead
        lead = factor(MOMENTUM.momentum, 2) * update
        weights = weights / 2 + update + lead - before
        np.testing.assert_allclose(found, [weights] * 2, rtol=0, atol=1e-6)


class Nested(torch.optim.SGD):
    """A class whose step() calls that of its base class, which torch hooks too."""

    def step(self, closure=None):
        return super().step(closure)


def test_hooks_run_around_the_extrapolated_update_of_torch():
    """A pre hook's writes are no part of the update; a post hook sees all of it, also where step() calls another's."""

    def train(rank):
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # (torch hooks a class when it is first made)

        def nested(parameters):
            return Nested(parameters, lr=MOMENTUM.lr, momentum=MOMENTUM.momentum)

        one, seen = TORCH.vectors([3], nested, quorum=2, weight_prediction=2), []
        one.opt.register_step_pre_hook(lambda *_: one.assign(0, one.weights() + 1))
        one.opt.register_step_post_hook(lambda *_: seen.append(one.weights()))
        for step in range(3):
            one.take(np.full(3, 1.0 + step))
            assert seen[-1].tobytes() == one.weights().tobytes()
        return one.weights(), len(seen)

    for weights, hooked in Cluster(2).run(train):
        rounds = [Applied(np.array([2.0 * (1 + step)] * 3 + [2.0]), MOMENTUM.lr) for step in range(3)]
        expected = replay("torch", MOMENTUM, np.zeros(3), rounds, 2, 2)
        calls = hooked // 3  # (a nested class's pre hooks run twice)
        np.testing.assert_allclose(weights, expected + 3 * calls, rtol=0, atol=1e-6)


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
def test_late_ranks_compute_at_the_same_weights(binding, tapes):  # noqa: F811
    outcomes = with_late_rank(Schedule("solo", 2), lambda rank: binding.trainer(MOMENTUM, quorum="solo"))
    assert len({outcome.after.tobytes() for outcome in outcomes}) == 1


@both
def test_one_rank_extrapolates_nothing(binding):
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


def test_leads_are_sent_with_the_state_of_a_torch_optimizer(monkeypatch):
    """To ranks that take it by ``broadcast_optimizer_state()`` or join an elastic job."""
    monkeypatch.setattr(functions.hvd, "rank", lambda: 0)

    def train(rank):
        one = TORCH.vectors([3], MOMENTUM, quorum=2, weight_prediction=2)
        one.take(np.full(3, 1.0))
        one.opt.drain()
        sent = functions.receive_state(
            one.opt, 0, "state", lambda _, value, name: value, lambda _, tensors, name: tensors
        )
        other = TORCH.vectors([3], MOMENTUM, quorum=2, weight_prediction=2)
        other.assign(0, one.weights())
        other.opt.load_state_dict(sent)
        for trainer in (one, other):
            trainer.take(np.full(3, 2.0))
            trainer.opt.drain()
        return one.weights().tobytes(), other.weights().tobytes()

    assert len({weights for pair in Cluster(2).run(train) for weights in pair}) == 1


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
    """Counts ATen calls, but for views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_extrapolation_costs_a_few_calls_whatever_the_number_of_parameters():
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
