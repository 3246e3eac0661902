"""Keras: checkpoints that lose nothing, and jobs that end by their rounds."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.tensorflow.bucket_layout import Layout, Terms, partition
from hvd_async.tensorflow.gradient_feed import Feed
from hvd_async.tensorflow.gradient_step import _py
from hvd_async.testing import Cluster
from tests.conformance.cases import CASES, Case
from tests.conformance.drive import scripted_engine, wait_for_rounds
from tests.conformance.keras_ranks import LOSS, KerasTrainer, batch, conv_model, flat

SGD = Case("sgd", "sgd", 0.1)
both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
Saved = tuple[list[Any], dict[str, Any]]


def saved(trainer: KerasTrainer) -> Saved:
    """What a checkpoint holds; the arrays pass through bytes, as in a file."""
    return trainer.model.get_weights(), {k: np.array(v) for k, v in trainer.opt.get_state().items()}


def resumed(trainer: KerasTrainer, checkpoint: Saved) -> KerasTrainer:
    """The trainer as it was when it was saved."""
    weights, state = checkpoint
    trainer.model.set_weights(weights)
    trainer.opt.set_state(state)
    return trainer


def bits(trainer: KerasTrainer) -> bytes:
    """Of the weights and the optimizer's variables."""
    return flat(v.numpy() for v in [*trainer.model.trainable_variables, *trainer.opt.variables]).tobytes()


# -- resuming -------------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("end", ["drain", "cut", "nothing"])
def test_a_resumed_synchronous_run_ends_with_the_same_bits(end, graph):
    case = CASES[7]  # Adam with decay

    def whole(rank: int) -> bytes:
        trainer = KerasTrainer(case, graph, quorum="all")
        trainer.train(rank, range(6))
        trainer.opt.drain()
        return bits(trainer)

    def first(rank: int) -> Saved:
        trainer = KerasTrainer(case, graph, quorum="all")
        trainer.train(rank, range(3))
        if end == "drain":
            trainer.opt.drain()
        elif end == "cut":
            trainer.opt.cut()
        return saved(trainer)

    def second(rank: int) -> tuple[bytes, int]:
        trainer = resumed(KerasTrainer(case, graph, quorum="all"), checkpoints[rank if end == "cut" else 0])
        trainer.train(rank, range(3, 6))
        trainer.opt.drain()
        return bits(trainer), trainer.opt.rounds

    checkpoints = Cluster(2).run(first)
    unbroken = Cluster(2).run(whole)
    assert Cluster(2).run(second) == [(one, 6) for one in unbroken]


def cut_with_a_pending_gradient(options: dict[str, Any]) -> list[tuple[Saved, list[Any]]]:
    """Rank 0 takes three steps, then rank 1 one, which no round carries: checkpoints after cut(), and gradients."""

    def train(rank: int) -> tuple[Saved, list[Any]]:
        trainer = KerasTrainer(SGD, **options)
        gradients = []
        worker = trainer.opt._async.worker_now()
        if rank == 1:
            wait_for_rounds(worker, 3)
        for step in range(1 if rank else 3):
            gradients.append(trainer.gradient(rank, step))
            trainer.step()
        trainer.opt.cut()
        return saved(trainer), gradients

    return Cluster(2).run(train)


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-6}, {"compression": hvd.Compression.bf16}], ids=str)
def test_no_gradient_is_lost_between_a_cut_and_its_resumption(options):
    cut = cut_with_a_pending_gradient(options)
    before = flat(conv_model().trainable_variables)
    ((_, zero), own), ((_, one), late) = cut
    assert not any("pending" in name for name in zero)
    assert any("pending" in name for name in one)
    assert np.array_equal(flat(cut[0][0][0]), flat(cut[1][0][0])), "the replicas differ after the cut"

    def go_on(rank: int) -> tuple[Any, Any, Any]:
        trainer = resumed(KerasTrainer(SGD, **options), cut[rank][0])
        gradient = trainer.gradient(rank, 7)
        trainer.step()
        trainer.opt.drain()
        return trainer.weights(), gradient, trainer.opt.stats()

    outcomes = Cluster(2).run(go_on)
    everything = sum([*own, *late, *(gradient for _, gradient, _ in outcomes)])
    for weights, _, stats in outcomes:
        tolerance = 1e-3 if options.get("compression") else 1e-5
        np.testing.assert_allclose(weights, before - 0.1 / 2 * everything, rtol=0, atol=tolerance)
        assert stats.gradients_applied == 3
        assert weights.tobytes() == outcomes[0][0].tobytes()


