"""Step hooks and constraints of ranks with weights of their own: they see, and leave, the model's weights."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import hvd_async.tensorflow.keras as hvd_keras
import hvd_async.torch as hvd
from hvd_async.testing import Cluster
from tests.conformance.gossip_ranks import by_options
from tests.conformance.keras_ranks import Scalar

SGP, OSGP, OSGP_STAR = {"topology": "star"}, {"algorithm": "osgp"}, {"algorithm": "osgp", "topology": "star"}
LEADERS = [
    {"algorithm": "easgd", "global_period": 2},
    {"algorithm": "lsgd", "group": [[0, 1], [2, 3]], "global_period": 4, "local_period": 2},
]
GOSSIP = [
    *(SGP, OSGP, OSGP_STAR, {"algorithm": "allreduce"}, {"algorithm": "adpsgd", "topology": "ring"}),
    {"algorithm": "dpsgd", "topology": "ring"},
    {"algorithm": "exact-diffusion", "topology": "ring"},
    {"algorithm": "noloco", "gossip_every": 2},
    {"algorithm": "local", "average_every": 4},
    {"algorithm": "slowmo", "average_every": 4, "outer_momentum": 0.9},
    {"algorithm": "diloco", "average_every": 2, "outer_momentum": 0.9, "max_staleness": 0},
]
STEPS, SIZE, LIMIT = 24, 4, 1.0


def wrapped(module: Any, optimizer: Any, options: dict[str, Any]) -> Any:
    """Return the optimizer as a GossipOptimizer or a LeaderOptimizer."""
    leads = options in LEADERS
    return (module.LeaderOptimizer if leads else module.GossipOptimizer)(optimizer, **options)


def gradient(rank: int, step: int) -> float:
    """Each rank is pushed beyond the limit for a while, and then back: each at its own time."""
    return -2.0 if (step + 3 * rank) % 12 < 8 else 3.0 - rank


# -- torch ------------------------------------------------------------------------------------------------------


def torch_rank(options: dict[str, Any], start: float = 0.5) -> tuple[torch.nn.Parameter, Any]:
    weight = torch.nn.Parameter(torch.tensor([start, -start]))
    return weight, wrapped(hvd, torch.optim.SGD([weight], lr=0.3, momentum=0.5), options)


def train(rank: int, weight: torch.nn.Parameter, opt: Any, steps: int = STEPS) -> list[np.ndarray[Any, Any]]:
    """Return what the parameter holds after each step."""
    path = []
    for step in range(steps):
        weight.grad = torch.tensor([gradient(rank, step), -gradient(rank, step)])
        if hasattr(opt, "record_loss"):
            opt.record_loss(float(rank + step))
        opt.step()
        path.append(weight.detach().numpy().copy())
    return path


@by_options(*GOSSIP, *LEADERS)
def test_a_clamp_in_a_post_hook_holds(options):
    """Exactly after each step; after a drain, too, where it averages what hooks have left (slowmo and diloco end with
    their momentum, and EASGD with its center)."""

    def work(rank: int) -> Any:
        weight, opt = torch_rank(options)
        opt.register_step_post_hook(lambda *_: weight.data.clamp_(-LIMIT, LIMIT))
        path = train(rank, weight, opt)
        opt.drain()
        return path, weight.detach().numpy().copy()

    outcomes = Cluster(SIZE, jitter=0.001).run(work)
    reached = np.abs([path for path, _ in outcomes])
    assert reached.max() == LIMIT
    if options.get("algorithm") not in ("slowmo", "diloco"):
        assert np.abs(outcomes[0][1]).max() <= LIMIT + 1e-6
    assert len({end.tobytes() for _, end in outcomes}) == 1


@by_options(SGP, OSGP_STAR, OSGP, GOSSIP[5], GOSSIP[-1], LEADERS[0])
def test_hooks_see_the_models_weights_once_a_step(options):
    """Post hooks, global ones too, see what the step leaves, pre hooks what the one before has left."""

    def work(rank: int) -> Any:
        weight, opt = torch_rank(options)
        seen: dict[str, list[Any]] = {"pre": [], "post": [], "global": []}

        def note(where: str) -> Any:
            return lambda own, *_: seen[where].append(weight.detach().numpy().copy()) if own is opt else None

        opt.register_step_pre_hook(note("pre"))
        opt.register_step_post_hook(note("post"))
        registered = register_optimizer_step_post_hook(note("global"))
        try:
            path = train(rank, weight, opt)
        finally:
            registered.remove()
        opt.drain()
        return path, seen

    for path, seen in Cluster(SIZE).run(work):
        np.testing.assert_array_equal(seen["post"], path)
        np.testing.assert_array_equal(seen["global"], path)
        np.testing.assert_array_equal(seen["pre"][1:], path[:-1])


def test_what_a_pre_hook_writes_are_the_weights():
    """The result is that of a write between the steps, to the same push-sum weights."""

    def work(rank: int, hooked: bool) -> Any:
        weight, opt = torch_rank(SGP)

        def halve(*_: Any) -> None:
            weight.data.mul_(0.5)

        if hooked:
            opt.register_step_pre_hook(halve)
        path = []
        for step in range(8):
            if not hooked:
                halve()
            path += train(rank, weight, opt, 1)
            if step == 3:
                opt.cut()
        opt.drain()
        return [*path, weight.detach().numpy()]

    runs = [Cluster(3).run(lambda rank, hooked=hooked: work(rank, hooked)) for hooked in (True, False)]
    np.testing.assert_array_equal(runs[0], runs[1])


def test_a_pre_hook_may_replace_the_closure_and_a_derived_class_runs_hooks_once():
    class Derived(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # (torch hooks the base's step too, from now on)

    def work(rank: int) -> Any:
        weight = torch.nn.Parameter(torch.ones(1))
        opt = hvd.GossipOptimizer(Derived([weight], lr=0.5), **SGP)
        calls: list[str] = []

        def closure() -> float:
            weight.grad = torch.ones(1)
            return 7.0

        opt.register_step_pre_hook(lambda own, args, kwargs: ((own, closure), {}))
        opt.register_step_post_hook(lambda *_: calls.append("post"))
        found = [opt.step(), opt.step()]
        opt.drain()
        return found, calls, weight.item()

    for found, calls, end in Cluster(3).run(work):
        assert found == [7.0, 7.0]
        assert calls == ["post"] * 2
        assert end < 0.5


def test_an_error_in_an_update_leaves_the_models_weights():
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["fails"]:
                raise ZeroDivisionError("boom")
            return super().step(closure)

    def work(rank: int) -> Any:
        weight = torch.nn.Parameter(torch.tensor([0.5, -0.5]))
        opt = hvd.GossipOptimizer(Failing([{"params": [weight], "fails": False}], lr=0.3), **SGP)
        path = train(rank, weight, opt, 3)
        opt.cut()
        assert opt.stats().push_sum_weight != 1.0
        opt.param_groups[0]["fails"] = True
        with pytest.raises(ZeroDivisionError):
            train(rank, weight, opt, 1)
        np.testing.assert_allclose(weight.detach().numpy(), path[-1], rtol=1e-6)
        opt.discard()

    Cluster(3).run(work)


# -- Keras ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@by_options(*GOSSIP, *LEADERS)
def test_keras_constraints_hold(options, graph):
    """After each step, after a cut, in the consensus and after a drain."""

    def work(rank: int) -> Any:
        one = Scalar(wrapped(hvd_keras, keras.optimizers.SGD(0.3, momentum=0.5), options), graph, 0.5)
        one.weight.constraint = keras.constraints.NonNeg()
        path = []
        for step in range(STEPS):
            path.append(one.step(-gradient(rank, step), float(step) if options in LEADERS else None))
            if step == STEPS // 2:
                one.opt.cut()
                path.append(float(one.weight.numpy()))
        with one.opt.consensus():
            path.append(float(one.weight.numpy()))
        one.opt.drain()
        return path, float(one.weight.numpy()), one.opt.consensus_distance()

    outcomes = Cluster(SIZE).run(work)
    assert min(min(path) for path, _, _ in outcomes) == 0.0
    assert len({end for _, end, _ in outcomes}) == 1
    assert {distance for _, _, distance in outcomes} == {0.0}


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@by_options(SGP, GOSSIP[5], {"algorithm": "local", "average_every": 2})
def test_constraints_whose_set_is_not_convex_hold(options, graph):
    """UnitNorm: the mean of two vectors of length 1 is shorter. All replicas are the same to the bit after a drain."""

    def work(rank: int) -> Any:
        weight = keras.Variable(np.array([[1.0], [0.0], [0.0]], np.float32), constraint=None)
        weight.constraint = keras.constraints.UnitNorm()
        opt = hvd_keras.GossipOptimizer(keras.optimizers.SGD(0.5), **options)
        opt.build([weight])

        def take(given: tf.Tensor) -> None:
            opt.apply([given], [weight])

        step, norms = tf.function(take) if graph else take, []
        for number in range(6):
            step(tf.constant(np.random.default_rng([rank, number]).normal(size=(3, 1)), tf.float32))
            norms.append(float(np.linalg.norm(weight.numpy())))
        opt.drain()
        return [*norms, float(np.linalg.norm(weight.numpy()))], weight.numpy().tobytes()

    outcomes = Cluster(3).run(work)
    np.testing.assert_allclose([norms for norms, _ in outcomes], 1.0, rtol=1e-5)
    assert len({end for _, end in outcomes}) == 1


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_constraint_is_applied_once_a_step(graph):
    """One that halves, rather than projects, on ranks that agree: as in plain Keras."""

    def run(opt: Any) -> list[float]:
        one = Scalar(opt, graph, 8.0)
        one.weight.constraint = lambda value: value * 0.5
        return [one.step(1.0) for _ in range(3)]

    plain = run(keras.optimizers.SGD(1.0))
    for path in Cluster(2).run(lambda rank: run(hvd_keras.GossipOptimizer(keras.optimizers.SGD(1.0), **GOSSIP[5]))):
        assert path == plain


def test_exact_diffusion_converges_to_the_constrained_minimum():
    """Ranks' own minima and curvatures differ; the mean's minimum is below 0 for some weights. In float64."""
    curvature = np.random.default_rng(3).uniform(0.2, 1.5, size=(4, 6))
    centre = np.random.default_rng(5).normal(size=(4, 6))

    def work(rank: int) -> Any:
        weight = keras.Variable(np.zeros(6), dtype="float64")
        weight.constraint = lambda value: tf.maximum(value, tf.zeros_like(value))
        opt = hvd_keras.GossipOptimizer(keras.optimizers.SGD(0.3), algorithm="exact-diffusion", topology="ring")
        opt.build([weight])
        for _ in range(400):
            opt.apply([tf.constant(curvature[rank] * (weight.numpy() - centre[rank]))], [weight])
        return weight.numpy()

    expected = np.maximum((curvature * centre).sum(axis=0) / curvature.sum(axis=0), 0.0)
    assert (expected == 0).any()
    for found in Cluster(4).run(work):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


class NaNAtLast(keras.constraints.Constraint):
    """Makes a rank's weights NaN when it is called for the last time."""

    def __init__(self, rank: int) -> None:
        self.rank, self.left = rank, STEPS

    def __call__(self, w: Any) -> Any:
        self.left -= 1
        return w * float("nan") if self.rank == 0 and not self.left else w


