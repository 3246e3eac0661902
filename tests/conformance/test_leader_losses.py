"""Training losses of ranks that follow a leader: which kinds, where they are recorded, when the choice sees them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance.keras_ranks import LOSS, Scalar, batch
from tests.conformance.leader_cases import PAIRS
from tests.conformance.leader_drive import TIMEOUT
from tests.conformance.leader_reference import Following, drawn, several
from tests.conformance.weight_ranks import SGD, KerasRank, TorchRank, also_graph

SILENT = dataclasses.replace(PAIRS, groups=((0,),), loss_window=4, loss_of=lambda *_: None)
NO_LOSS = r"this rank has recorded none: call opt.record_loss\(loss\) before each"


def of_torch() -> list[object]:
    return [1, 0.5, np.float32(3.0), torch.tensor([[4.0]]), torch.tensor(2.5, requires_grad=True) * 2]


def of_keras() -> list[object]:
    return [1, 0.5, np.float32(3.0), tf.constant([[4.0]]), tf.Variable(2.5) * 2.0, tf.constant([3.0], tf.float64)]


@pytest.mark.parametrize(
    ("binding", "losses", "mean"),
    [(TorchRank, of_torch, 12.5 / 4), (KerasRank, of_keras, 15.0 / 4)],
    ids=["torch", "keras"],
)
def test_what_a_loss_may_be(binding, losses, mean):
    """A number or a tensor of one; several since the last step all count, if they are among the last four."""

    def train(rank: int) -> None:
        one = binding(binding.least_squares(1, SGD), rank, SILENT)
        for shape in ((2,), (1, 2), (0,)):
            with pytest.raises(ValueError, match="takes one number, and this is a tensor of shape"):
                one.opt.record_loss(torch.ones(shape) if binding is TorchRank else tf.ones(shape))
        for loss in losses():
            one.opt.record_loss(loss)
        one.step()
        assert one.opt.stats().mean_loss == mean
        one.take(np.zeros(6), 7.0)
        assert one.opt.stats().mean_loss == mean + (7.0 - (3.0 if binding is KerasRank else 0.5)) / 4

    Cluster(1).run(train)


def test_a_loss_is_recorded_as_it_is_then():
    """Although it counts later, the script may change its tensor meanwhile."""

    def train(rank: int) -> None:
        one, loss = TorchRank(TorchRank.least_squares(1, SGD), rank, SILENT), torch.tensor(2.0)
        for number in (2.0, 4.0):  # (the first one counts at once)
            one.opt.record_loss(loss.fill_(number))
            one.step()
        loss.fill_(100.0)
        assert one.opt.stats().mean_loss == 3.0

    Cluster(1).run(train)


@also_graph
def test_a_rank_that_tells_no_loss_hears_so_at_the_first_pull_and_cannot_end(binding):
    """Before any weight has changed; once losses are recorded, training continues."""
    together = threading.Barrier(2)

    def train(rank: int) -> bytes:
        tells = [rank == 0]
        following = dataclasses.replace(
            PAIRS, groups=several(2, 2), loss_of=lambda *step: drawn(*step) if tells[0] else None
        )
        one = binding(binding.least_squares(2, SGD), rank, following)
        one.worker()
        if rank == 1:
            with pytest.raises(binding.raised(ValueError), match=NO_LOSS):
                one.train(10_000)
            assert one.weights().tobytes() == one.path[-1].tobytes()
            for end in (one.opt.drain, one.opt.cut, one.opt.consensus_distance):
                with pytest.raises(ValueError, match=NO_LOSS):
                    end()
            assert one.weights().tobytes() == one.path[-1].tobytes()
        else:
            one.train(8)
        together.wait(TIMEOUT)
        tells[0] = True
        one.train(3).opt.drain()
        return one.bits()

    assert len(set(Cluster(2).run(train, timeout=40))) == 1


def test_a_closures_loss_counts_where_none_was_recorded():
    def train(rank: int) -> None:
        one = TorchRank(TorchRank.least_squares(1, SGD), rank, SILENT).train(1)
        assert one.opt.stats().mean_loss is None
        assert one.opt.step(lambda: torch.tensor(6.0)) == 6.0
        assert one.opt.stats().mean_loss == 6.0
        one.opt.record_loss(1.0)
        one.opt.step(lambda: torch.tensor(100.0))
        assert one.opt.stats().mean_loss == 3.5
        before = one.bits()
        with pytest.raises(ValueError, match="takes one number"):
            one.opt.step(lambda: torch.ones(3))
        assert one.bits() == before
        one.opt.step()
        one.opt.drain()

    Cluster(1).run(train)


def test_learning_rates_of_a_rank_are_its_own_only_within_a_step():
    """Schedulers, step hooks and state_dict see the ones that all ranks have."""

    def train(rank: int) -> None:
        inside, hooks = [], []

        class Recording(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                inside.append(self.param_groups[0]["lr"])
                return torch.optim.SGD.step(self, closure)

        one = TorchRank(TorchRank.least_squares(2, SGD), rank, Following("lsgd", several(2, 1), lr_spread="power"))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(one.opt, 0.5)
        type(one.opt)._wrapped_class = Recording
        one.opt.register_step_pre_hook(lambda opt, *_: hooks.append(opt.param_groups[0]["lr"]))
        for step in range(3):
            one.train(1)
            assert one.opt.param_groups[0]["lr"] == 0.1 * 0.5**step
            scheduler.step()
        assert inside == [0.1 * 2**rank * 0.5**step for step in range(3)]
        assert hooks == [0.1 * 0.5**step for step in range(3)]
        one.opt.drain()
        assert one.state()["param_groups"][0]["lr"] == 0.1 / 8

    Cluster(2).run(train)


# -- Keras: losses of steps that are graphs ---------------------------------------------------------------------

sgd = keras.optimizers.SGD
ALONE = {"group": 1, "global_period": 1000, "loss_window": 100}
Event = tuple[str, float]


def spy(opt: Any) -> list[Event]:
    """("reported", loss) and ("begun", number of losses so far) as they come; a loss takes time to report."""
    ours = getattr(opt, "inner_optimizer", opt)
    events: list[Event] = []
    tell, begin = ours._async.record_loss, ours._async.begin_step

    def report(loss: Any) -> Any:
        time.sleep(0.01)  # (a step that does not wait for its loss has begun by then)
        events.append(("reported", float(loss)))
        return tell(loss)

    def begun(**given: Any) -> Any:
        events.append(("begun", float(sum(kind == "reported" for kind, _ in events))))
        return begin(**given)

    vars(ours._async).update(record_loss=report, begin_step=begun)
    return events


def alternating(losses: list[float], each: int = 1) -> list[Event]:
    """This many losses reported, a step begun, and so on."""
    events: list[Event] = []
    for number, loss in enumerate(losses, 1):
        events.append(("reported", loss))
        events += [("begun", float(number))] * (number % each == 0)
    return events


def alone(optimizer: Any = None, **options: Any) -> Any:
    """A wrapped optimizer for a cluster of one."""
    return hvd.LeaderOptimizer(sgd(1.0) if optimizer is None else optimizer, **ALONE | options)


def noted(script: Callable[[Scalar], object], plain: Any = None, graph: bool = False, **options: Any) -> list[Event]:
    """The events while a script trains one weight, from 3."""

    def train(rank: int) -> list[Event]:
        one = Scalar(alone(plain, **options), graph, 3.0)
        events = spy(one.opt)
        script(one)
        return events

    (events,) = Cluster(1).run(train)
    return events


def test_several_numbers_are_no_loss_in_a_graph():
    """Also where their number is not known while it is traced."""

    def train(rank: int) -> list[Any]:
        one = Scalar(alone())
        with pytest.raises(ValueError, match="takes one number, and this is a tensor of shape"):
            tf.function(one.opt.record_loss)(tf.ones([1, 2]))
        unknown = tf.function(one.opt.record_loss, input_signature=[tf.TensorSpec(None)])
        unknown(tf.ones([1, 1]))
        for shape in (2, 0):
            with pytest.raises(tf.errors.InvalidArgumentError):
                unknown(tf.ones(shape))
        one.step(1.0, 1.0)
        return [one.opt.stats().mean_loss]

    assert Cluster(1).run(train) == [[1.0]]


@pytest.mark.parametrize(
    ("graph", "each", "accumulation"),
    [(False, 1, "none"), (False, 2, "ours"), (True, 2, "ours"), (True, 2, "Keras'")],
)
def test_a_loss_reported_where_the_step_is_comes_once_and_before_its_choice(graph, each, accumulation):
    """Also where several passes make a step, which begins in a branch of the graph."""

    def script(one: Scalar) -> None:
        def step(target: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = (one.weight.value - target) ** 2
            gradient = tape.gradient(loss, one.weight.value)
            one.opt.record_loss(loss)
            one.opt.apply([gradient * 0.0], [one.weight])

        taken = tf.function(step) if graph else step
        for target in (1.0, 0.0, 2.0, 3.0):
            taken(tf.constant(target))

    optimizer = sgd(1.0, gradient_accumulation_steps=each if accumulation == "Keras'" else None)
    events = noted(script, optimizer, backward_passes_per_step=each if accumulation == "ours" else 1)
    assert events == alternating([4.0, 9.0, 1.0, 0.0], each)


def test_losses_of_several_steps_of_one_graph_come_each_before_its_own_and_in_order():
    def script(one: Scalar) -> None:
        @tf.function
        def steps() -> None:
            for _ in range(2):
                one.opt.record_loss(one.weight.value)
                one.opt.record_loss(one.weight.value + 0.5)
                one.opt.apply([tf.constant(1.0)], [one.weight])

        steps()
        steps()

    assert noted(script) == alternating([3.0, 3.5, 2.0, 2.5, 1.0, 1.5, 0.0, 0.5], each=2)


@pytest.mark.parametrize("apart", ["two functions", "an eager apply", "an eager loss"])
def test_a_loss_reported_elsewhere_than_the_step(apart):
    """In another graph, which is traced before or after; or eagerly."""

    def script(one: Scalar) -> None:
        record = one.opt.record_loss if apart == "an eager loss" else tf.function(one.opt.record_loss)
        for loss in (1.0, 2.0, 3.0):
            record(tf.constant(loss))
            one.step(1.0)

    assert noted(script, graph=apart != "an eager apply") == alternating([1.0, 2.0, 3.0])


def test_scale_loss_tells_it_as_in_keras_train_step():
    """Before it is scaled; its gradient is that of the loss."""

    def script(one: Scalar) -> None:
        @tf.function
        def step(target: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = one.opt.scale_loss((one.weight.value - target) ** 2)
            one.opt.apply_gradients([(tape.gradient(loss, one.weight.value), one.weight)])
            return loss

        assert [float(step(tf.constant(target))) for target in (1.0, 2.0, 0.0)] == [8 * 4.0, 8 * 1.0, 8 * 4.0]
        assert float(one.weight) == 0.0

    assert noted(script, sgd(0.5, loss_scale_factor=8.0)) == alternating([4.0, 1.0, 4.0])


def fitted(
    optimizer: Any, batches: int, dtype: str = "float32", epochs: int = 1, **how: Any
) -> tuple[list[Event], float]:
    """Return the events while a model was fitted, and the mean of the last epoch's losses."""
    layers = [keras.Input((5, 5, 1)), keras.layers.Flatten(), keras.layers.Dense(3, dtype=dtype)]
    model = keras.Sequential(layers)
    model.set_weights([np.full(w.shape, 0.1, np.float32) for w in model.get_weights()])
    model.dtype_policy = keras.DTypePolicy(dtype)
    model.compile(optimizer=optimizer, loss=LOSS, jit_compile=False, **how)
    data = [batch(0, step) for step in range(batches)]
    images, labels = (np.concatenate([one[i] for one in data]) for i in (0, 1))
    events = spy(model.optimizer)
    history = model.fit(images, labels, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return events, history.history["loss"][-1]


@pytest.mark.parametrize("how", [{"steps_per_execution": 3}, {"run_eagerly": True}], ids=["three-at-once", "eagerly"])
def test_fit_tells_each_steps_loss_once_and_before_its_choice(how):
    def train(rank: int) -> None:
        opt = alone(loss_window=7)
        events, mean = fitted(opt, 7, epochs=2, **how)
        assert opt.stats().steps == 14
        losses = [loss for kind, loss in events if kind == "reported"]
        assert events == alternating(losses)
        assert len(losses) == len(set(losses)) == 14
        assert opt.stats().mean_loss == pytest.approx(np.mean(losses[7:]), rel=1e-6) == pytest.approx(mean, rel=1e-5)

    Cluster(1).run(train)


def test_fit_in_mixed_float16_tells_losses_as_they_are():
    """Not the ones that a LossScaleOptimizer has scaled."""

    def train(rank: int) -> None:
        opt = alone(keras.optimizers.LossScaleOptimizer(sgd(0.05), initial_scale=64.0))
        assert isinstance(opt, keras.optimizers.LossScaleOptimizer)
        events, mean = fitted(opt, 4, "mixed_float16")
        losses = [loss for kind, loss in events if kind == "reported"]
        assert events == alternating(losses)
        assert opt.stats().steps == len(losses) == 4
        assert opt.stats().mean_loss == pytest.approx(np.mean(losses), rel=1e-6) == pytest.approx(mean, rel=1e-2)
        opt.drain()

    Cluster(1).run(train)


def test_a_loss_scale_optimizer_outside_keeps_losses_away_and_the_message_says_so():
    """``compile()`` wraps the optimizer in a LossScaleOptimizer under mixed_float16. EASGD does not need losses."""

    def train(rank: int) -> None:
        inside = r"(?s)LossScaleOptimizer must be inside: LeaderOptimizer\(LossScaleOptimizer\(optimizer\)\)"
        with pytest.raises(tf.errors.OpError, match=inside):
            fitted(alone(global_period=2), 20, "mixed_float16")
        easgd = hvd.LeaderOptimizer(sgd(0.1), algorithm="easgd", global_period=1)
        assert fitted(easgd, 3, "mixed_float16")[0] == [("begun", 0.0)] * 3
        assert (easgd.stats().mean_loss, easgd.stats().steps) == (None, 3)
        easgd.drain()

    (outcome,) = Cluster(1).outcomes(train)
    assert isinstance(outcome, ValueError | None), outcome  # (the other optimizer cannot be drained)
    assert outcome is None or "a leader is to be chosen" in str(outcome)


def test_a_graph_begins_a_step_before_it_moves_weights():
    """A step that cannot begin, as it meets ranks with other settings, leaves the weights as they are."""

    def train(rank: int) -> list[float]:
        one = Scalar(alone(), graph=True)
        begin, seen = one.opt._async.begin_step, []

        def begun(**given: Any) -> Any:
            time.sleep(0.05)  # (an update that does not wait is done by then)
            seen.append(float(one.weight.numpy()))
            return begin(**given)

        vars(one.opt._async).update(begin_step=begun)
        for _ in range(2):
            one.step(1.0, 1.0)
        return seen

    assert Cluster(1).run(train) == [[0.0, -1.0]]