def test_pending_gradients_are_for_the_same_rank_of_as_many_ranks_and_the_same_buckets():
    checkpoint = cut_with_a_pending_gradient({})[1][0]
    for size, rank, options, hint in (
        (2, 0, {}, r"rank 1 of 2 after cut\(\), with 1 gradient\(s\) pending"),
        (3, 1, {}, "on rank 1 of 3 they would be lost"),
        (2, 1, {"bucket_cap_mb": 1e-6}, "the same bucket_cap_mb, groups and compression"),
    ):

        def load(own: int, at: int = rank, given: Any = options) -> None:
            trainer = KerasTrainer(SGD, **given)
            if own == at:
                resumed(trainer, checkpoint)

        outcomes = Cluster(size).outcomes(load)
        with pytest.raises(ValueError, match=hint):
            raise outcomes[rank]  # type: ignore[misc]


def test_a_drained_checkpoint_resumes_at_another_size():
    def first(rank: int) -> Saved:
        trainer = KerasTrainer(CASES[1])
        trainer.train(rank, range(2))
        trainer.opt.drain()
        return saved(trainer)

    checkpoint = Cluster(2).run(first)[0]

    def second(rank: int) -> bytes:
        trainer = resumed(KerasTrainer(CASES[1]), checkpoint)
        trainer.train(rank, range(2))
        trainer.opt.drain()
        return bits(trainer)

    assert len(set(Cluster(3).run(second))) == 1


def test_state_is_not_saved_while_gradients_are_on_their_way():
    def train(rank: int) -> None:
        trainer = KerasTrainer(SGD)
        trainer.train(rank, range(1))
        try:
            with pytest.raises(ReplicaStateError, match=r"Call drain\(\) on every rank first .* or call cut\(\)"):
                trainer.opt.get_state()
        finally:
            trainer.opt.drain()
        trainer.opt.get_state()

    Cluster(2).run(train)


# -- ending by rounds -----------------------------------------------------------------------------------------


class Slow(keras.callbacks.Callback):
    """Rank 1 takes a step for every three of rank 0, as long as that one trains."""

    def __init__(self, rank: int, condition: threading.Condition, progress: list[int], over: threading.Event) -> None:
        super().__init__()
        self.rank, self.condition, self.progress, self.over = rank, condition, progress, over
        self.own = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.own += 1
        with self.condition:
            if self.rank:
                ready = self.condition.wait_for(lambda: self.over.is_set() or self.progress[0] >= 3 * self.own, 60)
                assert ready
            else:
                self.progress[0] += 1
                self.condition.notify_all()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        with self.condition:
            self.over.set()
            self.condition.notify_all()


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_job_ends_by_its_rounds(run_eagerly):
    condition, progress, over = threading.Condition(), [0], threading.Event()

    def train(rank: int) -> Any:
        model = conv_model()
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(0.02), pace="rounds", max_staleness=8)
        opt.build(model.trainable_variables)
        opt._async.worker_now()  # all ranks meet here, so nobody is late before that
        model.compile(optimizer=opt, loss=LOSS, run_eagerly=run_eagerly, jit_compile=False)
        data = tf.data.Dataset.from_tensor_slices(batch(rank, 0)).batch(2).repeat()
        slow = Slow(rank, condition, progress, over)
        stop = hvd.callbacks.StopAtRounds(15)
        model.fit(data, steps_per_epoch=1000, shuffle=False, verbose=0, callbacks=[slow, stop])
        return flat(model.trainable_variables).tobytes(), opt.rounds, opt.stats()

    (one, rounds, fast), (other, again, slow) = Cluster(2).run(train)
    assert one == other
    assert rounds == again
    assert 15 <= rounds <= 17
    assert fast.steps >= 14
    assert 1 <= slow.steps <= 7
    assert fast.gradients_applied == fast.total_produced == fast.steps + slow.steps


