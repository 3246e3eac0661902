"""One ``fit()``: the wrapped optimizers of a model, where the ranks meet, and the callbacks that observe it.

``Draining`` drains optimizers where the ranks meet; ``MonitorCallback`` and ``RecordCallback`` observe.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow import size
from horovod.tensorflow.functions import allgather_object

from hvd_async.monitor import Monitor
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.tensorflow.collectives import LIFECYCLE
from hvd_async.tensorflow.eager_methods import EagerMethods
from hvd_async.tensorflow.functions import notice_if_long
from hvd_async.tensorflow.methods import GossipMethods, WeightMethods
from hvd_async.tensorflow.variables import BUILD, build, is_built, raw
from hvd_async.traces.recorded import check_all_ranks, waited_s
from hvd_async.traces.recorder import Recorder


def our_optimizer(model: Any) -> Any:
    """Return the model's optimizer if it is wrapped (also inside a LossScaleOptimizer), else None."""
    found = _ours(getattr(model, "optimizer", None))
    return found[0] if found else None


def our_optimizers(model: Any) -> list[Any]:
    """Return all wrapped optimizers that train a model: its ``optimizer`` and those among its attributes, as in a GAN;
    if there are none, the optimizers of this process that have begun to train."""
    held = [getattr(model, "optimizer", None), *vars(model).values()]
    return list({id(one): one for each in held for one in _ours(each)}.values()) or begun()


def begun() -> list[Any]:
    """Return the wrapped optimizers of this process that have begun to train, in the order of their wrapping."""
    return [one for one in _in_process() if one._async.is_registered]


def _in_process() -> list[Any]:
    local = local_engine()  # (of a test's rank in a thread)
    return [one for one in LIFECYCLE.wrapped() if one._async.engine is local]


def _ours(held: Any) -> list[Any]:
    """Return the wrapped optimizers in an attribute's value: one, or several in a list or a dictionary."""
    if isinstance(held, dict):
        held = list(held.values())
    if isinstance(held, list | tuple):
        return [one for each in held if not isinstance(each, list | tuple | dict) for one in _ours(each)]
    if not isinstance(held, keras.optimizers.Optimizer):
        return []
    inner = getattr(held, "inner_optimizer", held)
    return [inner] if isinstance(inner, EagerMethods | WeightMethods) else []


def weighted(model: Any) -> list[Any]:
    """Return the wrapped optimizers that train a model and weight rounds by samples."""
    return [one for one in our_optimizers(model) if isinstance(one, EagerMethods) and one._async.weighted]


def record_batches(model: Any) -> None:
    """Make each training step of a model record the batch's number of samples with those optimizers."""
    step = model.train_step

    @functools.wraps(step)
    def recording(data: Any) -> Any:
        samples = tf.shape(next(one for one in keras.tree.flatten(data) if one is not None))[0]
        for one in weighted(model):
            one.record_samples(samples)
        return step(data)

    object.__setattr__(model, "train_step", recording)  # (past Keras, which tracks what a model is given)
    model.train_function = None  # (of an earlier fit(), with the step as it was)


def drain(optimizers: Sequence[Any]) -> None:
    """Drain all optimizers of the process, these among them. A collective."""
    _register(optimizers)
    optimizers[-1]._async.drain_all()


@contextlib.contextmanager
def consensus(optimizers: Sequence[Any]) -> Iterator[None]:
    """Return a context in which models hold the consensus, with any of these optimizers. A collective."""
    if len(optimizers) == 1:
        with optimizers[0].consensus():
            yield
        return
    _register(optimizers)
    optimizers[-1]._async.drain_all(False)  # (a cut: ranks with weights of their own keep them)
    with contextlib.ExitStack() as stack:
        for one in optimizers:
            if isinstance(one, WeightMethods):
                stack.enter_context(one._async.consensus_after_cut())
        yield


def _register(optimizers: Sequence[Any]) -> None:
    for one in optimizers:
        one._async.register()  # (before the first waits: others may wait for this rank to register the second)


# -- models without weights --------------------------------------------------------------------------------------------


def when_built(model: Any, action: Callable[[], None]) -> None:
    """Call ``action`` when a model has its weights: now, or between the start of ``fit()`` and the first step.

    Keras makes them while it traces that step, whose variables other ranks' values could reach only afterwards.

    Raises:
        ValueError: in the first batch, if its shapes cannot build the model.
    """
    if is_built(model):
        action()
    else:
        model.train_function = _FirstBatch(model, model.train_function, action)


