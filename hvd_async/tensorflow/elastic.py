"""``hvd.elastic`` for TensorFlow: Horovod's idiom, and survivors that continue from where they are.

``run`` is Horovod's. ``TensorFlowKerasState`` replaces Horovod's, which does not work on Keras 3, and whose
``restore()`` goes back to the last commit: this one never does. ``TensorFlowState`` is Horovod's, with roll-back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.tensorflow import elastic as horovods
from horovod.tensorflow.elastic import TensorFlowState, run
from horovod.tensorflow.functions import allgather_object, broadcast_object

from hvd_async.optimizers import elastic
from hvd_async.optimizers.methods import OptimizerMethods
from hvd_async.runtime import time_limits
from hvd_async.tensorflow.apply_round import scheduled
from hvd_async.tensorflow.collectives import LIFECYCLE, horovod_error
from hvd_async.tensorflow.functions import broadcast_tensors, is_sent
from hvd_async.tensorflow.variables import is_built, raw

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowKerasState(elastic.WithoutRollBack, ObjectState):
    """A Keras model, its optimizer and other attributes with which ranks continue when others are lost or join.

    Nothing is rolled back. Survivors keep their weights, or take those of the survivor that has seen the most rounds;
    gradients that no round has carried stay pending; new ranks get weights, optimizer state and statistics of a
    survivor, but keep their own random seeds. All ranks take the other attributes, and with them the learning rate,
    from the rank that has ended the most steps: so change them right after a step, as the callbacks of ``hvd.elastic``
    do. A new rank gets the settings in force: those of ``switch()`` and ``set_epoch()``.

    Functions that were traced for other ranks cannot be used: ``fit()`` traces its step again automatically; make a
    ``tf.function`` of your own in the function that ``run`` decorates.

    Args:
        model: built.
        optimizer: a wrapped optimizer; None: the one that the model was compiled with.
        backend: as in Horovod; it has no effect here.
        kwargs: attributes that can be pickled.

    Raises:
        ValueError: the model is not built.
    """

    _interrupt = HostsUpdatedInterrupt

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not is_built(model):
            raise ValueError("the model is not built: call model.build(input_shape) before")
        LIFECYCLE.elastic = True
        self.model, self.optimizer, self.backend = model, optimizer or model.optimizer, backend
        self._lifecycle, self._survivor = LIFECYCLE, False
        self._saved_state: dict[str, Any] = {}
        super().__init__(bcast_object=broadcast_object, get_rank=hvd.rank, **kwargs)

    def sync(self) -> None:
        """Agree with the present ranks on the state to continue from. A collective.

        Raises:
            ReplicaStateError: the ranks' states do not match, or no rank has weights to continue from.
        """
        exchange, ours = _Exchange(), self._ours()
        trained = {id(variable) for optimizer in ours for variable in exchange.weights(optimizer)}
        every = [*self.model.variables, *([] if ours else self.optimizer.variables)]
        others = [raw(v) for v in every if id(raw(v)) not in trained and is_sent(v)]
        own = {name: getattr(self, name) for name in self._saved_state}
        try:
            own, take = elastic.sync(exchange, self._survivor, ours, others, own)
        except tf.errors.UnknownError as error:  # (``run`` takes Horovod's own for a loss, and looks no further here)
            raise horovod_error(error) from error
        take()
        self._saved_state = own
        self._set_attrs()
        for name in ("train_function", "test_function", "predict_function"):  # (traced for other ranks)
            setattr(self.model, name, None)
        self._survivor = True

    def _ours(self) -> list[Any]:
        """Return the optimizer if it is wrapped, and build it; a ``LossScaleOptimizer`` may be around it."""
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        if not isinstance(inner, OptimizerMethods):
            return []
        if not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)
        return [inner]


class _Exchange(elastic.Exchange):
    """Collectives that send one rank's variables to others."""

    def __init__(self) -> None:
        self.rank, self.size = hvd.rank(), hvd.size()

    def everyones(self, value: Any, name: str) -> list[Any]:
        every: list[Any] = allgather_object(value, name=name)
        return every

    def object_of(self, root: int, value: Any, name: str) -> Any:
        return broadcast_object(value, root, name=name)

    def tensors_of(self, root: int, tensors: Sequence[Any], name: str) -> list[Any]:
        return broadcast_tensors(tensors, root, name)

    def vector_of(self, root: int, vector: Any, name: str) -> Any:
        (value,) = self.tensors_of(root, [tf.convert_to_tensor(vector)], name)
        return value.numpy()

    def put(self, tensors: Sequence[Any], values: Sequence[Any]) -> None:
        for variable, value in zip(tensors, values, strict=True):
            variable.assign(value)

    def weights(self, optimizer: Any) -> list[Any]:
        return [raw(variable) for variable in optimizer._trainable_variables]

    def state_of(self, root: int, optimizer: Any, name: str) -> Any:
        with_leads = self.object_of(root, bool(optimizer._async.replica.leads), f"{name}.leads")
        return self.tensors_of(root, self._state(optimizer, with_leads), name)

    def put_state(self, optimizer: Any, state: Any) -> None:
        with_leads = len(state) > len(optimizer.variables)
        self.put(self._state(optimizer, with_leads), state)

    @staticmethod
    def _state(optimizer: Any, with_leads: bool) -> list[Any]:
        """Return the wrapped optimizer's variables and, where the source has any, the leads of its updates."""
        replica = optimizer._async.replica
        replica.prepare()
        if with_leads:
            replica.extrapolation.make_leads()
        elif replica.leads:
            replica.extrapolation.forget_leads()
        return [raw(variable) for variable in optimizer.variables] + (list(replica.leads) if with_leads else [])

    def hyperparameters(self, optimizer: Any) -> Any:
        return None if scheduled(optimizer) else float(raw(optimizer.learning_rate))

    def put_hyperparameters(self, optimizer: Any, values: Any) -> None:
        if values is not None:
            optimizer.learning_rate = values


def _reset() -> None:
    """Restart Horovod and this library's optimizers after a membership change, for ``hvd.elastic.run``."""
    elastic.reset(LIFECYCLE, hvd.shutdown, hvd.init)


def install() -> None:
    """Make Horovod's ``run`` continue with this library's optimizers."""
    time_limits.limit_gloo()
    horovods._reset = _reset
