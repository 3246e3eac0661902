"""Which names a binding's modules export: Horovod's, in whose place they stand, and ours; nothing that they import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any


def public_names(own: Mapping[str, Any], horovods: ModuleType, ours: Iterable[Any]) -> list[str]:
    """Return a module's ``__all__``.

    Args:
        own: the module's names.
        horovods: the module in whose place it stands.
        ours: what it has besides, or in place of Horovod's: classes, functions, modules.
    """
    theirs = {name for name in dir(horovods) if not name.startswith("_") and name in own}
    return sorted(theirs | {one.__name__.rpartition(".")[2] for one in ours})
