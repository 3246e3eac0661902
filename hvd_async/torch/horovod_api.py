"""The one place through which this binding reaches Horovod's API: Horovod itself, or our own on torch.distributed.

``hvd`` has the names of ``horovod.torch``, which ``hvd_async.torch.distributed`` has too. Which of the two it is (see
``hvd_async.runtime.data_plane``) is decided by ``hvd.init()``: until then a script may still say which rank it is. What
is asked for earlier, and a script that calls ``horovod.torch.init()`` itself, get what the environment says on import.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from hvd_async.errors import no_horovod
from hvd_async.runtime import data_plane, launch
from hvd_async.torch.distributed import world
from hvd_async.torch.distributed.world import HorovodInternalError

HOROVODS_SCRIPT = "horovod.torch" in sys.modules
"""Whether the script has imported Horovod before this library did."""


def _load(plane: str) -> SimpleNamespace:
    """Return the modules of a data plane: its API, and what else this binding needs of it.

    Raises:
        ImportError: Horovod cannot be imported.
    """
    if plane != data_plane.HOROVOD:
        api: Any = importlib.import_module("hvd_async.torch.distributed")
        sets: Any = importlib.import_module("hvd_async.torch.distributed.process_sets")
        broadcast = api.broadcast_optimizer_state
        return SimpleNamespace(api=api, process_sets=sets, known=sets.ids_and_ranks, broadcast=broadcast, hook=None)
    try:
        api = importlib.import_module("horovod.torch")
        sets = importlib.import_module("horovod.common.process_sets")
        broadcast = importlib.import_module("horovod.torch.functions").broadcast_optimizer_state
    except ImportError as error:
        raise no_horovod(error, "torch") from error
    return SimpleNamespace(
        api=api,
        process_sets=sets,
        known=lambda: sets._basics._get_process_set_ids_and_ranks(),
        broadcast=broadcast,
        hook=api.mpi_ops._basics.shutdown,
    )


class Api:
    """Horovod's API for torch, on the data plane of this process. ``init`` decides which that is.

    Attributes:
        plane: the data plane, and why.
        process_sets: the module of process sets.
        horovods_broadcast: its function ``broadcast_optimizer_state``, which this library replaces in Horovod.
        exit_hook: what Horovod registers to run at the process's end; None on torch.distributed.
        when_on_horovod: called when Horovod has become the data plane.
    """

    def __init__(self) -> None:
        self.when_on_horovod: Callable[[], None] = lambda: None
        self._loaded: dict[str, SimpleNamespace] = {}
        self._process: int | None = None
        """The process in which ``init`` was called."""
        # (``device_count`` asks the driver's management library, so forked children can still use CUDA;
        # ``is_available`` would initialize CUDA)
        self._use(data_plane.choose(has_gpu=torch.cuda.device_count() > 0, horovods_script=HOROVODS_SCRIPT))

    def _use(self, plane: data_plane.DataPlane) -> None:
        new = plane.name not in self._loaded
        if new:
            self._loaded[plane.name] = _load(plane.name)
        self.plane, modules = plane, self._loaded[plane.name]
        self._api, self.process_sets, self.known_process_sets = modules.api, modules.process_sets, modules.known
        self.horovods_broadcast, self.exit_hook = modules.broadcast, modules.hook
        if new and self.on_horovod:
            self.when_on_horovod()

    @property
    def on_horovod(self) -> bool:
        """Whether Horovod is the data plane."""
        return self.plane.name == data_plane.HOROVOD

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def names(self) -> list[str]:
        """Return the names of the present data plane's API."""
        return [name for name in getattr(self._api, "__all__", dir(self._api)) if not name.startswith("_")]

    def settle(self) -> None:
        """Decide which data plane it is, for ``init``. One that is in use stays, but in a forked child.

        Raises:
            ValueError, ImportError: as ``data_plane.understand``; or a forked child would use its parent's Horovod.
        """
        if self._api.is_initialized() and self._process in (None, os.getpid()):
            return
        job = data_plane.understand(
            os.environ,
            world.default_group(),
            has_gpu=torch.cuda.device_count() > 0,
            horovods_script=HOROVODS_SCRIPT,
        )
        self._use(job.plane)
        if self.on_horovod and self._api.is_initialized():
            raise ValueError(
                "this process was forked after hvd.init(), and Horovod does not survive that. Call hvd.init() in the "
                "children only, or spawn them."
            )
        self._process = os.getpid()

    def init(self, *arguments: Any, **options: Any) -> None:
        """Decide which data plane it is, and meet the other ranks there.

        Raises:
            ValueError, ImportError: as ``settle``; as Horovod's ``init``; or something says that this process is not
                the only rank, as which it finds itself.
        """
        self.settle()
        self._api.init(*arguments, **options)
        self.refuse_alone()  # (Horovod stays initialized, since MPI cannot be a second time: each call raises)
        launch.warn_of_child(os.environ, self._api.size(), world.default_group())

    def refuse_alone(self, unknown: bool = True) -> None:
        """Refuse a job of one rank where anything says that there are more.

        Args:
            unknown: see ``launch.refuse_alone``.

        Raises:
            ValueError: something does.
        """
        launch.refuse_alone(os.environ, self._api.size(), world.default_group(), unknown)


hvd: Any = Api()


def forwarded(name: str) -> Callable[..., Any]:
    """Return a function that calls the one of this name of the data plane that it is then."""

    @functools.wraps(getattr(hvd, name))
    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(hvd, name)(*arguments, **options)

    return call


__all__ = ["Api", "HorovodInternalError", "forwarded", "hvd"]
