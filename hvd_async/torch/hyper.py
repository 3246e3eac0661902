"""A torch optimizer's hyperparameters as plain numbers, so that a round can carry them."""

from __future__ import annotations

from typing import Any

import torch

from hvd_async.events import Hyper


def _plain(value: Any) -> Any:
    """``value`` as MessagePack carries it."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _travels(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(v, int | float) for v in value)
    return isinstance(value, int | float | bool) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def read(groups: list[dict[str, Any]]) -> Hyper:
    """Learning rate, momentum, decay and whatever else is a number, for each parameter group."""
    return [{k: _plain(v) for k, v in group.items() if k != "params" and _travels(v)} for group in groups]


def write(groups: list[dict[str, Any]], hyper: Hyper) -> None:
    """Put ``hyper`` into the groups, keeping tuples tuples and tensors tensors."""
    for group, values in zip(groups, hyper, strict=True):
        for key, value in values.items():
            held = group.get(key)
            if isinstance(held, torch.Tensor):
                held.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(held, tuple) else value
