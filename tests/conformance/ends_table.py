"""The table of ends: every way a rank's training ends, times what crosses it.

Three ranks train one or two optimizers, with batch norm or without; each calls drain() or cut() so often, keeps its
optimizers or lets them go, trains another model afterwards, and ends. Each cell ends, and says how it must: normally,
with the same weights everywhere; or with an error that names the rank that failed or died.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvd_async.tensorflow.keras as keras_hvd
import hvd_async.torch as torch_hvd
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster, InjectedError
from tests.conformance import keras_ranks as _threads  # noqa: F401  enough of TensorFlow's, before anything has run
from tests.covering import covering

RANKS = 3
LIMIT = 60.0
"""Seconds in which a cell has to end, on a machine that does much else."""
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "solo": ("EagerOptimizer", {"quorum": "solo"}),
    "all": ("EagerOptimizer", {"quorum": "all"}),
    "host": ("EagerOptimizer", {"hierarchical": RANKS}),
    "sgp": ("GossipOptimizer", {"algorithm": "sgp"}),
    "dpsgd": ("GossipOptimizer", {"algorithm": "dpsgd"}),
    "adpsgd": ("GossipOptimizer", {"algorithm": "adpsgd", "topology": "ring"}),
    "host pairs": ("GossipOptimizer", {"algorithm": "adpsgd", "topology": "ring", "hierarchical": RANKS}),
    "quasi-global": ("GossipOptimizer", {"algorithm": "dpsgd", "quasi_global": True}),
    "exact-diffusion": ("GossipOptimizer", {"algorithm": "exact-diffusion"}),
    "noloco": ("GossipOptimizer", {"algorithm": "noloco", "gossip_every": 2}),
    "diloco": ("GossipOptimizer", {"algorithm": "diloco", "average_every": 2, "compression": "int8"}),
    "lsgd": ("LeaderOptimizer", {"algorithm": "lsgd", "group": RANKS, "global_period": 4}),
    "easgd": ("LeaderOptimizer", {"algorithm": "easgd", "global_period": 4}),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination.

    Attributes:
        end: "normal", or what rank 1 does after its drains: "exception", "death" (its connection ends).
        kept: ranks that still hold their optimizers afterwards.
        drains: how often each rank calls ``how``.
        how: "drain" or "cut".
        buffers: whether the models have batch norm.
        optimizers: of each rank.
    """

    end: str
    kept: tuple[int, ...]
    drains: tuple[int, ...]
    how: str
    buffers: bool
    optimizers: int


DIMENSIONS: list[Sequence[Any]] = [
    ("normal", "exception", "death"),
    ((0, 1, 2), (0,), ()),
    ((1, 1, 1), (2, 1, 1), (0, 1, 0), (0, 0, 0)),
    ("drain", "cut"),
    (True, False),
    (1, 2),
]
SOME: list[Sequence[Any]] = [("normal", "exception"), ((1,), ()), ((2, 1, 1),), ("drain", "cut"), (True,), (2,)]


def cells(dimensions: Sequence[Sequence[Any]], crossed: int) -> list[Any]:
    """Cells that cover a table, each with a name."""
    made = [Cell(*row) for row in covering(dimensions, crossed)]
    return [pytest.param(cell, id="-".join(str(value) for value in dataclasses.astuple(cell))) for cell in made]


# -- a rank in either framework -------------------------------------------------------------------------------


def start(tensor_size: int, seed: int) -> np.ndarray[Any, Any]:
    """Weights to begin with."""
    return np.linspace(-1, 1, tensor_size) + 0.1 * seed


def inputs(rank: int, number: int) -> np.ndarray[Any, Any]:
    """A rank's own batch."""
    return np.array([[rank + number * 0.1, 1.0], [0.5, -rank], [number, 0.3]], np.float32)


def make_torch(wrapper: str, buffers: bool, seed: int) -> tuple[torch.nn.Module, Any]:
    """A model and its optimizer, the same on all ranks."""
    layers = [torch.nn.Linear(2, 3), *([torch.nn.BatchNorm1d(3)] if buffers else []), torch.nn.Linear(3, 1)]
    model = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.as_tensor(start(parameter.numel(), seed)).reshape(parameter.shape))
    name, options = WRAPPERS[wrapper]
    named = {"named_buffers": model.named_buffers()} if buffers else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, getattr(torch_hvd, name)(optimizer, named_parameters=model.named_parameters(), **named, **options)


def step_torch(model: torch.nn.Module, optimizer: Any, rank: int, number: int) -> None:
    """One step on this rank's own data."""
    optimizer.zero_grad()
    loss = model(torch.as_tensor(inputs(rank, number))).square().mean()
    loss.backward()
    if hasattr(optimizer, "record_loss"):
        optimizer.record_loss(loss)
    optimizer.step()


def state_torch(model: torch.nn.Module) -> np.ndarray[Any, Any]:
    """Weights and buffers."""
    return np.concatenate([t.double().reshape(-1).numpy() for t in model.state_dict().values()])


