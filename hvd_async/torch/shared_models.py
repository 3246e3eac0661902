"""Models that torch itself shares between ranks: under DDP, sharded by FSDP, split by tensor parallelism.

This library's optimizers average whole models, each on one rank, and nothing else may average them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from hvd_async.errors import ReplicaStateError

AVERAGING = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Classes of modules around a model whose backward pass averages gradients over ranks, in torch and in other
packages."""
OPTIMIZERS: Mapping[str, str] = {
    "ZeroRedundancyOptimizer": "steps a part of the parameters on each rank and sends them to the others",
    "PostLocalSGDOptimizer": "averages the weights over ranks",
}
"""Optimizers of ``torch.distributed.optim`` that communicate, and what they do."""


def _kind(module: Any) -> str | None:
    """Return the name of ``AVERAGING`` that a module's class has, or inherits."""
    return next((one.__name__ for one in type(module).__mro__ if one.__name__ in AVERAGING), None)


class _Found:
    """The modules of ``AVERAGING`` in this process.

    Attributes:
        modules: the ones that are alive.
        made: how many there have been, so that a step can see cheaply whether there is a new one.
    """

    def __init__(self) -> None:
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.made = 0

    def add(self, module: Any, name: str = "", submodule: Any = None) -> None:
        """Note a module, if it is one; torch calls this for each submodule that a module gets."""
        if _kind(module) is not None and module not in self.modules:
            self.modules.add(module)
            self.made += 1


found = _Found()
register_module_module_registration_hook(found.add)
if torch.distributed.is_available() and torch.distributed.is_initialized():  # (else there is none yet)
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module):
            found.add(each)


def cause(parameters: Sequence[torch.Tensor], wrapper: str) -> str | None:
    """Return why the optimizer of these parameters cannot be wrapped, and what to write instead; None if it can.

    Args:
        parameters: of the optimizer.
        wrapper: name of the wrapped optimizer, for the text.
    """
    own = {id(parameter) for parameter in parameters}
    if _around(own) is not None:
        gc.collect()  # (one that was deleted may still be in a cycle)
    if (kind := _around(own)) is not None:
        return (
            f"{kind} is around this model and averages its gradients over ranks in each backward pass, which "
            f"{wrapper} is to replace: train the bare model, without `model = {kind}(model)`. Instead of no_sync() "
            f"pass backward_passes_per_step=. A {kind} that is not used any more must be deleted first"
        )
    if any(_is_distributed(parameter) for parameter in parameters):
        return (
            f"parameters are DTensors, so FSDP2 or tensor parallelism has given each rank a part of the model, and "
            f"{wrapper} needs the whole model on each rank: leave out fully_shard(), parallelize_module() or "
            f"distribute_module(), or train with torch's own optimizer"
        )
    return None


def _around(parameters: set[int]) -> str | None:
    """Return the name of ``AVERAGING`` of a module around some of these parameters, given by their ids."""
    around = (each for each in list(found.modules) if not parameters.isdisjoint(map(id, each.parameters())))
    return next((_kind(each) for each in around), None)


def check(optimizer: torch.optim.Optimizer) -> int:
    """Check a wrapped optimizer's parameters, before the first step and whenever ``found.made`` has changed since.

    Returns:
        ``found.made`` of this check.

    Raises:
        ReplicaStateError: torch itself shares the model between ranks; or has replaced its parameters.
    """
    made, parameters = found.made, [p for group in optimizer.param_groups for p in group["params"]]
    if (why := cause(parameters, "this optimizer") or _replaced(parameters)) is not None:
        raise ReplicaStateError(why)
    return made


def _replaced(parameters: Sequence[torch.Tensor]) -> str | None:
    """Return that the model was sharded after its optimizer had been made, and what to write instead; None if it was
    not. Parameters that have no gradient are in no module then."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    own = {id(parameter) for parameter in parameters if parameter.requires_grad and parameter.grad is None}
    if not distributed or not own:
        return None
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    held = [p for each in modules for p in vars(each).get("_parameters", {}).values()]
    sharded = any(_is_distributed(p) for p in held) or any(_kind(each) == AVERAGING[1] for each in modules)
    if not sharded or own.issubset(map(id, held)):
        return None
    return (
        "the model was sharded by FSDP or tensor parallelism after its optimizer had been made, whose parameters are "
        "no longer the model's. This optimizer needs the whole model on each rank: leave out fully_shard(), "
        "FullyShardedDataParallel(), parallelize_module() or distribute_module()"
    )


def _is_distributed(parameter: Any) -> bool:
    """Return whether a parameter is a DTensor, without an import of their modules, which takes long."""
    return any(one.__name__ == "DTensor" for one in type(parameter).__mro__)
