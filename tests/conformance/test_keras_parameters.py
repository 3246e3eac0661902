"""Keras: every parameter of Horovod's DistributedOptimizer, with Horovod's meaning."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.process_sets import SingleRank
from hvd_async.tensorflow.collectives import HorovodCollectives
from hvd_async.tensorflow.compression import Codec
from hvd_async.testing import Cluster
from tests.conformance.cases import SCRIPTS, Case, Script
from tests.conformance.drive import ScriptedWorker, attach, scripted_engine
from tests.conformance.keras_ranks import ranks

SGD = Case("sgd", "sgd", 0.1)
both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def trained(size: int, gradients: Any, graph: bool = False, rate: float = 1.0, **options: Any) -> list[list[Any]]:
    """Each rank takes steps with ``gradients(rank)``, of one weight vector that starts at zero; the weights after each
    step and after drain(). Plain SGD, quorum "all"."""

    def train(rank: int) -> list[Any]:
        given = [np.asarray(g, np.float32) for g in gradients(rank)]
        weights = keras.Variable(np.zeros_like(given[0]), name="weights")
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(rate), **{"quorum": "all"} | options)
        opt.build([weights])
        call: Any = lambda g: opt.apply([g], [weights])  # noqa: E731
        step = tf.function(call) if graph else call
        after = []
        for gradient in given:
            step(tf.constant(gradient))
            after.append(weights.numpy())
        opt.drain()
        return [*after, weights.numpy(), opt.stats(), int(opt.iterations)]

    return Cluster(size).run(train)


# -- compression ----------------------------------------------------------------------------------------------

VALUES = np.array([1.0 + 2.0**-9, 3.14159265, -1e-3, 2.0**-20, 1000.5], np.float32)


@both_modes
@pytest.mark.parametrize(("kind", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_compression_sends_half_precision(kind, dtype, graph):
    def rounded(values: Any) -> Any:
        return tf.cast(tf.cast(values, dtype), tf.float32).numpy()

    def gradients(rank: int) -> list[Any]:
        return [VALUES * (rank + 1)]

    outcomes = trained(2, gradients, graph, compression=getattr(hvd.Compression, kind))
    expected = -rounded(tf.cast(VALUES, dtype) + tf.cast(2 * VALUES, dtype)) / 2
    assert not np.array_equal(expected, -1.5 * VALUES)
    for first, *_ in outcomes:
        np.testing.assert_array_equal(first, expected)


def test_compression_halves_the_bytes_sent():
    def bytes_sent(compression: Any) -> int:
        return trained(2, lambda rank: [np.ones(1000)], compression=compression)[0][2].bytes_sent

    plain, half = bytes_sent(hvd.Compression.none), bytes_sent(hvd.Compression.bf16)
    assert plain == 4 * 1001
    assert half == 2 * 1001


def test_what_float16_cannot_hold_is_cut_off_and_reaches_nobody_as_infinity():
    outcomes = trained(2, lambda rank: [[1e6, -1e6, 60000.0, 1.0]], compression=hvd.Compression.fp16)
    for first, *_ in outcomes:
        np.testing.assert_allclose(first, [-65504 / 2, 65504 / 2, -65504 / 2, -1.0], rtol=2e-3)


@pytest.mark.parametrize(("kind", "staleness", "slots"), [("none", 16, 1), ("fp16", 16, 1), ("bf16", 16, 8)])
def test_gradients_are_counted_exactly_on_the_wire(kind, staleness, slots):
    """Also if each of 100 ranks has as many pending as the bound lets it have."""
    codec = Codec(getattr(hvd.Compression, kind), [tf.float32], 100, staleness)
    assert codec.slots == slots
    tails = [(staleness + 1) * tf.one_hot(rank % slots, slots) for rank in range(100)]
    sums = codec.encode(tails[0])
    for tail in tails[1:]:
        sums = sums + codec.encode(tail)
    assert float(tf.reduce_sum(codec.decode(sums, tf.float32))) == 100 * (staleness + 1)


def test_a_compression_of_ones_own():
    class Halved:
        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            return tf.cast(tensor, tf.float64), tensor.dtype

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return tf.cast(tensor, ctx)

    for first, *_, stats, _ in trained(2, lambda rank: [VALUES], compression=Halved):
        np.testing.assert_array_equal(first, -VALUES)
        assert stats.bytes_sent == 8 * (VALUES.size + 1)


# -- op, predivide --------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize(
    ("options", "factor"),
    [({}, 1 / 3), ({"op": hvd.Average}, 1 / 3), ({"op": hvd.Sum}, 1.0), ({"gradient_predivide_factor": 4.0}, 1 / 3)],
    ids=["default", "average", "sum", "predivide"],
)
def test_op_and_predivision(options, factor, graph):
    for first, *_ in trained(3, lambda rank: [[1.0 + rank, 10.0]], graph, **options):
        np.testing.assert_allclose(first, [-6 * factor, -30 * factor], rtol=1e-6)


def test_predivision_happens_before_the_sum():
    with scripted_engine(4):
        weights = keras.Variable([0.0])
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(1.0), gradient_predivide_factor=4.0)
        opt.build([weights])
        worker = attach(opt, ScriptedWorker(Script("one", ((1,),)), 4, 1, 1.0, tf.constant))
        opt.apply([tf.constant([2.0])])
    assert worker.handed[0].tolist() == [0.5, 1.0]
    assert float(weights[0]) == pytest.approx(-worker.applied[0].sums[0])  # x 4 / 4 ranks


# -- local aggregation ----------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("average", [False, True])
def test_backward_passes_per_step(average, graph):
    options = {"backward_passes_per_step": 3, "average_aggregated_gradients": average}
    outcomes = trained(2, lambda rank: [[2.0**step * (1 + rank)] for step in range(7)], graph, **options)
    one, two = (-1.5 * sum(2.0**s for s in steps) / (3 if average else 1) for steps in ((0, 1, 2), (3, 4, 5)))
    for *after, stats, iterations in outcomes:
        expected = [0.0, 0.0, one, one, one, one + two, one + two, one + two]  # the seventh waits for two more
        np.testing.assert_allclose(np.concatenate(after), expected, rtol=1e-6)
        assert (stats.steps, stats.gradients_applied, iterations) == (2, 4, 2)


def test_passes_short_of_a_step_stay_and_drain_says_so():
    with pytest.warns(UserWarning, match=r"1 backward pass\(es\) short of a step of 2"):
        trained(1, lambda rank: [[1.0]] * 3, backward_passes_per_step=2)


def test_a_pass_in_which_a_variable_has_no_gradient():
    def train(rank: int) -> list[float]:
        one, two = keras.Variable(0.0, name="one"), keras.Variable(0.0, name="two")
        opt = hvd.EagerOptimizer(
            keras.optimizers.SGD(1.0), quorum="all", backward_passes_per_step=2, bucket_cap_mb=1e-6
        )
        opt.build([one, two])
        opt.apply([tf.constant(1.0), None])
        opt.apply([tf.constant(2.0), tf.constant(4.0)])
        opt.drain()
        return [float(one), float(two)]

    assert Cluster(2).run(train) == [[-3.0, -4.0]] * 2


# -- groups, process sets, devices ----------------------------------------------------------------------------


def test_groups_and_num_groups_make_the_buckets():
    with scripted_engine(2):
        three = [keras.Variable([0.0], name=f"v{i}") for i in range(3)]
        by_list = hvd.EagerOptimizer(keras.optimizers.SGD(), groups=[[three[0], three[2]]])
        with pytest.warns(DeprecationWarning, match="groups="):
            by_number = hvd.EagerOptimizer(keras.optimizers.SGD(), num_groups=3)
        for opt, expected in ((by_list, [[1], [0, 2]]), (by_number, [[2], [1], [0]])):
            opt.build(three)
            opt.get_state()
            assert [list(b.indices) for b in opt._async.replica.layout.buckets] == expected


@both_modes
def test_a_process_set_averages_over_its_ranks_alone(graph):
    def train(rank: int) -> float:
        weight = keras.Variable(0.0)
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(1.0), quorum="all", process_set=ranks(0, 2))
        opt.build([weight])
        step = tf.function(lambda g: opt.apply([g], [weight])) if graph else lambda g: opt.apply([g], [weight])
        step(tf.constant((2.0, 3.0, 4.0)[rank]))
        opt.drain()
        assert opt.consensus_distance() == 0.0
        return float(weight)

    assert Cluster(3).run(train) == [-3.0, -3.0, -3.0]  # rank 1 is alone: -(2 + 1); the others (-2 - 4) / 2


def test_horovods_collectives_leave_a_lonely_rank_alone():
    collectives = object.__new__(HorovodCollectives)  # (nothing of Horovod is needed for one rank)
    given = tf.constant([1.0, 2.0])
    halved = collectives.allreduce_sum(given, "mine", SingleRank(3), scale=0.5)
    assert halved.done()
    assert halved.result().numpy().tolist() == [0.5, 1.0]
    assert collectives.broadcast(given, 3, "mine", SingleRank(3)).result().numpy().tolist() == [1.0, 2.0]


def test_vectors_and_dense_copies_are_made_where_the_devices_say():
    with scripted_engine(2):
        table = keras.Variable(np.zeros((4, 2), np.float32))
        opt = hvd.EagerOptimizer(
            keras.optimizers.SGD(), device_dense="/cpu:1", device_sparse="/cpu:2", sparse_as_dense=True
        )
        opt.build([table])
        attach(opt, ScriptedWorker(SCRIPTS[0], 2, 8, 0.1, tf.constant))

        def step(values: tf.Tensor) -> None:
            opt.apply([tf.IndexedSlices(values, tf.constant([1, 1, 3]), tf.constant([4, 2]))])

        graph = tf.function(step).get_concrete_function(tf.TensorSpec((3, 2))).graph
    devices = {op.type: op.device for op in graph.get_operations()}
    assert devices["UnsortedSegmentSum"].endswith("CPU:2")
    assert devices["ConcatV2"].endswith("CPU:1")


def test_local_variables_are_refused_with_the_reason():
    with scripted_engine(2):
        weight = keras.Variable(0.0, name="mine")
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(), scale_local_gradients=False)
        with pytest.raises(ReplicaStateError, match=r"mine.*plain Keras optimizer of its own"):
            opt.register_local_var(weight)
