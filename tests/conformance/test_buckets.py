"""Which gradients share a bucket in either binding, how they are counted there, and when a bucket leaves in Keras."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from horovod.common.util import split_list

import hvd_async.tensorflow.keras as hvd
import hvd_async.torch
from hvd_async.algorithms.eager.gradient_format import Tail, count_slots, largest_summand
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.tensorflow.gradient_format import Codec, partition
from hvd_async.testing import Cluster, Switchboard
from hvd_async.torch.gradient_format import Layout, make_wire
from hvd_async.torch.gradient_format import slots as torch_slots
from tests.conformance.eager_ranks import TINY


def variables(*sizes: int, dtypes: str = "") -> list[tf.Variable]:
    """float32 ones ("s"), float64 ("d") or float16 ("h")."""
    kinds = {"s": tf.float32, "d": tf.float64, "h": tf.float16}
    return [tf.Variable(tf.zeros([n], kinds[d])) for n, d in zip(sizes, dtypes or "s" * len(sizes), strict=True)]


def indices(buckets: list[Any]) -> list[list[int]]:
    return [list(bucket.indices) for bucket in buckets]


# -- which variables share a bucket ---------------------------------------------------------------------------


def test_buckets_fill_from_the_last_variable_up_to_the_cap():
    five = variables(10, 30, 10, 10, 200)
    assert indices(partition(five, 160, None)) == [[4], [2, 3], [0, 1]]
    assert indices(partition(five, 1e9, None)) == [[0, 1, 2, 3, 4]]
    assert indices(partition(five, 1, None)) == [[4], [3], [2], [1], [0]]


@pytest.mark.parametrize(
    ("pick", "hint"), [([[0, 1], [1]], "listed twice"), ([[0, None]], "not among the optimizer's variables")]
)
def test_wrong_groups_say_what_is_wrong(pick, hint):
    two, stranger = variables(1, 1), tf.Variable([0.0])
    with pytest.raises(ValueError, match=hint):
        partition(two, 1e9, [[stranger if i is None else two[i] for i in group] for group in pick])


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 9])
def test_groups_are_split_as_horovod_splits_them(groups):
    theirs = [part for part in split_list(list(range(5)), groups) if part][::-1]
    variables = [tf.Variable([0.0]) for _ in range(5)]
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(5)]
    place = {id(p): index for index, p in enumerate(parameters)}
    ours = [list(bucket.indices) for bucket in partition(variables, 1e9, groups)]
    torchs = [sorted(place[id(p)] for p in bucket.parameters) for bucket in Layout(parameters, groups=groups).buckets]
    assert ours == torchs == theirs


@pytest.mark.parametrize("size", [2, 3, 1000, 5000, 10_000])
def test_float16_counts_are_exact_however_many_ranks_there_are(size):
    """Every rank has as many pending as ``max_staleness`` lets it, and gradients that are cut off."""
    staleness, most = 16, 18
    slots = count_slots(size, staleness, "float16")
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert torch_slots(hvd_async.torch.Compression.fp16, [parameter], size, staleness) == slots
    rank_group = RankGroup(None, tuple(range(size)), 0, 0, size)
    wire = make_wire(Layout([parameter], tail=Tail(slots)), hvd_async.torch.Compression.fp16, Tail(slots), rank_group)
    codec = Codec(hvd.Compression.fp16, [tf.float32], size, staleness)
    assert codec.tail.slots == slots
    vector = np.zeros(2 + slots, np.float32)
    vector[:3] = [1e6, -1e6, most]
    for encoded in (wire.encode(torch.as_tensor(vector)).numpy(), codec.encode(tf.constant(vector)).numpy()):
        assert encoded.dtype == np.float16
        assert encoded[2] == most
        sharing = -(-size // slots)
        assert encoded[2:3].repeat(sharing).cumsum(dtype=np.float16)[-1] == most * sharing
        total = encoded[:2].copy()
        for _ in range(size - 1):
            total += encoded[:2]
        assert np.isfinite(total).all()
        assert abs(encoded[0] - largest_summand(size)) <= 2**-10 * encoded[0]


# -- overlap --------------------------------------------------------------------------------------------------


def late_backward(event: threading.Event, came: list[bool]) -> Any:
    """A layer whose backward pass waits for ``event``."""

    @tf.custom_gradient
    def through(x: tf.Tensor) -> Any:
        def backward(dy: tf.Tensor) -> tf.Tensor:
            def wait(gradient: Any) -> Any:
                came.append(event.wait(30))
                return gradient

            waited = tf.numpy_function(wait, [dy], dy.dtype, stateful=False)
            return tf.ensure_shape(waited, dy.shape)

        return x, backward

    return keras.layers.Lambda(through)


@pytest.mark.parametrize("use_fit", [True, False], ids=["fit", "loop"])
def test_a_bucket_leaves_while_backward_still_computes(use_fit, monkeypatch):
    """The last layer's gradients are handed over before backward has come to the first layer."""
    events = [threading.Event() for _ in range(2)]
    came: list[bool] = []
    original = Switchboard.join

    def join(self: Switchboard, rank: int, name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("hvd_async.eager.") and name.split(".")[3] == "1":  # (0 is the last layer's bias)
            events[rank].set()
        return original(self, rank, name, *args, **options)

    monkeypatch.setattr(Switchboard, "join", join)

    def train(rank: int) -> int:
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input((3,)), dense(4), late_backward(events[rank], came), dense(2)])
        model.set_weights([np.ones_like(w) for w in model.get_weights()])
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(0.1), quorum="all", bucket_cap_mb=TINY)
        opt.build(model.trainable_variables)
        opt._async.worker_now()  # the ranks meet: before that everything waits for them
        x, y = tf.ones((2, 3)), tf.zeros((2, 2))
        if use_fit:
            model.compile(optimizer=opt, loss="mse", jit_compile=False)
            model.fit(x, y, verbose=0)
        else:

            @tf.function
            def step() -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                opt.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

            step()
        opt.drain()
        return len(opt._async.replica.layout)

    assert Cluster(2).run(train) == [4, 4]
    assert came == [True, True]
