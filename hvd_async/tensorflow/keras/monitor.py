"""The monitor as a callback of ``fit()``."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from horovod.tensorflow import size
from horovod.tensorflow.functions import allgather_object

from hvd_async.monitor import Monitor
from hvd_async.tensorflow.keras.fit import Draining, our_optimizers
from hvd_async.tensorflow.wait_notices import told_if_long


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

    Keras does not tell callbacks when ``fit()`` raises. What was open then is closed by ``close()``, by the next
    ``fit()`` of this thread with such a callback, or by the process's end.

    Args:
        every: batches from one sample to the next.
        compare: whether all ranks tell each other at the end of each epoch how long they have waited, which a warning
            under gossip needs. A collective: then use the callback on every rank, and not with ``pace="rounds"``.
        options: of ``hvd_async.monitor.Monitor``.

    Attributes:
        monitors: of each optimizer; made with the first batch.
    """

    def __init__(self, every: int = 50, compare: bool = False, **options: Any) -> None:
        super().__init__()
        self.every, self.compare, self.options = every, compare, options
        self.monitors: list[Monitor] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        for left in _OPEN.lists:  # by a fit() that raised: it must keep no port
            _close(left)  # (one that goes on around this fit() opens them anew, with its next batch)
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
        with told_if_long("MonitorCallback"):
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
