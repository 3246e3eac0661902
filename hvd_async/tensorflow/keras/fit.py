"""Where the ranks of one ``fit()`` meet: the wrapped optimizers of a model, and the callback that drains them there."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_async.runtime.lifecycle import local_engine
from hvd_async.tensorflow.collectives import LIFECYCLE
from hvd_async.tensorflow.eager_methods import EagerMethods
from hvd_async.tensorflow.methods import GossipMethods, WeightMethods
from hvd_async.tensorflow.variables import raw


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


class _Meeting:
    """The last point of one ``fit()`` at which the ranks have met; the callbacks of a model share it.

    Attributes:
        at: that point.
        drains: whether ranks with weights of their own are drained at the end of each epoch.
        evaluation: closed when evaluation ends.
        warned: whether the user was warned that nothing is averaged.
        records: whether training steps record how many samples their batches have.
    """

    def __init__(self) -> None:
        self.at: tuple[str, int] | None = None
        self.drains = False
        self.evaluation = contextlib.ExitStack()
        self.warned = self.records = False


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
        if len(optimizers) == 1 and not optimizers[0].built:
            optimizers[0].build(self.model.trainable_variables)
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
        self._warn_of_plain_optimizer()

    def _set_model(self, optimizers: Sequence[Any]) -> None:
        """Make one of them average batch-norm statistics, unless the user has passed a model to any."""
        if optimizers and all(one._async.replica.model is None for one in optimizers):
            optimizers[0]._async.replica.model = self.model

    def _warn_of_plain_optimizer(self) -> None:
        plain = getattr(self.model, "optimizer", None)
        if self._meeting.warned or plain is None or our_optimizers(self.model) or LIFECYCLE.size() == 1:
            return
        own = {id(raw(v)) for v in self.model.trainable_variables}
        if any(not one.built or own & {id(raw(v)) for v in one._trainable_variables} for one in _in_process()):
            return  # (the model's train_step() may use it)
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
            pass

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        optimizers = self._optimizers_at(("end", 0))
        if optimizers:
            drain(optimizers)
        self._training = self._meeting.drains = False
