"""Saying what is waited for where a collective of Horovod's own waits for other ranks: it says so late, if at all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import horovod.tensorflow as hvd

from hvd_async.runtime.log import warn

PATIENCE = 30.0
"""Seconds before the first word."""


@contextlib.contextmanager
def told_if_long(what: str) -> Iterator[None]:
    """Around a collective: if it waits for long, this rank says for what, once.

    Args:
        what: the call, for people.
    """
    rank = hvd.rank()

    def tell() -> None:
        warn(
            f"rank {rank} has waited {PATIENCE:.0f} s in {what} for ranks that have not called it: every rank must, "
            f"with the same callbacks in the same order. Waiting on."
        )

    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