class _FirstBatch:
    """A model's ``train_function`` that builds the model before its first call, also on a rank without batches."""

    def __init__(self, model: Any, train: Callable[[Any], Any], action: Callable[[], None]) -> None:
        self._model, self._train, self._action = model, train, action

    def __call__(self, batches: Any) -> Any:
        self._model.train_function = self._train
        if not is_built(self._model):
            self._build(batches)
        self._action()
        return self._train(batches)

    def _build(self, batches: Any) -> None:
        """Trace the model's call, as Keras' step does. Nothing runs."""
        model = self._model
        try:
            if type(model).call is keras.Model.call:
                raise NotImplementedError("it has no call()")
            x, *_ = keras.utils.unpack_x_y_sample_weight(batches.element_spec)
            tf.function(lambda x: model(x, training=True), autograph=False).get_concrete_function(x)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"the first batch cannot build the model ({error}). {BUILD}") from error
        if not is_built(model):
            raise ValueError(f"the first batch did not build all layers of the model. {BUILD}")


class _Meeting:
    """The last point of one ``fit()`` at which the ranks have met; the callbacks of a model share it.

    Attributes:
        at: that point.
        drains: whether ranks with weights of their own are drained at the end of each epoch.
        evaluation: closed when evaluation ends.
        warned: whether the user was warned that nothing is averaged.
        before: numbers of steps when ``fit()`` began; see ``MeetingCallback._steps``.
        records: whether training steps record how many samples their batches have.
    """

    def __init__(self) -> None:
        self.at: tuple[str, int] | None = None
        self.drains = False
        self.evaluation = contextlib.ExitStack()
        self.warned = self.records = False
        self.before = (0, 0)


class BatchCount:
    """Number of batches for which Keras calls ``on_train_batch_end`` once: ``steps_per_execution``."""

    def __init__(self) -> None:
        self._last = -1

    def since(self, batch: int) -> int:
        """Return the number of batches since the previous call; in the last execution of an epoch there may be fewer.

        Args:
            batch: as Keras gives it, the place in the epoch of the execution's last batch.
        """
        before = self._last if batch > self._last else -1  # (a new epoch)
        self._last = batch
        return batch - before


