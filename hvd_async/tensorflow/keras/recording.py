"""Records ``fit()`` into the trace of a run, by what the optimizer says of its waiting."""

from __future__ import annotations

import os
import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_async.tensorflow.keras.fit import our_optimizer
from hvd_async.traces.recorded import check_all_ranks, waited_s
from hvd_async.traces.recorder import Recorder


class RecordCallback(keras.callbacks.Callback):
    """Record when this rank computes and when it waits in ``fit()``, into a trace that ``hvd_async advise`` reads.

    How long a step has waited is what the optimizer says; where in the step is not known, and taken to be its end. What
    lies between the end of an epoch and the next one, and evaluation, is in no step. The file is whole when ``fit()``
    returns; after one that raised, when another one has, or the process ends, or the callback is gone.

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
            ValueError: the model's optimizer is none of ours or of a process set, or Keras takes several steps at once.
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
            driver, settings = optimizer._async, dict(optimizer._async.settings)
            check_all_ranks(driver, (driver.engine or driver.lifecycle.engine()).size)
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
            weakref.finalize(self, self._recorder.close)  # Keras tells callbacks of no fit() that raises

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
        """Leave out what was since the last step."""
        self._waited = self._wait_s()
        if self._recorder is not None:
            self._recorder.skip()

    def _wait_s(self) -> float:
        optimizer = our_optimizer(self.model)
        return 0.0 if optimizer is None else waited_s(optimizer)
