"""Buffers of models: statistics of batch norm are averaged, each separately; others become rank 0's."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvd_async.tensorflow.keras as keras_hvd
import hvd_async.torch as torch_hvd
from hvd_async.testing import Cluster
from hvd_async.torch.tensors import NamedBuffers
from tests.conformance.leader_drive import in_step
from tests.conformance.leader_reference import Following, several
from tests.conformance.weight_ranks import SGD, TorchRank
from tests.conftest import LONG_RUN

WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("EagerOptimizer", {"quorum": "all"}),
    "gossip": ("GossipOptimizer", {"algorithm": "sgp"}),
    "lsgd": ("LeaderOptimizer", {"algorithm": "lsgd", "global_period": 1, "group": 1}),
    "easgd": ("LeaderOptimizer", {"algorithm": "easgd", "global_period": 1}),
}
all_wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)
KINDS = ("bool", "bfloat16", "float16", "float64", "int64", "uint32", "int8")
"""Dtypes of variables of Keras that no optimizer trains."""


class Net(torch.nn.Module):
    """A linear layer and batch norm, the same on all ranks, with other buffers."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(6.0).view(3, 2) / 5 - 0.5)
            self.layer.bias.zero_()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=name != "transient")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(inputs))


def wrap(wrapper: str, model: torch.nn.Module, named_buffers: Any = None, **more: Any) -> Any:
    """The model's optimizer."""
    name, options = WRAPPERS[wrapper]
    named = model.named_buffers() if named_buffers is None else named_buffers
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    return getattr(torch_hvd, name)(plain, named_buffers=named, **options, **more)


def step(model: torch.nn.Module, optimizer: Any, rank: int, number: int = 0) -> None:
    """One step on this rank's own data."""
    draw = torch.Generator().manual_seed(10 * rank + number)
    optimizer.zero_grad()
    (model(torch.randn(8, 2, generator=draw) * (1 + rank)) - 1).square().mean().backward()
    if hasattr(optimizer, "record_loss"):
        optimizer.record_loss(-float(rank))  # (the last rank leads)
    optimizer.step()


def bits(tensor: torch.Tensor) -> bytes:
    """A dense tensor's bytes."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def constants() -> dict[str, torch.Tensor]:
    """Buffers as models have them, of many kinds."""
    return {
        "mask": torch.triu(torch.full((4, 4), float("-inf")), 1),
        "observed": torch.tensor([float("inf"), float("-inf")]),
        "causal": torch.tril(torch.ones(4, 4, dtype=torch.bool)),
        "rotary": torch.polar(torch.ones(5), torch.arange(5.0)),
        "rotary_double": torch.polar(torch.ones(5).double(), torch.arange(5.0).double()).conj(),
        "words": torch.arange(5).to(torch.uint16),
        "scales": torch.linspace(0, 1, 5).to(torch.float8_e4m3fn),
        "brain": torch.linspace(0, 1, 3).bfloat16(),
        "tokens": torch.arange(4),
        "expanded": torch.tensor([[0.1]]).expand(3, 2),
        "transient": torch.linspace(0, 1, 7),
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(0.1),
        "adjacency": torch.eye(3).to_sparse(),
    }


class TorchModel:
    """A rank in torch after a step, whose batch norm has seen a mean of 1 + rank and a variance of 4 + rank."""

    def __init__(self, wrapper: str, rank: int, **options: Any) -> None:
        given = {name: one for name, one in constants().items() if not one.is_sparse and one.numel()}
        self.rank, self.first = rank, {name: bits(one.resolve_conj()) for name, one in given.items()}
        if rank:
            given = {n: torch.zeros_like(one) if n != "expanded" else one * 0 for n, one in given.items()}
            given["expanded"] = torch.zeros(1, 1).expand(3, 2)
        self.model = Net(**given, adjacency=torch.eye(3).to_sparse(), empty=torch.zeros(0, 3))
        self.opt = wrap(wrapper, self.model, **options)
        self.norm = self.model.norm
        self.step()
        self.assign(1.0 + rank, 4.0 + rank)

    def step(self) -> None:
        step(self.model, self.opt, self.rank)

    def assign(self, mean: Any, variance: Any) -> None:
        """Set the statistics."""
        for tensor, value in ((self.norm.running_mean, mean), (self.norm.running_var, variance)):
            tensor.copy_(torch.as_tensor(value).expand(3))

    def statistics(self) -> list[list[float]]:
        """Mean and variance."""
        return [self.norm.running_mean.tolist(), self.norm.running_var.tolist()]

    def others_are_rank_0s(self) -> bool:
        """Whether all other buffers have rank 0's bits; sparse and empty ones stay."""
        assert self.model.adjacency.is_sparse
        return all(bits(getattr(self.model, name).resolve_conj()) == one for name, one in self.first.items())


