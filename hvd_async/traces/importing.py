"""Has optimizers recorded that a script makes, without a change to it: their factories record what they return.

The factories are replaced when the script imports their module, so nothing is imported that it does not need.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hvd_async.runtime.log import warn
from hvd_async.traces.recorded import recorded

FACTORIES: Mapping[str, Sequence[str]] = {
    "horovod.torch": ("DistributedOptimizer",),
    "hvd_async.torch": ("EagerOptimizer", "GossipOptimizer", "LeaderOptimizer"),
}
"""By module, what makes optimizers there."""


def record_what_is_made(folder: Path, synchronize: bool = False) -> list[str]:
    """Have the first optimizer that this process makes recorded; call it before a factory's module is imported.

    Args:
        folder: of the trace.
        synchronize: wait for the GPU before each mark.

    Returns:
        The names of the factories that have made optimizers so far; it grows.

    Raises:
        ValueError: a module of factories is imported already.
    """
    early = [name for name in FACTORIES if name in sys.modules]
    if early:
        raise ValueError(f"{early[0]} is imported already: call record_what_is_made() before")
    made: list[str] = []

    def recording(module: ModuleType, name: str) -> Callable[..., Any]:
        make = getattr(module, name)

        @functools.wraps(make)
        def factory(*args: Any, **kwargs: Any) -> Any:
            optimizer = make(*args, **kwargs)
            if made:
                warn(f"record: a second optimizer was made, by {name}; only the first is recorded, by {made[0]}")
            else:
                wait = _waiting(optimizer) if synchronize else None
                recorded(optimizer, folder, module.rank(), module.size(), wait)
            made.append(name)
            return optimizer

        return factory

    def replace(module: ModuleType) -> None:
        for name in FACTORIES[module.__name__]:
            setattr(module, name, recording(module, name))

    sys.meta_path.insert(0, _Finder(replace))
    return made


def _waiting(optimizer: Any) -> Callable[[], None] | None:
    """Return what waits for the optimizer's device; None where that is the CPU."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.is_cuda:
                wait: Callable[[], None] = sys.modules["torch"].cuda.synchronize
                return wait
    return None


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of factories as the others do, and has their loader call ``replace`` with what it has loaded."""

    def __init__(self, replace: Callable[[ModuleType], None]) -> None:
        self._replace = replace
        self._open = set(FACTORIES)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._open:
            return None
        self._open.discard(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._replace)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as another one, and calls ``replace`` with the module."""

    def __init__(self, loader: Any, replace: Callable[[ModuleType], None]) -> None:
        self._loader, self._replace = loader, replace

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._replace(module)
