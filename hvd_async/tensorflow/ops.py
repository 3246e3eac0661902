"""Python functions as ops of a training graph, and readable errors from inside them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

OP_NAME = "hvd_async_needs_jit_compile_False"
"""XLA, which cannot run such ops, shows this name in its error."""


def as_op(call: Callable[..., Any], inputs: list[Any], types: Any) -> Any:
    """Return ``call`` as an op of the graph that is being built."""

    def readable(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except HorovodInternalError as error:
            # The graph makes a tf.errors.UnknownError of it, which hvd.elastic takes for Horovod's by this word.
            marked = HorovodInternalError(f"HorovodAllreduce: {error}")
            remember(marked)
            raise marked from error
        except Exception as error:
            remember(error)
            raise

    return tf.py_function(readable, inputs, types, name=OP_NAME)


def call_or_op(
    call: Callable[..., list[Any]], inputs: list[tf.Tensor], dtypes: list[tf.DType], elements: Any
) -> list[tf.Tensor]:
    """Run ``call`` now, or make it an op of the graph that is being built.

    Args:
        call: takes the inputs, returns as many vectors as there are dtypes.
        inputs: of it.
        dtypes: of the results.
        elements: of each result.
    """
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(one, dtype) for one, dtype in zip(call(*inputs), dtypes, strict=True)]
    results = as_op(call, inputs, dtypes)
    return [tf.ensure_shape(one, [n]) for one, n in zip(results, elements, strict=True)]


# -- tracebacks --------------------------------------------------------------------------------------------------------
# An error that this library raises while a graph runs comes out of TensorFlow with a hundred lines around it: where
# each op was made, and how Python got there. If it ends the process, the user's own lines and the error itself are
# shown instead.


_previous = sys.excepthook
_raised: list[BaseException] = []
"""The last error that was raised in a graph's op, if any."""
LIBRARIES = ("site-packages", "dist-packages")


def remember(error: BaseException) -> None:
    """Remember an error that an op of this library raises, which TensorFlow will wrap."""
    global _previous
    _raised[:] = [error]
    if sys.excepthook is not show:
        _previous, sys.excepthook = sys.excepthook, show


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an uncaught error; a ``sys.excepthook`` that leaves errors of others to the previous one."""
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