def test_stop_at_rounds_wants_a_number_of_rounds():
    with pytest.raises(ValueError, match="take 1 or more"):
        hvd.callbacks.StopAtRounds(0)


# -- errors ---------------------------------------------------------------------------------------------------


def test_horovods_failures_in_a_graph_are_recognisable_for_elastic():
    """horovod.tensorflow.elastic looks for UnknownError whose text has the word."""
    from horovod.common.exceptions import HorovodInternalError

    def fail() -> Any:
        raise HorovodInternalError("rank 1 on host b is gone")

    @tf.function
    def step() -> Any:
        return _py(fail, [], tf.int32)

    with pytest.raises(tf.errors.UnknownError, match="HorovodAllreduce: rank 1 on host b is gone"):
        step()


class Recorder:
    """Stands for the worker: what a step hands over, early or in the end."""

    def __init__(self) -> None:
        self.steps: list[dict[int, Any]] = []
        self.early: dict[int, Any] = {}

    def hand_over(self, bucket: int, vector: Any) -> None:
        assert bucket not in self.early
        self.early[bucket] = vector

    @property
    def gone(self) -> frozenset[int]:
        return frozenset(self.early)

    def finish_step(self, vectors: dict[int, Any], hyper: Any) -> list[Any]:
        everything = {**self.early, **vectors}
        self.steps.append({b: None if v is None else v.numpy().tolist() for b, v in sorted(everything.items())})
        self.early = {}
        return []


def test_a_step_that_is_broken_off_half_way_is_handed_over_once():
    """An op of the graph failed after the first bucket had gone: the next pass brings the others."""
    two, worker = [tf.Variable([0.0]), tf.Variable([0.0])], Recorder()
    layout = Layout(two, partition(two, 1, None), Terms())
    feed = Feed(layout, passes=1, average=False, nonfinite="skip")

    def give(bucket: int, value: float) -> None:
        feed.give(bucket, tf.constant([value, 1.0]), worker, scaled=False)  # type: ignore[arg-type]

    give(0, 1.0)
    give(0, 2.0)
    give(1, 3.0)
    feed.take(lambda: worker, [], scaled=False)  # type: ignore[arg-type,return-value]
    give(0, 4.0)
    feed.take(lambda: worker, [], scaled=False)  # type: ignore[arg-type,return-value]
    assert worker.steps == [{0: [1, 1], 1: [3, 1]}, {0: [4, 1], 1: [0, 1]}]


def test_a_step_in_a_graph_warns_of_nothing(caplog):
    """AutoGraph says when it cannot convert a function of ours."""

    def train(rank: int) -> None:
        weight = keras.Variable(0.0)
        opt = hvd.EagerOptimizer(keras.optimizers.SGD(1.0))
        opt.build([weight])

        @tf.function
        def step(gradient: tf.Tensor) -> None:
            opt.apply([gradient], [weight])

        step(tf.constant(1.0))
        opt.drain()

    logger = tf.get_logger()
    logger.addHandler(caplog.handler)
    try:
        Cluster(1).run(train)
    finally:
        logger.removeHandler(caplog.handler)
    assert [r.getMessage() for r in caplog.records if "AutoGraph" in r.getMessage()] == []


def test_get_state_before_build_says_what_to_call():
    with scripted_engine(2):
        opt = hvd.EagerOptimizer(keras.optimizers.SGD())
        with pytest.raises(ValueError, match=r"optimizer.build\(model.trainable_variables\)"):
            opt.get_state()