class Held(keras.layers.Layer):
    """Holds variables that no optimizer trains, of many dtypes."""

    def build(self, shape: Any) -> None:
        for kind in KINDS:
            made = self.add_weight(shape=(3,), dtype=kind, initializer="zeros", trainable=False, name=kind)
            setattr(self, kind, made)
        self.mask = self.add_weight(shape=(2,), initializer="zeros", trainable=False, name="mask")
        self.mask.assign([-np.inf, 0.0])

    def call(self, inputs: Any) -> Any:
        return inputs


class KerasModel:
    """The same in Keras, with seeds and a frozen layer, which are a rank's own."""

    def __init__(self, wrapper: str, rank: int, **more: Any) -> None:
        layers = keras.layers
        ones = {"kernel_initializer": "ones"}
        parts = [layers.Dense(3, **ones), layers.BatchNormalization(), Held(), layers.Dropout(0.5)]
        parts += [layers.Normalization(), layers.Dense(2, trainable=False, **ones)]
        model = keras.Sequential([keras.Input((2,)), *parts])
        name, options = WRAPPERS[wrapper]
        self.opt = getattr(keras_hvd, name)(keras.optimizers.SGD(0.01), model=model, **options, **more)
        self.opt.build(model.trainable_variables)
        self.rank, (_, self.norm, self.held, self.dropout, self.normalization, self.frozen) = rank, model.layers
        self.step()
        self.assign(1.0 + rank, 4.0 + rank)
        for kind in KINDS:
            variable = getattr(self.held, kind)
            variable.assign(tf.cast(tf.fill([3], rank == 0), variable.dtype))
        self.dropout.seed_generator.state.assign([7, rank])
        self.normalization.adapt_mean.assign([float(rank)] * 3)
        self.frozen.kernel.assign(np.full((3, 2), float(rank)))

    def step(self) -> None:
        if hasattr(self.opt, "record_loss"):
            self.opt.record_loss(-float(self.rank))
        self.opt.apply([tf.ones(v.shape) * (1.0 + self.rank) for v in self.opt._trainable_variables])

    def assign(self, mean: Any, variance: Any) -> None:
        for variable, value in ((self.norm.moving_mean, mean), (self.norm.moving_variance, variance)):
            variable.assign(np.broadcast_to(value, 3))

    def statistics(self) -> list[list[float]]:
        return [self.norm.moving_mean.numpy().tolist(), self.norm.moving_variance.numpy().tolist()]

    def others_are_rank_0s(self) -> bool:
        assert self.dropout.seed_generator.state.numpy().tolist() == [7, self.rank]
        assert self.frozen.kernel.numpy().tolist() == [[float(self.rank)] * 2] * 3
        assert self.held.mask.numpy().tolist() == [-np.inf, 0.0]
        kinds = [float(getattr(self.held, kind).numpy().astype(float)[0]) for kind in KINDS]
        return [*kinds, float(self.normalization.adapt_mean.numpy()[0])] == [1.0] * len(KINDS) + [0.0]


both = pytest.mark.parametrize("made", [TorchModel, KerasModel], ids=["torch", "keras"])


