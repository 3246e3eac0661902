"""This process's torch engine, on the data plane that was chosen for it; calls from ``torch.inference_mode()``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

from hvd_async.algorithms.registry import FAMILIES
from hvd_async.runtime.interfaces import Collectives
from hvd_async.runtime.lifecycle import Lifecycle
from hvd_async.torch.distributed import calls
from hvd_async.torch.horovod_api import hvd

# -- calls from inside inference mode ----------------------------------------------------------------------------------
# A tensor that is made in inference mode can never be changed in place outside of it. Tensors that a call makes here,
# such as vectors of weights and optimizer state, are changed later, by training or by the engine's thread. So calls
# leave the mode, and return to it.


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


# -- the engine --------------------------------------------------------------------------------------------------------


def plane_collectives() -> Callable[[], Collectives]:
    """Return the class of collectives of this process's data plane."""
    if hvd.on_horovod:
        from hvd_async.torch.horovod_collectives import HorovodCollectives

        return HorovodCollectives
    from hvd_async.torch.torch_collectives import TorchCollectives

    return TorchCollectives


def _make() -> Collectives:
    """Return this rank's collectives; refuse to train alone what a script has made several ranks of after ``init``."""
    made = plane_collectives()()
    hvd.refuse_alone(unknown=False)
    return made


class _TorchLifecycle(Lifecycle):
    """The lifecycle of torch optimizers, whose calls may come from inside ``torch.inference_mode()``."""

    join = outside_inference_mode(Lifecycle.join)
    settle = outside_inference_mode(Lifecycle.settle)
    shutdown = outside_inference_mode(Lifecycle.shutdown)


LIFECYCLE = _TorchLifecycle(
    _make,
    FAMILIES,
    lambda: (hvd.rank(), hvd.size()) if hvd.is_initialized() else None,
    lambda: hvd.exit_hook,
)
calls.check = LIFECYCLE.check
