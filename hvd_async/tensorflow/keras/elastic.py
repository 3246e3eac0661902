"""``hvd.elastic`` for Keras: the state of ``hvd_async.tensorflow.elastic``, and callbacks as Horovod's."""

from __future__ import annotations

from typing import Any

import keras

from hvd_async.tensorflow.elastic import TensorFlowKerasState, run
from hvd_async.tensorflow.keras.fit import BatchCount

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class KerasState(TensorFlowKerasState):
    """``TensorFlowKerasState``, by Horovod's name for Keras."""


class CommitStateCallback(keras.callbacks.Callback):
    """Commit the state every ``batches_per_commit`` batches, and at the end of each epoch: all ranks check there
    whether hosts have come or gone.

    Args:
        state: the elastic state.
        batches_per_commit: the same on all ranks; with ``compile(steps_per_execution=n)`` the next multiple of n.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state, self._each, self._batches, self._count = state, batches_per_commit, 0, BatchCount()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches += self._count.since(batch)
        if self._batches >= self._each:
            self._batches = 0
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keep the number of finished batches of the epoch in ``state.batch``; put it before the callback that commits.

    Horovod's keeps the last batch's number, so that this batch is repeated. Skip the finished batches yourself:
    ``fit(data.skip(state.batch))``.

    Args:
        state: the elastic state.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state, self._count = state, BatchCount()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.batch += self._count.since(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keep the number of finished epochs in ``state.epoch``; put it before the callback that commits.

    Args:
        state: the elastic state.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.epoch += 1
