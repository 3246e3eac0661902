"""Ranks with weights of their own, one interface for all bindings: least squares on six weights in two tensors.

They gossip, or follow a leader where they are given a ``Following``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvd_async.tensorflow.keras
import hvd_async.torch
from hvd_async.algorithms.gossip.config import ALGORITHMS as GOSSIP
from hvd_async.testing import Cluster
from tests.conformance import gossip_reference, keras_ranks, leader_drive, torch_ranks
from tests.conformance.cases import CASES, Case
from tests.conformance.gossip_reference import Problem
from tests.conformance.leader_drive import Seen
from tests.conformance.leader_reference import Following
from tests.conformance.reference import Array, State

SGD, MOMENTUM, NESTEROV, ADAM = CASES[0], CASES[1], CASES[5], CASES[6]
STILL = Case("still", "sgd", 0.0)
Saved = tuple[dict[str, Any], Array, Array]
"""A script's checkpoint: the optimizer's state, weights and statistics."""


@functools.cache
def _normal_equations(rank: int, step: int) -> tuple[Array, Array]:
    inputs, targets = gossip_reference.batch(rank, step)
    return inputs.T @ inputs / len(inputs), inputs.T @ targets / len(inputs)


def _gradient(z: Array, rank: int, step: int) -> Array:
    square, linear = _normal_equations(rank, step)
    return np.asarray(square @ z - linear)


def values(state: Any) -> Any:
    """A saved state with lists instead of arrays and tensors, which compare."""
    if isinstance(state, dict):
        return {name: values(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [values(value) for value in state]
    return state.tolist() if hasattr(state, "tolist") else state


class Rank:
    """One rank; each framework's subclass makes the model (``_wrap``), and has one vector of its weights.

    Each has ``weights()``, ``statistics()`` and ``state()``, ``assign``, ``set_statistics`` and ``load`` to bring them
    back, and ``set_rate``. ``take(gradient, loss, mean)`` is a step with a given gradient, after a loss is recorded and
    (on a normed rank) the running mean of its statistics is set, and their variance to ten times as much;
    ``freeze(index, frozen)`` takes the gradient away from one of the two tensors, or gives it back; ``moments()`` is
    the optimizer's state in the reference's form; ``through_a_file()`` a state as it comes back from a file without
    pickled code.

    Args:
        problem: its weights, data and optimizer: of ``least_squares``.
        rank: its place among the ranks that share the optimizer.
        following: the leader that it follows, and how; None: it gossips.
        make: makes another optimizer than the problem's, of the parameters.
        normed: whether it has batch-norm statistics of two features; see ``forward``.
        wrapper: another one than ``LeaderOptimizer`` or ``GossipOptimizer``.
        options: others of the wrapper.

    Attributes:
        framework, graph: the binding's, and whether a step is a graph.
        hvd: the namespace that a user imports.
        schedule_free: makes a schedule-free optimizer of parameters.
        process_set: makes a set of ranks.
        opt: wrapped.
        before: the weights with which the last step began.
        path: the weights after each step.
    """

    framework: ClassVar[str]
    graph: ClassVar[bool] = False
    hvd: ClassVar[Any]
    process_set = torch_ranks.ProcessSet

    def __init__(
        self,
        problem: Problem,
        rank: int,
        following: Following | None = None,
        make: Callable[[Any], Any] | None = None,
        normed: bool = False,
        wrapper: str = "",
        **options: Any,
    ) -> None:
        wrapper = wrapper or ("GossipOptimizer" if following is None else "LeaderOptimizer")
        self.leads = wrapper == "LeaderOptimizer"
        own = Following() if following is None else following
        self.problem, self.rank = problem, rank
        self.following = own if self.leads else dataclasses.replace(own, loss_of=lambda *_: None)
        self.path: list[Array] = []
        given = own.options() if self.leads and following is not None else {}
        self.opt = self._wrap(make, normed, getattr(self.hvd, wrapper), {**given, **options})
        self.assign(problem.start[rank])

    @classmethod
    def least_squares(cls, size: int, case: Case = MOMENTUM) -> Problem:
        """The reference's problem for this binding, with what it computes of the data kept."""
        return dataclasses.replace(gossip_reference.least_squares(size, case, cls.framework), gradient=_gradient)

    @classmethod
    def raised(cls, kind: type[Exception]) -> type[Exception]:
        """The class under which an error of a step comes to its caller."""
        return tf.errors.OpError if cls.graph else kind

    @classmethod
    def run(
        cls,
        following: Following,
        steps: int | Sequence[int],
        cluster: Cluster,
        case: Case = MOMENTUM,
        *,
        together: bool = False,
        behind: Sequence[int] = (),
        **options: Any,
    ) -> tuple[Problem, list[Seen]]:
        """Train as ``leader_drive.run`` does; ``options`` of the ranks. Returns the problem too."""
        problem = cls.least_squares(cluster.size, case)
        seen = leader_drive.run(lambda rank: cls(problem, rank, following, **options), steps, cluster, together, behind)
        return problem, seen

    @property
    def mean(self) -> float:
        """Mean of a normed rank's statistics; its variance is set with it."""
        return float(self.statistics()[0])

    @mean.setter
    def mean(self, value: float) -> None:
        self.set_statistics(np.full(2, value), np.full(2, 10.0 * value))

    def forward(self) -> Array | None:
        """Return the running mean after a normed rank's next step, where the test gives none."""
        if not self.leads or not len(self.statistics()):
            return None
        return self.statistics()[:2] + np.array([2.0**self.rank, 0.25 * (len(self.path) + 1)])

    def step(self, mean: Any = None) -> None:
        """One; ``mean`` as of ``take``."""
        self.before, number = self.weights(), len(self.path) + 1
        if self.problem.rate is not None:
            self.set_rate(self.problem.rate(number))
        loss = self.following.loss_of(self.before, self.rank, number)
        gradient = self.problem.gradient(self.before, self.rank, number)
        self.take(gradient, loss, self.forward() if mean is None else mean)
        self.path.append(self.weights())

    def train(self, steps: int) -> Self:
        """Several."""
        for _ in range(steps):
            self.step()
        return self

    def worker(self) -> Any:
        """The optimizer's; the first call meets the other ranks."""
        return self.opt._async.worker_now()

    def bits(self) -> bytes:
        """Weights and statistics."""
        return self.weights().tobytes() + self.statistics().tobytes()

    def drained(self) -> bytes:
        """Weights after a drain."""
        self.opt.drain()
        return self.weights().tobytes()

    def saved(self) -> Saved:
        """Return a script's checkpoint, by way of a file."""
        return self.through_a_file(self.state()), self.weights(), self.statistics()

    def resume(self, saved: Saved, done: int = 0) -> Self:
        """Take up what was saved after this many steps."""
        state, weights, statistics = saved
        self.assign(weights)
        if len(self.statistics()):
            self.set_statistics(statistics[:2], statistics[2:])
        self.load(state)
        self.path = [np.empty(0)] * done
        return self


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (Defazio et al., 2024, with beta = 0.9), as its authors' package has it: the weights are y
    while it trains, and x in between."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "k": 0})

    def eval(self) -> None:
        self._move(1 - 1 / 0.9)

    def train(self) -> None:
        self._move(0.1)

    @torch.no_grad()
    def _move(self, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class TorchRank(Rank):
    """A rank in torch.

    Args:
        arguments: of ``Rank``.
        dtype: of the parameters.
    """

    framework = "torch"
    hvd = hvd_async.torch

    def __init__(self, *arguments: Any, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((2,), (2, 2))]
        self.norm = torch.nn.BatchNorm1d(2)
        self._counted: list[torch.Tensor] = []
        super().__init__(*arguments, **options)

    def _wrap(self, make: Callable[[Any], Any] | None, normed: bool, wrapper: Any, options: dict[str, Any]) -> Any:
        if normed:
            self._counted = [self.norm.running_mean, self.norm.running_var]
            options = {"named_buffers": self.norm.named_buffers()} | options
        plain = torch_ranks.plain(self.problem.case, self.parameters) if make is None else make(self.parameters)
        return wrapper(plain, **options)

    schedule_free = ScheduleFree

    def take(self, gradient: Any, loss: Any = None, mean: Any = None) -> None:
        parts = torch.as_tensor(np.asarray(gradient, np.float64)).split((2, 4))
        self.opt.zero_grad()
        for parameter, part in zip(self.parameters, parts, strict=True):
            if parameter.requires_grad:
                torch.autograd.backward(parameter, part.view_as(parameter).to(parameter.dtype))
        if mean is not None:
            self.set_statistics(mean, 10 * np.asarray(mean))
        if loss is not None:
            self.opt.record_loss(loss)
        self.opt.step()

    def weights(self) -> Array:
        return torch_ranks.flat(self.parameters)

    def assign(self, weights: Any) -> None:
        with torch.no_grad():
            for parameter, part in zip(self.parameters, torch.as_tensor(weights).split((2, 4)), strict=True):
                parameter.copy_(part.view_as(parameter))

    def set_rate(self, rate: float) -> None:
        self.opt.param_groups[0]["lr"] = rate

    def freeze(self, index: int, frozen: bool) -> None:
        self.parameters[index].requires_grad_(not frozen)

    def statistics(self) -> Array:
        return torch_ranks.flat(self._counted) if self._counted else np.zeros(0)

    def set_statistics(self, mean: Any, variance: Any) -> None:
        for tensor, value in zip(self._counted, (mean, variance), strict=True):
            tensor.copy_(torch.as_tensor(value))

    def state(self) -> dict[str, Any]:
        return self.opt.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.opt.load_state_dict(copy.deepcopy(state))  # (torch keeps the tensors it is given)

    def through_a_file(self, state: dict[str, Any]) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def moments(self) -> State:
        held = [self.opt.state[p] for p in self.parameters]
        if "exp_avg" in held[0]:
            first, second = (torch_ranks.flat(own[name] for own in held) for name in ("exp_avg", "exp_avg_sq"))
            return State(len(self.path), first, second)
        return State(len(self.path), torch_ranks.flat(own["momentum_buffer"] for own in held), np.zeros(6))


class KerasRank(Rank):
    """A rank in Keras."""

    framework = "keras"
    hvd = hvd_async.tensorflow.keras

    def _wrap(self, make: Callable[[Any], Any] | None, normed: bool, wrapper: Any, options: dict[str, Any]) -> Any:
        shapes = ((2, 2), (2,))
        self.parameters = [keras.Variable(np.zeros(shape, np.float32), name=f"x{len(shape)}") for shape in shapes]
        self._counted: list[Any] = []
        if normed:
            self.model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
            self._counted = [self.model.layers[0].moving_mean, self.model.layers[0].moving_variance]
            options = {"model": self.model} | options
        opt = wrapper(keras_ranks.plain(self.problem.case) if make is None else make(self.parameters), **options)
        opt.build(self.parameters)
        self._apply = tf.function(self._take) if self.graph else self._take
        return opt

    def _take(self, loss: Any, mean: Any, *gradients: tf.Tensor) -> None:
        if mean is not None:
            self._counted[0].assign(mean)  # as a forward pass does
            self._counted[1].assign(10.0 * mean)
        if loss is not None:
            self.opt.record_loss(loss)
        self.opt.apply(gradients, self.parameters)

    @staticmethod
    def schedule_free(parameters: Any) -> Any:
        return keras.optimizers.ScheduleFreeAdamW(0.1)

    def take(self, gradient: Any, loss: Any = None, mean: Any = None) -> None:
        given = tf.constant(loss, tf.float64) if self.graph and loss is not None else loss
        moved = None if mean is None else tf.constant(mean, tf.float32, [2])
        pairs = zip(_split(gradient), self.parameters, strict=True)
        self._apply(given, moved, *(tf.constant(part) if p.trainable else None for part, p in pairs))

    def weights(self) -> Array:
        return keras_ranks.flat(self.parameters)

    def assign(self, weights: Any) -> None:
        for variable, part in zip(self.parameters, _split(weights), strict=True):
            variable.assign(part)

    def set_rate(self, rate: float) -> None:
        self.opt.learning_rate = rate

    def freeze(self, index: int, frozen: bool) -> None:
        self.parameters[index].trainable = not frozen

    def statistics(self) -> Array:
        return keras_ranks.flat(self._counted) if self._counted else np.zeros(0)

    def set_statistics(self, mean: Any, variance: Any) -> None:
        for variable, value in zip(self._counted, (mean, variance), strict=True):
            variable.assign(np.broadcast_to(value, 2))

    def state(self) -> dict[str, Any]:
        return self.opt.get_state()

    def load(self, state: dict[str, Any]) -> None:
        self.opt.set_state(state)

    def through_a_file(self, state: dict[str, Any]) -> dict[str, Any]:
        file = io.BytesIO()
        np.savez(file, **state)
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)

    def moments(self) -> State:
        if hasattr(self.opt, "_velocities"):
            return State(len(self.path), keras_ranks.flat(self.opt._momentums), keras_ranks.flat(self.opt._velocities))
        return State(len(self.path), keras_ranks.flat(self.opt.momentums), np.zeros(6))


