"""Computes ``__all__`` of a binding's modules: the names of the Horovod module that each replaces, and its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any


def public_names(own: Mapping[str, Any], horovods: ModuleType, ours: Iterable[Any]) -> list[str]:
    """Return a module's ``__all__``.

    Args:
        own: the module's namespace.
        horovods: the Horovod module that it replaces.
        ours: classes, functions and modules that it adds, or that replace Horovod's.
    """
    theirs = {name for name in dir(horovods) if not name.startswith("_") and name in own}
    return sorted(theirs | {one.__name__.rpartition(".")[2] for one in ours})