class Draining(keras.callbacks.Callback):
    """Callback that makes ranks meet where they must; several callbacks of one model share each meeting."""

    _training = False

    @property
    def _meeting(self) -> _Meeting:
        meeting: _Meeting | None = getattr(self.model, "_hvd_async_meeting", None)
        if meeting is None:
            meeting = _Meeting()
            object.__setattr__(self.model, "_hvd_async_meeting", meeting)
        return meeting

    def set_model(self, model: Any) -> None:
        """Take the model, which Keras gives each callback.

        Raises:
            ValueError: the model is compiled by XLA, which cannot wait for other ranks.
        """
        super().set_model(model)
        if isinstance(getattr(model, "train_function", None), _FirstBatch):  # (of a fit() that had no batch)
            model.train_function = None
        if getattr(model, "jit_compile", False) and not model.run_eagerly and our_optimizers(model):
            raise ValueError("XLA cannot wait for other ranks: compile the model with jit_compile=False")
        if weighted(model) and not self._meeting.records:
            self._meeting.records = True
            record_batches(model)

    def _optimizers_at(self, point: tuple[str, int]) -> list[Any]:
        """Return the optimizers that are to meet the other ranks' at ``point``; none if they have met there."""
        optimizers = our_optimizers(self.model)
        if not optimizers or self._meeting.at == point:
            return []
        self._meeting.at = point
        self._set_model(optimizers)
        if len(optimizers) == 1:
            build(optimizers[0], self.model)
        return [one for one in optimizers if one.built]  # (of several, the variables of each are known once it trains)

    def _together(self, optimizers: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model is the same on all ranks; afterwards too, unless ranks have weights of
        their own."""
        if not optimizers:
            return contextlib.nullcontext()
        if any(isinstance(one, WeightMethods) for one in optimizers) and not self._meeting.drains:
            return consensus(optimizers)
        drain(optimizers)
        return contextlib.nullcontext()

    def drain_begun(self) -> None:
        """Drain optimizers that have begun to train; a collective if there are any."""
        if earlier := begun():
            drain(earlier)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._training, self._epoch = True, 0
        self._meeting.at = None
        self._meeting.evaluation.pop_all()  # (an interrupted one: weights loaded since must not be overwritten)
        self._set_model(our_optimizers(self.model))
        self._meeting.before = self._steps()
        self._warn_of_plain_optimizer(self._meeting.before)

    def _set_model(self, optimizers: Sequence[Any]) -> None:
        """Make one of them average batch-norm statistics, unless the user has passed a model to any."""
        if optimizers and all(one._async.replica.model is None for one in optimizers):
            optimizers[0]._async.replica.model = self.model

    def _steps(self) -> tuple[int, int]:
        """Return the number of steps of the model's own optimizer, and of all wrapped ones."""
        iterations = getattr(getattr(self.model, "optimizer", None), "iterations", 0)
        return int(raw(iterations)), sum(one.stats().steps for one in _in_process())

    def _warn_of_plain_optimizer(self, steps: tuple[int, int]) -> None:
        """Warn if the model's own optimizer averages nothing.

        Args:
            steps: ``_steps()``.
        """
        plain = getattr(self.model, "optimizer", None)
        if self._meeting.warned or plain is None or our_optimizers(self.model) or LIFECYCLE.size() == 1:
            return
        own = {id(raw(v)) for v in self.model.trainable_variables}
        others = any(not one.built or own & {id(raw(v)) for v in one._trainable_variables} for one in _in_process())
        before = self._meeting.before
        if others and (steps[0] == before[0] or steps[1] != before[1]):
            return  # (the model's train_step() may use another one)
        self._meeting.warned = True
        warnings.warn(
            f"the model's optimizer is a plain {type(plain).__name__}, which averages nothing: the ranks train "
            f"separately. Wrap it: model.compile(optimizer=hvd.EagerOptimizer(...)). (keras.models.load_model() "
            f"returns a plain one; hvd.load_model() of hvd_async.tensorflow.keras wraps it.)",
            stacklevel=2,
        )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._meeting.at = None
        for one in our_optimizers(self.model):
            if isinstance(one, GossipMethods):
                one.set_epoch(epoch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizers = self._optimizers_at(("epoch", self._epoch)) if self._training else []
        self._meeting.evaluation.enter_context(self._together(optimizers))

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._meeting.evaluation.close()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # (also if only some ranks validate: all meet once per epoch, these before their validation, the others here)
        with self._together(self._optimizers_at(("epoch", epoch))):
            self._warn_of_plain_optimizer(self._steps())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        optimizers = self._optimizers_at(("end", 0))
        if optimizers:
            drain(optimizers)
        self._training = self._meeting.drains = False


# -- a callback that monitors ------------------------------------------------------------------------------------------


class _Open(threading.local):
    """Monitors that callbacks have open in this thread, a list for each callback."""

    def __init__(self) -> None:
        self.lists: list[list[Monitor]] = []


_OPEN = _Open()


class MonitorCallback(Draining):
    """Watch the optimizers of a model during ``fit()``: values for TensorBoard and Prometheus, and a warning of ranks
    that hold up the others.

    Several optimizers (a GAN's) have the numbers from 0 as their names, and write to ``NAME.0.prom``, ``NAME.1.prom``
    and so on; their ports follow each other, those of all ranks of one optimizer first.

    Keras does not notify callbacks when ``fit()`` raises. Files and ports that are open then are closed by ``close()``,
    by the next ``fit()`` of this thread with such a callback, or at the end of the process.

    Args:
        every: batches per sample; with ``compile(steps_per_execution=n)`` the next multiple of n.
        compare: whether all ranks exchange at the end of each epoch how long they have waited, which a warning under
            gossip needs. A collective: then use the callback on every rank, and not with ``pace="rounds"``.
        options: of ``hvd_async.monitor.Monitor``.

    Attributes:
        monitors: one per optimizer, from the first batch on.
    """

    def __init__(self, every: int = 50, compare: bool = False, **options: Any) -> None:
        super().__init__()
        self.every, self.compare, self.options = every, compare, options
        self._count = BatchCount()
        self.monitors: list[Monitor] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        for left in _OPEN.lists:  # (by a fit() that raised: it must not keep a port)
            _close(left)  # (a fit() around this one opens them again, with its next batch)
        _OPEN.lists.clear()
        if self.compare:
            super().on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.compare:
            super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.monitors:
            self._make()

    def _make(self) -> None:
        ours = our_optimizers(self.model)
        _OPEN.lists.append(self.monitors)
        try:
            for number, one in enumerate(ours):
                options = self.options if len(ours) == 1 else {"name": str(number), **self._of_several(number)}
                self.monitors.append(Monitor(one, every=self.every, **options))
        except (OSError, ValueError):
            self.close()
            raise

    def _of_several(self, number: int) -> dict[str, Any]:
        """Return the options of one of several optimizers, which cannot write to the same file, or listen together."""
        options = dict(self.options)
        if options.get("prometheus") is not None:
            path = Path(options["prometheus"])
            options["prometheus"] = path.with_name(f"{path.stem}.{number}{path.suffix}")
        if options.get("prometheus_port"):
            options["prometheus_port"] += number * (int(size()) if options.get("all_ranks") else 1)
        return options

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        steps = self._count.since(batch)
        for one in self.monitors:
            one.step(steps)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.compare:
            super().on_test_begin(logs)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if self.compare:
            super().on_test_end(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.compare:
            return
        own = [one.report() for one in self.monitors]  # (before ranks wait for each other at the epoch's end)
        super().on_epoch_end(epoch, logs)
        with notice_if_long("MonitorCallback"):
            everyone = allgather_object(own, name="hvd_async.monitor")
        for place, one in enumerate(self.monitors):
            one.compare([reports[place] for reports in everyone if place < len(reports)])

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        try:
            if self.compare:
                super().on_train_end(logs)
        finally:
            self.close()

    def close(self) -> None:
        """Close what is open, as the end of ``fit()`` does."""
        _OPEN.lists = [each for each in _OPEN.lists if each is not self.monitors]
        _close(self.monitors)


def _close(monitors: list[Monitor]) -> None:
    while monitors:
        monitors.pop().close()


# -- a callback that records -------------------------------------------------------------------------------------------


class RecordCallback(keras.callbacks.Callback):
    """Record when this rank computes and when it waits in ``fit()``, into a trace that ``hvd_async advise`` reads.

    The time that a step has waited comes from the optimizer; the wait is assumed to be at the end of the step. Time
    between epochs, and evaluation, belongs to no step. The file is complete when ``fit()`` returns; after a ``fit()``
    that raised, when another one returns, the process ends, or the callback is deleted.

    Args:
        folder: of the trace, the same for all ranks; on several hosts a shared one, or collect the files afterwards.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self._folder = folder
        self._recorder: Recorder | None = None
        self._waited = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin, at the first ``fit()``.

        Raises:
            ValueError: the model's optimizer is not wrapped, or of a process set, or Keras takes several steps at once.
            OSError: the folder cannot be written.
        """
        optimizer = our_optimizer(self.model)
        if optimizer is None:
            raise ValueError(
                "the model's optimizer does not say how long it waits: wrap it by hvd.EagerOptimizer(quorum='all'), "
                "which averages in every step as Horovod's does, and record that"
            )
        if int(self.model.steps_per_execution) > 1:
            raise ValueError("Keras takes several steps at once: record with compile(steps_per_execution=1)")
        if self._recorder is None:
            driver = optimizer._async
            check_all_ranks(driver, (driver.engine or driver.lifecycle.engine()).size)
            when_built(self.model, lambda: self._record(driver))

    def _record(self, driver: Any) -> None:
        settings = dict(driver.settings)
        self._recorder = Recorder(
            self._folder,
            driver.index,
            driver.size,
            framework="keras",
            algorithm=settings.pop("algorithm"),
            options=settings,
            parameter_bytes=sum(
                int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in self.model.trainable_variables
            ),
        )
        weakref.finalize(self, self._recorder.close)  # (Keras does not call callbacks when fit() raises)
        self._begin()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._begin()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        waited = self._wait_s()
        if self._recorder is not None:
            self._recorder.stepped(max(waited - self._waited, 0.0))
        self._waited = waited

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._begin()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._recorder is not None:
            self._recorder.flush()

    def _begin(self) -> None:
        """Leave out the time since the last step."""
        self._waited = self._wait_s()
        if self._recorder is not None:
            self._recorder.skip()

    def _wait_s(self) -> float:
        optimizer = our_optimizer(self.model)
        return 0.0 if optimizer is None else waited_s(optimizer)
