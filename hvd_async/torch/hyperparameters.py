"""A torch optimizer's hyperparameters and frozen parameters as numbers, so that a round can carry them."""

from __future__ import annotations

from typing import Any

import torch

from hvd_async.runtime.messages import Hyper


def _number(value: Any) -> bool | int | float | None:
    """``value`` as a plain number if it is one (NumPy's and one-element tensors too), else None."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return None
    plain = value.item() if hasattr(value, "item") else value
    return plain if isinstance(plain, int | float) else None


FROZEN = "frozen parameters"
"""The key of a group's frozen parameters, by their number in it; no optimizer's option has a space in its name."""


def read(groups: list[dict[str, Any]]) -> Hyper:
    """Learning rate, momentum, decay and whatever else is a number (or several), for each parameter group."""
    hyper: Hyper = []
    for group in groups:
        found: dict[str, Any] = {FROZEN: [i for i, p in enumerate(group["params"]) if not p.requires_grad]}
        for key, value in group.items():
            if key == "params":  # (of one element they would be numbers, for which a GPU would be waited for)
                continue
            if isinstance(value, tuple | list):
                numbers = [_number(v) for v in value]
                if None not in numbers:
                    found[key] = numbers
            elif (number := _number(value)) is not None:
                found[key] = number
        hyper.append(found)
    return hyper


def write(groups: list[dict[str, Any]], hyper: Hyper) -> None:
    """Put ``hyper`` into the groups, keeping tuples tuples and tensors tensors."""
    for group, values in zip(groups, hyper, strict=True):
        for key, value in values.items():
            if key == FROZEN:
                continue
            held = group.get(key)
            if isinstance(held, torch.Tensor):
                held.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(held, tuple) else value


def put_back(groups: list[dict[str, Any]], own: Hyper, written: Hyper) -> None:
    """Undo ``write``, which left ``written``, but for what has changed since: an optimizer that counts in its groups
    means it, and so does a scheduler in a step hook."""
    kept = [
        {key: value for key, value in mine.items() if now.get(key) == wrote.get(key)}
        for mine, now, wrote in zip(own, read(groups), written, strict=True)
    ]
    write(groups, kept)


def frozen(groups: list[dict[str, Any]], hyper: Hyper) -> set[int]:
    """The ids of the parameters that a round with ``hyper`` leaves alone."""
    return {id(group["params"][i]) for group, values in zip(groups, hyper, strict=True) for i in values[FROZEN]}