def make_keras(wrapper: str, buffers: bool, seed: int) -> tuple[keras.Model, Any]:
    """A model and its optimizer, the same on all ranks."""
    layers = [keras.Input((2,)), keras.layers.Dense(3, name="first")]
    layers += [keras.layers.BatchNormalization(name="norm")] if buffers else []
    model = keras.Sequential([*layers, keras.layers.Dense(1, name="last")], name="model")
    for variable in model.trainable_variables:
        variable.assign(start(int(np.prod(variable.shape)), seed).reshape(variable.shape))
    name, options = WRAPPERS[wrapper]
    optimizer = getattr(keras_hvd, name)(keras.optimizers.SGD(0.01, momentum=0.9), model=model, **options)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def step_keras(model: keras.Model, optimizer: Any, rank: int, number: int) -> None:
    """One step on this rank's own data, in eager mode."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(tf.constant(inputs(rank, number)), training=True)))
    gradients = tape.gradient(loss, model.trainable_variables)
    if hasattr(optimizer, "record_loss"):
        optimizer.record_loss(loss)
    optimizer.apply(gradients, model.trainable_variables)


def state_keras(model: keras.Model) -> np.ndarray[Any, Any]:
    """Weights and buffers."""
    return np.concatenate([np.asarray(v, np.float64).reshape(-1) for v in model.variables])


class Framework(NamedTuple):
    """One framework's side of a cell.

    Attributes:
        make: a model and its optimizer by wrapper, whether it has batch norm, and seed; the same on all ranks.
        step: one step of them, of a rank, with a number.
        state: a model's weights and buffers.
    """

    make: Callable[[str, bool, int], tuple[Any, Any]]
    step: Callable[[Any, Any, int, int], None]
    state: Callable[[Any], np.ndarray[Any, Any]]


FRAMEWORKS = {
    "torch": Framework(make_torch, step_torch, state_torch),
    "keras": Framework(make_keras, step_keras, state_keras),
}


# -- a cell ---------------------------------------------------------------------------------------------------


class _Holder:
    """In a reference cycle with its optimizers, as a trainer is."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers
        for optimizer in optimizers:
            vars(optimizer)["holder"] = self


def steps_of(cell: Cell, rank: int) -> int:
    """Uneven where that is allowed: ranks that are out of batches serve the others."""
    return 3 + (rank if any(cell.drains) else 0)


def run(cell: Cell, wrapper: str, framework: Framework) -> list[Any]:
    """Train, drain and end on every rank.

    Returns:
        What comes of each rank: its models' states after the drains and that of the model trained last, or its error.
    """
    make, step, state = framework

    def train(rank: int) -> Any:
        pairs = [make(wrapper, cell.buffers, seed) for seed in range(cell.optimizers)]
        for number in range(steps_of(cell, rank)):
            for model, optimizer in pairs:
                step(model, optimizer, rank, number)
        for _ in range(cell.drains[rank]):
            getattr(pairs[0][1], cell.how)()
        if cell.end == "exception" and rank == 1:
            raise ValueError("boom")  # (InjectedError would stand for Horovod's, and call a roll)
        engine = local_engine()
        assert engine is not None
        if cell.end == "death" and rank == 1:
            engine._channel.close()  # type: ignore[union-attr]
            return None
        states = [state(model) for model, _ in pairs]
        holder = _Holder([optimizer for _, optimizer in pairs])
        del pairs, optimizer, model
        if rank not in cell.kept:
            del holder
            gc.collect()
        trained = np.zeros(0)
        if len(set(cell.drains)) == 1:  # (else a rank may still be in a drain of the first)
            later, other = make(wrapper, cell.buffers, 7)
            for number in range(3):
                step(later, other, rank, number)
            other.drain()
            trained = state(later)
        engine.drain(leaving=True)
        return states, trained

    return list(Cluster(RANKS).outcomes(train, LIMIT))


def check(cell: Cell, outcomes: list[Any]) -> None:
    """Normal ends bring the same weights everywhere; otherwise all are informed of rank 1."""
    assert not any(isinstance(outcome, TimeoutError) for outcome in outcomes), outcomes
    if cell.end != "normal":
        for rank in (0, 2):
            over = cell.drains[rank] < cell.drains[1] or (len(set(cell.drains)) > 1 and rank not in cell.kept)
            if over and not isinstance(outcomes[rank], InjectedError):
                continue  # it had nothing left to drain when rank 1 failed
            assert isinstance(outcomes[rank], InjectedError), outcomes
            assert "rank 1 on host host1" in str(outcomes[rank])
        return
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    for _, trained in outcomes[1:]:
        assert np.array_equal(trained, outcomes[0][1])
    if cell.how == "drain" and len(set(cell.drains)) == 1 and cell.drains[0]:
        for states, _ in outcomes[1:]:
            assert all(map(np.array_equal, states, outcomes[0][0]))