@both
@pytest.mark.parametrize(
    ("wrapper", "policy", "means"),
    [
        *((wrapper, "average", [2.0, 2.0, 2.0]) for wrapper in WRAPPERS),
        ("eager", "root", [1.0, 1.0, 1.0]),
        ("eager", "local", [1.0, 2.0, 3.0]),
        ("lsgd", "local", [3.0, 3.0, 3.0]),
        ("easgd", "local", [1.0, 2.0, 3.0]),
    ],
)
@pytest.mark.filterwarnings("error:buffers")
def test_statistics_are_averaged_or_rank_0s_or_the_leaders_or_each_ranks_own(made, wrapper, policy, means):
    """And others become rank 0's: in ``consensus()``, which puts back what was there, and after a drain."""

    def train(rank: int) -> list[list[float]]:
        one = made(wrapper, rank, buffers=policy)
        own = one.statistics()
        with one.opt.consensus():
            shown = one.statistics()
            assert policy == "local" or one.others_are_rank_0s()
        assert one.statistics() == (own if wrapper != "eager" else shown)
        one.opt.drain()
        assert policy == "local" or one.others_are_rank_0s()
        assert one.statistics() == shown
        return shown

    assert Cluster(3).run(train) == [[[mean] * 3, [3.0 + mean] * 3] for mean in means]


def test_counters_of_batches_are_the_ranks_own_until_the_leaders_are_taken():
    following = Following("lsgd", several(2, 2), 1, 1, loss_of=lambda z, own, step: 1.0 - own)

    def train(rank: int) -> list[int]:
        count = torch.tensor(5 + rank)
        one = TorchRank(TorchRank.least_squares(2, SGD), rank, following, named_buffers=[("n", count)], buffers="local")
        in_step(one, 2)
        seen = [int(count)]
        with one.opt.consensus():
            seen.append(int(count))
        seen.append(int(count))
        one.opt.drain()
        return [*seen, int(count)]

    assert Cluster(2).run(train) == [[5, 6, 5, 6], [6, 6, 6, 6]]


@both
@pytest.mark.parametrize("wrapper", WRAPPERS if LONG_RUN else ("gossip", "easgd"))
def test_only_the_statistic_that_is_not_finite_is_left_out_and_named(made, wrapper):
    bad = float("nan") if wrapper in ("eager", "easgd") else float("inf")

    def train(rank: int) -> list[list[float]]:
        one = made(wrapper, rank)
        if rank == 1:
            one.assign([bad, 2.0, 2.0], 5.0)
        one.opt.drain()
        return one.statistics()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert Cluster(3).run(train) == [[[2.0] * 3, [5.0] * 3]] * 3  # of ranks 0 and 2
    (reported,) = [str(one.message) for one in caught if "not finite" in str(one.message)]
    assert "mean are not finite on this rank, which has no part in their average" in reported


class Codebook(Net):
    """A model with a buffer of its own that training changes, and one that it does not."""

    def __init__(self) -> None:
        super().__init__(codes=torch.zeros(3), scale=torch.ones(1), seen=torch.zeros(1, dtype=torch.int64))
        del self.norm

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(inputs) * self.scale
        self.codes.lerp_(out.detach().mean(0), 0.1)
        self.seen += 1
        return out


def in_a_trainer(model: torch.nn.Module) -> torch.nn.Module:
    trainer = torch.nn.Module()
    trainer.model, trainer.forward = model, model.forward
    return trainer


SILENT: list[tuple[str, Any, dict[str, Any], str | None]] = [
    ("batch norm", Net, {}, "norm.running_mean, norm.running_var, and"),
    ("inside another module", lambda: in_a_trainer(Net()), {}, "model.norm.running_mean, model.norm.running_var, and"),
    ("a codebook", Codebook, {}, "codes, and"),
    ("in evaluation mode", lambda: Net().eval(), {}, None),
    ("each rank's own on purpose", Net, {"buffers": "local"}, None),
    ("given", Net, {"named_buffers": "generator"}, None),
    ("none given on purpose", Net, {"named_buffers": None}, None),
]


