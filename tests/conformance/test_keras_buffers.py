"""Variables of Keras models beside the weights: statistics of batch norm are averaged, seeds are a rank's own, others
are rank 0's."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance.leader_drive import wait_for_pulls

WRAPPERS: dict[str, Any] = {
    "eager": lambda optimizer, **options: hvd.EagerOptimizer(optimizer, quorum="all", **options),
    "gossip": lambda optimizer, **options: hvd.GossipOptimizer(optimizer, algorithm="sgp", **options),
    "lsgd": lambda optimizer, **options: hvd.LeaderOptimizer(optimizer, global_period=1, group=1, **options),
    "easgd": lambda optimizer, **options: hvd.LeaderOptimizer(optimizer, algorithm="easgd", global_period=1, **options),
}
all_wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)


class Held(keras.layers.Layer):
    """Holds variables that no optimizer trains, of many dtypes."""

    def build(self, shape: Any) -> None:
        for kind in ("bool", "bfloat16", "float16", "float64", "int64", "uint32", "int8"):
            setattr(
                self, kind, self.add_weight(shape=(3,), dtype=kind, initializer="zeros", trainable=False, name=kind)
            )
        self.mask = self.add_weight(shape=(2,), initializer="zeros", trainable=False, name="mask")
        self.mask.assign([-np.inf, 0.0])

    def call(self, inputs: Any) -> Any:
        return inputs


def make(dtype: str = "float32") -> keras.Sequential:
    """A model whose weights are the same on all ranks."""
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(3, kernel_initializer="ones"),
            keras.layers.BatchNormalization(dtype=dtype),
            Held(),
            keras.layers.Dropout(0.5),
            keras.layers.Normalization(),
            keras.layers.Dense(2, kernel_initializer="ones", trainable=False),
        ]
    )
    model.layers[-1].kernel.assign(np.ones((3, 2)))
    return model


def step(model: Any, optimizer: Any, rank: int) -> None:
    """One."""
    if hasattr(optimizer, "record_loss"):
        optimizer.record_loss(float(rank))
    optimizer.apply([tf.ones(v.shape) * (1.0 + rank) for v in optimizer._trainable_variables])


def begun(wrapper: str, rank: int, dtype: str = "float32") -> tuple[Any, Any]:
    """A model and its optimizer after a step, with other values of everything on each rank."""
    model = make(dtype)
    optimizer = WRAPPERS[wrapper](keras.optimizers.SGD(0.01), model=model)
    optimizer.build(model.trainable_variables)
    step(model, optimizer, rank)
    _, norm, held, dropout, normalization, frozen = model.layers
    norm.moving_mean.assign([1.0 + rank] * 3)
    norm.moving_variance.assign([4.0 + rank] * 3)
    for kind in ("bool", "bfloat16", "float16", "float64", "int64", "uint32", "int8"):
        variable = getattr(held, kind)
        variable.assign(tf.cast(tf.fill([3], rank == 0), variable.dtype))
    dropout.seed_generator.state.assign([7, rank])
    normalization.adapt_mean.assign([float(rank)] * 3)
    frozen.kernel.assign(np.full((3, 2), float(rank)))
    return model, optimizer


@all_wrappers
@pytest.mark.filterwarnings("error:buffers")
def test_statistics_are_averaged_seeds_stay_and_others_become_rank_0s(wrapper):
    def train(rank: int) -> list[float]:
        model, optimizer = begun(wrapper, rank)
        _, norm, held, dropout, normalization, frozen = model.layers

        def seen() -> list[float]:
            assert dropout.seed_generator.state.numpy().tolist() == [7, rank]
            assert (
                frozen.kernel.numpy().tolist() == [[float(rank)] * 2] * 3
            )  # a weight, which this optimizer does not train
            assert held.mask.numpy().tolist() == [-np.inf, 0.0]
            kinds = [
                getattr(held, kind) for kind in ("bool", "bfloat16", "float16", "float64", "int64", "uint32", "int8")
            ]
            others = [*kinds, normalization.adapt_mean]
            return [float(v.numpy().astype(float)[0]) for v in (norm.moving_mean, norm.moving_variance, *others)]

        own = seen()
        with optimizer.consensus():
            shown = seen()
        assert seen() == (own if wrapper != "eager" else shown)
        optimizer.drain()
        assert seen() == shown
        return shown

    assert Cluster(3).run(train) == [[2.0, 5.0, *[1.0] * 7, 0.0]] * 3


@all_wrappers
def test_only_the_statistic_that_is_not_finite_is_left_out_and_named(wrapper):
    def train(rank: int) -> tuple[list[float], list[float]]:
        model, optimizer = begun(wrapper, rank)
        if rank == 1:
            model.layers[1].moving_mean.assign([np.nan, 1.0, 1.0])
        optimizer.drain()
        return model.layers[1].moving_mean.numpy().tolist(), model.layers[1].moving_variance.numpy().tolist()

    with pytest.warns(UserWarning, match=r"buffers [a-z_0-9/]*moving_mean are not finite on this rank"):
        assert Cluster(3).run(train) == [([2.0] * 3, [5.0] * 3)] * 3


@pytest.mark.parametrize("wrapper", ["eager", "gossip"])
def test_statistics_in_half_precision_are_summed_in_double(wrapper):
    """Their sum is beyond what float16 can hold."""

    def train(rank: int) -> list[float]:
        model, optimizer = begun(wrapper, rank)
        held = model.layers[2]
        held.float16._name = held.float16._path = "moving_variance"
        held.float16.assign([60000.0 + 64 * rank] * 3)
        optimizer.drain()
        values: list[float] = held.float16.numpy().tolist()
        return values

    assert Cluster(3).run(train) == [[60064.0] * 3] * 3


@pytest.mark.parametrize("wrapper", ["lsgd", "easgd"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_pulls_average_statistics_without_the_one_that_is_not_finite(wrapper, graph):
    def train(rank: int) -> list[float]:
        model, optimizer = begun(wrapper, rank)
        norm = model.layers[1]
        optimizer.drain()
        norm.moving_mean.assign([float(rank)] * 3)
        norm.moving_variance.assign([np.nan if rank else 4.0] * 3)
        taken = tf.function(lambda: step(model, optimizer, rank)) if graph else lambda: step(model, optimizer, rank)
        for number in range(4):
            taken()
            wait_for_pulls(optimizer._async.worker_now(), number + 2)
        return [float(norm.moving_mean[0]), float(norm.moving_variance[0])]

    assert Cluster(2).run(train) == [[0.5, 4.0]] * 2
