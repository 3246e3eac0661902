"""Calls from inside ``torch.inference_mode()``.

A tensor that is made in it can never be changed in place outside of it. What a call makes here, vectors of weights and
optimizer state say, is changed later, by training or by the engine's thread: so calls leave the mode, and return to it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """Leave inference mode, if this thread is in it; gradients stay disabled then."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def outside_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that leaves inference mode while it runs."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        with _outside():
            return function(*arguments, **options)

    return call


class EnteredOutside(contextlib.AbstractContextManager[None]):
    """A context manager that is entered and left outside of inference mode; its body has its own mode."""

    def __init__(self, inner: contextlib.AbstractContextManager[None]) -> None:
        self._inner = inner

    def __enter__(self) -> None:
        with _outside():
            self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        with _outside():
            return self._inner.__exit__(kind, error, traceback)
