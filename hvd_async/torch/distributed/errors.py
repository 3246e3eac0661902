"""Errors of Horovod's API on torch.distributed."""

from __future__ import annotations

from typing import NoReturn


class HorovodInternalError(RuntimeError):
    """A collective has failed, usually because another rank has ended."""


def no_counterpart(name: str, hint: str) -> NoReturn:
    """Raise for a function of Horovod's that torch.distributed has no counterpart for.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(f"{name} has no counterpart on torch.distributed. {hint}")
