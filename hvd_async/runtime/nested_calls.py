"""Nested calls of the library: from a signal handler or a hook during another call on the same thread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from hvd_async.errors import ReplicaStateError

F = TypeVar("F", bound=Callable[..., Any])
_unfinished: set[CodeType] = set()


def unfinished_until_it_returns(function: F) -> F:
    """Mark a function during which this rank is in the middle of a step or a drain."""
    _unfinished.add(function.__code__)
    return function


def refuse_nested_drain() -> None:
    """Raise if a marked function is on the stack of this thread.

    Raises:
        ReplicaStateError: this is a nested call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _unfinished:
            raise ReplicaStateError(
                "drain(), cut() or consensus() in the middle of a step or a drain, called by a signal handler or a "
                "hook: this rank would wait for itself. Have the handler set a flag, and drain where the loop reads "
                "it, between two steps"
            )
        frame = frame.f_back