@pytest.mark.parametrize(
    ("wrapper", "make", "more", "names"),
    [
        pytest.param(wrapper, *row[1:], id=f"{wrapper}-{row[0]}")
        for row in SILENT
        for wrapper in WRAPPERS
        if wrapper == "eager" or row is SILENT[0]
    ],
)
def test_buffers_that_training_changes_and_that_were_not_given_are_named_once(wrapper, make, more, names):
    def train(rank: int) -> None:
        name, options = WRAPPERS[wrapper]
        model, given = make(), dict(more)
        if "named_buffers" in given:
            given["named_buffers"] = model.named_buffers() if given["named_buffers"] else []
        optimizer = getattr(torch_hvd, name)(torch.optim.SGD(model.parameters(), lr=0.01), **options, **given)
        if rank == 0:
            model.load_state_dict({n: t + 1 if "running" in n else t for n, t in model.state_dict().items()})
        for number in range(4):
            step(model, optimizer, rank, number)
        optimizer.drain()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Cluster(2).run(train)
    said = [str(one.message) for one in caught if "training changes buffers" in str(one.message)]
    assert len(said) == (names is not None)
    assert all(f"of this model, {names} each rank keeps its own: pass named_buffers=" in one for one in said)


def test_unused_generators_of_models_are_called_again_and_other_pairs_are_taken_as_they_are():
    """A generator's arguments count; one that has been used, or filters, is pairs like a list."""
    model = Net()
    used = model.named_buffers()
    next(used)
    given = [model, model.named_buffers, model.named_buffers("m"), [*model.named_buffers()], used]
    given.append((n, b) for n, b in model.named_buffers() if "mean" in n)
    listed, before = [NamedBuffers(one) for one in given], model.norm.running_mean
    model.norm.running_mean = torch.ones(3)
    held = [{name: buffer is model.norm.running_mean for name, buffer in one.now()} for one in listed]
    names = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert [[*one] for one in held] == [names, names, [f"m.{n}" for n in names], names, names[1:], names[:1]]
    assert [any(one.values()) for one in held] == [True, True, True, False, False, False]
    assert dict(listed[3].now())[names[0]] is before


@all_wrappers
def test_a_buffer_with_another_shape_on_a_rank_is_left_alone_and_named(wrapper):
    """A rotary table that has grown with the longest sentence of a rank."""

    def train(rank: int) -> tuple[list[float], list[float]]:
        model = Net(table=torch.zeros(2))
        optimizer = wrap(wrapper, model)
        step(model, optimizer, rank)
        model.table = torch.full((2 + rank,), 1.0 + rank)
        model.norm.running_mean.fill_(1.0 + rank)
        optimizer.drain()
        return model.norm.running_mean.tolist(), model.table.tolist()

    with pytest.warns(UserWarning, match="buffers table have different shapes"):
        assert Cluster(2).run(train) == [([1.5] * 3, [1.0] * 2), ([1.5] * 3, [2.0] * 3)]


@pytest.mark.parametrize(("given", "reported"), [(["mean"], "'mean'"), (5, "5")])
def test_named_buffers_that_are_no_pairs_are_refused(given, reported):
    with pytest.raises(
        ValueError, match=rf"named_buffers must be pairs .* got \[{reported}\]. Pass model.named_buffers"
    ):
        torch_hvd.EagerOptimizer(torch.optim.SGD(Net().parameters(), lr=0.1), named_buffers=given)


# -- Keras ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["eager", "gossip"])
def test_statistics_in_half_precision_are_summed_in_double(wrapper):
    """Their sum is beyond what float16 can hold."""

    def train(rank: int) -> list[float]:
        one = KerasModel(wrapper, rank)
        half = one.held.float16
        half._name = half._path = "moving_variance"
        half.assign([60000.0 + 64 * rank] * 3)
        one.opt.drain()
        return half.numpy().tolist()

    assert Cluster(3).run(train) == [[60064.0] * 3] * 3
