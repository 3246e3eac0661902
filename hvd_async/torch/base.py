"""How a torch optimizer is wrapped, which cannot be, and what this binding supplies to its factories."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers.driver import derived
from hvd_async.optimizers.factories import Binding
from hvd_async.optimizers.methods import OptimizerMethods
from hvd_async.torch.bucket_layout import differentiable
from hvd_async.torch.buffers import NamedBuffers
from hvd_async.torch.collectives import LIFECYCLE
from hvd_async.torch.compression import Compression
from hvd_async.torch.horovod_api import horovods_broadcast, hvd
from hvd_async.torch.weight_replica import WeightReplica

BINDING = Binding(hvd, LIFECYCLE, Compression)


def refuse_a_step_for_state() -> None:
    """To be called in ``step()``: Horovod's own function may call it, where a script has it by name from before ours
    took its place.

    Raises:
        ReplicaStateError: it does.
    """
    frame = sys._getframe(2)
    for _ in range(3):  # (a scheduler has put a function of its own between)
        if frame.f_code is horovods_broadcast.__code__:
            raise ReplicaStateError(
                "horovod.torch's broadcast_optimizer_state makes an optimizer's state by a step, and a step of this "
                "one is a round of all ranks. It was imported by its name before hvd_async.torch: write `from "
                "hvd_async.torch import broadcast_optimizer_state`, or call hvd.broadcast_optimizer_state"
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


def check_optimizer(optimizer: Any, wrapper: str) -> None:
    """Refuse what cannot be wrapped.

    Args:
        optimizer: as the user gave it.
        wrapper: what is to wrap it.

    Raises:
        ValueError: with a hint.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is no torch optimizer: pass one, as in "
            f"{wrapper}(torch.optim.SGD(model.parameters(), lr=0.1))"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure several times a step, and ranks meet once a step: take another")
    if callable(getattr(optimizer, "first_step", None)) and callable(getattr(optimizer, "second_step", None)):
        kind = type(optimizer).__name__
        raise ValueError(
            f"{kind} steps in two halves, first_step() and second_step(), and ranks meet in step(): wrap its base "
            f"optimizer, as in {kind}(model.parameters(), lambda groups, **options: "
            f"{wrapper}(torch.optim.SGD(groups, **options)), lr=0.1), and drain that"
        )
    if isinstance(optimizer, OptimizerMethods) or hasattr(optimizer, "_allreduce_grad_async"):
        raise ValueError("this optimizer averages over ranks already: wrap the plain one")


def wrap(optimizer: torch.optim.Optimizer, methods: type[OptimizerMethods]) -> Any:
    """Return an optimizer with the same content, of a class that has these methods too."""
    wrapped = derived(optimizer, methods)
    vars(wrapped).pop("step", None)  # a scheduler made before has put its own wrapper there; it would bypass ours
    vars(optimizer)["_opt_called"] = True  # and it looks there for steps: it would warn that none was taken
    return wrapped


def listed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a factory's arguments, with those that can be read only once read.

    Raises:
        ValueError: as ``NamedBuffers``.
    """
    named, buffers = given["named_parameters"], given["named_buffers"]
    own = {"named_parameters": None if named is None else list(named), "named_buffers": NamedBuffers(buffers)}
    return {**given, **own}


def names_of(given: Mapping[str, Any], wrapper: str) -> dict[int, str] | None:
    """Return names by the parameters' id, of an optimizer that can be wrapped; None if the user gave none.

    Args:
        given: a factory's arguments.
        wrapper: its name.

    Raises:
        ValueError: as ``check_optimizer`` and ``parameter_names``.
    """
    optimizer = given["optimizer"]
    check_optimizer(optimizer, wrapper)
    return parameter_names([p for group in optimizer.param_groups for p in group["params"]], given["named_parameters"])


def weight_replica(given: Mapping[str, Any], wrapper: str, averages_statistics: bool = False) -> WeightReplica:
    """Return the replica of an optimizer whose ranks have weights of their own; raises as ``names_of``."""
    return WeightReplica(names_of(given, wrapper), given["named_buffers"], averages_statistics)


def parameter_names(
    parameters: Sequence[torch.Tensor], named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[int, str] | None:
    """Names by the parameters' id; None if ``named`` is.

    Raises:
        ValueError: ``named`` is no sequence of pairs, repeats a name, or leaves a parameter out.
    """
    if named is None:
        return None
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("named_parameters wants pairs (name, parameter): pass model.named_parameters()")
    names = {id(parameter): name for name, parameter in pairs}
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("named_parameters repeats a name: names must be unique")
    missing = sum(id(parameter) not in names for parameter in parameters if differentiable(parameter))
    if missing:
        raise ValueError(f"named_parameters leaves out {missing} of the optimizer's {len(parameters)} parameters")
    return names
