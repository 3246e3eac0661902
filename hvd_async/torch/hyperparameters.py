"""A torch optimizer's hyperparameters and frozen parameters as numbers, so that a round can carry them.

A hyperparameter is a number in ``param_groups`` that the user or a schedule sets. Some optimizers count there, too
(schedule-free's ``k`` and ``weight_sum``, Prodigy's ``k`` and ``d``). These *counters* are state: every replica's own
step changes them, so no round carries them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_async.runtime.protocol import Hyper
from hvd_async.torch import streams


def _number(value: Any) -> bool | int | float | None:
    """Return ``value`` as a plain number if it is one (NumPy's and one-element tensors too), else None."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return None
    if isinstance(value, torch.Tensor) and streams.gpu.holds(value):
        return float(_on_its_way(value))
    plain = value.item() if hasattr(value, "item") else value
    return plain if isinstance(plain, int | float) else None


def _on_its_way(number: torch.Tensor) -> streams.Later:
    """Return the value of a one-element tensor on a GPU; copy it only if it was written since the last call."""
    version, value = _read.get(number, (None, None))
    if value is None or version != number._version:
        value = streams.Later(number)
        _read[number] = number._version, value
    return value


def begin_to_read(groups: list[dict[str, Any]]) -> None:
    """Start copies of hyperparameters on a GPU to the host, so that ``read`` does not wait for work that is queued
    later."""
    for group in groups:
        for key, value in group.items():
            if key != "params" and isinstance(value, torch.Tensor) and value.numel() == 1 and streams.gpu.holds(value):
                _on_its_way(value)


_read = WeakTensorKeyDictionary()
"""The last value read of each tensor on a GPU: (its version counter then, the value)."""
PLAIN = (float, int, bool)
FROZEN = "frozen parameters"
"""The key of a group's frozen parameters, by their number in it; no optimizer's option has a space in its name."""


def read(groups: list[dict[str, Any]], counters: Collection[str] = ()) -> Hyper:
    """Return learning rate, momentum, decay and all other entries that are numbers, for each parameter group.

    Args:
        groups: parameter groups of the optimizer.
        counters: names of the entries to leave out.
    """
    hyper: Hyper = []
    for group in groups:
        found: dict[str, Any] = {FROZEN: [i for i, p in enumerate(group["params"]) if not p.requires_grad]}
        for key, value in group.items():
            # (parameters of one element would be numbers, for which a GPU would be waited for)
            if key == "params" or key in counters:
                continue
            if type(value) in PLAIN:
                found[key] = value
            elif isinstance(value, tuple | list):
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


def without(hyper: Hyper, counters: Collection[str]) -> Hyper:
    """Return hyperparameters, perhaps of a rank that did not know the counters yet, without these."""
    return [{key: value for key, value in values.items() if key not in counters} for values in hyper]


@contextlib.contextmanager
def noting_counters(groups: list[dict[str, Any]], counters: set[str]) -> Iterator[None]:
    """Add the names of all group entries that change in the context, in which the wrapped optimizer takes a step.

    Step hooks are user code, in which a schedule may set a learning rate, so they run outside. All replicas apply the
    same rounds, so they note the same names after the same round.

    Args:
        groups: the optimizer's.
        counters: known so far.
    """
    before = _marks(groups)
    yield
    for was, now in zip(before, _marks(groups), strict=True):
        counters.update(key for key, mark in now.items() if key not in was or _differs(was[key], mark))


def _marks(groups: list[dict[str, Any]]) -> list[dict[str, tuple[Any, int]]]:
    """Return each entry's value, and its version counter if it is a tensor, without waiting for a GPU."""
    return [
        {
            key: (value, value._version if isinstance(value, torch.Tensor) else 0)
            for key, value in group.items()
            if key != "params"
        }
        for group in groups
    ]


def _differs(one: tuple[Any, int], other: tuple[Any, int]) -> bool:
    if one[0] is other[0]:
        return one[1] != other[1]
    tensors = isinstance(one[0], torch.Tensor) or isinstance(other[0], torch.Tensor)
    return tensors or bool(one[0] != other[0])


def put_back(groups: list[dict[str, Any]], own: Hyper, written: Hyper) -> None:
    """Undo ``write``, which left ``written``, except for entries that an optimizer or a scheduler in a step hook has
    changed since."""
    kept = [
        {key: value for key, value in mine.items() if now.get(key) == wrote.get(key)}
        for mine, now, wrote in zip(own, read(groups), written, strict=True)
    ]
    write(groups, kept)


def frozen(groups: list[dict[str, Any]], hyper: Hyper) -> set[int]:
    """Return the ids of the parameters that a round with ``hyper`` does not move."""
    return {id(group["params"][i]) for group, values in zip(groups, hyper, strict=True) for i in values[FROZEN]}