@pytest.mark.parametrize("binding", ["torch", "keras"])
@by_options(SGP, OSGP, {"algorithm": "dpsgd"}, {"algorithm": "adpsgd"}, {"algorithm": "local"})
def test_nan_from_a_hook_or_a_constraint_is_raised_and_reaches_no_other_rank(options, binding):
    """In the last step before a drain."""
    seen = {}

    def work(rank: int) -> None:
        if binding == "torch":
            weight, opt = torch_rank(options)
            steps = iter(range(STEPS))

            def poison(*_: Any) -> None:
                if next(steps) == STEPS - 1 and rank == 0:
                    weight.data.fill_(float("nan"))

            opt.register_step_post_hook(poison)
            seen[rank] = lambda: weight.detach().numpy()
            train(rank, weight, opt)
        else:
            v = keras.Variable(np.full(1, 0.5, "float32"), name="w")
            v.constraint = NaNAtLast(rank)
            opt = wrapped(hvd_keras, keras.optimizers.SGD(0.1), options)
            opt.build([v])
            seen[rank] = lambda: np.asarray(v)
            for step in range(STEPS):
                opt.apply([tf.constant([gradient(rank, step)], tf.float32)], [v])
        opt.drain()

    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        Cluster(2).run(work)
    assert np.isfinite(seen[1]()).all()
