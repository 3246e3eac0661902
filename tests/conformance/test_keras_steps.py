"""Keras: a step with what only Keras has: schedules, settings, averaged passes, devices, its graph, errors."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.algorithms.eager.gradient_format import ReducedRound
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.tensorflow.ops import as_op
from hvd_async.testing import Cluster
from tests.conformance.cases import SCHEDULES, SCRIPTS
from tests.conformance.drive import ScriptedWorker, attach, scripted_engine, with_late_rank
from tests.conformance.eager_ranks import MOMENTUM, SGD, UNIT
from tests.conformance.keras_ranks import KerasTrainer, KerasVectors
from tests.conformance.reference import Applied, replay

both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


# -- rates and settings ---------------------------------------------------------------------------------------


@both_modes
def test_a_learning_rate_schedule_is_evaluated_at_the_version(graph, tapes):
    decay = keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.5)
    outcomes = with_late_rank(SCHEDULES[0], lambda rank: KerasTrainer(lambda _: keras.optimizers.SGD(decay), graph))
    for rank, outcome in enumerate(outcomes):
        carried = [a for a in tapes[rank].applied if a.sums[-1]]
        at_version = [Applied(a.sums, 0.2 * 0.5**index) for index, a in enumerate(carried)]
        np.testing.assert_allclose(outcome.after, replay("keras", SGD, outcome.before, at_version, 2), atol=1e-5)
        assert outcome.after.tobytes() == outcomes[0].after.tobytes()


def test_a_schedule_needs_no_config():
    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return 0.5 ** tf.cast(step, tf.float32)

    def train(rank: int) -> list[float]:
        one = KerasVectors([1], lambda _: keras.optimizers.SGD(Halving()), quorum="all")
        for _ in range(2):
            one.take(1.0)
        one.opt.drain()
        return one.weights().tolist()

    assert Cluster(2).run(train) == [[-1.5]] * 2


@both_modes
def test_momentum_correction_follows_the_rounds_rate(graph):
    """With it Keras' velocity, which has the rate inside, moves as torch's, which has not."""
    with scripted_engine(4):
        trainer = KerasTrainer(MOMENTUM, graph, weight_prediction=0)
        worker = attach(trainer.opt, ScriptedWorker(SCRIPTS[0], 4, trainer.weights().size, 0.05, tf.constant))
        trainer.opt._async.replica.momentum_correction = True
        before = trainer.weights()
        for step, lr in enumerate([0.05, 0.1, 0.1, 0.02]):
            worker.lr = lr
            trainer.train(0, range(step, step + 1))
    np.testing.assert_allclose(trainer.weights(), replay("torch", MOMENTUM, before, worker.applied, 4), atol=1e-5)


def halving() -> KerasVectors:
    """A rank with a weight whose velocity halves."""
    return KerasVectors([1], lambda _: keras.optimizers.SGD(1.0, momentum=0.5), quorum="all")


def test_settings_changed_on_one_rank_are_noticed_with_a_hint():
    def train(rank: int) -> None:
        one = halving()
        one.take(1.0)
        if rank:
            one.opt.momentum = 0.25
        one.take(1.0)
        one.opt.drain()

    outcomes = [str(outcome) for outcome in Cluster(2).outcomes(train)]
    assert any("change anything else on every rank after a drain()" in outcome for outcome in outcomes)


# -- steps ----------------------------------------------------------------------------------------------------


def test_a_step_in_a_graph_is_traced_once_warns_of_nothing_and_uses_its_threads_engine(caplog):
    """TensorFlow runs it in threads of its own, and traces a function twice that makes variables while it is traced;
    AutoGraph says when it cannot convert a function of this library."""

    def train(rank: int) -> tuple[bool, int]:
        one = KerasVectors([1], UNIT, graph=True, quorum="all")
        one.take(1.0)
        one.opt.drain()
        return one.opt._async.worker.engine is local_engine(), one._apply.experimental_get_tracing_count()

    logger = tf.get_logger()
    logger.addHandler(caplog.handler)
    try:
        assert Cluster(2).run(train) == [(True, 1)] * 2
    finally:
        logger.removeHandler(caplog.handler)
    assert [r.getMessage() for r in caplog.records if "AutoGraph" in r.getMessage()] == []


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


# -- broken off -----------------------------------------------------------------------------------------------


def test_a_round_that_was_not_begun_is_applied_by_the_next_step():
    """Ctrl-C between waiting for a round and applying it."""

    def train(rank: int) -> tuple[list[float], int]:
        one = KerasVectors([1], UNIT)
        one.take(1.0)
        begin, strikes = one.opt._async.worker.begin, iter([True, False, False])

        def begin_or_not(round_: ReducedRound) -> None:
            if next(strikes):
                raise KeyboardInterrupt
            begin(round_)

        one.opt._async.worker.begin = begin_or_not
        with pytest.raises(KeyboardInterrupt):
            one.take(10.0)
        assert one.weights().tolist() == [-1.0]
        one.take(100.0)  # ends the step before; its own gradient was of weights without it
        one.take(1000.0)
        one.opt.drain()
        return one.weights().tolist(), one.opt.stats().gradients_applied

    assert Cluster(1).run(train) == [([-1011.0], 3)]


def test_horovods_failures_in_a_graph_are_recognisable_for_elastic():
    """horovod.tensorflow.elastic looks for UnknownError whose text has the word."""
    from horovod.common.exceptions import HorovodInternalError

    def fail() -> Any:
        raise HorovodInternalError("rank 1 on host b is gone")

    @tf.function
    def step() -> Any:
        return as_op(fail, [], tf.int32)

    with pytest.raises(tf.errors.UnknownError, match="HorovodAllreduce: rank 1 on host b is gone"):
        step()


SCRIPT = """
import keras, numpy as np
import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster

def train(rank):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    opt = hvd.EagerOptimizer(keras.optimizers.SGD(0.1), nonfinite="raise")
    model.compile(optimizer=opt, loss="mse", jit_compile=False)
    model.fit(np.full((2, 2), np.nan), np.ones((2, 1)), verbose=0)

Cluster(1).run(train)
"""


def test_an_error_in_a_step_is_shown_with_the_users_own_lines(monkeypatch, capsys) -> None:
    """(``sys.excepthook`` is called as for an error that ends the process.)"""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(tf.errors.OpError) as raised:
        exec(compile(SCRIPT, "script.py", "exec"), {})
    sys.excepthook(raised.type, raised.value, raised.tb)
    _, _, shown = capsys.readouterr().err.partition(
        "Traceback (most recent call last; libraries' lines are left out):\n"
    )
    lines = shown.splitlines()
    assert lines[-1].startswith("FloatingPointError: NaN or infinity in this rank's gradients")
    assert any("in train" in line for line in lines)
    assert len(lines) < 20
