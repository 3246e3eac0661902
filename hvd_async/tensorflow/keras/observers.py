"""Callbacks that observe ``fit()``: the monitor, and the recorder of a trace."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow import size
from horovod.tensorflow.functions import allgather_object

from hvd_async.monitor import Monitor
from hvd_async.tensorflow.functions import notice_if_long
from hvd_async.tensorflow.keras.fit import Draining, our_optimizer, our_optimizers
from hvd_async.traces.recorded import check_all_ranks, waited_s
from hvd_async.traces.recorder import Recorder

# -- monitor -----------------------------------------------------------------------------------------------------------


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
        every: batches per sample.
        compare: whether all ranks exchange at the end of each epoch how long they have waited, which a warning under
            gossip needs. A collective: then use the callback on every rank, and not with ``pace="rounds"``.
        options: of ``hvd_async.monitor.Monitor``.

    Attributes:
        monitors: one per optimizer, from the first batch on.
    """

    def __init__(self, every: int = 50, compare: bool = False, **options: Any) -> None:
        super().__init__()
        self.every, self.compare, self.options = every, compare, options
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
        for one in self.monitors:
            one.step()

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


# -- recorder ----------------------------------------------------------------------------------------------------------


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
            weakref.finalize(self, self._recorder.close)  # (Keras does not call callbacks when fit() raises)

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