class KerasGraphRank(KerasRank):
    """A rank in Keras whose step is a ``tf.function``."""

    graph = True


def _split(flat: Any) -> list[Array]:
    """A vector as Keras' variables."""
    one, other = np.split(np.asarray(flat, np.float32), [4])
    return [one.reshape(2, 2), other]


TORCH, KERAS = pytest.param(TorchRank, id="torch"), pytest.param(KerasRank, id="keras")
KERAS_GRAPH = pytest.param(KerasGraphRank, id="keras-graph")
both = pytest.mark.parametrize("binding", [TORCH, KERAS])
also_graph = pytest.mark.parametrize("binding", [TORCH, KERAS, KERAS_GRAPH])
ALGORITHMS: list[tuple[str, dict[str, Any]]] = [
    *(("GossipOptimizer", {"algorithm": name}) for name in GOSSIP),
    ("LeaderOptimizer", {"algorithm": "lsgd", "group": 1}),
    ("LeaderOptimizer", {"algorithm": "easgd"}),
    ("EagerOptimizer", {"quorum": "solo"}),
    ("EagerOptimizer", {"quorum": "all"}),
]
every_algorithm = pytest.mark.parametrize(
    ("wrapper", "options"), ALGORITHMS, ids=["-".join(map(str, options.values())) for _, options in ALGORITHMS]
)
