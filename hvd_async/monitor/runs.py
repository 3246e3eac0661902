"""The monitor of a run of ``hvd_async.runner``, as its flag ``--monitor`` asks for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hvd_async.monitor.monitor import Monitor
from hvd_async.runner.options import Options
from hvd_async.runner.trainer import Trainer


@contextlib.contextmanager
def watched(options: Options, trainer: Trainer) -> Iterator[None]:
    """In it a trainer's optimizer is watched, if the options want it.

    Raises:
        OSError: a file cannot be opened.
    """
    if options.monitor is None:
        yield
        return
    folder = options.log_dir
    files = {} if folder is None else {"tensorboard": folder / "monitor", "prometheus": folder / "metrics.prom"}
    with Monitor(trainer.optimizer, every=options.monitor, tensorboard=files.get("tensorboard"),
                 prometheus=files.get("prometheus")) as monitor:  # fmt: skip
        trainer.watch = monitor.step
        yield
