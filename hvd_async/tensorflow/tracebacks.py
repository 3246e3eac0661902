"""Errors that end a process from inside a training step, in a few lines.

An error of ours that is raised while a graph runs comes out of TensorFlow with a hundred lines around it: where each op
was made, and Python's way to it. Where nobody catches it, the user's own lines and the error itself are shown instead.
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

import tensorflow as tf

_previous = sys.excepthook
_raised: list[BaseException] = []
"""The last error that was raised in a graph's op, if any."""
LIBRARIES = ("site-packages", "dist-packages")


def remember(error: BaseException) -> None:
    """An op of ours raises ``error``, which TensorFlow will wrap."""
    global _previous
    _raised[:] = [error]
    if sys.excepthook is not show:
        _previous, sys.excepthook = sys.excepthook, show


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """In place of ``sys.excepthook``, which shows whatever is no error of ours in TensorFlow's wrapping."""
    if not (_raised and isinstance(error, tf.errors.OpError) and str(_raised[0]) in str(error)):
        _previous(kind, error, trace)
        return
    cause = _raised[0]
    frames = [each for each in traceback.extract_tb(trace) if not any(name in each.filename for name in LIBRARIES)]
    lines = [
        "Traceback (most recent call last; libraries' lines are left out):\n",
        *traceback.format_list(frames),
        *traceback.format_exception_only(cause),
    ]
    sys.stderr.write("".join(lines))
