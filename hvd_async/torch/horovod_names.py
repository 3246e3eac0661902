"""Makes ``horovod.torch`` itself fit for scripts that use its names beside one of our optimizers.

Horovod numbers collectives without a name by all that the process has submitted, the engine's included, which are not
equally many on all ranks at a time: they would wait for each other for ever. Its ``join`` would silence the engine, its
``shutdown`` leave rounds behind. All calls of these, by whatever name a script has imported them, pass through one
reference to Horovod's library, and that is where they are mended. ``broadcast_optimizer_state``, which steps an
optimizer to make its state, and ``broadcast_parameters``, which knows few dtypes, are Python only: ours take their
places in Horovod's modules. ``TorchState`` drains first.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import elastic as horovods_elastic
from horovod.torch import functions, mpi_ops
from horovod.torch.elastic import state as elastic_state

from hvd_async.optimizers import elastic
from hvd_async.runtime import time_limits
from hvd_async.torch.collectives import LIFECYCLE
from hvd_async.torch.functions import broadcast_optimizer_state, broadcast_parameters

JOINED = -1
"""The handle of a join that was a drain; Horovod's own are from 0."""


class _Library:
    """Horovod's compiled library, as its Python sees it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if "_async_" in name:
            function = self._naming(function)
        setattr(self, name, function)  # (looked up once)
        return function

    def _naming(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a collective; one without a name gets that of its place among those without."""

        @functools.wraps(function)
        def named(*arguments: Any) -> Any:
            # (names are bytes; a string, which is empty, stands for none)
            if str not in map(type, arguments):
                return function(*arguments)
            return function(*(self._name() if isinstance(argument, str) else argument for argument in arguments))

        return named

    def _name(self) -> str:
        return f"unnamed.{next(self._numbers)}"

    def horovod_torch_join(self, output: torch.Tensor, device: int) -> int:
        """Drains our optimizers, where there are any: this rank still takes part in rounds."""
        last = LIFECYCLE.join()
        if last is None:
            return int(self._library.horovod_torch_join(output, device))
        output.fill_(last)
        return JOINED

    def horovod_torch_wait_and_clear(self, handle: int) -> None:
        if handle != JOINED:
            self._library.horovod_torch_wait_and_clear(handle)

    def horovod_torch_reset(self) -> None:
        """Horovod is about to shut down: our optimizers are drained, the engine is stopped."""
        LIFECYCLE.shutdown()
        self._numbers = itertools.count()  # (a rank that an elastic job has gained begins with 0)
        self._library.horovod_torch_reset()


def _settled(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ``TorchState``, for when nothing is on its way: it takes the model's weights before the optimizer's
    state, and they must go together. A collective once training has begun, as TorchState's own are."""

    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        LIFECYCLE.settle()
        return method(*arguments, **options)

    return call


def _reset() -> None:
    """Do what ``hvd.elastic.run`` does when ranks were lost or gained, with our optimizers."""
    elastic.reset(LIFECYCLE, hvd.shutdown, hvd.init)


def _rolling_back(method: Callable[..., Any]) -> Callable[..., Any]:
    """``TorchState.restore``: as ``_settled``; where ranks were lost, what is on its way is rolled back too."""

    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        with contextlib.suppress(HorovodInternalError):
            LIFECYCLE.settle()
        LIFECYCLE.roll_back()
        return method(*arguments, **options)

    return call


def install() -> None:
    """Put all of this in its place. (Once a process: this module is imported once.)"""
    mpi_ops.mpi_lib = _Library(mpi_ops.mpi_lib)
    for module in (hvd, functions, elastic_state):
        module.broadcast_optimizer_state = broadcast_optimizer_state
        module.broadcast_parameters = broadcast_parameters
    state = elastic_state.TorchState
    for name in ("__init__", "save", "sync"):
        setattr(state, name, _settled(getattr(state, name)))
    state.restore = _rolling_back(state.restore)
    horovods_elastic._reset = _reset
    time_limits.limit_gloo()
